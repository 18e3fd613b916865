"""What the process that ranks and others are forked from imports first."""

import gc
import os

gc.disable()  # while it imports what follows

from zstore.engine.runtime.process import FrozenObjects  # noqa: E402

FrozenObjects.frozen_before = True  # they freeze what they begin with, which need not be counted in each

_SERVER = os.getpid()


def _begin() -> None:
    if os.getppid() == _SERVER:
        gc.freeze()  # all of it is young: the first collection would go through it
        gc.enable()


os.register_at_fork(after_in_child=_begin)
