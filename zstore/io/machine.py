"""The machine's resources: worker threads for tasks that may block, and memory limits.

[Note: control groups]
`/proc/self/cgroup` names the group of the process, `/proc/self/mountinfo` the mounts of group file systems and the group
that is the root of each: in a container often the process's own group, under another name. The limits of a group apply to
all its subgroups. Its usage includes the page cache, which the kernel reclaims when memory is needed.
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

from .closing import Closing, join_threads, register_forkable, run_non_daemon, start_threads
from .queue import Ticket, promise

T = TypeVar("T")

_BYTES_PER_THREAD = 24 * 1024 * 1024
_FILES_PER_THREAD = 8


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def helpful_threads(nbytes: int, num_files: int) -> int:
    """Return how many helper threads are worthwhile for writing `num_files` files of `nbytes` in total.

    Starting a thread takes as long as writing a small file, and each system call releases the GIL.
    """
    return max(nbytes // _BYTES_PER_THREAD, num_files // _FILES_PER_THREAD)


class Workers(Closing):
    """`num_threads` threads, started immediately. Without threads, for example at interpreter shutdown, when none can be
    started, the tasks run in the calling thread. See [Note: endings].

    Unlike the I/O threads, these may wait for tickets and buffers. Close it, or use it in a `with` block.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = start_threads(num_threads, self._serve, name)
        register_forkable(self)

    def _forked(self) -> None:
        """Continue without threads in a forked child: tasks run in the calling thread. See [Note: forks]."""
        self._tasks, self._changed, self._threads = deque(), threading.Condition(), []

    def run(self, tasks: Iterable[Callable[[], T]], *, in_caller: bool = False) -> list[T]:
        """Run all tasks, each taken from the iterable when a thread is free, and return their results in order; must not be
        called from a task. With `in_caller`, the calling thread runs some of them too.

        After the first error no more tasks are started, and it is raised when the running ones have ended.
        """
        batch = iter(tasks)
        results: list[T | None] = []
        errors: list[BaseException] = []
        in_caller |= not self._threads
        num_running = min(len(self._threads), length_hint(tasks, len(self._threads))) + in_caller

        def next_task() -> Callable[[], None] | None:
            with self._changed:
                task, number = None if errors else next(batch, None), len(results)
                if task is None:
                    return None
                results.append(None)
            return partial(run_task, task, number)

        def run_task(task: Callable[[], T], number: int) -> None:
            results[number] = task()

        def run_tasks() -> None:
            nonlocal num_running
            try:
                while (task := next_task()) is not None:
                    task()
            except BaseException as error:
                errors.append(error)
            with self._changed:
                num_running -= 1
                if num_running == 0:
                    self._changed.notify_all()

        with self._changed:
            self._tasks.extend([run_tasks] * (num_running - in_caller))
            self._changed.notify_all()
        if in_caller:
            run_tasks()
        with self._changed:
            try:
                self._changed.wait_for(lambda: num_running == 0)
            except BaseException as error:  # Ctrl-C: no more tasks are started, and close() waits for the running ones
                errors.append(error)
                raise
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]

    def submit(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue one task; may be called from a task. Raises RuntimeError once this is closed."""
        ticket, run = promise(task)
        with self._changed:
            if self._closed:
                raise RuntimeError("a task after the shutdown of its threads")
            self._tasks.append(run)
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
            del task  # do not keep its objects alive

    def close(self) -> None:
        """Stop the threads once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        join_threads(self._threads)
        self._threads.clear()


def run_in_thread(task: Callable[[], T], name: str) -> Ticket[T]:
    """Run `task` in a new thread named `name`, which the interpreter waits for at exit."""
    ticket, run = promise(task)
    run_non_daemon(run, name)
    return ticket


class AsyncClosing(Closing):
    """Also closes itself at the end of an `async with` block, in a separate thread."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close, "zstore-close")


class ShutdownSafeExecutor(ThreadPoolExecutor):
    """An executor for an event loop that still works at interpreter shutdown, unlike the loop's default executor."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads)  # starts no threads, because nothing is submitted to it
        self._workers = Workers(num_threads, name)

    def submit(self, task: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call and return its future."""
        return self._workers.submit(partial(task, *args, **kwargs)).future


def interleave(first: Iterable[T], second: Iterable[T]) -> Iterator[T]:
    """Yield the items of both, alternating while both have items left."""
    return (each for pair in zip_longest(first, second) for each in pair if each is not None)


_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
_UNLIMITED_BYTES = 2**60
"""Cgroups version 1 shows a huge number if there is no limit."""


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Memory of a control group that has a limit."""

    key: str
    """Identifies the group on its machine."""
    limit_bytes: int
    used_bytes: int
    """Memory charged to the group that the kernel cannot reclaim."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the machine, and of the groups whose limits apply to this process. None: unknown."""

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
        """Total memory that this process, and others in the same group, can use."""
        return min((n for n in (self.total_bytes, self.limit_bytes) if n is not None), default=None)

    @property
    def available_bytes(self) -> int | None:
        """Memory available now, on the machine and within every group."""
        if self.machine_available_bytes is None:
            return None
        group_bytes = [max(0, group.limit_bytes - group.used_bytes) for group in self.groups]
        return min([self.machine_available_bytes, *group_bytes])


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return this system's memory figures. `root` is the folder with `/proc` and the mounts."""
    fields = {
        key: int(value.split()[0]) * 1024
        for key, _, value in (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    }
    return HostMemory(
        machine=_read(root / "proc/sys/kernel/random/boot_id").strip() or platform.node(),
        total_bytes=fields.get("MemTotal"),
        machine_available_bytes=fields.get("MemAvailable"),
        swap_bytes=fields.get("SwapTotal", 0),
        groups=tuple(_limited_groups(root)),
    )


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; if that is unknown, the peak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return most_resident_bytes()


def most_resident_bytes() -> int:
    """Return this process's peak resident memory in bytes."""
    import resource  # only on Unix, like this function

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def _limited_groups(root: Path) -> Iterator[GroupMemory]:
    """Yield the groups with a limit: the process's own and its ancestors."""
    memberships = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, words = before.split(), after.split()
        if len(fields) <= 4 or not words or (kind := words[0]) not in _GROUP_FILES:
            continue
        is_v2 = kind == "cgroup2"
        if not is_v2 and "memory" not in words[-1].split(","):
            continue
        mounted, folder = PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/")
        for number, controllers, name in memberships:
            if (number == "0" and not controllers) if is_v2 else "memory" in controllers.split(","):
                for path in _group_folders(mounted, folder, PurePosixPath(name)):
                    if (group := _group_memory(path, kind)) is not None:
                        yield group


def _unescaped(text: str) -> str:
    """Return a field of mountinfo with its escapes decoded."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _group_folders(mounted: PurePosixPath, mount: Path, name: PurePosixPath) -> Iterator[Path]:
    """Yield the folders of group `name` and its ancestors, up to group `mounted`, the root of the mount."""
    relative = name.relative_to(mounted) if name.is_relative_to(mounted) else PurePosixPath()
    if ".." in relative.parts:
        relative = PurePosixPath()
    for part in (relative, *relative.parents):
        yield mount / part


_GROUP_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""By file system: the files with a group's limit and usage, and the page cache's fields in `memory.stat`."""


def _group_memory(folder: Path, kind: str) -> GroupMemory | None:
    limit_file, used_file, cache = _GROUP_FILES[kind]
    limit = _number(folder / limit_file)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    cached = sum(int(fields.get(name, 0)) for name in cache)
    used, status = _number(folder / used_file) or 0, folder.stat()
    return GroupMemory(key=f"{status.st_dev}:{status.st_ino}", limit_bytes=limit, used_bytes=max(0, used - cached))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Return the text of a system file, or nothing if it does not exist."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
