"""Shutdown of objects, threads and the program: at the end of a `with` block, and of the interpreter.

[Note: endings]
Once the main thread has ended, Python waits for non-daemon threads, then calls the functions registered with atexit, then
stops all other threads. Since Python 3.12, no thread can be started in any of these phases. So work that is completed
during shutdown uses existing threads, or the calling thread:

- work that must be completed (a save, an upload) runs in a non-daemon thread (`run_non_daemon`) and is registered with
  `Completions`, because after Ctrl-C Python no longer waits for such threads. An unreported failure makes the exit code
  non-zero;
- helper threads are created by `start_threads`, which creates fewer if no more can be started; callers then do the work
  themselves. Once they have been stopped, `join_threads` does not wait for them;
- open objects are closed by the finalizers of `make_finalizer`, while all threads still run.

Only public interfaces of Python are used. docs/saving.md has a table of all endings.

[Note: forks]
A forked child process, such as a DataLoader's worker, has the memory of its parent but none of its threads, and locks held
by other threads stay locked. `register_forkable` lets open objects react: objects that write belong to the parent, raise
in the child, and are never closed there; work continues without helper threads; files that are only read are reopened.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol, Self, TypeVar

from ..errors import CheckpointError

T = TypeVar("T")

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.1
"""First and longest pause between two polls of `wait_until`; the pauses double."""


class Closing(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_threads(number: int, target: Callable[[], None], name: str) -> list[threading.Thread]:
    """Start daemon threads named `name`-0, ...; fewer than `number`, or none, if no more threads can be started."""
    threads = []
    for i in range(number):
        thread = threading.Thread(target=target, name=f"{name}-{i}", daemon=True)
        if not _try_start(thread):
            break
        threads.append(thread)
    return threads


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait until the threads have ended; at interpreter shutdown, which stops them, return at once."""
    if not sys.is_finalizing():
        for thread in threads:
            thread.join()


def run_non_daemon(task: Callable[[], None], name: str) -> None:
    """Run `task` in a thread that the interpreter waits for at exit, or in this one if no thread can be started."""
    if not _try_start(threading.Thread(target=task, name=name, daemon=False)):
        task()


def _try_start(thread: threading.Thread) -> bool:
    if sys.is_finalizing():
        return False  # Python 3.13.0 would wait forever for the thread to start
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise  # no memory, or too many threads
        return False
    return True


_EXIT_CODE = 120
"""Python's own exit code for failures during shutdown."""
_counter = itertools.count()
_finalizers: dict[int, weakref.finalize[..., Any]] = {}
"""Finalizers to call at the end of the program, in the order in which their owners were opened."""
_all_completions: list[Completions] = []


def complete_or_warn(complete: Callable[[], None], prefix: str = "") -> None:
    """Complete background work; log an error as a warning, after `prefix`."""
    try:
        complete()
    except Exception as error:
        logging.getLogger("zstore").warning("%s%s", prefix, error)


def make_finalizer(owner: object, close: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """Return a finalizer that calls `close(*args)` once: when it is called, when `owner` is garbage-collected, or when the
    program ends, in reverse order of creation. It does nothing at the end of a forked child process, where the objects
    belong to the parent."""
    finalizer = weakref.finalize(owner, close, *args)
    finalizer.atexit = False
    for number in [number for number, existing in list(_finalizers.items()) if not existing.alive]:
        _finalizers.pop(number, None)
    _finalizers[next(_counter)] = finalizer
    _at_exit(_close_all)
    for completions in _all_completions:  # which run first: background work may need open objects
        completions.reregister()
    return finalizer


def _close_all() -> None:
    for _, finalizer in sorted(_finalizers.items(), reverse=True):
        try:
            finalizer()
        except Exception:
            sys.excepthook(*sys.exc_info())


def _at_exit(call: Callable[[], None]) -> None:
    """Register a function with atexit, again each time: since Python 3.13, children started by multiprocessing drop the
    functions that were registered before."""
    atexit.unregister(call)
    atexit.register(call)


def _in_forked_child(call: Callable[[], None]) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class _Forkable(Protocol):
    def _forked(self) -> None: ...


_forkable: weakref.WeakSet[_Forkable] = weakref.WeakSet()
FORKED_ERROR_TEXT = (
    "was opened by the process that this one was forked from, whose threads are not here: open it in this process, in a "
    "DataLoader's worker by `worker_init_fn` or at the first sample"
)
"""The end of error messages about an object that cannot be used in a forked child."""


def register_forkable(owner: _Forkable) -> None:
    """Call `owner._forked()` in each child process that is forked while `owner` is alive. See [Note: forks]."""
    _forkable.add(owner)


def _forked() -> None:
    for finalizer in _finalizers.values():
        finalizer.detach()
    _finalizers.clear()
    for owner in list(_forkable):
        owner._forked()


_in_forked_child(_forked)


def main_thread_has_ended() -> bool:
    """Return whether the main thread has finished the program, so that no caller can receive an error."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    # The module `threading` then waits for other threads; until executors' threads have ended, `is_alive` is true.
    return not main.is_alive() or (frame is not None and frame.f_globals.get("__name__") == "threading")


class Completions:
    """Background work that the program's exit waits for. Failures that were not reported are then printed to stderr, and
    the exit code is 120, Python's own for failures during shutdown. None of this applies in a forked child process."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[str, Callable[[], object]]] = {}
        self._failed: dict[object, str] = {}
        self._lock = threading.Lock()
        self._exit_waits = False
        self._child_pid: int | None = None
        """Id of the multiprocessing child that this is registered in."""
        _in_forked_child(self._reset)
        _all_completions.append(self)

    def reregister(self) -> None:
        """Register again, so that background work is completed before functions that were registered in the meantime run."""
        if self._running:
            _at_exit(self._complete_at_exit)

    def begin(self, title: str, wait: Callable[[], object]) -> object:
        """Register work as running, and return its key; `wait` returns when it has ended, successfully or not."""
        key = object()
        _at_exit(self._complete_at_exit)
        self._join_multiprocessing()
        with self._lock:
            self._running[key] = title, wait
        return key

    def end(self, key: object, error: BaseException | None) -> None:
        """Record that the work has ended. `error` is an error that must be reported; its frames are not kept alive."""
        with self._lock:
            title, _ = self._running.pop(key, ("", None))
            if error is not None:
                self._failed[key] = f"{title} failed: {type(error).__name__}: {error}"

    def mark_observed(self, key: object) -> None:
        """Record that the error has been reported; ignored at interpreter shutdown, when nobody can handle it."""
        if not main_thread_has_ended():
            with self._lock:
                self._failed.pop(key, None)

    def _join_multiprocessing(self) -> None:
        """Register with multiprocessing too, which ends forked children with `os._exit`."""
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None or self._child_pid == os.getpid():
            return
        from multiprocessing.util import Finalize

        self._child_pid = os.getpid()
        Finalize(None, self._complete_in_child, exitpriority=-100)  # last

    def exit_is_waiting(self) -> bool:
        """Return whether the program's exit is waiting for work."""
        return self._exit_waits or main_thread_has_ended()

    def _wait(self) -> str:
        """Wait for all running work; return the failures."""
        self._exit_waits = True
        with self._lock:
            running = list(self._running.items())
        for key, (_, wait) in running:
            try:
                wait()
            except KeyboardInterrupt:
                self.end(key, InterruptedError("the program was interrupted again during its exit"))
        return "; ".join(self._failed.values())

    def _complete_at_exit(self) -> None:
        if text := self._wait():
            sys.stdout = _FailingOutput(sys.stdout, text)

    def _complete_in_child(self) -> None:
        if text := self._wait():
            sys.stderr.write(f"{text}\n")
            self._failed.clear()
            if sys.exc_info()[0] is None:  # otherwise the exit code is already non-zero
                for thread in threading.enumerate():
                    if not thread.daemon and thread is not threading.current_thread():
                        thread.join()
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                os._exit(_EXIT_CODE)

    def _reset(self) -> None:
        self._lock, self._exit_waits = threading.Lock(), False
        self._running.clear()
        self._failed.clear()


class _FailingOutput:
    """Standard output whose last flush, by the interpreter, raises: the documented way to set the exit code then."""

    closed = False

    def __init__(self, inner: Any, text: str) -> None:
        self._inner = inner
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def flush(self) -> None:
        """Flush; raise if the interpreter ends."""
        if self._inner is not None:
            self._inner.flush()
        if sys.is_finalizing():
            raise RuntimeError(self._text)

    def __repr__(self) -> str:
        return "the end of the program"


def wait_until(
    ready: Callable[[], T | None],
    timeout_s: float,
    failure: Callable[[], str],
    *,
    check: Callable[[], None],
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return the first true result of `ready()`, polled with pauses that double, from 1 ms.

    `check` raises if waiting has become pointless; `pause` sleeps for the given seconds, or until something else ends
    it. Raises CheckpointError with the text of `failure()` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _MIN_PAUSE_S
    while not (result := ready()):
        check()
        if time.monotonic() > deadline:
            raise CheckpointError(failure())
        pause(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return result


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer a SIGINT received during the block until its end; for blocks of milliseconds.

    Python runs handlers only in the main thread, so in other threads this does nothing.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is None:
        yield
        return
    interrupted = False

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
