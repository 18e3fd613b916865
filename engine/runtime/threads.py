"""How many threads torch uses for operations of the calling thread."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from threadpoolctl import ThreadpoolController


def one_thread(wanted: bool = True) -> AbstractContextManager[object]:
    """Return a context in which operations of this thread, and no other's, are not shared among torch's threads.

    An operation on a tile takes some 10 microseconds, and as long to wake a thread that sleeps for it; beside I/O the cores
    have other work. The values are the same.
    """
    if not wanted:
        return nullcontext()
    torch.get_num_threads()  # lets torch set this thread's number, which it would do over ours at the first operation
    limits: AbstractContextManager[object] = _openmp().limit(limits=1)
    return limits


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
