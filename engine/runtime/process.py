"""The process of a rank: its messages, signals, garbage collector, and process group.

[Note: messages]
All messages go to the logger "zstore": progress at INFO, notable events at WARNING. Without configuration Python shows nothing
below WARNING, so `show_messages` adds a handler for stderr, and level INFO, if neither that logger nor the root has a handler.
The handler is silent if another one receives the messages, so configuring logging later duplicates no line. To see fewer
messages, call `logging.getLogger("zstore").setLevel(logging.WARNING)`, before or after.

[Note: stopping by a signal]
The handler only records the signal. It is one of `World.messages`, which the ranks exchange in each step, so all ranks know of
it after the same step. Then the state is saved, and the process exits with code 75: run it again. A second signal has its
default effect immediately.

[Note: the collector]
A collection visits every object in the process, including those of torch, transformers and the model, which takes 0.2 s, and
all ranks wait for a rank that collects. So objects that exist when an engine is created are frozen until it is closed. With
`disable_python_gc` there are no collections: steps leave no cycles, and a script that creates cycles calls `gc.collect()`.
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


class _FallbackHandler(logging.Handler):
    """Writes to the current `sys.stderr`, unless another handler receives the message."""

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
    """Warn on rank 0 of a condition that holds on all ranks."""
    started = torch_dist.is_available() and torch_dist.is_initialized()
    if not started or torch_dist.get_rank() == 0:
        _log.warning(message, *arguments)


def show_messages() -> None:
    """Show the package's messages if logging is not configured. See [Note: messages]."""
    if _log.hasHandlers():
        return
    handler = _FallbackHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s", datefmt="%H:%M:%S"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


class StopSignals:
    """Handles signals for the duration of a run. See [Note: stopping by a signal]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._received: int | None = None  # by this rank
        self._original_handlers: dict[int, Any] = {}

    def watch(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        """Record these signals from now on, instead of their default effect. Raises UsageError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be watched only from the main thread: call this where the script starts")
        self._world.messages["signal"] = lambda: self._received
        for number in signals:
            if number not in self._original_handlers:
                self._original_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as a data loader's worker, inherits the handler but not the run.
        if os.getpid() != self._pid or self._received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received = number
        name = signal.Signals(number).name
        text = f"zstore: rank {self._world.rank}: {name}: will stop after this step; a second signal stops at once\n"
        # Not print, which the signal may have interrupted.
        os.write(2, text.encode())

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that a rank received, once all ranks know of it."""
        received = self._world.received.get("signal", [])
        number = self._received if self._world.world_size == 1 else max(received, default=None)
        return None if number is None else signal.Signals(number)

    def close(self) -> None:
        """Restore the original handlers of the signals; a second call does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        handlers, self._original_handlers = self._original_handlers, {}
        for number, handler in handlers.items():
            # None if the original handler was not Python's.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class FrozenObjects:
    """Freezes the existing objects until `end` of this engine, or until a second engine is created. See [Note: the collector].

    Nothing is frozen with several engines, since only the collector finds an engine dropped without `close()`, nor if the
    application froze objects, since `gc` can only unfreeze all of them."""

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
                self.unfreeze()
            elif not FrozenObjects.frozen_before:
                gc.freeze()

    def end(self) -> None:
        """Unfreeze all objects; a second call does nothing."""
        with FrozenObjects._lock:
            if not self._ended:
                self._ended = True
                FrozenObjects._count -= 1
                self.unfreeze()

    @classmethod
    def unfreeze(cls) -> None:
        """Unfreeze objects that an engine froze."""
        if cls.frozen_before is False:
            gc.unfreeze()


class CollectorPause:
    """Disables the garbage collector until the last pause in this process ends."""

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
        """Restore the collector's state; a second call does nothing."""
        with CollectorPause._lock:
            if not self._ended:
                self._ended = True
                CollectorPause._count -= 1
                if CollectorPause._count == 0 and CollectorPause._was_enabled:
                    gc.enable()

    @classmethod
    def _reset(cls) -> None:
        """Enable the collector in a forked child, such as a worker of a data loader."""
        if cls._count and cls._was_enabled:
            gc.enable()
        cls._lock, cls._count = threading.Lock(), 0


os.register_at_fork(after_in_child=CollectorPause._reset)


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
    """Initialize torch.distributed from the environment variables of torchrun or mpirun; do nothing if it is initialized, or
    for a single process.

    A collective that blocks for longer than `timeout` fails: 30 minutes by default, or DEEPSPEED_TIMEOUT minutes. The engine's
    watchdog detects ranks that fail, die or stall much earlier. `dist_backend` is by default NCCL with CUDA and gloo without;
    gloo also replaces "nccl", with a warning on rank 0. `auto_mpi_discovery`, `verbose` and `config` are for compatibility.
    """
    cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        backend = "gloo"
        if (rank if rank >= 0 else int(os.environ.get("RANK", "0"))) == 0:
            _warn_of_gloo()
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
        # Otherwise NCCL guesses it from the rank, and barriers warn or hang if it guesses a different rank's device.
        device_id=device if backend == "nccl" else None,
    )
    # Before the interpreter shuts down, which gloo's threads would not survive.
    atexit.register(_destroy)


def _destroy() -> None:
    """Destroy the process group that `init_distributed` created, if it exists."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


@functools.cache
def _warn_of_gloo() -> None:
    """Warn once in a process."""
    _log.warning("init_distributed: there is no CUDA device here; using gloo instead of nccl")
