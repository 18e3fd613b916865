"""One optimizer step over the state: the change of each parameter, and the pass that carries it out.

[Note: the update]
Goals: the state passes once, in tiles that stay in cache; nothing of the size of the model is allocated; the bits are
the same on every tier, in every step mode and with any number of threads (see `side_by_side`). Phases, for each
parameter that had a gradient on any rank, in order:
1. the store brings a tile of master and slots (read ahead, from disk), unpadded, ending at a multiple of 16 elements;
2. the gradient's rows, in memory or in the same pass from disk, are cast to fp32 and multiplied once with one fp32
   scalar (1 / loss scale, and the clip);
3. the kernel changes master and slots in place, those that are stored in another form by their codec (`SlotCodec`);
   the store takes them back (written behind);
4. the master is cast into the parameter's own rows: memory of the parameter, or an array that the pass fills.
In fp32 without offload the master is the parameter's memory, and phase 4 has nothing to do; if its slots are in
another memory than the parameter, it is copied to them in phase 1 and back in phase 4.

Parameters whose arrays are in one memory and stored as the kernel takes them need no pass, unless others do in an update
behind the loop, which keeps the order: phases 2 to 4 run over their memory, found once (`OptimizerState.in_place`), many
small parameters in one call of each of torch's kernels for lists of tensors, large ones in tiles.

In host memory one kernel takes phases 2 to 4 of Adam's tiles in one pass, if it is there ([Note: the host kernel]).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch

from zstore.errors import ZstoreError
from zstore.io import num_cores
from zstore.io.tensors import as_torch
from zstore.store import ModeName, Stream, Tile

from ..params.record import ParameterRecord
from ..runtime.device import (
    Copy,
    Event,
    GradientTiles,
    H2DQueue,
    Scratch,
    labelled,
    one_thread,
    side_by_side,
    threads_for,
    tile_numel,
)
from ..runtime.native import HostKernel, StepTensors, num_threads
from .kernel import FusedAdam, FusedAdamStep, ParameterStep, SlotTiles, TorchKernel, takes_threads
from .state import InPlace, OptimizerState

Rows = Callable[[ParameterRecord], torch.Tensor | None]
"""Gives this rank's rows of an averaged gradient, 1-D; None if they are on disk (`OptimizerState.spilled`)."""
Admit = Callable[[ParameterRecord, bool], bool]
"""Asked, with the record and whether to wait for it, before its state is touched: whether that may be."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of one step, fixed when the step is decided: later changes are for the next step."""

    step: int
    """Number of the step, from 1; errors name it."""
    factor: float
    """Factor of the gradients, applied once, in fp32."""
    factors: Mapping[ParameterRecord, float] = field(default_factory=dict)
    """Factors of the gradients of some parameters in place of `factor`."""
    groups: Sequence[Mapping[str, Any]]
    """Settings of each parameter group: lr, betas, weight decay and so on."""

    @staticmethod
    def of(
        groups: Sequence[Mapping[str, Any]],
        *,
        step: int,
        factor: float,
        factors: Mapping[ParameterRecord, float] | None = None,
    ) -> StepSettings:
        """Return a copy of the groups' present settings; their parameters are left out."""
        copies = [{name: _copy(value) for name, value in group.items() if name != "params"} for group in groups]
        own = {record: float(np.float32(one)) for record, one in (factors or {}).items()}
        return StepSettings(step=step, factor=float(np.float32(factor)), factors=own, groups=copies)

    def factor_of(self, record: ParameterRecord) -> float:
        """Return the factor of a parameter's gradient, applied once, in fp32."""
        return self.factors.get(record, self.factor)

    def differences(self, now: StepSettings) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield group, name and both values of the settings that are others `now`."""
        for number, (before, after) in enumerate(zip(self.groups, now.groups, strict=True)):
            for name, value in before.items():
                if name in after and _plain(after[name]) != _plain(value):
                    yield number, name, value, after[name]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class _Change:
    """Phases 2 to 4 of one record; few at a time, so that the gradient's rows are free when it is done. Several threads may
    apply it to tiles if all is in the host's memory."""

    def __init__(self, changes: Changes, record: ParameterRecord, h2d: H2DQueue) -> None:
        self.record = record
        self._state = state = changes.state
        self._step = changes.step_of(record)
        self._factor = changes.settings.factor_of(record)
        self._room = changes.room
        self._h2d = h2d
        rows = changes.rows(record)
        self._gradient = None if rows is None else GradientTiles(state.transfers, rows, self._room)
        """This rank's rows; None: they are in the tile."""
        self._slots: SlotTiles = state.codec.tiles(record.name, changes.settings.step, record.owned_range[0])
        self._num_state = 1 + len(state.slots_of(record))
        """First arrays of a tile: the master and the slots."""
        casts = record.rest is None and not state.is_master(record)
        self._own = record.owned() if casts else None
        """The parameter's own rows, if the master is to be cast into them."""
        self._after = changes.last_read(record)
        self._staged: GradientTiles | None = None
        """The parameter's own rows, which are (in) the master, on their way to the rest of its state in host memory."""
        self._has_buffers = record.rest is not None and state.any_on_disk([[record.rest]])
        """Whether the new rows are in buffers, which are another tile's after this one."""

    def apply(self, tile: Tile) -> None:
        """Carry the phases out on one tile."""
        views = [as_torch(view) for view in tile.views]
        held, slots, others = views[0], views[1 : self._num_state], views[self._num_state :]
        master = self._bring(held, slots, tile)
        first, stop, rows = tile.first, tile.stop, self._gradient
        if rows is None:
            rows = GradientTiles(self._state.transfers, others.pop(), self._room)
            first, stop = 0, master.numel()
        own = others[0] if others else None if self._own is None else self._own[tile.first : tile.stop]
        after = None if others else self._after
        if host := _host_of(self._state, self._step, master, rows.rows, own):
            here = self._state.transfers.streams.is_host(rows.rows)
            gradient = rows.rows[first:stop] if here else rows.on_host(first, stop)
            tensors = [master], [slots], [gradient], [own]
            _in_one_pass(host, self._step, self._factor, tensors, self._h2d, [after], num_threads=1)
        else:
            gradient = rows.tile(first, stop, master)
            if self._factor != 1.0:
                gradient.mul_(self._factor)
            self._slots.update(self._step, master, gradient, slots, tile.first)
            if own is not None:
                self._h2d.put(own, master, after)
        if master is not held:
            self._h2d.put(held, master, self._after)
        if self._has_buffers:
            self._h2d.drain()

    def _bring(self, held: torch.Tensor, slots: list[torch.Tensor], tile: Tile) -> torch.Tensor:
        """Return the master in the memory of its slots; `held` itself if it is there."""
        transfers = self._state.transfers
        link = transfers.link(held, slots[0]) if slots else None
        if link is None:
            return held
        if link == "device_to_host":
            if self._staged is None:
                self._staged = GradientTiles(transfers, self.record.owned())
            return self._staged.on_host(tile.first, tile.stop)
        copy = cast(Copy, transfers.bring(held, slots[0]))
        copy.follow()
        self._h2d.add(copy)
        return copy.values


def _host_of(
    state: OptimizerState, step: ParameterStep, master: torch.Tensor, gradient: torch.Tensor, own: torch.Tensor | None
) -> HostKernel | None:
    """Return the kernel that takes phases 2 to 4 of a parameter in one pass, if there is one; see [Note: the host kernel]."""
    is_host = state.transfers.streams.is_host
    if state.host is None or (own is None and master.numel() < _LEAST_FP32 and gradient.dtype == torch.float32):
        return None
    if not isinstance(step, FusedAdamStep) or not state.codec.is_plain or not is_host(master):
        return None
    here = [each for each in (master, gradient, own) if each is not None and is_host(each)]
    return state.host if state.host.takes(here, gradient.dtype, None if own is None else own.dtype) else None


def _in_one_pass(
    host: HostKernel,
    step: ParameterStep,
    factor: float,
    tensors: tuple[
        Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor], Sequence[torch.Tensor | None]
    ],
    h2d: H2DQueue,
    after: Sequence[Event],
    *,
    num_threads: int,
) -> None:
    """Carry out phases 2 to 4 of (masters, slots, gradients in host memory, the parameters' own rows)."""
    masters, slots, gradients, owns = tensors
    weights = [None if own is None else h2d.stage(own) for own in owns]
    cast(FusedAdamStep, step).one_pass(host, StepTensors(masters, slots, gradients, weights), factor, num_threads)
    for own, weight, event in zip(owns, weights, after, strict=True):
        if own is not None and weight is not None:
            h2d.send(own, weight, event)


_CORES_OF_TWO_CONSUMERS = 4
_MOST_HERE, _MOST_THERE = 64 * 1024, 16 * 1024 * 1024
"""Most elements of small parameters that are changed together: in cache on the host, and in few kernels on a device."""
_LEAST_FP32 = 16 * 1024
"""Least elements of a parameter without casts that a host kernel takes: of smaller ones torch's kernel takes lists as fast."""
_MOST_AT_ONCE, _MOST_BEHIND = 256 * 1024 * 1024, 4 * 1024 * 1024
"""Most elements of parameters whose gradients are taken together in the step, and behind the loop."""


class _Portion:
    """Rows of parameters in one memory that are changed by one call of each kernel: they take the same step."""

    def __init__(self, step: ParameterStep, factor: float, host: HostKernel | None) -> None:
        self.numel = 0
        self._host = host
        self._step = step
        self._factor = factor
        self._records: list[ParameterRecord] = []
        self._gradients: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = []
        self._own: list[torch.Tensor | None] = []

    def add(
        self, record: ParameterRecord, rows: torch.Tensor, place: InPlace, own: torch.Tensor | None, at: tuple[int, int]
    ) -> None:
        """Add elements `at` (first, stop) of a parameter: `rows` are of its gradient, and its master is cast into its `own`."""
        first, stop = at
        self.numel += stop - first
        self._records.append(record)
        master, slots = place.master, place.slots
        if stop - first < rows.numel():
            rows, master, slots = rows[first:stop], master[first:stop], [slot[first:stop] for slot in slots]
            own = None if own is None else own[first:stop]
        self._gradients.append(rows)
        self._masters.append(master)
        self._slots.append(slots)
        self._own.append(own)

    def apply(self, room: Scratch, h2d: H2DQueue, after: Callable[[ParameterRecord], Event], num_threads: int) -> None:
        """Carry the phases out; a host kernel has `num_threads`."""
        gradients = self._gradients
        if self._host is not None:
            tensors, events = (self._masters, self._slots, gradients, self._own), list(map(after, self._records))
            _in_one_pass(self._host, self._step, self._factor, tensors, h2d, events, num_threads=num_threads)
            return
        if gradients[0].dtype != torch.float32:
            numels = [rows.numel() for rows in gradients]
            gradients = list(torch.split(room.take("gradients", gradients[0], torch.float32, self.numel), numels))
            torch._foreach_copy_(gradients, self._gradients)
        if self._factor != 1.0:
            torch._foreach_mul_(gradients, self._factor)
        self._step.tiles(self._masters, gradients, self._slots)
        h2d.put_all(self._own, self._masters, list(map(after, self._records)))


def _admitted(records: Sequence[ParameterRecord], admit: Admit | None, most: int) -> Iterator[list[ParameterRecord]]:
    """Yield the admitted records in order, those together that need not be waited for, with `most` elements or one."""
    some: list[ParameterRecord] = []
    numel = 0
    for record in records:
        ready = admit is None or admit(record, not some)
        if some and (not ready or numel + record.owned_numel > most):
            yield some
            some, numel = [], 0
            ready = ready or (admit is not None and admit(record, True))
        if ready:
            some.append(record)
            numel += record.owned_numel
    if some:
        yield some


def read_ahead(state: OptimizerState, records: Sequence[ParameterRecord], *, behind: bool) -> list[Stream]:
    """Begin to read the first of `records` from disk for an update of them; return the passes. Do nothing if that fails: then
    the update will too, with an error on all ranks."""
    _, mine = _divided(state, records, behind=behind)
    begun: list[Stream] = []
    if state.any_on_disk(_arrays(state, mine)[0]):
        with suppress(ZstoreError):
            for part in _parts(state, mine, behind=behind):
                groups, modes = _arrays(state, part)
                begun.append(state.store.read_ahead(groups, modes=modes))
    return begun


@cache
def num_consumers() -> int:
    """Return how many threads update what comes from disks: on two cores, which the I/O needs too, a second one makes a step
    slower (docs/design/0005-step.md)."""
    return 2 if num_cores() >= _CORES_OF_TWO_CONSUMERS else 1


def _parts(state: OptimizerState, mine: list[ParameterRecord], *, behind: bool) -> list[list[ParameterRecord]]:
    """Return the parameters that each thread takes of those that pass; neighbours, which may share files, are together."""
    several = not behind and num_consumers() > 1 and all(takes_threads(state.kernel_of(record)[0]) for record in mine)
    count = num_consumers() if several and state.any_on_disk(_arrays(state, mine)[0]) else 1
    total, before = sum(record.owned_numel for record in mine), 0
    parts: list[list[ParameterRecord]] = [[] for _ in range(count)]
    for record in mine:
        parts[before * count // total].append(record)
        before += record.owned_numel
    return [part for part in parts if part]


def _divided(
    state: OptimizerState, records: Sequence[ParameterRecord], *, behind: bool
) -> tuple[dict[ParameterRecord, InPlace], list[ParameterRecord]]:
    """Return those of `records` with rows here that are changed in place, and those that pass, in order."""
    mine = [record for record in records if record.owned_numel]
    placed = {record: place for record in mine if (place := state.in_place(record)) is not None}
    if behind and len(placed) < len(mine):
        placed = {}
    return placed, [record for record in mine if record not in placed]


def _arrays(state: OptimizerState, records: Iterable[ParameterRecord]) -> tuple[list[list[str]], dict[str, ModeName]]:
    """Return the arrays of each parameter, which pass together in an update, and their modes."""
    groups: list[list[str]] = []
    modes: dict[str, ModeName] = {}
    for record in records:
        arrays = state.all_arrays(record)
        groups.append(list(arrays))
        modes |= arrays
        if record in state.spilled:  # in an array that may become a wider one
            groups[-1].append(state.spilled[record])
            modes[state.spilled[record]] = "read"
    return groups, modes


class Changes:
    """The changes of one step to `records`, each of which has a gradient by the time that it is admitted."""

    def __init__(
        self,
        state: OptimizerState,
        records: Sequence[ParameterRecord],
        settings: StepSettings,
        rows: Rows,
        last_read: Callable[[ParameterRecord], Event] = lambda record: None,
        *,
        begun: Sequence[Stream] = (),
    ) -> None:
        self.state, self.records, self.settings, self.rows = state, records, settings, rows
        self.last_read = last_read
        """Returns when the device has read a parameter's own rows for the last time; None: what it was asked for so far."""
        self.room = Scratch()
        self._begun = begun
        """Passes over their arrays that `read_ahead` has begun."""
        self._steps: dict[ParameterRecord, ParameterStep] = {}
        self._shared: dict[tuple[Any, ...], ParameterStep] = {}

    def run(self, *, admit: Admit | None = None, done: Callable[[ParameterRecord], None] | None = None) -> None:
        """Carry the changes out, in order. See [Note: the update].

        `admit(record, wait)` is asked before a record's state is touched; `done(record)` is called when its new state,
        and its new rows, are the present ones.
        """
        placed, mine = _divided(self.state, self.records, behind=done is not None)
        for some in _admitted(list(placed), admit, _MOST_AT_ONCE if done is None else _MOST_BEHIND):
            self._change_in_place({record: placed[record] for record in some}, behind=done is not None)
            if done is not None:
                for record in some:
                    done(record)
        parts = _parts(self.state, mine, behind=done is not None)
        work, context = partial(self._pass, admit=admit, done=done), self.state.transfers.streams.stream_context()
        side_by_side(lambda each: work(*each), zip_longest(parts, self._begun), len(parts), context)

    def _pass(
        self,
        mine: list[ParameterRecord],
        begun: Stream | None,
        *,
        admit: Admit | None,
        done: Callable[[ParameterRecord], None] | None,
    ) -> None:
        """Change parameters in a pass over their arrays; `begun` ahead, if any is."""
        h2d = H2DQueue(self.state.transfers)

        def ended(group: int) -> None:
            h2d.drain()
            if done is not None:
                done(mine[group])

        admitted = None if admit is None else (lambda group, wait: admit(mine[group], wait))
        on_end = None if done is None else ended
        groups, modes = _arrays(self.state, mine)
        from_disk = self.state.any_on_disk(groups)
        if begun is not None and begun.go_on(admitted, on_end):
            tiles = begun.tiles()
        else:
            tiles = self.state.store.tiles(groups, "update", modes=modes, admit=admitted, on_end=on_end)
        with labelled("update"), one_thread(from_disk), closing(tiles):
            # Other threads would have tiles of a disk after the next one was asked for, when they are written already.
            alone = done is not None or from_disk or not self.state.transfers.streams.device_is_host
            alone = alone or not all(takes_threads(self.state.kernel_of(record)[0]) for record in mine)
            threads = 1 if alone else threads_for([record.owned_numel for record in mine])
            side_by_side(lambda each: each[0].apply(each[1]), self._changes(tiles, mine, h2d), threads)
        h2d.drain()

    def _change_in_place(self, placed: Mapping[ParameterRecord, InPlace], *, behind: bool) -> None:
        """Change parameters whose arrays are in one memory; one thread does so `behind` the loop."""
        transfers, h2d = self.state.transfers, H2DQueue(self.state.transfers)
        found: list[tuple[ParameterRecord, InPlace, torch.Tensor]] = []
        coming: list[Copy] = []
        for record, place in placed.items():
            rows = self.rows(record)
            if rows is None:
                raise AssertionError(f"the gradient of {record.name} is not in memory")
            copy = transfers.bring(rows, place.master)
            if copy is not None:
                coming.append(copy)
            found.append((record, place, rows if copy is None else copy.values))
        for each in coming:
            transfers.finish(each)
        on_host = [rows.numel() for _, _, rows in found if transfers.streams.is_host(rows)]
        alone = behind or not all(takes_threads(self.state.kernel_of(record)[0]) for record in placed)
        threads = 1 if alone or self.state.host is not None else threads_for(on_host)  # the host kernel has its own
        h2d.most *= threads
        with labelled("update"), self.state.store.changing([name for one in placed.values() for name in one.names]):
            count = num_threads(self.state.host_ranks, behind=behind)
            work = partial(_Portion.apply, room=self.room, h2d=h2d, after=self.last_read, num_threads=count)
            side_by_side(work, self._portions(found, threads), threads, transfers.streams.stream_context())
            h2d.drain()

    def _portions(self, found: Iterable[tuple[ParameterRecord, InPlace, torch.Tensor]], threads: int) -> list[_Portion]:
        """Cut what is changed: small parameters go together, large ones in tiles."""
        portions: list[_Portion] = []
        last: dict[Any, _Portion] = {}
        for record, place, rows in found:
            own = record.owned() if place.casts else place.rest
            step = self.step_of(record)
            factor, numel = self.settings.factor_of(record), rows.numel()
            on_host = self.state.transfers.streams.is_host(place.master)
            most, tile = (_MOST_HERE, tile_numel(threads)) if on_host else (_MOST_THERE, _MOST_THERE)
            host, weight = _host_of(self.state, step, place.master, rows, own), None
            if host is not None:  # which cuts tiles itself, but what is sent to a device is on its way beside the rest
                sent = own is not None and not self.state.transfers.streams.is_host(own)
                most = tile = _MOST_BEHIND if sent else _MOST_AT_ONCE
                weight = sent, own is None or own.dtype
            for first in range(0, numel, tile):
                stop = min(first + tile, numel)
                key = step, factor, rows.dtype, on_host, weight
                if key not in last or last[key].numel + stop - first > most:
                    last[key] = _Portion(step, factor, host)
                    portions.append(last[key])
                last[key].add(record, rows, place, own, (first, stop))
        return portions

    def _changes(
        self, tiles: Iterable[Tile], mine: Sequence[ParameterRecord], h2d: H2DQueue
    ) -> Iterator[tuple[_Change, Tile]]:
        """Yield each tile with the change to apply to it."""
        change: _Change | None = None
        for tile in tiles:
            if change is None or change.record is not mine[tile.group]:
                change = _Change(self, mine[tile.group], h2d)
            yield change, tile

    def step_of(self, record: ParameterRecord) -> ParameterStep:
        """Return the step of a parameter, which those with the same settings and scalars share."""
        found = self._steps.get(record)
        if found is None:
            (kernel, group), scalars = self.state.kernel_of(record), self.state.scalars[record]
            key = group, *scalars.items()
            found = self._shared.get(key) if isinstance(kernel, FusedAdam | TorchKernel) else None
            if found is None:
                found = self._shared[key] = kernel.start(self.settings.groups[group], scalars)
            self._steps[record] = found
        return found

    def note_scalars(self, records: Sequence[ParameterRecord]) -> None:
        """Count the step in the scalars of `records`, those without rows here too."""
        for record in records:
            self.state.scalars[record] = self.step_of(record).scalars()
