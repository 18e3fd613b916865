"""The device that computes: its streams, events and pinned memory, and copies between tensors in different memories.

[Note: the hand-over]
A device works behind the host, in the order of a stream. Copies that nothing else has to wait for use streams of their own,
one for each direction, beside the computation. So each copy names the event it follows, and anyone who uses its target,
or reuses its source, waits for it:
event    a point in the work that the device was given so far: a copy reads and writes device memory after it.
copy     begins after an event and ends with one. Until it is waited for, nobody touches or frees target or source. Tensors
         that move together, those of a unit, are one copy: one call and one event, however many they are.
wait     the host waits until the event is reached: the copied values are there, for the device too, and the source may be
         reused.
follow   the device waits, and the host goes on: the copied values are there for what the device is given from now on.
Threads that give the device work do so on the stream of their creator, so that its order is theirs.

torch casts on the host's side of a copy that it waits for, so values travel in the type of the device's side. A copy
that nobody waits for at once is cast before it begins, or after it ended.
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

_MOST_UP = 2
"""Tiles on their way to the device: one is copied while the next is computed."""
_LEAST_MEAN_NUMEL = 128 * 1024
_MOST_SIDE_BY_SIDE = 4
"""Threads that work on tiles of their own, and share torch's: of sixteen each waited for the others' Python, and one leaves
the cores idle while its Python runs."""

T = TypeVar("T")

Event = Any
"""A point in the work of a device; opaque except to the streams that recorded it."""
StreamContext = Callable[[], AbstractContextManager[None]]


def labelled(phase: str, what: str = "") -> AbstractContextManager[object]:
    """Name a phase of the engine, of `what`, in the trace of a running torch.profiler, as "zstore::unshard (layers.0)"."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"zstore::{phase} ({what})" if what else f"zstore::{phase}")


class Streams:
    """Streams of a device that computes in the host's memory: nothing crosses, and nothing is late.

    See [Note: the hand-over]. Every method may be called from any thread.
    """

    device_is_host = True
    """Whether the device computes in the host's memory."""
    cuda_runtime: Any = None
    """The library that registers host memory as pinned; None: torch's binding, if there is a CUDA device."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in the host's memory."""
        return True

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for `numel` elements, 1-D, pinned if possible."""
        return torch.empty(numel, dtype=dtype)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy across, cast on the host's side, in the order of this thread's stream; done on return."""
        target.copy_(source)

    def record(self) -> Event:
        """Return the end of the work that this thread gave the device so far."""
        return None

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Event) -> Event:
        """Begin to copy each source across into its target, all in one direction and each of its target's type, beside the
        computation; return the event of the end."""
        torch._foreach_copy_(targets, sources)

    def wait(self, event: Event) -> None:
        """Return when the event is reached."""

    def follow(self, event: Event) -> None:
        """Let what this thread gives the device from now on come after the event; the host does not wait."""

    def query(self, event: Event) -> bool:
        """Return whether the event was reached, so that `wait` would not block."""
        return True

    def stream_context(self) -> StreamContext:
        """Return the context that a thread working for the caller enters: its device and its stream."""
        return nullcontext


class CudaStreams(Streams):
    """Streams of a CUDA device: one for each direction beside the one that computes."""

    device_is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Events are created, and streams looked up, on the current device of a thread.
        torch.cuda.set_device(device)
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned: copies block, and are still right
            return torch.empty(numel, dtype=dtype)

    def record(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Event) -> Event:
        stream = self._down if self.is_host(targets[0]) else self._up
        stream.wait_event(after)
        with stream:  # as torch.cuda.stream(stream), in a tenth of the time
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
    """Return the streams between the host and `device`, and make it this thread's current device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


@dataclass(eq=False, repr=False)
class Copy:
    """A copy under way, of one tensor or of several. See [Note: the hand-over]."""

    _streams: Streams
    _event: Event
    targets: list[torch.Tensor]
    """Not to be touched before the end."""
    _sources: list[torch.Tensor] | None
    """Nobody may reuse their memory before the end."""

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
        """Let the device wait for the copy, and the host not: its work from now on sees the values."""
        self._streams.follow(self._event)

    def done(self) -> bool:
        """Return whether the copy is done, so that `wait` would not block."""
        if self._sources is not None and self._streams.query(self._event):
            self._sources = None
        return self._sources is None


class Transfers:
    """All copies of one rank's state, gradients and rows over its streams."""

    def __init__(self, streams: Streams, links: LinkCounters, rooms: Rooms | None = None) -> None:
        self.streams = streams
        self._links = links
        self._rooms = None if streams.device_is_host else rooms

    def empty_host(self, numel: int, dtype: torch.dtype, what: str = "") -> torch.Tensor:
        """Return host memory for `numel` elements, 1-D, pinned if possible: that of a former tensor for the same thing that
        nobody has any more, or new one. For sizes that come again in every step."""
        if self._rooms is None or not numel:
            return self.streams.empty_host(numel, dtype)
        return as_torch(self._rooms.take(numel * dtype.itemsize, what)).view(dtype)

    def synchronize(self) -> None:
        """Return when the device has done this thread's work so far: others may read its memory on streams of theirs."""
        self.streams.wait(self.streams.record())

    def link(self, source: torch.Tensor, target: torch.Tensor) -> str | None:
        """Return the link of a copy from one tensor to another, or None within one memory."""
        if self.streams.is_host(source) == self.streams.is_host(target):
            return None
        return "device_to_host" if self.streams.is_host(target) else "host_to_device"

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, cast to its type; done on return."""
        link = self.link(source, target)
        if link is None:
            target.copy_(source)
            return
        travels = source if link == "device_to_host" else target
        with self._links.moving(link, source.numel() * travels.element_size()):
            self.streams.copy_now(target, source)

    def begin(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None, counted: bool = True
    ) -> Copy:
        """Begin a copy across, between equal types, after the work that the device was given so far (or `after`)."""
        return self.begin_all([target], [source], after=after, counted=counted)

    def begin_all(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], *, after: Event = None, counted: bool = True
    ) -> Copy:
        """Begin to copy each source into its target, at least one and all in one direction, as one copy; see `begin`."""
        if counted:
            link = self.link(sources[0], targets[0]) or "device_to_host"
            self._links.begin(link, sum(target.nbytes for target in targets))
        event = self.streams.copy(targets, sources, self.streams.record() if after is None else after)
        return Copy(self.streams, event, targets, sources)

    def bring(self, values: torch.Tensor, other: torch.Tensor) -> Copy | None:
        """Begin to copy `values`, 1-D, into new memory beside `other`; None if they are there."""
        link = self.link(values, other)
        if link is None:
            return None
        if link == "device_to_host":
            return self.begin(self.empty_host(values.numel(), values.dtype), values)
        return self.begin(other.new_empty(values.numel(), dtype=values.dtype), values)

    def finish(self, copy: Copy) -> torch.Tensor:
        """Wait for a copy, and count that; return its values."""
        if not copy.done():
            link = "device_to_host" if self.streams.is_host(copy.values) else "host_to_device"
            started = time.perf_counter()
            copy.wait()
            self._links.stalled(link, "begun earlier", time.perf_counter() - started)
        return copy.wait()


class Scratch(threading.local):
    """Memory of each thread for the length of a tile, by name, kept for later tiles: memory that is freed and allocated
    again has fresh pages each time, which costs more than the work on it."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, beside: torch.Tensor, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return memory beside 1-D `beside`, of its length or of `numel` elements, with undefined values, until `name` is
        taken again."""
        numel = beside.numel() if numel is None else numel
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != beside.device:
            kept = self._kept[name] = beside.new_empty(numel, dtype=dtype)
        return kept[:numel]


class GradientTiles:
    """The rows of a gradient, tile by tile, in fp32 beside the state, copied there ahead of use if they are elsewhere. With
    `room` each tile uses the same memory, unless the rows can be changed in place."""

    def __init__(self, transfers: Transfers, rows: torch.Tensor, room: Scratch | None = None) -> None:
        self._transfers = transfers
        self.rows = rows
        self._room = room
        self._ahead: tuple[int, int, Copy] | None = None

    def tile(self, first: int, stop: int, beside: torch.Tensor) -> torch.Tensor:
        """Return rows `[first, stop)` in the memory of `beside`, in fp32, for the caller to change."""
        part = self.rows[first:stop]
        link = self._transfers.link(part, beside)
        if link is None:
            if self._room is None or part.dtype == torch.float32:
                return part.float()
            return self._room.take("gradient", part, torch.float32).copy_(part)
        if link == "host_to_device":
            return self._transfers.finish(
                self._transfers.begin(torch.empty_like(beside, dtype=part.dtype), part)
            ).float()
        return self.on_host(first, stop).float()

    def on_host(self, first: int, stop: int) -> torch.Tensor:
        """Return rows `[first, stop)` of a device in their own type in host memory, for the caller to change."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[:2] != (first, stop):
            ahead = self._begin(first, stop)
        # All tiles of a parameter but the last have one size.
        following = min(2 * stop - first, self.rows.numel())
        if following > stop:
            self._ahead = self._begin(stop, following)
        return self._transfers.finish(ahead[2])

    def _begin(self, first: int, stop: int) -> tuple[int, int, Copy]:
        staging = self._transfers.empty_host(stop - first, self.rows.dtype)
        return first, stop, self._transfers.begin(staging, self.rows[first:stop])


class H2DQueue:
    """New rows on their way to the parameters' memory: a tile is copied while the next is computed. Several threads may put
    rows. Rows in host memory may be new ones of a device's."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._under_way: deque[Copy] = deque()
        self._places = count()
        self.most = _MOST_UP
        """Tiles that may be under way."""

    def put(self, rows: torch.Tensor, master: torch.Tensor, after: Event = None) -> None:
        """Cast `master` into `rows`; they hold the values after `drain`, and until then a master on the device is not to be
        changed, one of the host's is the caller's again on return. Rows on the device are written after what was asked of it
        so far, or `after` an event if nothing of that reads them since."""
        link = self._transfers.link(master, rows)
        if link is None:
            rows.copy_(master)
            return
        if link == "device_to_host":
            self.add(self._transfers.begin(rows, master.to(rows.dtype)))
            return
        self.send(rows, self.stage(rows).copy_(master), after)

    def stage(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory of the host for new values of `rows`, to `send` them: `rows` themselves if they are there."""
        if self._transfers.streams.is_host(rows):
            return rows
        # In turn, whichever are under way: the same memory serves in every step.
        place = f"rows {next(self._places) % (self.most + 1)}"
        return self._transfers.empty_host(rows.numel(), rows.dtype, place)

    def send(self, rows: torch.Tensor, staged: torch.Tensor, after: Event = None) -> None:
        """Copy what was staged into `rows`; see `put`."""
        if staged is not rows:
            self.add(self._transfers.begin(rows, staged, after=after))

    def add(self, copy: Copy) -> None:
        """Wait in `drain` for a copy too."""
        self._under_way.append(copy)
        self.drain(self.most)

    def drain(self, most: int = 0) -> None:
        """Return when all rows are there, except for the last `most` tiles."""
        while len(self._under_way) > most and (copy := _next(self._under_way)) is not None:
            self._transfers.finish(copy)


def one_thread(enabled: bool = True, *, most: int = 1) -> AbstractContextManager[object]:
    """Return a context in which operations of this thread, and of no other, are not split among torch's threads, or among
    `most` of them.

    An operation on a tile takes some 10 microseconds, and so does waking a sleeping thread for it; beside I/O the cores
    have other work. The values are the same.
    """
    if not enabled:
        return nullcontext()
    torch.get_num_threads()  # lets torch set this thread's number, which it would otherwise do over ours at the first operation
    limits: AbstractContextManager[object] = _openmp().limit(limits=most)
    return limits


def threads_for(numels: Sequence[int]) -> int:
    """Return how many threads work on tiles of arrays of so many elements `side_by_side`: one if torch has one, if there is
    little to do, or if arrays are so small that Python, which one thread runs at a time, takes longer."""
    numel = sum(numels)
    if numel < len(numels) * _LEAST_MEAN_NUMEL:
        return 1
    return max(1, min(torch.get_num_threads(), _MOST_SIDE_BY_SIDE, numel // MEMORY_TILE_NUMEL))


def tile_numel(num_threads: int) -> int:
    """Return the elements of a tile in host memory for each of `num_threads` threads, which share torch's."""
    return max(1, torch.get_num_threads() // num_threads) * MEMORY_TILE_NUMEL


def side_by_side(
    work: Callable[[T], object], items: Iterable[T], num_threads: int, context: StreamContext = nullcontext
) -> None:
    """Call `work` on all `items`, each on one of `num_threads` threads, which share torch's threads.

    The threads take the items in order, never two threads the same one. So they wait for each other once, at the end, and
    do not spin as torch's threads do in each operation, the more so beside other programs. All items are there before the
    first is taken: threads that waited for each other to make them slept longer than they worked. The first error stops the
    items that have not begun. With one thread the caller does the work, and its operations are split as usual. Each thread
    enters `context`.
    """
    if num_threads <= 1:
        for item in items:
            work(item)
        return
    left = deque(items)

    def serve() -> None:
        try:
            while (item := _next(left)) is not None:
                work(item)
        except BaseException:
            left.clear()
            raise

    share = max(1, torch.get_num_threads() // num_threads)

    def alone() -> None:
        with one_thread(most=share), context():
            serve()

    with Workers(num_threads - 1, "zstore-tiles") as workers:
        workers.run([alone] * num_threads, here=True)


def _next(left: deque[T]) -> T | None:
    try:
        return left.popleft()
    except IndexError:  # another thread took the last one
        return None


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
