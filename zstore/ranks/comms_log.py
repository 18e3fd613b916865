"""Times of single collectives, by operation and size.

[Note: bandwidth]
The size of a collective is one rank's bytes of the larger side: the output of an all-gather, the input of a reduction or an
exchange. The algorithm bandwidth is size / time; the bus bandwidth is that times (n - 1) / n for an all-gather, a
reduce-scatter and an exchange among n ranks, which each link carries for any n, and times 1 for a
broadcast and for a transfer between two ranks. These are nccl-tests' definitions
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). If gradients are summed on all ranks ("for
all_reduce"), that is an exchange and a gather, each with a row of its own; between two ranks on gloo it may be one
all-reduce, whose factor is 2 (n - 1) / n = 1.

An asynchronous collective is timed until somebody has waited for it. On CUDA events on the compute stream, which waits,
take the time; they are read when the table is made.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import format_bytes
from .work import TimedWork, Work

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("zstore")

OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "broadcast", "send", "recv", "all_reduce", "control")
"""Names to ask for: operations, and purposes that they serve."""

_OTHER_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_object": "control",
    "all_gather_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "barrier": "control",
    "isend": "send",
    "irecv": "recv",
}

_SHARED = ("all_gather", "all_to_all", "reduce_scatter")
"""Operations in which each rank has its part already; see [Note: bandwidth]."""

_PENDING = 4096
"""Pairs of events that wait to be read, at most."""


def operation_named(name: str) -> str | None:
    """Return our name of an operation that DeepSpeed or torch calls `name`; None if it is unknown."""
    found = _OTHER_NAMES.get(name, name)
    return found if found in OPERATIONS else None


def bus_factor(operation: str, world_size: int) -> float:
    """Return bus bandwidth / algorithm bandwidth. See [Note: bandwidth]."""
    return (world_size - 1) / world_size if operation in _SHARED else 1.0


@dataclass(frozen=True, kw_only=True)
class LoggedCollective:
    """A timed collective."""

    operation: str
    """torch's name, shortened: "all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast", "send", "recv"."""
    purpose: str
    """`Kind` of its bytes: "all_reduce", "control", ..."""
    nbytes: int
    """Size; see [Note: bandwidth]."""
    caller: str = ""
    """The calling function, if callers are named."""


@dataclass(kw_only=True)
class CollectiveTimes:
    """Calls of one operation and size."""

    calls: int = 0
    total_s: float = 0.0
    shortest_s: float = float("inf")
    longest_s: float = 0.0
    straggler_s: float | None = None
    """Seconds beyond those of the rank that spent fewest on these calls; None if the ranks did not compare."""

    def add(self, seconds: float) -> None:
        """Count a call."""
        self.calls += 1
        self.total_s += seconds
        self.shortest_s = min(self.shortest_s, seconds)
        self.longest_s = max(self.longest_s, seconds)


@dataclass(kw_only=True)
class CommsLog:
    """Times the collectives of a world. Every method may be called from any thread."""

    world_size: int
    device: torch.device
    only: frozenset[str] | None = None
    """Operations or purposes that are timed; None: all."""
    verbose: bool = False
    """Log each call as it ends."""
    debug: bool = False
    """Name callers."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[LoggedCollective, CollectiveTimes] = {}
        self._pending: list[tuple[LoggedCollective, Any, Any]] = []

    def _wanted(self, operation: str, purpose: str) -> bool:
        return self.only is None or not self.only.isdisjoint((operation, purpose))

    def _named(self, operation: str, purpose: str, nbytes: int) -> LoggedCollective:
        caller = _caller() if self.debug else ""
        return LoggedCollective(operation=operation, purpose=purpose, nbytes=nbytes, caller=caller)

    @contextmanager
    def timing(self, within: AbstractContextManager[None], operation: str, purpose: str, nbytes: int) -> Iterator[None]:
        """Time a `with` block, inside `within`."""
        if not self._wanted(operation, purpose):
            with within:
                yield
            return
        end = self._begin(self._named(operation, purpose, nbytes))
        with within:
            yield
        end()

    def watch(self, start: Callable[[], Work], operation: str, purpose: str, nbytes: int) -> Work:
        """Return the collective that `start` begins; it is timed until the first wait for it has ended."""
        if not self._wanted(operation, purpose):
            return start()
        end = self._begin(self._named(operation, purpose, nbytes))
        return TimedWork(start(), end)

    def _begin(self, called: LoggedCollective) -> Callable[[], None]:
        """Begin to time; the returned function ends it."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            return lambda: self._count(called, time.perf_counter() - started)
        import torch

        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record(torch.cuda.current_stream(self.device))

        def end() -> None:
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last.record(torch.cuda.current_stream(self.device))
            with self._lock:
                self._pending.append((called, first, last))
                is_full = len(self._pending) >= _PENDING
            if is_full or self.verbose:
                self._read_events()

        return end

    def _read_events(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for called, first, last in pending:
            last.synchronize()
            self._count(called, first.elapsed_time(last) / 1e3)

    def _count(self, called: LoggedCollective, seconds: float) -> None:
        with self._lock:
            self._times.setdefault(called, CollectiveTimes()).add(seconds)
        if self.verbose:
            _log.info("collective: %s", _call_text(called, seconds, self.world_size))

    def times(self) -> dict[LoggedCollective, CollectiveTimes]:
        """Return the times so far, by operation and size, larger ones first."""
        self._read_events()
        with self._lock:
            found = {called: CollectiveTimes(**vars(times)) for called, times in self._times.items()}
        return dict(sorted(found.items(), key=lambda one: (one[0].operation, one[0].purpose, -one[0].nbytes)))

    def clear(self) -> None:
        """Forget all times."""
        self._read_events()
        with self._lock:
            self._times.clear()


_PLUMBING = {str(Path(__file__).parent / name) for name in ("comms_log.py", "work.py", "world.py")}


def _caller() -> str:
    """Return the nearest function outside of the ranks' own files, as `unshard.py:42 gather`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in _PLUMBING or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


# -- text ---------------------------------------------------------------------------------------------------------------


def _call_text(called: LoggedCollective, seconds: float, world_size: int) -> str:
    algorithm = called.nbytes / seconds / 1e9 if seconds > 0 else 0.0
    bus = algorithm * bus_factor(called.operation, world_size)
    return (
        f"{_name(called)} {format_bytes(called.nbytes)} in {seconds * 1e3:.3f} ms, algorithm {algorithm:.3f} GB/s, bus "
        f"{bus:.3f} GB/s" + (f", by {called.caller}" if called.caller else "")
    )


def _name(called: LoggedCollective) -> str:
    return called.operation if called.purpose == called.operation else f"{called.operation} for {called.purpose}"


def summary_text(times: dict[LoggedCollective, CollectiveTimes], world_size: int) -> str:
    """Return a table with a row for each operation and size."""
    compared = any(found.straggler_s is not None for found in times.values())
    named = any(called.caller for called in times)
    header = ["operation", "size", "calls", "total ms", "mean ms", "min ms", "max ms", "algorithm GB/s", "bus GB/s"]
    header += ["straggler ms"] if compared else []
    header += ["caller"] if named else []
    rows = [header]
    for called, found in times.items():
        algorithm = called.nbytes * found.calls / found.total_s / 1e9 if found.total_s > 0 else 0.0
        straggler = "" if found.straggler_s is None else f"{found.straggler_s * 1e3:.2f}"
        seconds = (found.total_s, found.total_s / found.calls, found.shortest_s, found.longest_s)
        rows.append(
            [
                _name(called),
                format_bytes(called.nbytes),
                str(found.calls),
                *(f"{one * 1e3:.2f}" for one in seconds),
                f"{algorithm:.3f}",
                f"{algorithm * bus_factor(called.operation, world_size):.3f}",
                *([straggler] if compared else []),
                *([called.caller] if named else []),
            ]
        )
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines: the first column and callers to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lefts = {0, *(place for place, name in enumerate(rows[0]) if name == "caller")}
    return "\n".join(
        "  ".join(
            text.ljust(width) if place in lefts else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
