"""The compute device: its streams, events and pinned memory, and copies between host and device memory.

[Note: copies between host and device]
A device executes work asynchronously, in the order of a stream. Background copies use two other streams, one per direction.
So each copy waits for an event, and code that uses its target or reuses its source waits for the copy's end:
event    a point in the work submitted to the device; a copy accesses device memory only after its event.
copy     starts after an event and ends with one. The tensors of a unit are copied by one call.
wait     blocks the host until the event; then host and device see the new values, and the source may be reused.
follow   makes the device wait, but not the host: work submitted from now on sees the new values.
Threads submit work on the stream of the thread that started them. A blocking copy is cast on the host, so values are
transferred in the device tensor's dtype. A background copy is cast before its start or after its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

from zstore.io import LinkCounters, Rooms, Workers
from zstore.io.memory import as_torch
from zstore.store import MEMORY_TILE_NUMEL

_MAX_PENDING_TILES = 2
"""Maximum number of tiles being copied to the device: one is copied while the next is computed."""
_MAX_DOWN_BYTES = 256 * 1024 * 1024
"""Maximum device memory of pending copies to host memory (at least the two largest batches). A batch uses up to half of it, or
is one larger tensor."""
_MIN_MEAN_NUMEL = 128 * 1024
_MAX_TILE_THREADS = 4
"""Maximum number of threads for tiles. Sixteen contended for Python's lock; one leaves cores idle while its Python runs."""

T = TypeVar("T")

Event = Any
"""A point in the work of a device; opaque to all but the streams that recorded it."""
StreamContext = Callable[[], AbstractContextManager[None]]


def labelled(phase: str, what: str = "") -> AbstractContextManager[object]:
    """Label a phase of the engine in the trace of a running torch.profiler, such as "zstore::unshard (layers.0)"."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"zstore::{phase} ({what})" if what else f"zstore::{phase}")


class Streams:
    """Streams of a device that computes in the host's memory: there are no transfers, and nothing is asynchronous.

    See [Note: copies between host and device]. Every method may be called from any thread.
    """

    device_is_host = True
    """Whether the device computes in the host's memory."""
    cuda_runtime: Any = None
    """The library that registers host memory as pinned; None: torch's binding, if there is a CUDA device."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in the host's memory."""
        return True

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a host buffer for `numel` elements, 1-D, pinned if possible."""
        return torch.empty(numel, dtype=dtype)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, casting on the host, in the order of this thread's stream; blocks."""
        target.copy_(source)

    def record(self) -> Event:
        """Return the event after the work that this thread has submitted."""
        return None

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Event) -> Event:
        """Start to copy each source into its target in the background, all in one direction and between equal dtypes; return
        the event after it."""
        torch._foreach_copy_(targets, sources)

    def wait(self, event: Event) -> None:
        """Wait until the event is reached."""

    def follow(self, event: Event) -> None:
        """Order work that this thread submits from now on after the event; the host does not wait."""

    def query(self, event: Event) -> bool:
        """Return whether the event has been reached, so `wait` would not block."""
        return True

    def stream_context(self) -> StreamContext:
        """Return the context of the caller's device and stream, for a thread that works for it."""
        return nullcontext


class CudaStreams(Streams):
    """Streams of a CUDA device: one for each direction of copies besides the compute stream."""

    device_is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Events and streams belong to the current device of a thread.
        torch.cuda.set_device(device)
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned: copies block, and are still correct
            return torch.empty(numel, dtype=dtype)

    def record(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Event) -> Event:
        stream = self._down if self.is_host(targets[0]) else self._up
        stream.wait_event(after)
        with stream:  # like torch.cuda.stream(stream), in a tenth of the time
            torch._foreach_copy_(targets, sources, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def follow(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def stream_context(self) -> StreamContext:
        stream = torch.cuda.current_stream(self._device)

        @contextmanager
        def enter() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(stream))
                yield

        return enter


def streams_for(device: torch.device) -> Streams:
    """Return the streams between the host and `device`, which becomes this thread's current device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


@dataclass(eq=False, repr=False)
class Copy:
    """A pending copy of one or several tensors. See [Note: copies between host and device]."""

    _streams: Streams
    _event: Event
    targets: list[torch.Tensor]
    """Must not be used before the copy ends."""
    _sources: list[torch.Tensor] | None
    """Their memory must not be reused before the copy ends."""

    @property
    def values(self) -> torch.Tensor:
        """The target of a copy of one tensor."""
        return self.targets[0]

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return its values."""
        if self._sources is not None:
            self._streams.wait(self._event)
            self._sources = None
        return self.values

    def follow(self) -> None:
        """Make the device wait for the copy, not the host."""
        self._streams.follow(self._event)

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        if self._sources is not None and self._streams.query(self._event):
            self._sources = None
        return self._sources is None


class Transfers:
    """All copies of one rank's state, gradients and rows over its streams."""

    def __init__(self, streams: Streams, links: LinkCounters, rooms: Rooms | None = None) -> None:
        self.streams = streams
        self._links = links
        self._rooms = None if streams.device_is_host else rooms

    def empty_host(self, numel: int, dtype: torch.dtype, purpose: str = "") -> torch.Tensor:
        """Return a host buffer for `numel` elements, 1-D, pinned if possible: that of a freed tensor of the same `purpose`,
        or a new one. For sizes that recur in every step."""
        if self._rooms is None or not numel:
            return self.streams.empty_host(numel, dtype)
        return as_torch(self._rooms.take(numel * dtype.itemsize, purpose)).view(dtype)

    def synchronize(self) -> None:
        """Wait until the device has completed this thread's work, so that other streams may read its memory."""
        self.streams.wait(self.streams.record())

    def link(self, source: torch.Tensor, target: torch.Tensor) -> str | None:
        """Return the link of a copy from one tensor to another; None if both are on the host or both on the device."""
        if self.streams.is_host(source) == self.streams.is_host(target):
            return None
        return "device_to_host" if self.streams.is_host(target) else "host_to_device"

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, cast to its dtype; blocks."""
        link = self.link(source, target)
        if link is None:
            target.copy_(source)
            return
        transferred = source if link == "device_to_host" else target
        with self._links.moving(link, source.numel() * transferred.element_size()):
            self.streams.copy_now(target, source)

    def begin(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None, counted: bool = True
    ) -> Copy:
        """Start a copy between host and device, between equal dtypes, after the work submitted up to now (or `after`)."""
        return self.begin_all([target], [source], after=after, counted=counted)

    def begin_all(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], *, after: Event = None, counted: bool = True
    ) -> Copy:
        """Start one copy of one or more sources into their targets, all in one direction; see `begin`."""
        if counted:
            link = self.link(sources[0], targets[0]) or "device_to_host"
            self._links.begin(link, sum(target.nbytes for target in targets))
        event = self.streams.copy(targets, sources, self.streams.record() if after is None else after)
        return Copy(self.streams, event, targets, sources)

    def begin_to(self, values: list[torch.Tensor], likes: list[torch.Tensor]) -> Copy:
        """Start to copy `values`, 1-D and all in one direction, into new tensors on the devices of `likes`, one each."""
        if self.streams.is_host(likes[0]):
            targets = [self.empty_host(source.numel(), source.dtype) for source in values]
        else:
            pairs = zip(values, likes, strict=True)
            targets = [like.new_empty(source.numel(), dtype=source.dtype) for source, like in pairs]
        return self.begin_all(targets, values)

    def finish(self, copy: Copy) -> torch.Tensor:
        """Wait for a copy, record for how long, and return the values."""
        if not copy.done():
            link = "device_to_host" if self.streams.is_host(copy.values) else "host_to_device"
            started = time.perf_counter()
            copy.wait()
            self._links.add_stall(link, "begun earlier", time.perf_counter() - started)
        return copy.wait()


class Scratch(threading.local):
    """Each thread's buffers for one tile, by name, reused for later tiles: page faults in newly allocated memory cost more than
    the work on it."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return an uninitialized buffer on the device of 1-D `like`, of its length or `numel`, valid until the next call for
        `name`."""
        numel = like.numel() if numel is None else numel
        memory = self._memory.get(name)
        if memory is None or memory.numel() < numel or memory.dtype != dtype or memory.device != like.device:
            memory = self._memory[name] = like.new_empty(numel, dtype=dtype)
        return memory[:numel]


class GradientTiles:
    """The rows of a gradient, tile by tile, in fp32 in the state's memory; if they are in a different one, the next tile is
    copied ahead. With `scratch`, all tiles use the same buffer, unless the rows can be changed in place."""

    def __init__(self, transfers: Transfers, rows: torch.Tensor, scratch: Scratch | None = None) -> None:
        self._transfers = transfers
        self.rows = rows
        self._scratch = scratch
        self._ahead: tuple[int, int, Copy] | None = None

    def tile(self, first: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        """Return rows `[first, stop)` on the device of `like`, in fp32, for the caller to change."""
        part = self.rows[first:stop]
        link = self._transfers.link(part, like)
        if link is None:
            if self._scratch is None or part.dtype == torch.float32:
                return part.float()
            return self._scratch.take("gradient", part, torch.float32).copy_(part)
        if link == "host_to_device":
            return self._transfers.finish(self._transfers.begin(torch.empty_like(like, dtype=part.dtype), part)).float()
        return self.on_host(first, stop).float()

    def on_host(self, first: int, stop: int) -> torch.Tensor:
        """Return rows `[first, stop)`, which are on a device, in their own dtype in host memory, for the caller to change."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[:2] != (first, stop):
            ahead = self._begin(first, stop)
        # All tiles of a parameter except the last have the same size.
        following = min(2 * stop - first, self.rows.numel())
        if following > stop:
            self._ahead = self._begin(stop, following)
        return self._transfers.finish(ahead[2])

    def _begin(self, first: int, stop: int) -> tuple[int, int, Copy]:
        staging = self._transfers.empty_host(stop - first, self.rows.dtype)
        return first, stop, self._transfers.begin(staging, self.rows[first:stop])


class H2DQueue:
    """Copies of updated weights to the parameters: one tile is copied while the next is computed. Thread-safe."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._pending: deque[Copy] = deque()
        self._counter = count()
        self.max_pending = _MAX_PENDING_TILES
        """Maximum number of pending tiles."""

    def put(self, rows: list[torch.Tensor], masters: list[torch.Tensor], after: Event = None) -> None:
        """Cast `masters` into `rows`, all of one dtype and in one memory; they are complete after `drain`. Until then, masters
        on the device must not change; those in host memory may change on return. Rows on the device are written after
        the work submitted until now, or `after` an event if no later work reads them."""
        link = self._transfers.link(masters[0], rows[0])
        if link is None:
            torch._foreach_copy_(rows, masters)
        elif link == "device_to_host":
            self.add(self._transfers.begin_all(rows, [master.to(rows[0].dtype) for master in masters]))
        else:
            staged = self.stage(rows)
            torch._foreach_copy_(staged, masters)
            self.send(rows, staged, after)

    def stage(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return host buffers for the new values of `rows`, for `send`: `rows` themselves if they are in host memory."""
        if self._transfers.streams.is_host(rows[0]):
            return list(rows)
        # Round-robin, so that every step uses the same buffers.
        purpose, sizes = f"rows {next(self._counter) % (self.max_pending + 1)}", list(map(torch.Tensor.numel, rows))
        return list(self._transfers.empty_host(sum(sizes), rows[0].dtype, purpose).split_with_sizes(sizes))

    def send(self, rows: Sequence[torch.Tensor], staged: list[torch.Tensor], after: Event = None) -> None:
        """Copy the `staged` values into `rows`; see `put`."""
        if staged[0] is not rows[0]:
            self.add(self._transfers.begin_all(list(rows), staged, after=after))

    def add(self, copy: Copy) -> None:
        """Add a copy that `drain` waits for."""
        self._pending.append(copy)
        self.drain(self.max_pending)

    def drain(self, max_pending: int = 0) -> None:
        """Wait for all tiles except the last `max_pending`."""
        while len(self._pending) > max_pending and (copy := _next(self._pending)) is not None:
            self._transfers.finish(copy)


class D2HQueue:
    """Copies from the device to host memory, in batches, which are delivered in the order of `put`. Used from one thread at a
    time."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._batch: list[tuple[torch.Tensor | None, torch.Tensor, Callable[[torch.Tensor], None]]] = []
        """The next copies, which have not been started."""
        self._batch_bytes = 0
        self._pending: deque[tuple[Copy, list[Callable[[torch.Tensor], None]], int]] = deque()
        """The batches that were started: copy, receivers of the values, and bytes on the device."""
        self._max_bytes = _MAX_DOWN_BYTES

    def put(self, target: torch.Tensor | None, values: torch.Tensor, deliver: Callable[[torch.Tensor], None]) -> None:
        """Add a copy of `values` to `target`, of the same dtype, or to a new host buffer (None); `deliver` gets the result."""
        self._batch.append((target, values, deliver))
        self._batch_bytes += values.nbytes

    @property
    def is_full(self) -> bool:
        """Whether the batch should be sent."""
        return self._batch_bytes >= _MAX_DOWN_BYTES // 2

    def send(self) -> None:
        """Start to copy the batch; deliver earlier batches that are complete or, to free memory, wait for them."""
        if not self._batch:
            return
        batch, nbytes, self._batch, self._batch_bytes = self._batch, self._batch_bytes, [], 0
        empty = self._transfers.empty_host
        targets = [empty(values.numel(), values.dtype) if target is None else target for target, values, _ in batch]
        copy = self._transfers.begin_all(targets, [values for _, values, _ in batch])
        self._pending.append((copy, [deliver for _, _, deliver in batch], nbytes))
        self._max_bytes = max(self._max_bytes, 2 * nbytes)
        while self._pending and (self._pending[0][0].done() or sum(n for _, _, n in self._pending) > self._max_bytes):
            self._deliver()

    def _deliver(self) -> None:
        copy, receivers, _ = self._pending.popleft()
        self._transfers.finish(copy)
        for deliver, values in zip(receivers, copy.targets, strict=True):
            deliver(values)

    def drain(self) -> None:
        """Wait for all batches that were sent, and deliver them."""
        while self._pending:
            self._deliver()

    def drop(self) -> None:
        """Discard all copies, once those that were started have finished."""
        while self._pending:
            self._pending.popleft()[0].wait()
        self._batch, self._batch_bytes = [], 0


def one_thread(enabled: bool = True, *, num_threads: int = 1) -> AbstractContextManager[object]:
    """Return a context in which operations of this thread (only) use one of torch's threads, or `num_threads`. An operation
    on a tile takes some 10 microseconds, and so does waking a thread for it. The results are the same."""
    if not enabled:
        return nullcontext()
    torch.get_num_threads()  # torch sets this thread's count now; at the first operation it would override ours
    limits: AbstractContextManager[object] = _openmp().limit(limits=num_threads)
    return limits


def threads_for(numels: Sequence[int]) -> int:
    """Return the number of threads for `side_by_side` over tiles of arrays with `numels` elements: one if torch has one thread,
    if there is little work, or if the arrays are so small that Python, with its lock, dominates."""
    numel = sum(numels)
    if numel < len(numels) * _MIN_MEAN_NUMEL:
        return 1
    return max(1, min(torch.get_num_threads(), _MAX_TILE_THREADS, numel // MEMORY_TILE_NUMEL))


def tile_numel(num_threads: int) -> int:
    """Return the elements of a tile in host memory for each of `num_threads` threads, which share torch's."""
    return max(1, torch.get_num_threads() // num_threads) * MEMORY_TILE_NUMEL


def side_by_side(
    work: Callable[[T], object], items: Iterable[T], num_threads: int, context: StreamContext = nullcontext
) -> None:
    """Call `work` on all `items`, on `num_threads` threads, which share torch's threads and each enter `context`.

    The threads take the items in order. They wait for each other only at the end, and do not spin in each operation as
    torch's threads do. All items exist before the first is taken: threads that waited for new ones would sleep longer than they
    work. The first error stops items that have not started. With one thread the caller does the work, with all torch threads.
    """
    if num_threads <= 1:
        for item in items:
            work(item)
        return
    remaining = deque(items)

    def serve() -> None:
        try:
            while (item := _next(remaining)) is not None:
                work(item)
        except BaseException:
            remaining.clear()
            raise

    share = max(1, torch.get_num_threads() // num_threads)

    def work_alone() -> None:
        with one_thread(num_threads=share), context():
            serve()

    with Workers(num_threads - 1, "zstore-tiles") as workers:
        workers.run([work_alone] * num_threads, in_caller=True)


def _next(items: deque[T]) -> T | None:
    try:
        return items.popleft()
    except IndexError:  # another thread took the last one
        return None


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
