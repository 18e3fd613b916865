"""One optimizer step over the state: the change of each parameter, in place or in a pass over the store.

[Note: the update]
The state is read and written once, in tiles that stay in cache; nothing as large as the model is allocated; the result is
bit-identical on every tier, in every step mode and with any number of threads (see `side_by_side`). Each parameter that had a
gradient on any rank goes through four phases:
1. the store provides a tile of master and slots (read ahead, from disk), unpadded, ending at a multiple of 16 elements;
2. the gradient's rows, in memory or streamed from disk with the tile, are cast to fp32 and multiplied once by one fp32 scalar
   (1 / loss scale, and the clip factor);
3. the kernel updates master and slots in place; slots in a different format go through their codec (`SlotCodec`);
4. the master is cast to the parameter's weights: its buffer, or an array that the pass writes. An fp32 master may be that
   buffer; if its slots are in a different memory, it is copied there in phase 1 and back in phase 4.

Parameters whose arrays are in the same memory, in the kernel's format, are updated in place (`OptimizerState.in_place`),
without phase 1: many small ones in one call of each of torch's kernels for lists of tensors, large ones in tiles. In the
background this is done only if no parameter needs a pass, to keep the order. Which parameters a step updates, and how, is
planned once (`UpdatePlan`, `_Batch`). In host memory one kernel, if available, runs phases 2 to 4 of Adam in one pass ([Note:
the host kernel]).
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
"""Returns this rank's rows of averaged gradients, each 1-D; None if they are on disk (`OptimizerState.spilled`)."""
Admit = Callable[[ParameterRecord, bool], bool]
"""Returns whether the state of a record may be updated now; if the flag is set, waits until that is known."""
Done = Callable[[ParameterRecord], None]
"""Called once the state and weights of a record have been updated."""


class _StreamedUpdate:
    """Phases 2 to 4 of one record, tile by tile. At most a few exist at a time, so that gradients are freed as their updates
    finish. Several threads may apply it to different tiles if all data is in host memory."""

    def __init__(self, changes: Changes, record: ParameterRecord, h2d: H2DQueue) -> None:
        self.record = record
        self._state = state = changes.state
        self._step, self._factor = changes.step_of(record), changes.settings.factor_of(record)
        self._scratch, self._h2d = changes.scratch, h2d
        (rows,) = changes.rows([record])
        self._gradient = None if rows is None else GradientTiles(state.transfers, rows, self._scratch)
        """This rank's rows; None if they are in the tile."""
        self._slots = state.codec.of(record.name, changes.settings.step, record.owned_range[0])
        self._num_state = 1 + len(state.slots_of(record))
        """The first arrays of a tile: the master and the slots."""
        has_casts = record.stored_array is None and not state.is_master(record)
        self._weights = record.owned() if has_casts else None
        """This rank's rows of the parameter in memory, if the master is cast into them."""
        self._after = changes.last_read([record])
        self._master_tiles: GradientTiles | None = None
        """Tiles of a master on the device, copied to its slots in host memory."""
        self._has_buffers = record.stored_array is not None and state.any_on_disk([[record.stored_array]])
        """Whether the weights are written to buffers, which later tiles reuse."""

    def apply(self, tile: Tile) -> None:
        """Run the phases on one tile."""
        views = [as_torch(view) for view in tile.views]
        stored_master, slots, arrays = views[0], views[1 : self._num_state], views[self._num_state :]
        master = self._master_with_slots(slots, stored_master, tile)
        if self._gradient is not None:
            gradient, first, stop = self._gradient, tile.first, tile.stop
        else:
            gradient = GradientTiles(self._state.transfers, arrays.pop(), self._scratch)
            first, stop = 0, master.numel()
        weights, after = (arrays[0], None) if arrays else (self._weights, self._after)
        if not arrays and weights is not None:
            weights = weights[tile.first : tile.stop]
        kernel = _host_kernel_for(self._state, self._step, master, gradient.rows, weights)
        if kernel is None:
            values = gradient.tile(first, stop, master)
            if self._factor != 1.0:
                values.mul_(self._factor)
            self._slots.update(self._step, master, values, slots, tile.first)
            if weights is not None:
                self._h2d.put([weights], [master], after)
        else:
            is_host = self._state.transfers.streams.is_host
            rows = gradient.rows[first:stop] if is_host(gradient.rows) else gradient.on_host(first, stop)
            tensors = StepTensors([master], [slots], [rows], [weights])
            queue = None if weights is None or is_host(weights) else self._h2d
            _in_one_pass(kernel, self._step, self._factor, tensors, queue, after, num_threads=1)
        if master is not stored_master:
            self._h2d.put([stored_master], [master], self._after)
        if self._has_buffers:
            self._h2d.drain()

    def _master_with_slots(self, slots: list[torch.Tensor], stored: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Return the master in the same memory as its slots: `stored` itself if it is there already."""
        transfers = self._state.transfers
        link = transfers.link(stored, slots[0]) if slots else None
        if link is None:
            return stored
        if link == "device_to_host":
            if self._master_tiles is None:
                self._master_tiles = GradientTiles(transfers, self.record.owned())
            return self._master_tiles.on_host(tile.first, tile.stop)
        copy = transfers.begin_to([stored], [slots[0]])
        copy.follow()
        self._h2d.add(copy)
        return copy.values


def _host_kernel_for(
    state: OptimizerState,
    step: ParameterStep,
    master: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor | None,
) -> HostKernel | None:
    """Return the kernel that runs phases 2 to 4 of a parameter in one pass, if any; see [Note: the host kernel]."""
    is_host = state.transfers.streams.is_host
    if state.host is None or (weights is None and master.numel() < _MIN_FP32 and gradient.dtype == torch.float32):
        return None
    if not isinstance(step, FusedAdamStep) or not state.codec.is_plain or not is_host(master):
        return None
    on_host = [tensor for tensor in (master, gradient, weights) if tensor is not None and is_host(tensor)]
    return state.host if state.host.takes(on_host, gradient.dtype, None if weights is None else weights.dtype) else None


def _in_one_pass(
    kernel: HostKernel,
    step: ParameterStep,
    factor: float,
    tensors: StepTensors,
    h2d: H2DQueue | None,
    after: Event,
    *,
    num_threads: int,
) -> None:
    """Run phases 2 to 4 of tensors in host memory. With `h2d`, the weights are on the device, which reads them until `after`;
    the new ones are sent there together."""
    one_pass = cast(FusedAdamStep, step).one_pass
    if h2d is None:
        one_pass(kernel, tensors, factor, num_threads)
        return
    weights = cast(Sequence[torch.Tensor], tensors.weights)
    staged = h2d.stage(weights)
    one_pass(kernel, tensors._replace(weights=staged), factor, num_threads)
    h2d.send(weights, staged, after)


_MIN_CORES_OF_TWO_CONSUMERS = 4
_MAX_ON_HOST, _MAX_ON_DEVICE = 64 * 1024, 16 * 1024 * 1024
"""The most elements of small parameters that are updated together: they fit in the host's cache, or need few device kernels."""
_MIN_FP32 = 16 * 1024
"""The fewest elements for which the host kernel updates an fp32 parameter without casts: below, torch's is as fast."""
_MAX_IN_STEP, _MAX_IN_BACKGROUND = 256 * 1024 * 1024, 4 * 1024 * 1024
"""The most elements of parameters whose gradients are taken together, in the step and in the background."""


class _KernelCall:
    """Parts of parameters in the same memory that take the same step, updated by one call of each kernel."""

    def __init__(self, kernel: HostKernel | None, *, sends: bool) -> None:
        self.numel = 0
        self.records: list[ParameterRecord] = []
        self._kernel, self._sends = kernel, sends
        self._parts: list[tuple[int, slice | None]] = []
        """The index of each gradient, and its elements; None: all of them."""
        self._masters: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = []
        self._weights: list[torch.Tensor | None] = []

    def add(
        self, record: ParameterRecord, index: int, place: InPlace, weights: torch.Tensor | None, part: tuple[int, int]
    ) -> None:
        """Add elements `part` (first, stop) of a parameter with gradient `index`; its master is cast into `weights`."""
        rows = slice(*part)
        self.numel += part[1] - part[0]
        self.records.append(record)
        self._parts.append((index, None if part == (0, place.master.numel()) else rows))
        self._masters.append(place.master[rows])
        self._slots.append([slot[rows] for slot in place.slots])
        self._weights.append(None if weights is None else weights[rows])

    def run(
        self, changes: Changes, step: ParameterStep, rows: Sequence[torch.Tensor], h2d: H2DQueue, num_threads: int
    ) -> None:
        """Run the phases with gradients among `rows`; a host kernel uses `num_threads`."""
        factor, after = changes.settings.factor_of(self.records[0]), changes.last_read(self.records)
        gradients = [rows[index] if part is None else rows[index][part] for index, part in self._parts]
        if self._kernel is not None:
            tensors = StepTensors(self._masters, self._slots, gradients, self._weights)
            queue = h2d if self._sends else None
            _in_one_pass(self._kernel, step, factor, tensors, queue, after, num_threads=num_threads)
            return
        if gradients[0].dtype != torch.float32:
            sources, scratch = gradients, changes.scratch.take("gradients", gradients[0], torch.float32, self.numel)
            gradients = list(scratch.split_with_sizes(list(map(torch.Tensor.numel, sources))))
            torch._foreach_copy_(gradients, sources)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        step.tiles(self._masters, gradients, self._slots)
        weights = cast(list[torch.Tensor], self._weights)
        if self._sends:
            h2d.put(weights, self._masters, after)
        elif self._weights[0] is not None:
            torch._foreach_copy_(weights, self._masters)


def _plan_calls(
    changes: Changes, places: Sequence[tuple[ParameterRecord, InPlace]], rows: Sequence[torch.Tensor], threads: int
) -> list[_KernelCall]:
    """Return the kernel calls of parameters with gradients like `rows`: small ones of a kind together, large ones in tiles."""
    state, is_host = changes.state, changes.state.transfers.streams.is_host
    calls: list[_KernelCall] = []
    current: dict[Any, _KernelCall] = {}
    for index, (record, place) in enumerate(places):
        master, weights = place.master, record.owned() if place.casts else place.separate_rows
        step, factor, on_host = changes.step_of(record), changes.settings.factor_of(record), is_host(master)
        kernel = _host_kernel_for(state, step, master, rows[index], weights)
        sends = weights is not None and is_host(weights) != on_host
        limit, tile = (_MAX_ON_HOST, tile_numel(threads)) if on_host else (_MAX_ON_DEVICE, _MAX_ON_DEVICE)
        if kernel is not None:  # it cuts tiles itself; one call's weights are sent while the next call computes
            limit = tile = _MAX_IN_BACKGROUND if sends else _MAX_IN_STEP
        kind = step, factor, rows[index].dtype, on_host, kernel is None, sends, weights is not None and weights.dtype
        for first in range(0, master.numel(), tile):
            stop = min(first + tile, master.numel())
            if kind not in current or current[kind].numel + stop - first > limit:
                current[kind] = _KernelCall(kernel, sends=sends)
                calls.append(current[kind])
            current[kind].add(record, index, place, weights, (first, stop))
    return calls


class _Batch:
    """The kernel calls of parameters that are updated in place together, planned for gradients like `rows`."""

    def __init__(
        self,
        changes: Changes,
        places: Sequence[tuple[ParameterRecord, InPlace]],
        rows: Sequence[torch.Tensor],
        *,
        in_background: bool,
    ) -> None:
        state, transfers = changes.state, changes.state.transfers
        self.names = [name for _, place in places for name in place.names]
        self.masters = [place.master for _, place in places]
        links = [transfers.link(*pair) for pair in zip(rows, self.masters, strict=True)]
        self.transferred = [[i for i, current in enumerate(links) if current == link] for link in set(links) if link]
        """Indices of the gradients that are not in the same memory as their master, by direction."""
        self._memory = [(record, record.full, record.shard) for record, place in places if place.casts]
        on_host = [master.numel() for master in self.masters if transfers.streams.is_host(master)]
        uses_one = in_background or state.host is not None  # the host kernel has its own threads
        uses_one = uses_one or not _allows_threads(state, [record for record, _ in places])
        self.threads = 1 if uses_one else threads_for(on_host)
        self.num_threads = num_threads(
            state.host_ranks, overlaps_compute=in_background and transfers.streams.device_is_host
        )
        """Threads of a host kernel."""
        self.calls = _plan_calls(changes, places, rows, self.threads)

    def fits(self, changes: Changes) -> bool:
        """Return whether parameters still have the same buffers, and those of each call still take the same step."""
        for record, full, shard in self._memory:
            if record.full is not full or record.shard is not shard:
                return False
        scalars, factors = changes.state.scalars, changes.settings.factors
        for call in self.calls:
            first = call.records[0]
            for record in call.records:
                if scalars[record] != scalars[first] or (factors and factors.get(record) != factors.get(first)):
                    return False
        return True


def _admitted(records: Sequence[ParameterRecord], admit: Admit | None, limit: int) -> Iterator[list[ParameterRecord]]:
    """Yield the admitted records in order, in groups of up to `limit` elements (or one record) that need no wait."""
    group: list[ParameterRecord] = []
    numel = 0
    for record in records:
        is_ready = admit is None or admit(record, not group)
        if group and (not is_ready or numel + record.owned_numel > limit):
            yield group
            group, numel = [], 0
            is_ready = is_ready or (admit is not None and admit(record, True))
        if is_ready:
            group.append(record)
            numel += record.owned_numel
    if group:
        yield group


@cache
def num_consumers() -> int:
    """Return how many threads update state from disk. On two cores a second thread makes a step slower, since I/O needs
    the core too (docs/design/0005-step.md)."""
    return 2 if num_cores() >= _MIN_CORES_OF_TWO_CONSUMERS else 1


def _allows_threads(state: OptimizerState, records: Iterable[ParameterRecord]) -> bool:
    """Return whether several threads may update tiles of `records`: only torch's fused kernel does not share an optimizer."""
    return all(isinstance(state.kernel_of(record)[0], FusedAdam) for record in records)


class _StreamedPart:
    """Parameters that one thread updates in a pass over their arrays."""

    def __init__(self, state: OptimizerState, records: Sequence[ParameterRecord]) -> None:
        self.records = records
        self.groups: list[list[str]] = []
        """The arrays of each parameter, whose tiles are read together."""
        self.modes: dict[str, ModeName] = {}
        for record in records:
            arrays = state.all_arrays(record)
            self.groups.append(list(arrays))
            self.modes |= arrays
            if record in state.spilled:  # the array's name changes when it is replaced by a wider one
                self.groups[-1].append(state.spilled[record])
                self.modes[state.spilled[record]] = "read"
        self.from_disk = state.any_on_disk(self.groups)
        self.allows_threads = _allows_threads(state, records)


class UpdatePlan:
    """Which of the `records` are updated in place, since their arrays are in the same memory, and which in a pass, and how."""

    def __init__(self, state: OptimizerState, records: Sequence[ParameterRecord], *, in_background: bool) -> None:
        owned = [record for record in records if record.owned_numel]
        self.places = {record: place for record in owned if (place := state.in_place(record)) is not None}
        if in_background and len(self.places) < len(owned):
            self.places = {}
        self.max_numel = _MAX_IN_BACKGROUND if in_background else _MAX_IN_STEP
        self.batches = list(_admitted(list(self.places), None, self.max_numel))
        """The parameters updated in place, in groups whose gradients are taken together."""
        streamed = _StreamedPart(state, [record for record in owned if record not in self.places])
        allows_several = not in_background and streamed.from_disk and streamed.allows_threads
        count, before, total = num_consumers() if allows_several else 1, 0, sum(r.owned_numel for r in streamed.records)
        parts: list[list[ParameterRecord]] = [[] for _ in range(count)]
        for record in streamed.records:  # adjacent records stay together: they may share files
            parts[before * count // total].append(record)
            before += record.owned_numel
        self.parts = [_StreamedPart(state, part) for part in parts if part]
        self.in_background = in_background
        """Whether the training loop continues during the update."""
        self.started: list[Stream] = []
        """Passes of the parts whose reads were started ahead; the update takes them over."""

    @staticmethod
    def of(state: OptimizerState, records: Sequence[ParameterRecord], *, in_background: bool) -> UpdatePlan:
        """Return the plan, cached until the store is rearranged."""
        make = partial(UpdatePlan, state, records, in_background=in_background)
        return state.planned((UpdatePlan, in_background, *records), make)

    def read_ahead(self, store: Store) -> None:
        """Start reading the first parameters from disk. An error is ignored: the update will hit it again, and raise it on all
        ranks."""
        if any(part.from_disk for part in self.parts):
            with suppress(ZstoreError):
                self.started.extend(store.read_ahead(part.groups, modes=part.modes) for part in self.parts)


class Changes:
    """The update of `records` in one step; each has a gradient when it is admitted."""

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
        self._started, plan.started = plan.started, []
        self.last_read = last_read
        """Returns the event after which the device no longer reads the weights; None: after all submitted work."""
        self.scratch = Scratch()
        self._steps: dict[ParameterRecord, ParameterStep] = {}
        self._shared: dict[tuple[Any, ...], ParameterStep] = {}

    def run(self, *, admit: Admit | None = None, done: Done | None = None) -> None:
        """Update all records, in order. See [Note: the update]."""
        plan = self._plan
        for batch in plan.batches if admit is None else _admitted(list(plan.places), admit, plan.max_numel):
            self._update_in_place(batch)
            if done is not None:
                for record in batch:
                    done(record)
        parts, context = zip_longest(plan.parts, self._started), self.state.transfers.streams.stream_context()
        side_by_side(lambda part: self._stream(*part, admit, done), parts, len(plan.parts), context)

    def _stream(self, part: _StreamedPart, started: Stream | None, admit: Admit | None, done: Done | None) -> None:
        """Update parameters in a pass over their arrays, `started` if its reads were started ahead."""
        records = part.records
        h2d = H2DQueue(self.state.transfers)

        def finish_group(group: int) -> None:
            h2d.drain()
            if done is not None:
                done(records[group])

        admitted = None if admit is None else (lambda group, wait: admit(records[group], wait))
        on_end = None if done is None else finish_group
        if started is not None and started.resume(admitted, on_end):
            tiles = started.tiles()
        else:
            tiles = self.state.store.tiles(part.groups, "update", modes=part.modes, admit=admitted, on_end=on_end)
        with labelled("update"), one_thread(part.from_disk), closing(tiles):
            # A tile from disk is written back when the next one is requested, while other threads could still be using it.
            uses_one = self._plan.in_background or part.from_disk or not self.state.transfers.streams.device_is_host
            uses_one = uses_one or not part.allows_threads
            threads = 1 if uses_one else threads_for([record.owned_numel for record in records])
            side_by_side(lambda work: work[0].apply(work[1]), self._updates(tiles, records, h2d), threads)
        h2d.drain()

    def _update_in_place(self, records: Sequence[ParameterRecord]) -> None:
        """Update parameters whose arrays are in the same memory; in the background, on one thread."""
        state, transfers, plan, rows = self.state, self.state.transfers, self._plan, []
        for record, gradient in zip(records, self.rows(records), strict=True):
            if gradient is None:
                raise AssertionError(f"the gradient of {record.name} is not in memory")
            rows.append(gradient)
        kinds = [(tensor.dtype, tensor.is_cpu, tensor.is_contiguous() and not tensor.is_neg()) for tensor in rows]
        batch = state.planned(
            (_Batch, plan.in_background, torch.get_num_threads(), *kinds, *records),
            lambda: _Batch(
                self, [(record, plan.places[record]) for record in records], rows, in_background=plan.in_background
            ),
            lambda cached: cached.fits(self),
        )
        for indices in batch.transferred:
            copy = transfers.begin_to([rows[i] for i in indices], [batch.masters[i] for i in indices])
            transfers.finish(copy)
            for index, values in zip(indices, copy.targets, strict=True):
                rows[index] = values
        h2d, work = H2DQueue(transfers), []
        h2d.max_pending *= batch.threads
        for call in batch.calls:
            step = self.step_of(call.records[0])
            self._steps.update(dict.fromkeys(call.records, step))
            work.append(partial(call.run, self, step, rows, h2d, batch.num_threads))
        with labelled("update"), state.store.changing(batch.names):
            side_by_side(lambda call: call(), work, batch.threads, transfers.streams.stream_context())
            h2d.drain()

    def _updates(
        self, tiles: Iterable[Tile], records: Sequence[ParameterRecord], h2d: H2DQueue
    ) -> Iterator[tuple[_StreamedUpdate, Tile]]:
        """Yield each tile with the update to apply to it."""
        update: _StreamedUpdate | None = None
        for tile in tiles:
            if update is None or update.record is not records[tile.group]:
                update = _StreamedUpdate(self, records[tile.group], h2d)
            yield update, tile

    def step_of(self, record: ParameterRecord) -> ParameterStep:
        """Return the step of a parameter, shared by parameters with the same settings and scalars."""
        step = self._steps.get(record)
        if step is None:
            (kernel, group), scalars = self.state.kernel_of(record), self.state.scalars[record]
            key = group, *scalars.items()
            step = self._shared.get(key) if isinstance(kernel, FusedAdam | TorchKernel) else None
            if step is None:
                step = self._shared[key] = kernel.start(self.settings.groups[group], scalars)
            self._steps[record] = step
        return step

    def note_scalars(self, records: Sequence[ParameterRecord]) -> None:
        """Store the scalars of `records` after the step (such as its count), including records without rows on this rank."""
        after: dict[ParameterStep, Scalars] = {}
        for record in records:
            step = self._steps.get(record) or self.step_of(record)
            if step not in after:
                after[step] = step.scalars()
            self.state.scalars[record] = after[step].copy()
