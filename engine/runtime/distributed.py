"""Starting torch.distributed the way training scripts ask for it."""

from __future__ import annotations

import atexit
import datetime
import functools
import logging
import os
from typing import Any

import torch
import torch.distributed as torch_dist

from zstore.ranks.world import cuda_device

_log = logging.getLogger("zstore")


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
