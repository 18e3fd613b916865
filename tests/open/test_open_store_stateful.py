"""What `zstore.open_store` gives, against a dict of arrays: any order of calls, also failing and cancelled ones."""

import asyncio
import contextlib
import errno
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - bfloat16
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import zstore
from tests.store.stores import turn_in_place
from zstore.checkpoint.part import SaveSummary
from zstore.checkpoint.reader import tags
from zstore.errors import BudgetError, CheckpointExistsError, StorageError, UsageError, ZstoreError
from zstore.io import Ticket
from zstore.io.memory import as_numpy, as_torch
from zstore.store import Store, StoreOptions
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import random_values, same_bits

BUDGET_BYTES = 8 << 20
KINDS = [  # the first three rest on disk
    ((170, 130), "float32"),
    ((3, 70, 400), "bfloat16"),
    ((90_000,), "int8"),
    ((), "int64"),
    ((7, 3, 2), "bool"),
    ((0, 4), "float64"),
]
names = st.sampled_from(["a/w", "a/x", "b/w", "alone"])
several = st.lists(names, min_size=1, max_size=3, unique=True)
kinds = st.integers(0, len(KINDS) - 1)
seeds = st.integers(0, 1000)
tiers = st.sampled_from(["disk", "host", "device"])
fractions = st.floats(0, 1)
FAULTS = ["open", "read", "write", "allocate", "fsync", "link", "rename", "unlink", "sync_folder"]


def plain(value: Any) -> np.ndarray:
    return as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)


def make(kind: int, seed: int) -> np.ndarray:
    shape, dtype = KINDS[kind]
    return random_values(dtype, int(np.prod(shape)), seed).reshape(shape)


def turn(value: Any) -> None:
    turn_in_place(plain(value).reshape(-1))


def turned(value: np.ndarray) -> np.ndarray:
    other = value.copy()
    turn(other)
    return other


class LostFiles(FaultyFiles):
    """Files of a drive that nothing reaches any more from operation `fail_at` on, as it is once a process was killed."""

    def happen(self, kind: Any, path: str) -> None:
        for each in FAULTS:
            self.inject(Fault(kind=each, times=None, error_number=self.error_number))
        super().happen(kind, path)


class OpenStoreMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zstore-open-"))
        for name in ("run", "ckpt"):
            (self.folder / name).mkdir()
        self.open_anew()
        self.saved: dict[str, dict[str, np.ndarray]] = {}
        self.saving: dict[str, Ticket[SaveSummary]] = {}
        self.turn = 0

    def open_anew(self) -> None:
        self.files = LostFiles(error_number=errno.EIO)
        options = StoreOptions(run_path=self.folder / "run", host_budget_bytes=BUDGET_BYTES, num_threads=2)
        self.store = Store(options, files=self.files)
        self.values: dict[str, np.ndarray] = {}
        self.tiers: dict[str, str] = {}

    def tier(self, name: str, value: np.ndarray, tier: str | None) -> str:
        chosen = tier or self.tiers.get(name, "disk")
        return "host" if chosen == "disk" and value.nbytes < 64 * 1024 else chosen

    def note(self, name: str, value: np.ndarray, tier: str | None = None) -> None:
        self.tiers[name] = self.tier(name, value, tier)
        self.values[name] = value

    def there(self, some: Sequence[str]) -> list[str]:
        return [name for name in some if name in self.values]

    def check(self, some: Sequence[str] | None = None) -> None:
        for name in self.values if some is None else some:
            assert same_bits(plain(self.store.get(name).wait()), self.values[name]), name
            assert self.store.spec(name).shape == self.values[name].shape

    def tag(self) -> str:
        self.turn += 1
        return f"{self.turn:03d}"

    @rule(name=names, kind=kinds, seed=seeds, tier=st.none() | tiers, is_torch=st.booleans(), waits=st.booleans())
    def put(self, name: str, kind: int, seed: int, tier: Any, is_torch: bool, waits: bool) -> None:
        value = make(kind, seed)
        ticket = self.store.put(name, as_torch(value.copy()) if is_torch else value, tier=tier)
        self.note(name, value, tier)
        if waits:
            ticket.wait()
            assert self.store.tier_of(name).wait() == self.tiers[name]
            assert isinstance(self.store.get(name).wait(), torch.Tensor if is_torch else np.ndarray)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), one=fractions, other=fractions, seed=seeds)
    def update(self, data: st.DataObject, one: float, other: float, seed: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        former = self.values[name]
        value = random_values(former.dtype.name, former.size, seed).reshape(former.shape)
        if not former.ndim:
            self.store.update(name, value)
        else:
            first, stop = sorted((round(one * len(former)), round(other * len(former))))
            whole = former.copy()
            whole[first:stop] = value[first:stop]
            self.store.update(name, value[first:stop], rows=slice(first, stop))
            value = whole
        self.note(name, value)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), one=fractions, other=fractions, into=st.booleans())
    def get(self, data: st.DataObject, one: float, other: float, into: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        expected, rows = self.values[name], None
        if expected.ndim:
            first, stop = sorted((round(one * len(expected)), round(other * len(expected))))
            rows = slice(first, stop)
            expected = expected[rows]
        out = np.empty_like(expected) if into else None
        found = self.store.get(name, rows=rows, out=out).wait()
        assert out is None or found is out
        assert same_bits(plain(found), expected)

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name not in self.values:
            with pytest.raises(KeyError, match="has no array"):
                self.store.delete(name)
        else:
            self.store.delete(name)
            del self.values[name], self.tiers[name]
        assert sorted(self.store.names()) == sorted(self.values)
        assert len(self.store) == len(self.values)
        assert (name in self.store) == (name in self.values)

    @rule(some=several, tier=tiers)
    def move(self, some: list[str], tier: Any) -> None:
        for name in self.there(some):
            self.store.move(name, tier=tier)
            self.tiers[name] = self.tier(name, self.values[name], tier)
            assert self.store.tier_of(name).wait() == self.tiers[name]

    @rule(some=several, ahead=st.integers(0, 3), mode=st.sampled_from(["update", "read"]), most=st.integers(1, 3))
    def stream(self, some: list[str], ahead: int, mode: Any, most: int) -> None:
        some = self.there(some)
        values = iter(self.store.stream(some, prefetch=ahead, mode=mode))
        for number, (name, value) in enumerate(values):
            assert name == some[number]
            assert same_bits(plain(value), self.values[name])
            turn(value)
            if mode == "update":
                self.note(name, turned(self.values[name]))
            if number + 1 == most:
                break
        values.close()

    @rule(tier=tiers)
    def too_large(self, tier: Any) -> None:
        """A budget that has no room says so, and nothing else changes."""
        with pytest.raises(BudgetError, match="host_budget_bytes"):
            self.store.put("large", np.zeros(BUDGET_BYTES, np.int8), tier="host").wait()
        self.store.put("large", np.zeros(BUDGET_BYTES, np.int8), tier="disk").wait()
        with pytest.raises(BudgetError, match="host_budget_bytes"):
            next(iter(self.store.stream(["large"])))
        with pytest.raises(BudgetError, match="host_budget_bytes"):
            self.store.move("large", tier="host").wait()
        self.store.delete("large").wait()

    @rule()
    def flush(self) -> None:
        self.store.flush().wait()
        self.check()

    @rule(some=st.none() | several, waits=st.booleans(), again=st.booleans())
    def checkpoint(self, some: list[str] | None, waits: bool, again: bool) -> None:
        tag, chosen = self.tag(), None if some is None else self.there(some)
        saving = self.store.checkpoint(self.folder / "ckpt" / tag, names=chosen, extra={"turn": self.turn})
        self.saved[tag] = {name: self.values[name] for name in (self.values if chosen is None else chosen)}
        self.saving[tag] = saving
        if waits or again:
            saving.wait()
        if again:
            with pytest.raises(CheckpointExistsError):
                self.store.checkpoint(self.folder / "ckpt" / tag).wait()
            self.store.checkpoint(self.folder / "ckpt" / tag, overwrite=True).wait()
            self.saved[tag] = dict(self.values)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.store.flush().wait()
        tag = data.draw(st.sampled_from(sorted(self.saved)))
        self.saving.pop(tag).wait() if tag in self.saving else None
        self.store.load(self.folder / "ckpt", tag).wait()
        for name, value in self.saved[tag].items():
            self.note(name, value)

    @precondition(lambda self: self.values)
    @rule(some=several, changed=st.integers(0, 3), seed=seeds)
    def cancel(self, some: list[str], changed: int, seed: int) -> None:
        """Tasks that are cancelled in a pass, a change and a save: what they began goes on, and no more."""
        some, tag = self.there(some), self.tag()
        last = next(reversed(self.values))
        values = {name: random_values(v.dtype.name, v.size, seed).reshape(v.shape) for name, v in self.values.items()}

        async def go_over() -> None:
            async for name, value in self.store.stream(some, prefetch=1):
                turn(value)
                self.note(name, turned(self.values[name]))
                seen.append(name)
                if len(seen) == changed:
                    reached.set()
                    await asyncio.Event().wait()
            reached.set()

        async def save_and_change() -> None:
            self.saved[tag] = dict(self.values)
            saving = self.saving[tag] = self.store.checkpoint(self.folder / "ckpt" / tag)
            for name in self.values:
                self.store.update(name, values[name])
                self.note(name, values[name])
            await self.store.get(last)
            await saving

        async def main() -> None:
            if not changed:
                reached.set()
            task = asyncio.create_task(go_over())
            await reached.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            task = asyncio.create_task(save_and_change())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        seen: list[str] = []
        reached = asyncio.Event()
        asyncio.run(main())
        self.check()

    @rule(some=several, seed=seeds, kind=kinds)
    def threads(self, some: list[str], seed: int, kind: int) -> None:
        errors: list[BaseException] = []

        def work(name: str) -> None:
            try:
                for number in range(3):
                    self.store.put(name, make(kind, seed + number))
                    assert same_bits(self.store.get(name).wait(), make(kind, seed + number))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in some]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for name in some:
            self.note(name, make(kind, seed + 2))

    def complete_saves(self) -> None:
        """A fault is to hit one call."""
        for tag in list(self.saving):
            self.saving.pop(tag).wait()

    def forget_errors(self) -> None:
        while True:
            try:
                self.store.flush().wait()
            except (StorageError, UsageError):
                continue
            return

    @precondition(lambda self: self.values)
    @rule(
        data=st.data(),
        call=st.sampled_from(["put", "other", "update", "stream", "get", "move", "checkpoint"]),
        kind=st.sampled_from(FAULTS),
        first=st.integers(0, 4),
        lasting=st.booleans(),
        seed=seeds,
    )
    def fail(self, data: st.DataObject, call: str, kind: Any, first: int, lasting: bool, seed: int) -> None:
        """A drive fails: who asked is told, and each array is what it was, what it was to be, or says that it is lost."""
        self.complete_saves()
        self.forget_errors()
        name, tag = data.draw(st.sampled_from(sorted(self.values))), self.tag()
        former = self.values[name]
        value = random_values(former.dtype.name, former.size, seed).reshape(former.shape)
        other = make((seed % 3 + 1) % 3, seed)
        new = {"put": value, "other": other, "update": value, "stream": turned(former)}.get(call, former)
        fault = Fault(kind=kind, first=first, times=None if lasting else 1, error_number=errno.EIO)
        self.files.inject(fault)
        failure: BaseException | None = None
        try:
            if call in ("put", "other"):
                self.store.put(name, new.copy()).wait()
            elif call == "update":
                self.store.update(name, value).wait()
            elif call == "stream":
                for _, found in self.store.stream([name]):
                    turn(found)
            elif call == "get":
                assert same_bits(plain(self.store.get(name).wait()), former)
            elif call == "move":
                self.store.move(name, tier="disk" if self.tiers[name] == "host" else "host").wait()
            else:
                self.store.checkpoint(self.folder / "ckpt" / tag).wait()
        except (StorageError, UsageError) as error:
            failure = error
        self.files.heal()
        self.forget_errors()
        if call == "checkpoint" and tag in {info.tag for info in tags(self.folder / "ckpt")}:
            self.saved[tag] = dict(self.values)
        else:
            assert call != "checkpoint" or failure is not None
        if failure is None:
            self.note(name, new, self.store.tier_of(name).wait())
        elif name not in self.store:
            assert call == "other"
            del self.values[name], self.tiers[name]
        else:
            ticket = self.store.get(name)
            if (lost := ticket.error()) is None:
                found = plain(ticket.wait())
                assert same_bits(found, former) or same_bits(found, new)
                self.note(name, found, self.store.tier_of(name).wait())
            else:
                assert call in ("put", "update", "stream")
                assert isinstance(lost, UsageError)
                assert "failed partway" in str(lost)
                self.store.put(name, value).wait()
                self.note(name, value)
        self.check()

    @rule(number=st.integers(0, 80), seed=seeds)
    def kill(self, number: int, seed: int) -> None:
        """The process ends somewhere in a save: the checkpoint is whole or absent, those before are as they were."""
        self.complete_saves()
        self.forget_errors()
        tag, held = self.tag(), dict(self.values)
        self.files.fail_at = len(self.files.operations) + number
        with contextlib.suppress(ZstoreError):
            saving = self.store.checkpoint(self.folder / "ckpt" / tag)
            for name, value in held.items():
                self.store.update(name, random_values(value.dtype.name, value.size, seed).reshape(value.shape))
            saving.wait()
        with contextlib.suppress(ZstoreError, OSError):
            self.store.close()
        found = {info.tag for info in tags(self.folder / "ckpt")}
        assert self.saved.keys() <= found <= {*self.saved, tag}
        self.saved |= dict.fromkeys(found - self.saved.keys(), held)
        self.open_anew()  # sweeps what was left

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.files.heal()
            self.check()
            self.store.flush().wait()
            assert self.store.statistics().pool_bytes == BUDGET_BYTES // 2
        finally:
            self.store.close()
        assert {info.tag for info in tags(self.folder / "ckpt")} == set(self.saved)
        for tag, expected in self.saved.items():
            with zstore.open_checkpoint(self.folder / "ckpt", tag) as checkpoint:
                assert checkpoint.verify() == []
                assert set(checkpoint) == set(expected)
                for name, value in expected.items():
                    assert same_bits(checkpoint[name].numpy(), value), (tag, name)
        assert list(self.folder.rglob("*.shard")) == []
        shutil.rmtree(self.folder)


class LongOpenStoreMachine(OpenStoreMachine):
    """The same for longer."""


TestOpenStore = pytest.mark.timeout(280)(OpenStoreMachine.TestCase)
TestOpenStore.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
TestLongOpenStore = pytest.mark.soak(LongOpenStoreMachine.TestCase)
TestLongOpenStore.settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)
