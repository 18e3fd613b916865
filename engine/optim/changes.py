"""One optimizer step over the state: the change of each parameter, and the pass that carries it out.

[Note: the update]
The state passes once, in tiles that stay in cache; nothing of the size of the model is allocated; the bits are the same on
every tier, in every step mode and with any number of threads (see `side_by_side`). Phases, for each parameter that had a
gradient on any rank, in order:
1. the store brings a tile of master and slots (read ahead, from disk), unpadded, ending at a multiple of 16 elements;
2. the gradient's rows, in memory or in the same pass from disk, are cast to fp32 and multiplied once with one fp32
   scalar (1 / loss scale, and the clip);
3. the kernel changes master and slots in place, slots stored in another form through their codec (`SlotCodec`);
4. the master is cast into the parameter's own rows: memory of the parameter, or an array that the pass fills. In fp32 it
   may be that memory; if its slots are in another memory, it is copied to them in phase 1 and back in phase 4.

Parameters whose arrays are in one memory and stored as the kernel takes them need no pass, unless others do in the
background, which keeps the order: phases 2 to 4 run over their memory (`OptimizerState.in_place`), many small parameters in
one call of each of torch's kernels for lists of tensors, large ones in tiles. What a step does with which parameters is
planned once (`UpdatePlan`, `_Batch`). In host memory one kernel, if available, runs phases 2 to 4 of Adam's tiles in one pass
([Note: the host kernel]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from itertools import zip_longest
from typing import Any, cast

import torch

from zstore.errors import ZstoreError
from zstore.io import num_cores
from zstore.io.memory import as_torch
from zstore.store import ModeName, Store, Stream, Tile

from ..params.record import ParameterRecord
from ..runtime.device import (
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
from .kernel import FusedAdam, FusedAdamStep, ParameterStep, Scalars, StepSettings, TorchKernel
from .state import InPlace, OptimizerState

Rows = Callable[[Sequence[ParameterRecord]], Iterable[torch.Tensor | None]]
"""Gives this rank's rows of averaged gradients, each 1-D; None if they are on disk (`OptimizerState.spilled`)."""
Admit = Callable[[ParameterRecord, bool], bool]
"""Asked, with the record and whether to wait for it, before its state is touched: whether that may be."""
Done = Callable[[ParameterRecord], None]
"""Called once a record's new state and new rows are the current ones."""


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
        (rows,) = changes.rows([record])
        self._gradient = None if rows is None else GradientTiles(state.transfers, rows, self._room)
        """This rank's rows; None: they are in the tile."""
        self._slots = state.codec.of(record.name, changes.settings.step, record.owned_range[0])
        self._num_state = 1 + len(state.slots_of(record))
        """First arrays of a tile: the master and the slots."""
        casts = record.stored_array is None and not state.is_master(record)
        self._own = record.owned() if casts else None
        """The parameter's own rows, if the master is cast into them."""
        self._after = changes.last_read([record])
        self._staged: GradientTiles | None = None
        """The parameter's own rows, which are (in) the master, on their way to the rest of its state in host memory."""
        self._has_buffers = record.stored_array is not None and state.any_on_disk([[record.stored_array]])
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
            is_host = self._state.transfers.streams.is_host(rows.rows)
            gradient = rows.rows[first:stop] if is_host else rows.on_host(first, stop)
            sends = own is not None and not self._state.transfers.streams.is_host(own)
            tensors, queue = StepTensors([master], [slots], [gradient], [own]), self._h2d if sends else None
            _in_one_pass(host, self._step, self._factor, tensors, queue, after, num_threads=1)
        else:
            gradient = rows.tile(first, stop, master)
            if self._factor != 1.0:
                gradient.mul_(self._factor)
            self._slots.update(self._step, master, gradient, slots, tile.first)
            if own is not None:
                self._h2d.put([own], [master], after)
        if master is not held:
            self._h2d.put([held], [master], self._after)
        if self._has_buffers:
            self._h2d.drain()

    def _bring(self, held: torch.Tensor, slots: list[torch.Tensor], tile: Tile) -> torch.Tensor:
        """Return the master in the memory of its slots; `held` itself if it is already there."""
        transfers = self._state.transfers
        link = transfers.link(held, slots[0]) if slots else None
        if link is None:
            return held
        if link == "device_to_host":
            if self._staged is None:
                self._staged = GradientTiles(transfers, self.record.owned())
            return self._staged.on_host(tile.first, tile.stop)
        copy = transfers.bring_all([held], [slots[0]])
        copy.follow()
        self._h2d.add(copy)
        return copy.values


def _host_of(
    state: OptimizerState, step: ParameterStep, master: torch.Tensor, gradient: torch.Tensor, own: torch.Tensor | None
) -> HostKernel | None:
    """Return the kernel that runs phases 2 to 4 of a parameter in one pass, if any; see [Note: the host kernel]."""
    is_host = state.transfers.streams.is_host
    if state.host is None or (own is None and master.numel() < _MIN_FP32 and gradient.dtype == torch.float32):
        return None
    if not isinstance(step, FusedAdamStep) or not state.codec.is_plain or not is_host(master):
        return None
    on_host = [each for each in (master, gradient, own) if each is not None and is_host(each)]
    return state.host if state.host.takes(on_host, gradient.dtype, None if own is None else own.dtype) else None


def _in_one_pass(
    host: HostKernel,
    step: ParameterStep,
    factor: float,
    tensors: StepTensors,
    h2d: H2DQueue | None,
    after: Event,
    *,
    num_threads: int,
) -> None:
    """Carry out phases 2 to 4 of tensors in host memory. If the weights are on the device, which reads them until `after`, they
    go there together by `h2d`."""
    one_pass = cast(FusedAdamStep, step).one_pass
    if h2d is None:
        one_pass(host, tensors, factor, num_threads)
        return
    weights = cast(Sequence[torch.Tensor], tensors.weights)
    staged = h2d.stage(weights)
    one_pass(host, tensors._replace(weights=staged), factor, num_threads)
    h2d.send(weights, staged, after)


_MIN_CORES_OF_TWO_CONSUMERS = 4
_MAX_ON_HOST, _MAX_ON_DEVICE = 64 * 1024, 16 * 1024 * 1024
"""Most elements of small parameters that are changed together: in cache on the host, and in few kernels on a device."""
_MIN_FP32 = 16 * 1024
"""Least elements of a parameter without casts that a host kernel takes: of smaller ones torch's kernel takes lists as fast."""
_MAX_IN_STEP, _MAX_IN_BACKGROUND = 256 * 1024 * 1024, 4 * 1024 * 1024
"""Most elements of parameters whose gradients are taken together in the step, and in the background."""


class _Portion:
    """Rows of parameters in one memory that one call of each kernel changes, since they take the same step."""

    def __init__(self, host: HostKernel | None, *, sends: bool) -> None:
        self.numel = 0
        self.records: list[ParameterRecord] = []
        self._host, self._sends = host, sends
        self._parts: list[tuple[int, slice | None]] = []
        """The number of each gradient, and the elements of it unless it is whole."""
        self._masters: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = []
        self._own: list[torch.Tensor | None] = []

    def add(
        self, record: ParameterRecord, number: int, place: InPlace, own: torch.Tensor | None, part: tuple[int, int]
    ) -> None:
        """Add elements `part` (first, stop) of a parameter with gradient `number`; its master is cast into its `own` rows."""
        rows = slice(*part)
        self.numel += part[1] - part[0]
        self.records.append(record)
        self._parts.append((number, None if part == (0, place.master.numel()) else rows))
        self._masters.append(place.master[rows])
        self._slots.append([slot[rows] for slot in place.slots])
        self._own.append(None if own is None else own[rows])

    def apply(
        self, changes: Changes, step: ParameterStep, rows: Sequence[torch.Tensor], h2d: H2DQueue, num_threads: int
    ) -> None:
        """Carry the phases out with gradients among `rows`; a host kernel has `num_threads`."""
        factor, after = changes.settings.factor_of(self.records[0]), changes.last_read(self.records)
        gradients = [rows[number] if part is None else rows[number][part] for number, part in self._parts]
        if self._host is not None:
            tensors = StepTensors(self._masters, self._slots, gradients, self._own)
            queue = h2d if self._sends else None
            _in_one_pass(self._host, step, factor, tensors, queue, after, num_threads=num_threads)
            return
        if gradients[0].dtype != torch.float32:
            given, room = gradients, changes.room.take("gradients", gradients[0], torch.float32, self.numel)
            gradients = list(room.split_with_sizes(list(map(torch.Tensor.numel, given))))
            torch._foreach_copy_(gradients, given)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        step.tiles(self._masters, gradients, self._slots)
        own = cast(list[torch.Tensor], self._own)
        if self._sends:
            h2d.put(own, self._masters, after)
        elif self._own[0] is not None:
            torch._foreach_copy_(own, self._masters)


class _Batch:
    """Portions of parameters that are changed in place together, planned for gradients like `rows`."""

    def __init__(
        self,
        changes: Changes,
        places: Sequence[tuple[ParameterRecord, InPlace]],
        rows: Sequence[torch.Tensor],
        *,
        in_background: bool,
    ) -> None:
        state, transfers, is_host = changes.state, changes.state.transfers, changes.state.transfers.streams.is_host
        self.names = [name for _, place in places for name in place.names]
        self.masters = [place.master for _, place in places]
        links = [transfers.link(*each) for each in zip(rows, self.masters, strict=True)]
        self.crossing = [[n for n, one in enumerate(links) if one == link] for link in set(links) if link]
        """Numbers of the gradients that are not in their master's memory, grouped by direction."""
        self._memory = [(record, record.full, record.shard) for record, place in places if place.casts]
        on_host = [master.numel() for master in self.masters if is_host(master)]
        alone = in_background or state.host is not None  # the host kernel has its own threads
        alone = alone or not _takes_threads(state, [record for record, _ in places])
        self.threads = 1 if alone else threads_for(on_host)
        self.num_threads = num_threads(
            state.host_ranks, beside_compute=in_background and transfers.streams.device_is_host
        )
        """Threads of a host kernel."""
        self.portions: list[_Portion] = []
        last: dict[Any, _Portion] = {}
        for number, (record, place) in enumerate(places):  # small ones go together, large ones in tiles
            master, own = place.master, record.owned() if place.casts else place.rest
            step, factor, hosted = changes.step_of(record), changes.settings.factor_of(record), is_host(master)
            most, tile = (_MAX_ON_HOST, tile_numel(self.threads)) if hosted else (_MAX_ON_DEVICE, _MAX_ON_DEVICE)
            host, sends = _host_of(state, step, master, rows[number], own), own is not None and is_host(own) != hosted
            if host is not None:  # it cuts tiles itself; weights are sent to a device while the others are computed
                most = tile = _MAX_IN_BACKGROUND if sends else _MAX_IN_STEP
            key = step, factor, rows[number].dtype, hosted, host is None, sends, None if own is None else own.dtype
            for first in range(0, master.numel(), tile):
                stop = min(first + tile, master.numel())
                if key not in last or last[key].numel + stop - first > most:
                    last[key] = _Portion(host, sends=sends)
                    self.portions.append(last[key])
                last[key].add(record, number, place, own, (first, stop))

    def fits(self, changes: Changes) -> bool:
        """Return whether parameters still have the same memory, and all of a portion still take the same step."""
        for record, full, shard in self._memory:
            if record.full is not full or record.shard is not shard:
                return False
        scalars, factors = changes.state.scalars, changes.settings.factors
        for portion in self.portions:
            first = portion.records[0]
            for record in portion.records:
                if scalars[record] != scalars[first] or (factors and factors.get(record) != factors.get(first)):
                    return False
        return True


def _admitted(records: Sequence[ParameterRecord], admit: Admit | None, most: int) -> Iterator[list[ParameterRecord]]:
    """Yield the admitted records in order, grouped if they need no wait, up to `most` elements or one record."""
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


@cache
def num_consumers() -> int:
    """Return how many threads update what comes from disks: on two cores, which the I/O needs too, a second one makes a step
    slower (docs/design/0005-step.md)."""
    return 2 if num_cores() >= _MIN_CORES_OF_TWO_CONSUMERS else 1


def _takes_threads(state: OptimizerState, records: Iterable[ParameterRecord]) -> bool:
    """Return whether several threads may update tiles of `records`: kernels other than torch's fused one share an optimizer."""
    return all(isinstance(state.kernel_of(record)[0], FusedAdam) for record in records)


class _Passing:
    """Parameters that pass, on one thread."""

    def __init__(self, state: OptimizerState, records: Sequence[ParameterRecord]) -> None:
        self.records = records
        self.groups: list[list[str]] = []
        """The arrays of each parameter, which pass together."""
        self.modes: dict[str, ModeName] = {}
        for record in records:
            arrays = state.all_arrays(record)
            self.groups.append(list(arrays))
            self.modes |= arrays
            if record in state.spilled:  # in an array that may become a wider one
                self.groups[-1].append(state.spilled[record])
                self.modes[state.spilled[record]] = "read"
        self.from_disk = state.any_on_disk(self.groups)
        self.takes_threads = _takes_threads(state, records)


class UpdatePlan:
    """How `records` are updated, by the arrangement of the store: in place if their rows are in one memory, else in a pass."""

    def __init__(self, state: OptimizerState, records: Sequence[ParameterRecord], *, in_background: bool) -> None:
        mine = [record for record in records if record.owned_numel]
        self.places = {record: place for record in mine if (place := state.in_place(record)) is not None}
        if in_background and len(self.places) < len(mine):
            self.places = {}
        self.most = _MAX_IN_BACKGROUND if in_background else _MAX_IN_STEP
        self.batches = list(_admitted(list(self.places), None, self.most))
        """The parameters updated in place, in groups that are changed together."""
        passing = _Passing(state, [record for record in mine if record not in self.places])
        several = not in_background and passing.from_disk and passing.takes_threads
        count, before, total = num_consumers() if several else 1, 0, sum(r.owned_numel for r in passing.records)
        parts: list[list[ParameterRecord]] = [[] for _ in range(count)]
        for record in passing.records:  # neighbours, which may share files, are together
            parts[before * count // total].append(record)
            before += record.owned_numel
        self.parts = [_Passing(state, part) for part in parts if part]
        self.in_background = in_background
        """Whether the loop continues during the update."""
        self.begun: list[Stream] = []
        """Passes of the parts that were begun ahead of the update, until it takes them over."""

    @staticmethod
    def of(state: OptimizerState, records: Sequence[ParameterRecord], *, in_background: bool) -> UpdatePlan:
        """Return the plan, made once as long as the store is not rearranged."""
        make = partial(UpdatePlan, state, records, in_background=in_background)
        return state.planned((UpdatePlan, in_background, *records), make)

    def read_ahead(self, store: Store) -> None:
        """Start reading the first parameters from disk. Do nothing if that fails: then the update will too, with an
        error on all ranks."""
        if any(part.from_disk for part in self.parts):
            with suppress(ZstoreError):
                self.begun.extend(store.read_ahead(part.groups, modes=part.modes) for part in self.parts)


class Changes:
    """The changes of one step to `records`, each of which has a gradient when it is admitted."""

    def __init__(
        self,
        state: OptimizerState,
        records: Sequence[ParameterRecord],
        settings: StepSettings,
        rows: Rows,
        last_read: Callable[[Sequence[ParameterRecord]], Event] = lambda records: None,
        *,
        in_background: bool = False,
    ) -> None:
        self.state, self.records, self.settings, self.rows = state, records, settings, rows
        self._plan = plan = UpdatePlan.of(state, records, in_background=in_background)
        self._begun, plan.begun = plan.begun, []
        self.last_read = last_read
        """Returns when the device last reads the parameters' own rows; None: after all work submitted so far."""
        self.room = Scratch()
        self._steps: dict[ParameterRecord, ParameterStep] = {}
        self._shared: dict[tuple[Any, ...], ParameterStep] = {}

    def run(self, *, admit: Admit | None = None, done: Done | None = None) -> None:
        """Carry the changes out, in order. See [Note: the update]."""
        plan = self._plan
        for some in plan.batches if admit is None else _admitted(list(plan.places), admit, plan.most):
            self._change_in_place(some)
            if done is not None:
                for record in some:
                    done(record)
        parts, context = zip_longest(plan.parts, self._begun), self.state.transfers.streams.stream_context()
        side_by_side(lambda each: self._pass(*each, admit, done), parts, len(plan.parts), context)

    def _pass(self, part: _Passing, begun: Stream | None, admit: Admit | None, done: Done | None) -> None:
        """Change parameters in a pass over their arrays; `begun` ahead, if any is."""
        mine = part.records
        h2d = H2DQueue(self.state.transfers)

        def ended(group: int) -> None:
            h2d.drain()
            if done is not None:
                done(mine[group])

        admitted = None if admit is None else (lambda group, wait: admit(mine[group], wait))
        on_end = None if done is None else ended
        if begun is not None and begun.resume(admitted, on_end):
            tiles = begun.tiles()
        else:
            tiles = self.state.store.tiles(part.groups, "update", modes=part.modes, admit=admitted, on_end=on_end)
        with labelled("update"), one_thread(part.from_disk), closing(tiles):
            # Other threads would still use a disk's tile after the next one is requested, when it is already being written.
            alone = self._plan.in_background or part.from_disk or not self.state.transfers.streams.device_is_host
            threads = 1 if alone or not part.takes_threads else threads_for([record.owned_numel for record in mine])
            side_by_side(lambda each: each[0].apply(each[1]), self._changes(tiles, mine, h2d), threads)
        h2d.drain()

    def _change_in_place(self, records: Sequence[ParameterRecord]) -> None:
        """Change parameters whose arrays are in one memory; one thread does so in the background."""
        state, transfers, plan, rows = self.state, self.state.transfers, self._plan, []
        for record, found in zip(records, self.rows(records), strict=True):
            if found is None:
                raise AssertionError(f"the gradient of {record.name} is not in memory")
            rows.append(found)
        kinds = [(each.dtype, each.is_cpu, each.is_contiguous() and not each.is_neg()) for each in rows]
        batch = state.planned(
            (_Batch, plan.in_background, torch.get_num_threads(), *kinds, *records),
            lambda: _Batch(
                self, [(record, plan.places[record]) for record in records], rows, in_background=plan.in_background
            ),
            lambda found: found.fits(self),
        )
        for numbers in batch.crossing:
            copy = transfers.bring_all([rows[n] for n in numbers], [batch.masters[n] for n in numbers])
            transfers.finish(copy)
            for number, values in zip(numbers, copy.targets, strict=True):
                rows[number] = values
        h2d, work = H2DQueue(transfers), []
        h2d.most *= batch.threads
        for portion in batch.portions:
            step = self.step_of(portion.records[0])
            self._steps.update(dict.fromkeys(portion.records, step))
            work.append(partial(portion.apply, self, step, rows, h2d, batch.num_threads))
        with labelled("update"), state.store.changing(batch.names):
            side_by_side(lambda call: call(), work, batch.threads, transfers.streams.stream_context())
            h2d.drain()

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
        """Return the step of a parameter, shared by parameters with the same settings and scalars."""
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
        """Count the step in the scalars of `records`, including records without rows on this rank."""
        after: dict[ParameterStep, Scalars] = {}
        for record in records:
            step = self._steps.get(record) or self.step_of(record)
            if step not in after:
                after[step] = step.scalars()
            self.state.scalars[record] = after[step].copy()
