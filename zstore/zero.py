"""The names that DeepSpeed has in `deepspeed.zero`, for scripts that `import zstore as deepspeed`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from zstore.engine import Init, gather
from zstore.engine.access.gather import Parameters

__all__ = ["GatheredParameters", "Init"]


def GatheredParameters(  # noqa: N802
    params: Parameters,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """Return `zstore.gather(params, modifier_rank)`; nothing is done where it is not `enabled`.

    `fwd_module` is taken and not needed: a module's forward gathers what it reads.
    """
    return gather(params, modifier_rank) if enabled else nullcontext()
