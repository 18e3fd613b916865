"""Reading and writing the training state as whole tensors by name, sharded or offloaded or neither.

All calls are collectives: all ranks make them, with the same names, in the same order. Values are read from the arrays in
the store, after `prepare` has completed pending work.

[Note: pieces]
The flat elements of an array are cut at the ends of shards, and into pieces of whole chunks, about 8 MiB. A piece's owner
prefetches it and sends it to rank 0, or to all ranks. All ranks process all pieces in the same order. If the state is not
sharded, every rank has all of it, and nothing is sent. A rank that fails continues with zeros, so no other rank waits for it;
the ranks agree on errors after every 32 Mi elements, and at the end.
"""

from __future__ import annotations

import difflib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from zstore.errors import UsageError, listed
from zstore.format import Grid, make_grid, model_array, optimizer_array, stored_shape
from zstore.io.memory import as_torch, plain_memory
from zstore.ranks.world import World, agree_any

from ..params.record import OTHER_MODES, ParameterRecord, Residency
from .guard import ParameterGuard

if TYPE_CHECKING:
    from ..training.training import Training

T = TypeVar("T")

_PIECE_NUMEL = 2 * 1024 * 1024
_PIECES_AHEAD = 2
_AGREE_NUMEL = 32 * 1024 * 1024

Read = Callable[[], torch.Tensor]
"""Waits for a read and returns its elements, 1-D, on any device."""


@dataclass(frozen=True, kw_only=True)
class RankArray:
    """This rank's rows of an array of a parameter."""

    record: ParameterRecord
    name: str
    """Name of the array."""
    dtype: torch.dtype
    start_read: Callable[[int, int], Read]
    """Starts a read of local flat elements `[first, stop)` of this rank's shard."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole array if it differs from the parameter's: the array is then partitioned along its own rows."""

    def grid(self, num_ranks: int) -> Grid:
        """Return its partition over `num_ranks` ranks that share the state."""
        return self.record.state_grid if self.shape is None else make_grid(stored_shape(self.shape), num_ranks)


Put = Callable[[RankArray, int, torch.Tensor], None]
"""Stores a piece of an array: the index of its first global flat element, and its values, 1-D, on the CPU."""


class Access:
    """Access to whole tensors of one run. `before_changes` completes reads of the state, such as a save, before a change."""

    def __init__(
        self, roots: dict[str, nn.Module | None], training: Training, before_changes: Callable[[], None]
    ) -> None:
        self.model, self.world = training.model, training.world
        self.state, self.gradients, self.scaler = training.state, training.gradients, training.scaler
        self.units = None if training.hooks is None else training.hooks.units
        """None if parameters are not sharded."""
        self._update = training.update
        self._before_changes = before_changes
        self._require_not_offloaded = training.require_not_offloaded
        records = self.state.records
        self._by_name = {name: record for record in records for name in (record.name, *record.aliases)}
        self.guard = ParameterGuard(roots, training)
        """Watches the parameters of the model, and its state dicts."""
        live_runs.add(self)

    def find(self, name: str) -> ParameterRecord | None:
        """Return the record of a parameter by its name in the model, optionally with the engine's prefix `module.`."""
        return self._by_name.get(name) or self._by_name.get(name.removeprefix("module."))

    def record(self, name: str) -> ParameterRecord:
        """Return the record of a parameter by its name. Raises UsageError with the nearest names."""
        found = self.find(name)
        if found is None:
            raise UsageError(f"the model has no parameter {name!r}; {_suggestion(name, self._by_name)}")
        return found

    def require_no_open_gather(self, call: str) -> None:
        """Raise UsageError within a block of `zstore.gather`, whose values would become outdated."""
        if self.guard.open_blocks:  # the same on all ranks
            self.world.raise_on_all_ranks(UsageError(f"{call} within `with zstore.gather(...)`: end the block first"))

    def prepare(self, call: str, check: Callable[[], T], *, changes: bool = False, moves: bool = False) -> T:
        """Wait for the last step's update and return the result of `check`, if the ranks agree on `call` (all ranks).

        An error of `check` on any rank is raised on every rank, as is UsageError if the state cannot be read or changed now.
        With `moves` the state may be offloaded.
        """
        with self.world.agreeing(call=call):
            if not moves:
                self._require_not_offloaded(call)
            if self._update.is_in_backward:
                raise UsageError(
                    f'{call} between backward() and step(): with "step_overlap": "backward" the state is being changed then; '
                    f"call step() first, or {OTHER_MODES}"
                )
            self._update.wait()
            self._update.require_consistent()
            if not self.guard.open_blocks:
                self.guard.check_values()
            if changes and (calls := self.guard.running):
                raise UsageError(f"{call} within a {calls[-1]}: parameters can be changed between steps only")
            checked = check()
        if changes:
            self._before_changes()
        return checked

    def parameter(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a parameter's fp32 master, or itself if it is not trained."""
        record = self.prepare(f"get_full_parameter({name!r})", lambda: self.record(name))
        return self.read_whole(self.source(record, "model"), rank0_only=rank0_only)

    def optimizer_state(self, name: str, slot: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return an optimizer slot of a parameter; a scalar as a tensor of no dimensions."""
        source = self.slot(name, slot)
        if isinstance(source, RankArray):
            return self.read_whole(source, rank0_only=rank0_only)
        return torch.tensor(source) if self.world.rank == 0 or not rank0_only else None

    def slot(self, name: str, slot: str) -> RankArray | float:
        """Return this rank's rows of an optimizer slot of a parameter, or its scalar (all ranks)."""
        record = self.prepare(f"get_optimizer_state({name!r}, {slot!r})", lambda: self._record_with_slot(name, slot))
        scalars = self.state.scalars[record]
        return scalars[slot] if slot in scalars else self.source(record, f"optimizer/{slot}", torch.float32)

    def _record_with_slot(self, name: str, slot: str) -> ParameterRecord:
        """Return the record of a parameter that has the optimizer slot `slot`."""
        record = self.record(name)
        if record.group is None:
            raise UsageError(f"parameter {name!r} is not trained, so it has no optimizer state")
        slots = (*(slot.name for slot in self.state.slots_of(record)), *self.state.scalars[record])
        if slot not in slots:
            raise UsageError(f"the optimizer has no {slot!r} of parameter {name!r}; {_suggestion(slot, slots)}")
        return record

    def gradient(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return the gradient accumulated in the current step, averaged over ranks; None if there is none."""
        record, gradients = self.prepare(f"get_gradient({name!r})", lambda: self.record(name)), self.gradients
        if record.group is None:
            return None
        if not gradients.rules.each_backward:
            mean = gradients.mean(record)
            found = None if mean is None else mean.cpu().view(record.parameter.shape)
        else:
            rows = gradients.owned(record)
            if not agree_any(self.world, [rows is not None])[0]:
                return None
            # In fp32 on every rank: rows on disk may be in a wider dtype than another rank's.
            source = rows_source(record, torch.zeros(0) if rows is None else rows, torch.float32)
            found = self.read_whole(source, rank0_only=rank0_only)
        if found is None or (rank0_only and self.world.rank > 0):
            return None
        return found.float().div_(self.scaler.scale)

    def source(self, record: ParameterRecord, group: str, dtype: torch.dtype | None = None) -> RankArray:
        """Return this rank's rows of an array of a parameter, in its own dtype or in `dtype`. The array of group "model" is
        the master, or the parameter if it is not trained."""
        store, name = self.state.store, f"{group}/{record.name}"
        spec = store.spec(name)
        read_dtype: torch.dtype = dtype or getattr(torch, spec.dtype)

        def start_read(first: int, stop: int) -> Read:
            ticket = store.read(name, first, stop)
            return lambda: as_torch(ticket.wait()).to(read_dtype)

        shape = None if spec.shape == tuple(record.parameter.shape) else spec.shape
        return RankArray(record=record, name=name, dtype=read_dtype, start_read=start_read, shape=shape)

    def read_whole(self, source: RankArray, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a whole array on the CPU; with `rank0_only` None on other ranks (all ranks)."""
        shape = source.record.parameter.shape if source.shape is None else torch.Size(source.shape)
        out = torch.empty(shape, dtype=source.dtype) if self.world.rank == 0 or not rank0_only else None
        self.read_into({} if out is None else {source.record: out.view(-1)}, [source], rank0_only=rank0_only)
        return out

    def read_into(
        self, targets: Mapping[ParameterRecord, torch.Tensor], sources: Sequence[RankArray], *, rank0_only: bool = False
    ) -> None:
        """Read whole arrays into their parameters' targets, 1-D; arrays without a target are skipped (all ranks)."""

        def put(source: RankArray, first: int, values: torch.Tensor) -> None:
            target = targets.get(source.record)
            if target is not None:
                target[first : first + values.numel()] = values

        self.for_each_piece(sources, put, rank0_only=rank0_only)

    def for_each_piece(self, sources: Sequence[RankArray], put: Put, *, rank0_only: bool) -> None:
        """Call `put` with every piece of whole arrays, in order, on every rank or only on rank 0 (all ranks).

        An error of `put` or of a read on any rank is raised on every rank. See [Note: pieces].
        """
        world, sharded = self.world, self.state.is_sharded and self.world.world_size > 1
        num_ranks = world.world_size if sharded else 1
        error: Exception | None = None

        def attempt(call: Callable[..., T], *args: Any) -> T | None:
            nonlocal error
            try:
                return call(*args)
            except Exception as raised:
                error = error or raised
                return None

        def is_own(piece: _ArrayPiece) -> bool:
            return world.rank == piece.shard if sharded else world.rank == 0 or not rank0_only

        own_pieces = filter(is_own, _pieces(sources, num_ranks))
        reads: deque[Read | None] = deque()
        unchecked_numel = 0
        for piece in _pieces(sources, num_ranks):
            numel, values = piece.stop - piece.first, None
            if is_own(piece):
                while len(reads) <= _PIECES_AHEAD and (next_own := next(own_pieces, None)) is not None:
                    reads.append(attempt(next_own.source.start_read, next_own.first, next_own.stop))
                read = reads.popleft()
                values = None if read is None else attempt(read)
                values = torch.zeros(numel, dtype=piece.source.dtype) if values is None else values
            if sharded:
                values = _send(world, piece, values, rank0_only=rank0_only)
            if values is not None and error is None:
                attempt(lambda p, v: put(p.source, p.start + p.first, v.cpu()), piece, values)
            unchecked_numel += numel
            if unchecked_numel >= _AGREE_NUMEL:
                world.raise_on_all_ranks(error)
                unchecked_numel = 0
        world.raise_on_all_ranks(error)

    def set_parameter(self, name: str, values: Any) -> None:
        """Replace a parameter and its master with rank 0's `values`."""

        def check() -> ParameterRecord:
            self.check_values(record := self.record(name), values)
            return record

        self.set_from_rank0(self.prepare(f"set_full_parameter({name!r})", check, changes=True), values)

    def set_from_rank0(self, record: ParameterRecord, values: Any) -> None:
        """Replace a parameter and its master with rank 0's `values`, of its shape (all ranks)."""
        dtype = torch.float32 if record.group is not None else record.dtype
        self.write([(record, self.broadcast_from_rank0(record, values, dtype))])

    def set_optimizer_state(self, name: str, slot: str, values: Any) -> None:
        """Replace an optimizer slot of a parameter with rank 0's `values`."""

        def check() -> ParameterRecord:
            record = self._record_with_slot(name, slot)
            scalars = self.state.scalars[record]
            if scalars.get("updates") == 0:
                raise UsageError(
                    f"the optimizer makes its state of parameter {name!r} in the first step, and would overwrite {slot!r}: "
                    "set it after a step"
                )
            if slot not in scalars:
                self.check_values(record, values)
            elif values is not None or self.world.rank == 0:
                float(values)
            return record

        record = self.prepare(f"set_optimizer_state({name!r}, {slot!r})", check, changes=True)
        scalars = self.state.scalars[record]
        if slot in scalars:
            scalars[slot] = self.world.broadcast_object(float(values) if self.world.rank == 0 else None)
            return
        full = self.broadcast_from_rank0(record, values, torch.float32)
        with self._changing():
            self._fill(record, full, optimizer_array(slot, record.name))

    def check_values(self, record: ParameterRecord, values: Any) -> None:
        """Raise UsageError if the shape of `values` is not the parameter's; only rank 0 needs values."""
        if values is None and self.world.rank > 0:
            return
        shape = tuple(torch.as_tensor(values).shape)
        if shape != tuple(record.parameter.shape):
            raise UsageError(
                f"parameter {record.name!r}: expected values of shape {tuple(record.parameter.shape)}, got {shape}"
            )

    def broadcast_from_rank0(self, record: ParameterRecord, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return rank 0's values on every rank, 1-D [numel]."""
        world = self.world
        if world.rank == 0:
            full = plain_memory(torch.as_tensor(values).detach().to(world.device, dtype).reshape(-1))
        else:
            full = torch.empty(record.numel, dtype=dtype, device=world.device)
        world.broadcast(full)
        return full

    def write(self, values: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Replace parameters and their masters with the same values, 1-D [numel], on every rank (all ranks)."""
        with self._changing():
            for record, full in values:
                self._fill(record, full, model_array(record.name))
                if record.stored_array is not None and record.stored_array != model_array(record.name):
                    self._fill(record, full, record.stored_array)
                elif record.shard is not None:
                    record.shard.copy_(full[slice(*record.owned_range)])
                if record.residency is not Residency.RELEASED and record.full is not full:
                    record.full.copy_(full)

    def _fill(self, record: ParameterRecord, full: torch.Tensor, name: str) -> None:
        """Set this rank's rows of an array from `full`."""
        rows = full[slice(*record.owned_range)]
        with self.state.open_pass([[name]], "fill") as tiles:
            for tile in tiles:
                self.state.transfers.copy_into(as_torch(tile.views[0]), rows[tile.first : tile.stop])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the state in the block; an error on any rank is raised on all, and leaves the state torn (all ranks)."""
        if self.units is not None:
            self.units.invalidate()
        note = "The state was only partly changed: load a checkpoint before continuing."
        with self._update.changing(), self.world.agreeing(note):
            yield

    def close(self) -> None:
        """Hide this run from `zstore.gather`, and stop watching the model."""
        live_runs.discard(self)
        self.guard.remove()


def rows_source(record: ParameterRecord, rows: torch.Tensor, dtype: torch.dtype) -> RankArray:
    """Return this rank's rows of a parameter, 1-D in memory, to be read in `dtype`."""

    def start_read(first: int, stop: int) -> Read:
        return lambda: rows[first:stop].to(dtype)

    return RankArray(record=record, name=f"rows/{record.name}", dtype=dtype, start_read=start_read)


live_runs: weakref.WeakSet[Access] = weakref.WeakSet()
"""The runs of all open engines, searched by `find_run`."""


def find_run(parameter: nn.Parameter) -> tuple[Access, ParameterRecord] | None:
    """Return the run of the open engine that has the parameter, and its record; None if no engine has it."""
    found = ((access, access.guard.records.get(parameter)) for access in list(live_runs))
    return next(((access, record) for access, record in found if record is not None), None)


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    return f"there are {listed(list(map(repr, names)), 5)}"


class _ArrayPiece(NamedTuple):
    """Flat elements `[first, stop)` of a shard of an array; the shard begins at global flat element `start`."""

    source: RankArray
    shard: int
    start: int
    first: int
    stop: int


def _pieces(sources: Sequence[RankArray], num_ranks: int) -> Iterator[_ArrayPiece]:
    for source in sources:
        grid = source.grid(num_ranks)
        step = max(1, _PIECE_NUMEL // grid.chunk_numel) * grid.chunk_numel
        for shard in range(grid.num_shards):
            valid = grid.shard_valid_numel(shard)
            for first in range(0, valid, step):
                yield _ArrayPiece(source, shard, shard * grid.shard_numel, first, min(valid, first + step))


def _send(world: World, piece: _ArrayPiece, values: torch.Tensor | None, *, rank0_only: bool) -> torch.Tensor | None:
    """Return a piece's values on the ranks that receive it, None on others; its owner passes `values` (all ranks)."""
    if rank0_only and world.rank not in (0, piece.shard):
        return None
    if values is None:
        values = torch.empty(piece.stop - piece.first, dtype=piece.source.dtype, device=world.device)
    values = values.to(world.device)
    if rank0_only:
        world.transfer(values, piece.shard, 0)
        return values if world.rank == 0 else None
    world.broadcast(values, piece.shard)
    return values


class StateByParameter(Mapping[Any, Mapping[str, torch.Tensor]]):
    """The state of each updated parameter, by parameter. Entries are lazy: see `StateOfParameter`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __getitem__(self, parameter: Any) -> Mapping[str, torch.Tensor]:
        record = self._access.guard.records.get(parameter)
        if record is None or not self._is_updated(record):
            return {}  # like the defaultdict that it replaces
        return StateOfParameter(self._access, record)

    def _is_updated(self, record: ParameterRecord) -> bool:
        return any(self._access.state.scalars.get(record, {}).values())

    def __contains__(self, parameter: object) -> bool:
        return parameter in set(self)

    def __iter__(self) -> Iterator[Any]:
        return iter([record.parameter for record in self._access.state.scalars if self._is_updated(record)])

    def __len__(self) -> int:
        return sum(map(self._is_updated, self._access.state.scalars))


class StateOfParameter(Mapping[str, torch.Tensor]):
    """The optimizer's slots of one parameter: reading a slot gathers a whole fp32 copy on the CPU (all ranks).
    `engine.set_optimizer_state` changes a slot."""

    def __init__(self, access: Access, record: ParameterRecord) -> None:
        self._access = access
        self._record = record

    def __getitem__(self, slot: str) -> Any:
        if slot not in self._slots():
            raise KeyError(slot)
        with self._access.world.calling("access"):
            return self._access.optimizer_state(self._record.name, slot)

    def _slots(self) -> list[str]:
        state, record = self._access.state, self._record
        scalars = [name for name in state.scalars[record] if name != "updates"]  # the engine's own
        return [*scalars, *(slot.name for slot in state.kernel_slots(record))]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots())

    def __len__(self) -> int:
        return len(self._slots())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a dictionary of tensors. Raises UsageError on several ranks."""
        if self._access.world.world_size > 1:
            raise UsageError(
                "the optimizer's state cannot be copied or pickled, since it is sharded over ranks: save all of it with "
                "engine.save_checkpoint() or accelerator.save_state(), or read single slots, on all ranks"
            )
        return dict, (dict(self),)
