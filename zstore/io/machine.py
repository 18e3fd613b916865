"""The machine: its cores, as threads for tasks that wait for others, and its memory.

[Note: control groups]
`/proc/self/cgroup` names the group that the process is in, `/proc/self/mountinfo` the mounts that show groups and the
group that each shows: in a container often the process's own, under another name. The limits of a group hold for
all groups below it. Its use includes the page cache, which the kernel reclaims when memory is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import length_hint
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

from .closing import Closing, join_threads, notify_of_fork, run_to_the_end, start_threads
from .queue import Ticket, promise

T = TypeVar("T")

_BYTES_A_THREAD = 24 * 1024 * 1024
_FILES_A_THREAD = 8


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def helpful_threads(nbytes: int, num_files: int) -> int:
    """Return how many threads, besides the caller's, a write of this many files with this many bytes in all is worth.

    Starting one takes as long as writing a small file, and each system call releases the GIL.
    """
    return max(nbytes // _BYTES_A_THREAD, num_files // _FILES_A_THREAD)


class Workers(Closing):
    """`num_threads` threads, started at once; with none, as at the end of the interpreter, when none can be started, callers
    carry out their tasks themselves. See [Note: endings].

    Unlike the I/O threads, these may wait for tickets and buffers. Close it, or use it in a `with` block.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = start_threads(num_threads, self._serve, name)
        notify_of_fork(self)

    def _forked(self) -> None:
        """Go on without threads in a forked child: callers carry out their tasks. See [Note: forks]."""
        self._tasks, self._changed, self._threads = deque(), threading.Condition(), []

    def run(self, tasks: Iterable[Callable[[], T]], *, here: bool = False) -> list[T]:
        """Run all tasks, each taken from the iterable when a thread is free, and return their results in order; must not be
        called from a task. With `here` the caller runs some of them.

        The first error stops tasks that have not begun, and is raised when the others have ended.
        """
        batch = iter(tasks)
        results: list[T | None] = []
        errors: list[BaseException] = []
        here |= not self._threads
        left = min(len(self._threads), length_hint(tasks, len(self._threads))) + here

        def take() -> Callable[[], None] | None:
            with self._changed:
                task, number = None if errors else next(batch, None), len(results)
                if task is None:
                    return None
                results.append(None)
            return partial(carry_out, task, number)

        def carry_out(task: Callable[[], T], number: int) -> None:
            results[number] = task()

        def serve() -> None:
            nonlocal left
            try:
                while (task := take()) is not None:
                    task()
            except BaseException as error:
                errors.append(error)
            with self._changed:
                left -= 1
                if left == 0:
                    self._changed.notify_all()

        with self._changed:
            self._tasks.extend([serve] * (left - here))
            self._changed.notify_all()
        if here:
            serve()
        with self._changed:
            try:
                self._changed.wait_for(lambda: left == 0)
            except BaseException as error:  # Ctrl-C: nothing new begins, and close() waits for what runs
                errors.append(error)
                raise
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]

    def submit(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue one task; may be called from a task. Raises RuntimeError once the threads ended."""
        ticket, carry_out = promise(task)
        with self._changed:
            if self._closed:
                raise RuntimeError("a task after the shutdown of its threads")
            self._tasks.append(carry_out)
            self._changed.notify()
        while not self._threads and self._tasks:
            self._tasks.popleft()()
        return ticket

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # its objects are not this thread's to keep

    def close(self) -> None:
        """End the threads once nothing is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        join_threads(self._threads)
        self._threads.clear()


def run_in_thread(task: Callable[[], T], name: str) -> Ticket[T]:
    """Carry out `task` in a new thread, called `name`; the interpreter waits for its end."""
    ticket, carry_out = promise(task)
    run_to_the_end(carry_out, name)
    return ticket


class AsyncClosing(Closing):
    """Closes itself at the end of an `async with` block, too, in a thread."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close, "zstore-close")


class LastingExecutor(ThreadPoolExecutor):
    """An event loop's executor that also works at the end of the interpreter, which shuts the loop's own down."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads)  # starts no thread: nothing is submitted to it
        self._workers = Workers(num_threads, name)

    def submit(self, task: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call and return its future."""
        return self._workers.submit(partial(task, *args, **kwargs)).future


def in_turn(first: Iterable[T], second: Iterable[T]) -> Iterator[T]:
    """Yield all items of both, each in order, alternating while both have some."""
    return (each for pair in zip_longest(first, second) for each in pair if each is not None)


_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
_UNLIMITED_BYTES = 2**60
"""Version 1 writes its largest number if there is no limit."""


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Memory of a control group that has a limit."""

    key: str
    """Identifies the group among those of its machine."""
    limit_bytes: int
    used_bytes: int
    """Memory charged to the group that the kernel cannot take back."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the machine, and of the groups whose limits hold for this process. None: the system does not say."""

    machine: str
    """Identifies the machine until it restarts."""
    total_bytes: int | None
    machine_available_bytes: int | None
    """The machine's memory that is available without swapping."""
    swap_bytes: int = 0
    groups: tuple[GroupMemory, ...] = ()

    @property
    def limit_bytes(self) -> int | None:
        """The lowest limit of the groups; None without a limit."""
        return min((group.limit_bytes for group in self.groups), default=None)

    @property
    def usable_bytes(self) -> int | None:
        """All memory that processes like this one can have together."""
        return min((n for n in (self.total_bytes, self.limit_bytes) if n is not None), default=None)

    @property
    def available_bytes(self) -> int | None:
        """Memory available now, on the machine and within every group."""
        if self.machine_available_bytes is None:
            return None
        left = [max(0, group.limit_bytes - group.used_bytes) for group in self.groups]
        return min([self.machine_available_bytes, *left])


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return this system's memory figures. `root`: the folder in which `/proc` and the mounts are."""
    fields = {
        key: int(value.split()[0]) * 1024
        for key, _, value in (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    }
    return HostMemory(
        machine=_read(root / "proc/sys/kernel/random/boot_id").strip() or platform.node(),
        total_bytes=fields.get("MemTotal"),
        machine_available_bytes=fields.get("MemAvailable"),
        swap_bytes=fields.get("SwapTotal", 0),
        groups=tuple(_groups(root)),
    )


def resident_bytes() -> int:
    """Return the bytes that this process has resident; if the system does not say, the peak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return most_resident_bytes()


def most_resident_bytes() -> int:
    """Return the most bytes that this process had resident."""
    import resource  # only on Unix, like this function

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def _groups(root: Path) -> Iterator[GroupMemory]:
    """Yield the groups with a limit, from the process's own upwards."""
    own = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, words = before.split(), after.split()
        if len(fields) <= 4 or not words or (kind := words[0]) not in _FILES:
            continue
        second = kind == "cgroup2"
        if not second and "memory" not in words[-1].split(","):
            continue
        shown, folder = PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/")
        for number, controllers, name in own:
            if (number == "0" and not controllers) if second else "memory" in controllers.split(","):
                for path in _upwards(shown, folder, PurePosixPath(name)):
                    if (group := _group(path, kind)) is not None:
                        yield group


def _unescaped(text: str) -> str:
    """Return a field of mountinfo with its escapes decoded."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _upwards(shown: PurePosixPath, mount: Path, name: PurePosixPath) -> Iterator[Path]:
    """Yield the folder of group `name` and its parents, as far as the mount of group `shown` has them."""
    inside = name.relative_to(shown) if name.is_relative_to(shown) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        yield mount / part


_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""By file system: the files of a group's limit and use, and the lines of `memory.stat` that are page cache."""


def _group(folder: Path, kind: str) -> GroupMemory | None:
    limit_file, used_file, cache = _FILES[kind]
    limit = _number(folder / limit_file)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    cached = sum(int(fields.get(name, 0)) for name in cache)
    used, found = _number(folder / used_file) or 0, folder.stat()
    return GroupMemory(key=f"{found.st_dev}:{found.st_ino}", limit_bytes=limit, used_bytes=max(0, used - cached))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Return the text of a system file, or nothing if it does not exist."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
