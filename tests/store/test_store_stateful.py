"""Store against a perfect store: any order of operations, on all tiers, gives the same bytes."""

import errno
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.store.stores import turn_in_place
from zstore.errors import StorageError, UsageError
from zstore.format import ArraySpec, make_grid, numpy_dtype
from zstore.io import ShardReader
from zstore.io.queue import Priority, Ticket, wait_all
from zstore.store import LocalShard, Snapshot, Store, StoreOptions
from zstore.testing.contract import as_array
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import random_values, same_bits

# (group, tier, shape, dtypes, world size, shard): a group's arrays share a layout. On disk they have 64 KiB at least.
GROUPS = [
    ("disk/large", "disk", (500, 257), ("float32", "bfloat16", "int8"), 1, 0),
    ("disk/last", "disk", (1001, 131), ("int16", "int16"), 2, 1),
    ("disk/mixed", "disk", (20_000,), ("float32", "bfloat16"), 1, 0),
    ("host/some", "host", (70, 33), ("float32", "bool"), 3, 2),
    ("host/none", "host", (5, 8), ("float32",), 4, 3),
    ("device/some", "device", (300, 100), ("float32", "bfloat16"), 2, 0),
    ("device/scalar", "device", (), ("int64",), 1, 0),
]
NAMES = [[f"{group}.{i}" for i in range(len(dtypes))] for group, _, _, dtypes, _, _ in GROUPS]
groups = st.integers(0, len(GROUPS) - 1)
names = st.sampled_from([name for group in NAMES for name in group])
seeds = st.integers(0, 1000)
fractions = st.floats(0, 1)


@dataclass
class Pinned:
    """A snapshot, what it must hold, and the files made from it."""

    snapshot: Snapshot
    expected: dict[str, np.ndarray]
    released: bool = False
    superseded: set[str] = field(default_factory=set)
    """Arrays that were changed since."""


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zstore-stateful-"))
        self.files = FaultyFiles()
        options = StoreOptions(run_path=self.folder, host_budget_bytes=3 << 20, num_threads=2)
        self.store = Store(options, files=self.files)
        self.model: dict[str, np.ndarray] = {}
        self.pinned: list[Pinned] = []
        self.behind: list[Ticket[None]] = []
        self.published: list[tuple[Path, LocalShard, np.ndarray]] = []
        for group, tier, shape, dtypes, world_size, shard in GROUPS:
            for i, dtype in enumerate(dtypes):
                spec = ArraySpec(name=f"{group}.{i}", shape=shape, dtype=dtype)
                grid = make_grid(spec.stored_shape, world_size)
                self.store.create(spec, grid=grid, shard=shard, tier=tier)  # type: ignore[arg-type]
                numel = grid.shard_valid_numel(shard)
                assert self.store.local(spec.name).valid_numel == numel
                self.model[spec.name] = np.zeros(numel, numpy_dtype(dtype))
        assert self.store.names() == list(self.model)

    def values(self, name: str, numel: int, seed: int) -> np.ndarray:
        return random_values(self.store.spec(name).dtype, numel, seed)

    def make_way(self, changing: Sequence[str]) -> None:
        """Release the pins that a change of `changing` would wait for, as a save behind training does."""
        in_memory = {name for name in changing if self.store.tier(name).name != "disk"}
        for pinned in list(self.pinned):
            pinned.superseded.update(changing)
            if in_memory & set(pinned.expected):
                self.release_one(pinned)

    def release_one(self, pinned: Pinned) -> None:
        pinned.snapshot.release()
        pinned.released = True
        self.pinned = [p for p in self.pinned if not p.released]

    def part(self, name: str, one: float, other: float) -> tuple[int, int]:
        numel = self.model[name].size
        first, stop = sorted((round(one * numel), round(other * numel)))
        return first, stop

    @rule(name=names, seed=seeds)
    def write(self, name: str, seed: int) -> None:
        self.make_way([name])
        values = self.values(name, self.model[name].size, seed)
        values.flags.writeable = False
        self.store.write(name, values).wait()
        self.model[name][:] = values

    @rule(name=names, one=fractions, other=fractions, seed=seeds)
    def write_part(self, name: str, one: float, other: float, seed: int) -> None:
        self.make_way([name])
        first, stop = self.part(name, one, other)
        values = self.values(name, stop - first, seed)
        self.store.write(name, values, first).wait()
        self.model[name][first:stop] = values

    @rule(name=names, seed=seeds)
    def write_several_behind(self, name: str, seed: int) -> None:
        self.make_way([name])
        numel = self.model[name].size
        values = [self.values(name, numel, seed + i) for i in range(3)]
        tickets = [self.store.write(name, v) for v in values[:2]]
        found = self.store.read(name)
        self.behind.append(self.store.write(name, values[2]))
        assert same_bits(found.wait(), values[1])
        assert all(ticket.done() for ticket in tickets)
        self.model[name][:] = values[2]

    @rule(which=st.lists(groups, min_size=1, max_size=3, unique=True))
    def update(self, which: list[int]) -> None:
        changing = [name for g in which for name in NAMES[g]]
        self.make_way(changing)
        for tile in self.store.tiles([NAMES[g] for g in which]):
            for view in tile.views:
                turn_in_place(as_array(view))
        for name in changing:
            turn_in_place(self.model[name])

    @rule(which=groups, seed=seeds)
    def fill(self, which: int, seed: int) -> None:
        self.make_way(NAMES[which])
        values = {name: self.values(name, self.model[name].size, seed) for name in NAMES[which]}
        for tile in self.store.tiles([NAMES[which]], "fill"):
            for name, view in zip(NAMES[which], tile.views, strict=True):
                as_array(view)[:] = values[name][tile.first : tile.stop]
        for name, array in values.items():
            self.model[name][:] = array

    @rule(name=names)
    def read(self, name: str) -> None:
        assert same_bits(self.store.read(name).wait(), self.model[name])

    @rule(name=names, one=fractions, other=fractions)
    def read_part(self, name: str, one: float, other: float) -> None:
        first, stop = self.part(name, one, other)
        assert same_bits(self.store.read(name, first, stop).wait(), self.model[name][first:stop])

    @rule(which=groups)
    def read_in_a_pass(self, which: int) -> None:
        for tile in self.store.tiles([NAMES[which]], "read"):
            for name, view in zip(NAMES[which], tile.views, strict=True):
                assert same_bits(as_array(view), self.model[name][tile.first : tile.stop])

    @rule(name=names)
    def remove_and_create(self, name: str) -> None:
        """An array that no snapshot has is gone with its files, and its name and room are free."""
        local, tier = self.store.local(name), self.store.tier(name).name
        if holders := [pinned for pinned in self.pinned if name in pinned.expected]:
            if any(name not in pinned.superseded for pinned in holders):  # the present version
                with pytest.raises(UsageError):
                    self.store.remove(name)
            return
        held, before = f"{tier}_bytes", self.store.statistics()
        self.store.remove(name)
        assert list(self.folder.rglob(f"*{name.rpartition('/')[2]}.*.shard")) == []
        assert getattr(before, held) - getattr(self.store.statistics(), held) == local.nbytes
        with pytest.raises(KeyError, match="no array"):
            self.store.read(name)
        self.store.create(local.spec, grid=local.grid, shard=local.shard, tier=tier)
        self.model[name] = np.zeros_like(self.model.pop(name))
        self.read(name)

    @rule(name=names)
    def rename_there_and_back(self, name: str) -> None:
        if any(name in pinned.expected for pinned in self.pinned):
            return
        spec, tier = self.store.spec(name), self.store.tier(name).name
        assert self.store.rename(name, replace(spec, name="other/v"), tier=tier)
        assert "other/v" in self.store.names()
        assert name not in self.store.names()
        assert same_bits(self.store.read("other/v").wait(), self.model[name])
        assert self.store.rename("other/v", spec, tier=tier)
        self.model = {each: self.model[each] for each in self.store.names()}

    @rule()
    def commit(self) -> None:
        self.store.flush().wait()

    @precondition(lambda self: len(self.pinned) < 3)
    @rule(some=st.one_of(st.none(), st.lists(names, min_size=1, unique=True)))
    def snapshot(self, some: list[str] | None) -> None:
        snapshot = self.store.snapshot(some)
        expected = {name: values.copy() for name, values in self.model.items() if name in snapshot.pins}
        assert list(expected) == (self.store.names() if some is None else sorted(some, key=self.store.names().index))
        self.pinned.append(Pinned(snapshot, expected))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), links=st.booleans())
    def publish(self, data: st.DataObject, links: bool) -> None:
        pinned = data.draw(st.sampled_from(self.pinned))
        name = data.draw(st.sampled_from(sorted(pinned.expected)))
        pin = pinned.snapshot.pins[name]
        if not links:
            self.files.inject(Fault(kind="link", times=None, error_number=errno.EXDEV))
        path = self.folder / f"published-{len(self.published)}"
        summary = pin.publish(self.store.resources, path, pin.local.grid, pin.local.shard, Priority.CHECKPOINT)
        self.files.heal()
        assert not (summary.linked and not links)
        assert summary.linked in (False, self.store.tier(name).name == "disk")
        self.published.append((path, pin.local, pinned.expected[name]))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        pinned = data.draw(st.sampled_from(self.pinned))
        self.release_one(pinned)
        if twice:
            pinned.snapshot.release()

    @rule(which=st.sampled_from([0, 1]), seed=seeds, well=st.integers(0, 3), kind=st.sampled_from(["read", "write"]))
    def fail(self, which: int, seed: int, well: int, kind: str) -> None:
        """An update of arrays on disk hits an error: each has its former version, or says that it is lost."""
        wait_all(self.behind)
        self.files.inject(Fault(kind=kind, first=well, times=None, error_number=errno.EIO))  # type: ignore[arg-type]
        held = {name for pinned in self.pinned for name in pinned.expected if name not in pinned.superseded}
        failure: StorageError | None = None
        try:
            for tile in self.store.tiles([NAMES[which]]):
                for view in tile.views:
                    view[:] = 0
        except StorageError as error:
            failure = error
        self.files.heal()
        for pinned in self.pinned:
            pinned.superseded.update(NAMES[which])
        for name in NAMES[which]:
            if failure is None:
                self.model[name].fill(0)
                continue
            assert failure.errno == errno.EIO
            ticket = self.store.read(name)
            lost = ticket.error()
            if lost is None:
                assert same_bits(ticket.wait(), self.model[name])
                continue
            assert isinstance(lost, UsageError)
            assert "failed partway" in str(lost)
            assert name not in held
            values = self.values(name, self.model[name].size, seed)
            self.store.write(name, values).wait()
            self.model[name][:] = values

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for pinned in self.pinned:
                for name, pin in pinned.snapshot.pins.items():
                    path = self.folder / f"published-{len(self.published)}"
                    pin.publish(self.store.resources, path, pin.local.grid, pin.local.shard, Priority.CHECKPOINT)
                    self.published.append((path, pin.local, pinned.expected[name]))
            for pinned in list(self.pinned):
                self.release_one(pinned)
            for name, values in self.model.items():
                assert same_bits(self.store.read(name).wait(), values)
            # What was published holds what was pinned, whatever was done to the shard since.
            for path, local, expected in self.published:
                reader = ShardReader(self.store.resources, path, local.spec, local.grid, local.shard)
                reader.verify()
                out = np.zeros_like(expected)
                reader.read(local.base, local.base + local.valid_numel, out.view(np.uint8))
                assert same_bits(out, expected)
            found = self.store.statistics()
            assert found.pool_peak_bytes + found.host_bytes <= 3 << 20
            with self.store.resources.pool.acquire(self.store.resources.pool.nbytes):
                pass
        finally:
            self.store.close()
            left = list(self.folder.rglob("*.shard"))
            shutil.rmtree(self.folder)
        assert left == []


TestStore = pytest.mark.timeout(280)(StoreMachine.TestCase)
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
