"""The end of a program while torch.distributed.checkpoint saves behind it. See [Note: endings].

Python waits for the thread of `async_save` by itself, but not after Ctrl-C; nobody asks its future for an error then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from torch.distributed.checkpoint import state_dict_saver

from zstore.io.closing import Completions

_PAUSE_S = 0.01
_completions = Completions()
_under_way: dict[int, object] = {}
"""By thread: the key of its save in `_completions`."""


def complete_at_the_end(title: str) -> None:
    """Let the end of the program wait until this thread, if it is not the main one, comes back from DCP."""
    for thread in [thread for thread in list(_under_way) if not _is_saving(thread)]:
        _completions.end(_under_way.pop(thread, None), None)
    thread = threading.get_ident()
    if thread != threading.main_thread().ident and thread not in _under_way:
        _under_way[thread] = _completions.begin(title, partial(_wait, thread))


class _Call:
    """Is called as nothing holds it any more."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


_of_thread = threading.local()


def call_at_the_end_of_the_thread(call: Callable[[], object]) -> None:
    """Call `call` as this thread ends, if it is not the main one: DCP's has saved then, or failed on whichever rank, which it
    tells nobody but the future."""
    if threading.get_ident() != threading.main_thread().ident:
        _of_thread.call = _Call(call)


@contextlib.contextmanager
def told_at_the_end(title: str) -> Iterator[None]:
    """Name an error of the block on stderr, with a non-zero exit code, if the program has ended."""
    try:
        yield
    except BaseException as error:
        _completions.fail(title, error)
        raise


def _wait(thread: int) -> None:
    # Not for the thread, which Python 3.11 takes for ended if Ctrl-C interrupted a join.
    while _is_saving(thread):
        time.sleep(_PAUSE_S)


def _is_saving(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_globals is not vars(state_dict_saver):
        frame = frame.f_back
    return frame is not None
