"""A run's state as a training script sees it: whole tensors by name, read and set, whatever is sharded or offloaded.

Everything here is a collective: all ranks call it, with the same names, in the same order. Values are read from the arrays
in the store, so that reading disturbs nothing; `finished` completes pending work first.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from zstore.errors import UsageError, listed
from zstore.format import model_array, optimizer_array
from zstore.io.tensors import as_torch, plain_memory

from ..params.record import ParameterRecord, Residency
from ..zero.gradients import WholeGradients, agree_any
from .full_tensors import ArrayPiece, RankArray, WholeArrays
from .statedict import StateDictGuard

if TYPE_CHECKING:
    from ..training.training import Training
    from ..zero.unshard import ShardedUnits

T = TypeVar("T")


class Access:
    """Whole tensors of one run. `before_changes` ends work that must not see the state change in place (a save)."""

    def __init__(self, training: Training, units: ShardedUnits | None, before_changes: Callable[[], None]) -> None:
        self.model, self.world = training.model, training.world
        self.state, self.gradients, self.scaler = training.state, training.gradients, training.scaler
        self.units = units
        """None if parameters are not sharded."""
        self._pending = training.pending
        self._before_changes = before_changes
        self._under_way: list[str] = []
        self.away: set[str] = set()
        """State that `offload_states` moved away."""
        self.open_blocks = 0
        """Blocks of `zstore.gather` that are open."""
        self.before_reading: Callable[[], None] | None = None
        """Takes over values that a script changed in place."""
        records = self.state.records
        self._by_name = {name: record for record in records for name in (record.name, *record.aliases)}
        self._by_parameter = {record.parameter: record for record in records}
        self.guard = StateDictGuard(self.model, self.record_of, self._loses)
        """Watches the state dicts of the model."""
        _live.add(self)

    # -- which, and when --------------------------------------------------------------------------------------------

    def record_of(self, parameter: nn.Parameter) -> ParameterRecord | None:
        """Return the record of a parameter of this run, None for any other."""
        return self._by_parameter.get(parameter)

    def _loses(self, record: ParameterRecord) -> bool:
        """Return whether values that a script writes into a parameter now are replaced by the next step."""
        return record.group is not None and not self.open_blocks and not self.state.is_master(record)

    def find(self, name: str) -> ParameterRecord | None:
        """Return the record of a parameter by its name in the model; a leading `module.` is the engine's own."""
        return self._by_name.get(name) or self._by_name.get(name.removeprefix("module."))

    def record(self, name: str) -> ParameterRecord:
        """Return the record of a parameter by its name.

        Raises UsageError with the nearest names.
        """
        found = self.find(name)
        if found is None:
            raise UsageError(f"the model has no parameter {name!r}; {_nearest(name, self._by_name)}")
        return found

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Note that a forward or a backward of the engine is under way."""
        self._under_way.append(what)
        try:
            yield
        finally:
            self._under_way.pop()

    def require_no_block(self, call: str) -> None:
        """Raise UsageError within a block of `zstore.gather`: the values that it gave would be out of date."""
        if self.open_blocks:  # as on the other ranks
            error = UsageError(f"{call} within `with zstore.gather(...)`: end the block first")
            self.world.raise_together(error)

    def finished(self, call: str, check: Callable[[], T], *, changes: bool = False, moves: bool = False) -> T:
        """Return the result of `check`, once the state is that of the last step and the ranks agree on `call` (all ranks).

        Raises on every rank the error of `check` on any, and UsageError for state that cannot be read or changed now; state
        that was moved away can only be moved further (`moves`).
        """
        with self.world.agreeing():
            if self.away and not moves:
                raise UsageError(
                    f"{call}: states were moved away by offload_states(): call engine.reload_states() first"
                )
            if self._pending.is_in_backward:
                raise UsageError(
                    f'{call} between backward() and step(): with "step_overlap": "backward" the '
                    "state is being changed then; call step() first"
                )
            self._pending.complete()
            self._pending.require_whole()
            if self.before_reading is not None and not self.open_blocks:
                self.before_reading()
            if changes and self._under_way:
                raise UsageError(f"{call} within a {self._under_way[-1]}: parameters can be changed between steps only")
            checked = check()
        calls = self.world.all_gather_object(call)
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(calls))
            raise UsageError(f"all ranks have to make the same call, but they made different ones: {listed}")
        if changes:
            self._before_changes()
        return checked

    # -- reading ----------------------------------------------------------------------------------------------------

    def parameter(self, name: str, *, rank0_only: bool) -> torch.Tensor | None:
        """Return a parameter's fp32 master, or itself if it is not trained."""
        record = self.finished(f"get_full_parameter({name!r})", lambda: self.record(name))
        return self._whole(self.source(record, "model"), rank0_only)

    def optimizer_state(self, name: str, slot: str, *, rank0_only: bool) -> torch.Tensor | None:
        """Return an optimizer slot of a parameter; a scalar as a tensor of no dimensions."""
        source = self.slot(name, slot)
        if isinstance(source, float):
            return torch.tensor(source) if self.world.rank == 0 or not rank0_only else None
        return self._whole(source, rank0_only)

    def slot(self, name: str, slot: str) -> RankArray | float:
        """Return this rank's rows of an optimizer slot of a parameter, or its scalar (all ranks)."""
        record = self.finished(f"get_optimizer_state({name!r}, {slot!r})", lambda: self._record_with(name, slot))
        scalars = self.state.scalars[record]
        return scalars[slot] if slot in scalars else self.source(record, f"optimizer/{slot}", torch.float32)

    def _record_with(self, name: str, slot: str) -> ParameterRecord:
        """Return the record of a parameter of which the optimizer keeps `slot`."""
        record = self.record(name)
        if record.group is None:
            raise UsageError(f"parameter {name!r} is not trained, so there is no optimizer state of it")
        slots = (*(slot.name for slot in self.state.slots_of(record)), *self.state.scalars[record])
        if slot not in slots:
            raise UsageError(f"the optimizer has no {slot!r} of parameter {name!r}; {_nearest(slot, slots)}")
        return record

    def gradient(self, name: str, *, rank0_only: bool) -> torch.Tensor | None:
        """Return the mean over ranks of the gradient that the step under way has so far; None if there is none."""
        record = self.finished(f"get_gradient({name!r})", lambda: self.record(name))
        gradients = self.gradients
        if record.group is None:
            return None
        if isinstance(gradients, WholeGradients):
            mean = gradients.mean(record)
            found = None if mean is None else mean.cpu().view(record.parameter.shape)
        else:
            rows = gradients.owned(record)
            if not agree_any(self.world, [rows is not None])[0]:
                return None
            # In fp32 on every rank: one may hold rows on disk, in a wider type than another.
            found = self._whole(
                rows_source(record, torch.zeros(0) if rows is None else rows, torch.float32), rank0_only
            )
        if found is None or (rank0_only and self.world.rank > 0):
            return None
        return found.float().div_(self.scaler.scale)

    def source(self, record: ParameterRecord, group: str, dtype: torch.dtype | None = None) -> RankArray:
        """Return this rank's rows of an array of a parameter, for `WholeArrays`, in the type of the array or in `dtype`. That
        of group "model" is the master, or the parameter if it is not trained."""
        store, name = self.state.store, f"{group}/{record.name}"
        spec = store.spec(name)
        kind: torch.dtype = dtype or getattr(torch, spec.dtype)

        def begin(first: int, stop: int) -> Callable[[], torch.Tensor]:
            ticket = store.read(name, first, stop)
            return lambda: as_torch(ticket.wait()).to(kind)

        shape = None if spec.shape == tuple(record.parameter.shape) else spec.shape
        return RankArray(record=record, name=name, dtype=kind, begin=begin, shape=shape)

    def read_into(
        self, targets: Mapping[ParameterRecord, torch.Tensor], sources: Sequence[RankArray], *, rank0_only: bool = False
    ) -> None:
        """Read the arrays `sources` into the targets, 1-D, of their parameters; those without one are skipped (all ranks)."""

        def take(piece: ArrayPiece) -> None:
            target = targets.get(piece.source.record)
            if target is not None:
                target[piece.first : piece.stop] = piece.values

        self.each(sources, take, rank0_only=rank0_only)

    def each(self, sources: Sequence[RankArray], take: Callable[[ArrayPiece], None], *, rank0_only: bool) -> None:
        """Call `take` with every piece of the arrays, in flat order; see `WholeArrays.each`."""
        WholeArrays(self.world, sources, sharded=self.state.is_sharded).each(take, rank0_only=rank0_only)

    def whole(self, source: RankArray, *, rank0_only: bool = False) -> torch.Tensor:
        """Return the whole array `source` on the CPU (all ranks); with `rank0_only` nothing of it on other ranks."""
        shape = source.record.parameter.shape if source.shape is None else torch.Size(source.shape)
        wanted = self.world.rank == 0 or not rank0_only
        out = torch.empty(shape.numel() if wanted else 0, dtype=source.dtype)
        self.read_into({source.record: out}, [source], rank0_only=rank0_only)
        return out.view(shape) if wanted else out

    def _whole(self, source: RankArray, rank0_only: bool) -> torch.Tensor | None:
        found = self.whole(source, rank0_only=rank0_only)
        return None if rank0_only and self.world.rank > 0 else found

    # -- changing ---------------------------------------------------------------------------------------------------

    def set_parameter(self, name: str, values: Any) -> None:
        """Replace a parameter and its master by rank 0's `values`."""

        def check() -> ParameterRecord:
            record = self.record(name)
            self.check_values(record, values)
            return record

        self.set_from_rank0(self.finished(f"set_full_parameter({name!r})", check, changes=True), values)

    def set_from_rank0(self, record: ParameterRecord, values: Any) -> None:
        """Replace a parameter and its master by rank 0's `values`, of its shape (all ranks)."""
        dtype = torch.float32 if record.group is not None else record.dtype
        self.write([(record, self.from_rank0(record, values, dtype))])

    def set_optimizer_state(self, name: str, slot: str, values: Any) -> None:
        """Replace an optimizer slot of a parameter by rank 0's `values`."""

        def check() -> ParameterRecord:
            record = self._record_with(name, slot)
            scalars = self.state.scalars[record]
            if scalars.get("updates") == 0:
                raise UsageError(
                    f"the optimizer makes its state of parameter {name!r} in the first step, and would overwrite {slot!r}: "
                    "set it after a step"
                )
            if slot in scalars:
                float(values)
            else:
                self.check_values(record, values)
            return record

        record = self.finished(f"set_optimizer_state({name!r}, {slot!r})", check, changes=True)
        scalars = self.state.scalars[record]
        if slot in scalars:
            scalars[slot] = float(self.world.broadcast_object(float(values)))
            return
        full = self.from_rank0(record, values, torch.float32)
        with self._changing():
            self._fill(record, full, optimizer_array(slot, record.name))

    def check_values(self, record: ParameterRecord, values: Any) -> None:
        """Raise UsageError for values of another shape than the parameter's; None will do on other ranks than 0."""
        if values is None and self.world.rank > 0:
            return
        shape = tuple(torch.as_tensor(values).shape)
        if shape != tuple(record.parameter.shape):
            raise UsageError(
                f"parameter {record.name!r}: expected values of shape {tuple(record.parameter.shape)}, got {shape}"
            )

    def from_rank0(self, record: ParameterRecord, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return rank 0's values on every rank, 1-D [numel]."""
        world = self.world
        if world.rank == 0:
            full = plain_memory(torch.as_tensor(values).detach().to(world.device, dtype).reshape(-1))
        else:
            full = torch.empty(record.numel, dtype=dtype, device=world.device)
        world.broadcast(full)
        return full

    def write(self, values: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Replace parameters and their masters by the same values, 1-D [numel], on every rank (all ranks)."""

        with self._changing():
            for record, full in values:
                self._fill(record, full, model_array(record.name))
                if record.rest is not None and record.rest != model_array(record.name):
                    self._fill(record, full, record.rest)
                elif record.shard is not None:
                    record.shard.copy_(full[slice(*record.owned_range)])
                if record.residency is not Residency.RELEASED and record.full is not full:
                    record.full.copy_(full)

    def _fill(self, record: ParameterRecord, full: torch.Tensor, name: str) -> None:
        """Set this rank's rows of an array to those of `full`."""
        rows = full[slice(*record.owned_range)]
        with self.state.passing([[name]], "fill") as tiles:
            for tile in tiles:
                self.state.transfers.copy_into(as_torch(tile.views[0]), rows[tile.first : tile.stop])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the state in the block, on every rank or with an error on every rank, and then it is torn (all ranks)."""
        if self.units is not None:
            self.units.values_change()
        note = "The state was changed in part: load a checkpoint before going on."
        with self._pending.changing(), self.world.agreeing(note):
            yield

    def apart(self, records: Iterable[ParameterRecord]) -> list[ParameterRecord]:
        """Return those that are resident, and whose master of this rank's rows is other memory."""
        state = self.state
        return [
            record
            for record in records
            if record.group is not None and record.owned_numel and record.residency is Residency.RESIDENT
            if not state.is_master(record)
        ]

    def take_over(self, records: Sequence[ParameterRecord]) -> None:
        """Let the masters of resident parameters follow a script's changes in place, each rank its own rows: an element whose
        bits differ from its master's becomes the master, others keep the digits that the parameter does not have.
        Gathered values are forgotten. See [Note: changed in place] in `guard`."""
        apart = self.apart(records)
        with self.state.passing([[model_array(record.name)] for record in apart], "update") as tiles:
            for tile in tiles:
                record = apart[tile.group]
                master, own = as_torch(tile.views[0]), record.owned()[tile.first : tile.stop]
                own = own.to(master.device)
                differs = _as_integers(own) != _as_integers(master.to(own.dtype))
                master.copy_(torch.where(differs, own.float(), master))
        if self.units is not None:
            self.units.forget()

    def close(self) -> None:
        """Let `zstore.gather` forget this run, and take the hooks off the model."""
        _live.discard(self)
        self.guard.remove()


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating values."""
    return values.view(torch.int32 if values.itemsize == 4 else torch.int16)


def rows_source(record: ParameterRecord, rows: torch.Tensor, dtype: torch.dtype) -> RankArray:
    """Return this rank's rows of a parameter, 1-D in memory, for `WholeArrays`, cast to `dtype`."""

    def begin(first: int, stop: int) -> Callable[[], torch.Tensor]:
        return lambda: rows[first:stop].to(dtype)

    return RankArray(record=record, name=f"rows/{record.name}", dtype=dtype, begin=begin)


_live: weakref.WeakSet[Access] = weakref.WeakSet()
"""The runs of all open engines: a parameter alone must be enough to find its run."""


def live() -> list[Access]:
    """Return the runs whose engines are open."""
    return list(_live)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    return f"there are {listed([repr(one) for one in names], 5)}"
