"""Masters and optimizer slots in the store, with stored parameters and gradients.

A checkpoint consists of the `model/` and `optimizer/` arrays. `parameter/` (16-bit rows of offloaded parameters) and
`gradient/` (rows that wait on disk for the update) are swap space: no checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from zstore.format import Grid, grid_in_checkpoint, make_grid, model_array, optimizer_array, stored_shape
from zstore.io.memory import as_torch
from zstore.store import ModeName, Store, TierName, Tile

from ..params.record import ParameterRecord, RowsInStore
from ..params.sharding import GradientTypes
from ..plan.plan import Places
from ..runtime.device import Transfers, one_thread
from ..runtime.native import HostKernel, host_kernel
from ..zero.spill import GradientSpill
from .kernel import FusedAdam, Kernel, Scalars, SlotArray, SlotCodec, TorchKernel

Tiles = Generator[Tile, None, None]
T = TypeVar("T")
_MAX_PLANS = 16
"""Maximum number of cached plans per parameter, on average: different parameters may have gradients in each step."""


class InPlace(NamedTuple):
    """The whole arrays of a parameter that an update changes in place: 1-D, of equal length, in the same memory."""

    names: list[str]
    master: torch.Tensor
    slots: list[torch.Tensor]
    separate_rows: torch.Tensor | None
    """The parameter's own rows, if an array of the store has them separately from the master."""
    casts: bool
    """Whether the master is cast into `ParameterRecord.owned()`."""


class OptimizerState:
    """This rank's arrays. `kernels` has one entry per parameter group; `codec` says how slots are stored; `host_ranks`
    ranks share the cores for the host kernel (0: state in host memory is updated by torch's kernel)."""

    def __init__(
        self,
        store: Store,
        kernels: Sequence[Kernel],
        transfers: Transfers,
        *,
        is_sharded: bool = False,
        codec: SlotCodec | None = None,
        host_ranks: int = 0,
    ) -> None:
        self.store = store
        self.transfers = transfers
        self.is_sharded = is_sharded
        """Whether each rank has only its own rows; else every rank has all rows."""
        self.codec = codec or SlotCodec()
        self.host: HostKernel | None = None
        """The kernel for state in host memory; None: torch's kernel, or there is no such state."""
        self.host_ranks = host_ranks
        self.kernels = kernels
        self.array_names: dict[ParameterRecord, list[str]] = {}
        """Arrays in a checkpoint, by parameter, in order: the master (or the untrained parameter), then the slots."""
        self.scalars: dict[ParameterRecord, Scalars] = {}
        """Step counts and similar scalars of each parameter that the optimizer updates, in order."""
        self.spilled: dict[ParameterRecord, str] = {}
        """Arrays of the gradients that wait for the update on disk, by parameter."""
        self.plans: dict[Any, Any] = {}
        """Cached results of `planned`; cleared when kernels change or buffers are freed."""
        self._layout_generation = self._num_planned = 0
        """The store's layout generation for which `plans` is valid, and the total length of its keys."""
        self._own_masters: set[ParameterRecord] = set()
        """Parameters that are their own fp32 masters; tiers do not imply it, since `offload_states` moves arrays."""

    @property
    def records(self) -> list[ParameterRecord]:
        """All parameters, in order."""
        return list(self.array_names)

    def gradient_spill(self) -> GradientSpill:
        """Return an accessor for the gradients that wait on disk, each in its array in `spilled`."""
        return GradientSpill(self.store, self.spilled, self.transfers)

    def add(
        self,
        record: ParameterRecord,
        initial: torch.Tensor | RowsInStore,
        placement: Places,
        *,
        types: GradientTypes[torch.dtype] | None = None,
        owns_fp32: bool = False,
    ) -> None:
        """Create the arrays of a parameter; `initial` has this rank's rows, 1-D, in the highest precision available.

        Rows in the store become its `model/` array if that belongs on their tier; else they are copied into it.
        The rows of an offloaded parameter are in `record.stored_array` from now on, and it is released. A gradient that
        waits on disk has the planned dtype of `types`. With `owns_fp32` an fp32 parameter is its own master wherever its
        slots are.
        """
        slots = self.slots_of(record)
        self.array_names[record] = [model_array(record.name), *(optimizer_array(s.name, record.name) for s in slots)]
        offloaded = placement.parameter != "device"
        # Pinned, because rows are fetched: no other arrays are copied from host memory to the device.
        tier: TierName = "pinned" if placement.parameter == "host" else placement.parameter
        own_master = record.dtype == torch.float32 and (offloaded or placement.state == "device" or owns_fp32)
        if record.group is not None and not own_master:
            self._create(record, "model", torch.float32, placement.state, fill=initial)
            if offloaded:
                record.stored_array = self._create(record, "parameter", record.dtype, tier, fill=initial)
        elif offloaded:
            record.stored_array = self._create(record, "model", record.dtype, tier, fill=initial)
        else:
            self._create(record, "model", record.dtype, "device", memory=record.owned())
        if offloaded:
            record.release()
            self.use_in_place(record)
        if record.group is None:
            return
        if own_master:
            self._own_masters.add(record)
        in_host_memory = placement.state != "device" or self.transfers.streams.device_is_host
        if self.host_ranks and in_host_memory and isinstance(self.kernels[record.group], FusedAdam):
            self.host = host_kernel()
        for slot in slots:
            name = f"optimizer/{slot.name}"
            if slot.shape is None:
                self._create(record, name, slot.dtype, placement.state)
                continue
            spec = replace(record.spec(name, slot.dtype), shape=slot.shape)
            grid = self.state_grid_of(record, slot.shape)
            self.store.create(spec, grid=grid, shard=record.state_shard, tier=placement.state)
        self.scalars[record] = self.kernels[record.group].initial()
        if placement.gradient == "disk":
            dtype = (types or GradientTypes(summed=torch.float32)).planned(record.dtype)
            self.spilled[record] = self._create(record, "gradient", dtype, "disk")

    def use_in_place(self, record: ParameterRecord) -> None:
        """Use a released parameter in place if this rank has all its rows in memory that the device can compute on directly."""
        has_all_rows = record.world_size == 1 and self.transfers.streams.device_is_host
        if has_all_rows and record.stored_array is not None and self.store.tier(record.stored_array).name == "host":
            record.use_in_place(as_torch(self.store.memory(record.stored_array)))

    def _create(
        self,
        record: ParameterRecord,
        group: str,
        dtype: torch.dtype,
        tier: TierName,
        *,
        memory: torch.Tensor | None = None,
        fill: torch.Tensor | RowsInStore | None = None,
    ) -> str:
        spec = record.spec(group, dtype)
        if isinstance(fill, RowsInStore) and not fill.is_adopted and self.store.rename(fill.array, spec, tier=tier):
            fill.array, fill.is_adopted = spec.name, True
            return spec.name
        self.store.create(spec, grid=record.state_grid, shard=record.state_shard, tier=tier, memory=memory)
        if isinstance(fill, RowsInStore):
            with self.open_pass([[spec.name, fill.array]], "fill", modes={fill.array: "read"}) as tiles:
                for tile in tiles:
                    self.transfers.copy_into(as_torch(tile.views[0]), as_torch(tile.views[1]))
        elif fill is not None:
            with self.open_pass([[spec.name]], "fill") as tiles:
                for tile in tiles:
                    self.transfers.copy_into(as_torch(tile.views[0]), fill[tile.first : tile.stop])
        return spec.name

    def slots_of(self, record: ParameterRecord) -> Sequence[SlotArray]:
        """Return a parameter's arrays other than its master, in the kernel's order; none if it is frozen."""
        return self.codec.stored(self.kernel_slots(record))

    def kernel_slots(self, record: ParameterRecord) -> Sequence[SlotArray]:
        """Return the slots that a parameter's kernel updates, in its order; none if it is frozen."""
        return () if record.group is None else self.kernels[record.group].arrays(record.owned_numel, record.shape)

    def state_grid_of(self, record: ParameterRecord, shape: tuple[int, ...]) -> Grid:
        """Return the partition of an array of `shape` in this rank's state of a parameter."""
        if shape == record.shape:
            return record.state_grid
        return make_grid(stored_shape(shape), record.world_size if self.is_sharded else 1)

    def is_master(self, record: ParameterRecord) -> bool:
        """Return whether the fp32 master is the parameter itself, in its own tensor or in the store."""
        return record in self._own_masters

    def whole_master(self, record: ParameterRecord) -> torch.Tensor:
        """Return the fp32 master of a parameter whose whole state is on the device, 1-D [numel]."""
        return record.full if self.is_master(record) else as_torch(self.store.memory(model_array(record.name)))

    def grid_of_ranks(self, record: ParameterRecord, name: str) -> Grid:
        """Return the partition of an array of the parameter over the ranks."""
        spec = self.store.spec(name)
        return record.grid if spec.shape == record.shape else make_grid(spec.stored_shape, record.world_size)

    def grid_in_files(self, record: ParameterRecord, name: str) -> Grid:
        """Return the partition of an array of the parameter in a checkpoint."""
        spec = self.store.spec(name)
        return grid_in_checkpoint(spec.stored_shape, spec.itemsize, self.grid_of_ranks(record, name))

    def owned_range(self, record: ParameterRecord, name: str) -> tuple[int, int]:
        """Return the global flat elements `[first, stop)` that this rank has of an array of the parameter."""
        shape = self.store.spec(name).shape
        if shape == record.shape:
            return record.owned_range
        grid = self.state_grid_of(record, shape)
        rows = grid.shard_range(record.state_shard)
        return rows[0] * grid.row_numel, rows[1] * grid.row_numel

    def kernel_of(self, record: ParameterRecord) -> tuple[Kernel, int]:
        """Return the kernel of a trained parameter, and the index of its group."""
        if record.group is None:
            raise KeyError(f"{record.name} is frozen")
        return self.kernels[record.group], record.group

    @contextmanager
    def open_pass(
        self, groups: Sequence[Sequence[str]], mode: ModeName, *, modes: Mapping[str, ModeName] | None = None
    ) -> Iterator[Tiles]:
        """Open a pass over groups of arrays for a `with` block; a pass that is incomplete at the end of the block is dropped.

        Tiles from disk are processed by one thread: it is faster than the disk, while torch's threads, which spin as they
        wait for each other, would take cores from the I/O threads.
        """
        tiles = self.store.tiles(groups, mode, modes=modes)
        with one_thread(self.any_on_disk(groups)), closing(tiles):
            yield tiles

    def any_on_disk(self, groups: Iterable[Sequence[str]]) -> bool:
        """Return whether a pass over the groups reads or writes the disk."""
        return any(self.store.tier(name).name == "disk" for names in groups for name in names)

    def planned(self, key: tuple[Any, ...], make: Callable[[], T], fits: Callable[[T], bool] = lambda _: True) -> T:
        """Return the result of `make` for `key`, cached as long as it `fits` and the store is not rearranged."""
        if self._layout_generation != self.store.layout_generation:
            self.plans.clear()
            self._layout_generation, self._num_planned = self.store.layout_generation, 0
        plan: T | None = self.plans.get(key)
        if plan is None or not fits(plan):
            if self._num_planned > _MAX_PLANS * (len(self.scalars) + _MAX_PLANS):
                self.plans.clear()  # the plan of a prefetched update stays alive
                self._num_planned = 0
            plan = self.plans[key] = make()
            self._num_planned += len(key)
        return plan

    def in_place(self, record: ParameterRecord) -> InPlace | None:
        """Return the arrays of a trained parameter if they are all in the same memory and its kernel takes several parameters
        at once: torch's fused kernel does so anywhere, its other optimizers on a device."""
        names = list(self.all_arrays(record))
        kernel = self.kernel_of(record)[0]
        takes_lists = isinstance(kernel, FusedAdam | TorchKernel)
        if not takes_lists or not self.codec.is_plain:
            return None
        if record in self.spilled or any(self.store.tier(name).name == "disk" for name in names):
            return None
        arrays = [as_torch(self.store.memory(name)) for name in names]
        if any(self.transfers.link(array, arrays[0]) for array in arrays):
            return None
        if isinstance(kernel, TorchKernel) and self.transfers.streams.is_host(arrays[0]):
            return None
        rows = arrays.pop() if len(arrays) > len(self.array_names[record]) else None
        casts = record.stored_array is None and not self.is_master(record)
        return InPlace(names, arrays[0], arrays[1:], rows, casts)

    def change_in_one_pass(self, groups: Sequence[Sequence[str]], change: Callable[[], None]) -> None:
        """Call `change` once, in a pass that has begun all of `groups`: nothing else reads the arrays meanwhile."""
        with self.open_pass(groups, "update") as tiles:
            for tile in tiles:
                if tile.group == len(groups) - 1 and tile.first == 0:
                    change()

    def all_arrays(self, record: ParameterRecord) -> Mapping[str, ModeName]:
        """Return the parameter's `array_names`, and its array of separate rows if any, with their modes in an update."""
        modes: dict[str, ModeName] = dict.fromkeys(self.array_names[record], "update")
        if record.stored_array is not None:
            modes.setdefault(record.stored_array, "fill")
        return modes

    def rows_in_memory(self) -> dict[str, torch.Tensor]:
        """Return the parameters' own rows that are cast from masters and are in host memory (any thread may write to them),
        by the name of the master's array."""
        all_rows = {model_array(r.name): r.owned() for r in self._cast_from_masters() if r.stored_array is None}
        return {name: rows for name, rows in all_rows.items() if rows.device.type == "cpu"}

    def _cast_from_masters(self) -> list[ParameterRecord]:
        return [r for r in self.scalars if not self.is_master(r) and r.owned_numel]

    def refresh_parameters(self, skip: Container[str] = ()) -> None:
        """Cast all masters, except arrays in `skip`, into the parameters' own rows, in memory and store (after a load)."""
        records = [r for r in self._cast_from_masters() if model_array(r.name) not in skip]
        groups = [[model_array(r.name), *([] if r.stored_array is None else [r.stored_array])] for r in records]
        modes: dict[str, ModeName] = {r.stored_array: "fill" for r in records if r.stored_array is not None}
        with self.open_pass(groups, "read", modes=modes) as tiles:
            for tile in tiles:
                record = records[tile.group]
                rows = (
                    record.owned()[tile.first : tile.stop] if record.stored_array is None else as_torch(tile.views[1])
                )
                self.transfers.copy_into(rows, as_torch(tile.views[0]))

    def follow_parameters(self, records: Sequence[ParameterRecord]) -> None:
        """Copy what other code wrote to resident parameters into their separate masters, each rank its own rows: an element
        that differs from its cast master replaces the master; the remaining masters keep their extra precision."""
        with self.open_pass([[model_array(record.name)] for record in records], "update") as tiles:
            for tile in tiles:
                master, rows = as_torch(tile.views[0]), records[tile.group].owned()[tile.first : tile.stop]
                own = torch.empty_like(master, dtype=rows.dtype)
                self.transfers.copy_into(own, rows)
                bits = torch.int32 if own.itemsize == 4 else torch.int16
                differs = own.view(bits) != master.to(own.dtype).view(bits)
                torch.where(differs, own.float(), master, out=master)
