"""Doubles at the `Files` seam: operations that fail, move less than asked, get lost, wait, or end the process.

All override the primitives of `Files`: everything above them, resuming and reporting included, is the real code.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ..errors import storage_error
from ..format.arrays import Bytes
from ..format.shardfile import ScatteredMemory
from ..io.files import Files, Kind, OpenFile


class WatchedFiles(Files):
    """Files that call `step(kind, path)` ahead of every operation; its error is the operation's."""

    def __init__(self, *, direct: bool = True) -> None:
        super().__init__(direct=direct)
        self.max_dirty_bytes = -1  # the same operations under any other load: each file is flushed

    def step(self, kind: Kind, path: str) -> None:
        """Do the double's work."""
        raise NotImplementedError

    def _open(self, path: str, flags: int) -> int:
        self.step("open", path)
        return super()._open(path, flags)

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        self.step("read", file.path)
        return super()._preadv(file, out, offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        self.step("write", file.path)
        return super()._pwritev(file, data, offset)

    def _do(self, kind: Kind, path: str, operation: Callable[[], object]) -> None:
        self.step(kind, path)
        super()._do(kind, path, operation)

    def write_small(self, path: str | Path, data: bytes, *, sync: bool = True) -> None:
        try:
            self.step("write_small", os.fspath(path))
        except OSError as error:
            raise storage_error(error, "cannot write the file", path=os.fspath(path)) from error
        super().write_small(path, data, sync=sync)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure of some operations of one kind, on paths that match `pattern`."""

    kind: Kind
    pattern: str = "*"
    """Shell pattern of the whole path, as `*/rank-00001/*.shard`; of the source for links and renames."""
    first: int = 0
    """Number of matching operations that succeed before."""
    times: int | None = 1
    """Number that fail then; None: all of them."""
    error_number: int = 0
    """Fail with this errno."""
    most_bytes: int | None = None
    """Instead of failing, move at most so many bytes (reads and writes)."""
    lost: bool = False
    """Instead of failing, report a write as done, and do nothing, like a drive that loses its cache."""

    def hits(self, kind: Kind, path: str, seen: Iterator[int]) -> bool:
        """Take a number of `seen` for an operation that matches; return whether it fails."""
        if self.kind != kind or not fnmatch.fnmatch(path, self.pattern):
            return False
        number = next(seen) - self.first
        return number >= 0 and (self.times is None or number < self.times)


class FaultyFiles(WatchedFiles):
    """Files whose operation number `fail_at` (counted from 0, over all kinds) fails with `error_number`, and whose
    operations suffer the `faults` that match them.

    With `fail_at` None only faults act, and `operations` names all operations, in order. `only` limits that count to
    some kinds. It starts with `open` left out, since a file is opened before anything else is done to it.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        error_number: int = 0,
        *,
        only: frozenset[str] | None = None,
        faults: tuple[Fault, ...] = (),
        direct: bool = True,
    ) -> None:
        super().__init__(direct=direct)
        self.fail_at = fail_at
        self.error_number = error_number
        self.operations: list[str] = []
        self.paths: list[tuple[str, str]] = []
        """(kind, path) of every operation while armed, opens included."""
        self.failed: str | None = None
        self.armed = True
        """Nothing is counted and nothing fails while this is false."""
        self.free: int | None = None
        """Bytes of room on the drive; None: as many as there are."""
        self._only = only
        self._faults = [(fault, count()) for fault in faults]
        self._watch = threading.Lock()

    def free_bytes(self, path: str | Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free

    def inject(self, fault: Fault) -> None:
        """Add a fault; its count begins now."""
        with self._watch:
            self._faults.append((fault, count()))

    def heal(self) -> None:
        """Let all operations succeed from now on."""
        with self._watch:
            self._faults.clear()
            self.fail_at = None

    def step(self, kind: Kind, path: str) -> None:
        self._fault_of(kind, path)

    def _fault_of(self, kind: Kind, path: str) -> Fault | None:
        """Count the operation, and return the fault that it suffers; raises if that is an error."""
        with self._watch:
            if not self.armed:
                return None
            self.paths.append((kind, path))
            # Every fault counts every operation that it matches, so no short cut here.
            hits = [fault for fault, seen in self._faults if fault.hits(kind, path, seen)]
            counted = kind != "open" and (self._only is None or kind in self._only)
            if counted:
                self.operations.append(kind)
            now = counted and len(self.operations) - 1 == self.fail_at
            if now:
                self.failed = kind
        if now:
            self.happen(kind, path)
        fault = hits[0] if hits else None
        if fault is not None and fault.error_number:
            raise OSError(fault.error_number, os.strerror(fault.error_number))
        return fault

    def happen(self, kind: Kind, path: str) -> None:
        """Carry out the failure of operation number `fail_at`."""
        raise OSError(self.error_number, os.strerror(self.error_number))

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        fault = self._fault_of("read", file.path)
        return Files._preadv(self, file, out if fault is None else out[: fault.most_bytes], offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        fault = self._fault_of("write", file.path)
        if fault is not None and fault.lost:
            return data.size
        return Files._pwritev(self, file, data if fault is None else data[: fault.most_bytes], offset)


class DeadlyFiles(FaultyFiles):
    """Files whose operation number `fail_at` kills the process (SIGKILL) before it is carried out."""

    def happen(self, kind: Kind, path: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class CallingFiles(Files):
    """Files that call `before(kind, path)` ahead of each rename and each small file, for tests of others' view."""

    def __init__(self, before: Callable[[str, Path], None]) -> None:
        super().__init__()
        self._before = before

    def rename(self, source: str | Path, target: str | Path) -> None:
        self._before("rename", Path(target))
        super().rename(source, target)

    def write_small(self, path: str | Path, data: bytes, *, sync: bool = True) -> None:
        self._before("write_small", Path(path))
        super().write_small(path, data, sync=sync)


class GatedFiles(WatchedFiles):
    """Files whose operations of the kinds in `held` wait until the test lets them go, in the order it likes.

    This is latency without sleeping: `arrived(n)` waits until n operations are at the gate, `release(i)` releases the i-th
    operation that ever arrived, `open_gate()` all present and future ones.
    """

    def __init__(self, *held: Kind, pattern: str = "*") -> None:
        super().__init__()
        self._held = held
        self._pattern = pattern
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._released: set[int] = set()
        self._open_for_all = False

    def step(self, kind: Kind, path: str) -> None:
        if kind not in self._held or not fnmatch.fnmatch(path, self._pattern):
            return
        with self._changed:
            number = len(self._waiting)
            self._waiting.append(path)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open_for_all or number in self._released)

    def arrived(self, count: int, timeout_s: float = 30.0) -> list[str]:
        """Wait until `count` operations have arrived; returns the paths of all that did, in order."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= count, timeout_s):
                raise TimeoutError(f"expected {count} operations at the gate, got {len(self._waiting)}")
            return list(self._waiting)

    def release(self, *numbers: int) -> None:
        """Release these arrivals; operations that have not arrived yet will not wait."""
        with self._changed:
            self._released.update(numbers)
            self._changed.notify_all()

    def open_gate(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._open_for_all = True
            self._changed.notify_all()

    def close_gate(self) -> None:
        """Hold operations from now on, after `open_gate`."""
        with self._changed:
            self._open_for_all = False

    @contextmanager
    def backwards(self) -> Iterator[None]:
        """Inside the `with` block, let operations that arrive within 20 ms proceed last come, first served."""
        self.close_gate()
        stop = threading.Event()

        def serve() -> None:
            while not stop.wait(0.02):
                for number in reversed(range(len(self._waiting))):
                    self.release(number)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        try:
            yield
        finally:
            stop.set()
            self.open_gate()
            server.join()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Open the gate at the end, so that a failing test ends too."""
        try:
            yield
        finally:
            self.open_gate()
