"""The process of a rank: its messages, signals, collector of reference cycles, and process group.

[Note: messages]
All messages go to the logger "zstore": progress at INFO, events that deserve a look at WARNING. Python shows nothing below
WARNING of a logger that was not configured, so a plain script would never see its progress. Therefore `show_messages` gives
that logger, if neither it nor the root has a handler, one that writes to stderr, and level INFO if none was set. Once
another handler would get the same messages, this one is silent, so configuring logging later doubles no line. To see less:
`logging.getLogger("zstore").setLevel(logging.WARNING)`, before or after.

[Note: stopping by a signal]
A handler only notes the signal. It is one of `World.messages`, which travel with what the ranks exchange in each step anyway,
so that after the same step all of them know, whichever rank was signalled. Then the state is saved, and the process ends
with code 75, which says: run me again. A second signal takes effect at once, as if nobody handled it.

[Note: the collector]
A collection walks over every object of the process, those of torch, transformers and the model among them, which takes
0.2 s; with many ranks, all wait for the one that collects. So objects that exist when an engine is made are frozen until
it is closed. With `disable_python_gc` there are none: steps leave no cycles, and a loop that does calls `gc.collect()`.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as torch_dist

from zstore.errors import UsageError
from zstore.ranks.world import World, cuda_device

_log = logging.getLogger("zstore")

STOPPED_EXIT_CODE = 75
"""Exit code of a run that saved and stopped because of a signal: EX_TEMPFAIL, try again."""

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


# -- messages ---------------------------------------------------------------------------------------------------------


class _FallbackHandler(logging.Handler):
    """Writes to the present `sys.stderr`, unless another handler gets the message."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        others = [handler for handler in _log.handlers if handler is not self]
        if others or (_log.propagate and logging.getLogger().handlers):
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def warn_once(message: str, *arguments: object) -> None:
    """Warn on rank 0 of something that is the same on every rank."""
    started = torch_dist.is_available() and torch_dist.is_initialized()
    if not started or torch_dist.get_rank() == 0:
        _log.warning(message, *arguments)


def show_messages() -> None:
    """Let the package's messages be seen if nobody configured logging. See [Note: messages]."""
    if _log.hasHandlers():
        return
    handler = _FallbackHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s", datefmt="%H:%M:%S"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


# -- signals ----------------------------------------------------------------------------------------------------------


class StopSignals:
    """Handles signals for the length of a run. See [Note: stopping by a signal]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._noted: int | None = None  # the signal that this rank got
        self._before: dict[int, Any] = {}

    def watch(self, numbers: Iterable[int] = STOP_SIGNALS) -> None:
        """Note these signals from now on in place of ending the process. Raises UsageError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be watched from the main thread only: call this where the script starts")
        self._world.messages["signal"] = lambda: self._noted
        for number in numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, as a data loader's worker, has the handler but not the run.
        if os.getpid() != self._pid or self._noted is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._noted = number
        name = signal.Signals(number).name
        text = f"zstore: rank {self._world.rank}: {name}: will stop after this step; a second signal stops at once\n"
        # Not print: this may come in the middle of one.
        os.write(2, text.encode())

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that some rank got, once all ranks know of it."""
        heard = self._world.received.get("signal", [])
        number = self._noted if self._world.world_size == 1 else max(heard, default=None)
        return None if number is None else signal.Signals(number)

    def close(self) -> None:
        """Restore the former handlers of the signals; a second call does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            # None: the former handler was not Python's.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# -- the collector ----------------------------------------------------------------------------------------------------


class FrozenObjects:
    """Spares the collector the objects that are there now, until `end` of this engine, or until another is made. See [Note: the
    collector].

    With several engines nothing is frozen: one that is dropped without `close()` is found by the collector alone. Nor if the
    application froze objects itself: only all can be unfrozen."""

    _lock = threading.Lock()
    _count = 0  # of engines that have not ended
    frozen_before: bool | None = None  # by the application, before its first engine

    def __init__(self) -> None:
        self._ended = False
        with FrozenObjects._lock:
            if FrozenObjects.frozen_before is None:
                FrozenObjects.frozen_before = bool(gc.get_freeze_count())
            FrozenObjects._count += 1
            if FrozenObjects._count > 1:
                self.thaw()
            elif not FrozenObjects.frozen_before:
                gc.freeze()

    def end(self) -> None:
        """Let the collector look at all objects again; a second call does nothing."""
        with FrozenObjects._lock:
            if not self._ended:
                self._ended = True
                FrozenObjects._count -= 1
                self.thaw()

    @classmethod
    def thaw(cls) -> None:
        """Unfreeze what an engine froze."""
        if cls.frozen_before is False:
            gc.unfreeze()


class CollectorPause:
    """Turns the collector off until `end`, or until the last of several pauses in this process ended."""

    _lock = threading.Lock()
    _count = 0
    """Pauses that have not ended."""
    _was_enabled = False
    """Whether the collector was on before the first of them."""

    def __init__(self) -> None:
        self._ended = False
        with CollectorPause._lock:
            if CollectorPause._count == 0:
                CollectorPause._was_enabled = gc.isenabled()
                gc.disable()
            CollectorPause._count += 1

    def end(self) -> None:
        """Restore the collector's former state; a second call does nothing."""
        with CollectorPause._lock:
            if not self._ended:
                self._ended = True
                CollectorPause._count -= 1
                if CollectorPause._count == 0 and CollectorPause._was_enabled:
                    gc.enable()

    @classmethod
    def _start_anew(cls) -> None:
        """Turn the collector on in a forked child, as a worker of a data loader."""
        if cls._count and cls._was_enabled:
            gc.enable()
        cls._lock, cls._count = threading.Lock(), 0


os.register_at_fork(after_in_child=CollectorPause._start_anew)


# -- the process group ------------------------------------------------------------------------------------------------


def init_distributed(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed from the variables that torchrun sets, or mpirun; do nothing if it runs already, or for a
    process alone.

    A collective in which a rank waits for longer than `timeout` fails; by default 30 minutes, or as many as the variable
    DEEPSPEED_TIMEOUT says. Ranks that fail, die or stop are noticed much earlier, by the engine's watch.
    `dist_backend` "nccl" on a machine without CUDA is gloo, with one warning, of rank 0. By default it is NCCL if there is
    CUDA. `auto_mpi_discovery`, `verbose` and `config` are accepted for scripts that
    pass them.
    """
    cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        backend = "gloo"
        if (rank if rank >= 0 else int(os.environ.get("RANK", "0"))) == 0:
            _say_gloo()
    if torch_dist.is_initialized() or dist_init_required is False:
        return
    if init_method is None and rank < 0 and not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    device = cuda_device(int(os.environ.get("LOCAL_RANK", "0"))) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    torch_dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout or datetime.timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", "30"))),
        # Else NCCL guesses it from the rank, and barriers warn or hang if the guess is another rank's device.
        device_id=device if backend == "nccl" else None,
    )
    # Before the interpreter shuts down: gloo's threads would meet a process that is half shut down.
    atexit.register(_end)


def _end() -> None:
    """End the process group that `init_distributed` started, if it still runs."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


@functools.cache
def _say_gloo() -> None:
    """Warn once in a process."""
    _log.warning("init_distributed: there is no CUDA device here; using gloo instead of nccl")
