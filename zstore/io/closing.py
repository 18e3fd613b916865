"""How objects, threads and the program end: at the end of a `with` block, and of the interpreter.

[Note: endings]
Once the main thread has ended, Python waits for the threads that are no daemons, then calls the functions registered with
atexit, then stops all other threads. From 3.12 on no thread can be started in any of these phases. So work that is completed
then uses threads from before, or the calling thread:

- work that must be completed (a save, an upload) runs by `run_to_the_end`, in a thread that is no daemon, and is
  known to `Completions`: after Ctrl-C Python no longer waits for such threads. An unreported failure makes the exit
  code non-zero;
- threads that help are made by `start_threads`, which makes fewer if no more can be started; callers do without. Once they were
  stopped, `join_threads` does not wait for them;
- open objects are closed by `closing_with`, while all threads still run.

Only public interfaces of Python are used. docs/saving.md has a table of all endings.

[Note: forks]
A forked child process, as a DataLoader's worker, has the memory of its parent and none of its threads, and locks that
another thread had stay locked. `notify_of_fork` lets open objects know: those that write belong to the parent, raise
in the child, and are never closed there; threads that help are done without; files that are only read are opened again.
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
"""Pauses of `wait_until` between two looks, which double."""


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
    """Start daemon threads called `name`-0, ...; fewer than `number`, or none, when no thread can be started any more."""
    threads = []
    for i in range(number):
        thread = threading.Thread(target=target, name=f"{name}-{i}", daemon=True)
        if not _started(thread):
            break
        threads.append(thread)
    return threads


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait until the threads have ended; at interpreter shutdown, which stops them, return at once."""
    if not sys.is_finalizing():
        for thread in threads:
            thread.join()


def run_to_the_end(task: Callable[[], None], name: str) -> None:
    """Run `task` in a separate thread that the interpreter waits for at exit; when no thread can be started any more,
    run it here."""
    if not _started(threading.Thread(target=task, name=name, daemon=False)):
        task()


def _started(thread: threading.Thread) -> bool:
    if sys.is_finalizing():
        return False  # Python 3.13.0 would start it, and wait for ever until it runs
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise  # no memory, or too many threads
        return False
    return True


_EXIT_CODE = 120
"""Python's own for failures while it ends."""
_numbers = itertools.count()
_open: dict[int, weakref.finalize[..., Any]] = {}
"""Finalizers called at the end of the program, in the order in which their owners were opened."""
_all_completions: list[Completions] = []


def settle(complete: Callable[[], None], failed: str = "") -> None:
    """Complete background work; an error is a warning, after `failed`."""
    try:
        complete()
    except Exception as error:
        logging.getLogger("zstore").warning("%s%s", failed, error)


def closing_with(owner: object, close: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """Return a finalizer that calls `close(*args)` once, when it is called, when `owner` is collected, or when the
    program ends: the last one opened is closed first.

    Not at the end of a forked child process: its parent's objects are not its own.
    """
    finalizer = weakref.finalize(owner, close, *args)
    finalizer.atexit = False
    for number in [number for number, each in list(_open.items()) if not each.alive]:
        _open.pop(number, None)
    _open[next(_numbers)] = finalizer
    _at_exit(_close_all)
    for completions in _all_completions:  # which run first: background work may need open objects
        completions.reregister()
    return finalizer


def _close_all() -> None:
    for _, finalizer in sorted(_open.items(), reverse=True):
        try:
            finalizer()
        except Exception:
            sys.excepthook(*sys.exc_info())


def _at_exit(call: Callable[[], None]) -> None:
    """Let the end of the interpreter call it. Again each time: from Python 3.13 on multiprocessing forgets, in the children
    that it starts, functions registered before."""
    atexit.unregister(call)
    atexit.register(call)


def _in_forked_child(call: Callable[[], None]) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class _Forkable(Protocol):
    def _forked(self) -> None: ...


_forkable: weakref.WeakSet[_Forkable] = weakref.WeakSet()
OF_THE_PARENT = (
    "was opened by the process that this one was forked from, whose threads are not here: open it in this process, in a "
    "DataLoader's worker by `worker_init_fn` or at the first sample"
)
"""The end of a message about an object that cannot be used in a forked child."""


def notify_of_fork(owner: _Forkable) -> None:
    """Let `owner._forked()` be called in each child process that is forked while there is an owner. See [Note: forks]."""
    _forkable.add(owner)


def _forked() -> None:
    for finalizer in _open.values():
        finalizer.detach()
    _open.clear()
    for owner in list(_forkable):
        owner._forked()


_in_forked_child(_forked)


def program_ended() -> bool:
    """Return whether the main thread has run its last line, so that no caller can receive an error."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    # Python waits for other threads there; until it has waited for executors' threads, the main thread counts as alive.
    return not main.is_alive() or (frame is not None and frame.f_globals.get("__name__") == "threading")


class Completions:
    """Background work of the program, whose end waits for all of it, and names on stderr failures that were not reported.

    Then the exit code is 120, Python's own for failures while it ends. In a forked child process none of this applies.
    """

    def __init__(self) -> None:
        self._running: dict[object, tuple[str, Callable[[], object]]] = {}
        self._failed: dict[object, str] = {}
        self._lock = threading.Lock()
        self._is_awaited = False
        self._child: int | None = None
        """The process whose end by multiprocessing is seen."""
        _in_forked_child(self._forget)
        _all_completions.append(self)

    def reregister(self) -> None:
        """Let the end of the interpreter wait for background work, before it calls functions registered until now."""
        if self._running:
            _at_exit(self._complete)

    def begin(self, title: str, wait: Callable[[], object]) -> object:
        """Register `title` as running; `wait` returns when it has ended, successfully or not. Return its key."""
        key = object()
        _at_exit(self._complete)
        self._join_multiprocessing()
        with self._lock:
            self._running[key] = title, wait
        return key

    def end(self, key: object, error: BaseException | None) -> None:
        """Record that it has ended; `error` is an error that must be reported. Its frames are not kept."""
        with self._lock:
            title, _ = self._running.pop(key, ("", None))
            if error is not None:
                self._failed[key] = f"{title} failed: {type(error).__name__}: {error}"

    def mark_observed(self, key: object) -> None:
        """Record that its error has been reported; not at interpreter shutdown, when no report arrives."""
        if not program_ended():
            with self._lock:
                self._failed.pop(key, None)

    def _join_multiprocessing(self) -> None:
        """Register with multiprocessing too, for the end of a child: it ends forked children with `os._exit`."""
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None or self._child == os.getpid():
            return
        from multiprocessing.util import Finalize

        self._child = os.getpid()
        Finalize(None, self._complete_child, exitpriority=-100)  # last

    def end_waits(self) -> bool:
        """Return whether the end of the program waits for work."""
        return self._is_awaited or program_ended()

    def _wait(self) -> str:
        """Wait for all that is running; return the failures."""
        self._is_awaited = True
        with self._lock:
            running = list(self._running.items())
        for key, (_, wait) in running:
            try:
                wait()
            except KeyboardInterrupt:
                self.end(key, InterruptedError("the program was interrupted once more while it ended"))
        return "; ".join(self._failed.values())

    def _complete(self) -> None:
        if text := self._wait():
            sys.stdout = _FailingOutput(sys.stdout, text)

    def _complete_child(self) -> None:
        if text := self._wait():
            sys.stderr.write(f"{text}\n")
            self._failed.clear()
            if sys.exc_info()[0] is None:  # else its exit code is non-zero already
                for thread in threading.enumerate():
                    if not thread.daemon and thread is not threading.current_thread():
                        thread.join()
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                os._exit(_EXIT_CODE)

    def _forget(self) -> None:
        self._lock, self._is_awaited = threading.Lock(), False
        self._running.clear()
        self._failed.clear()


class _FailingOutput:
    """Standard output whose last flush, by the interpreter, raises: the documented way to an exit code from there."""

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
    """Return what `ready()` returns, once that is true; look again after pauses that double, beginning with 1 ms.

    `check` raises if waiting has become pointless; `pause` sleeps for the given seconds, or until something else ends
    it. Raises CheckpointError with the text of `failure()` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _MIN_PAUSE_S
    while not (found := ready()):
        check()
        if time.monotonic() > deadline:
            raise CheckpointError(failure())
        pause(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return found


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let a SIGINT received during the block take effect at its end; for blocks of milliseconds.

    Python runs handlers only in the main thread, so in other threads this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
