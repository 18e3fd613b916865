"""What `bench.convergence` compares: configs whose keys change numbers, each beside the exact run that it departs from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Group:
    """An exact run and what is set beside it."""

    exact: Mapping[str, Any]
    """Changes to the common config; sections are merged."""
    cases: Mapping[str, Mapping[str, Any]]
    """By name, changes to `exact`."""
    ranks: tuple[int, ...] = (2,)
    """Ranks of its runs."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Options of the benchmark that this group needs otherwise."""


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


# The warm-up of the rate and of the variance, a fifth of 200 steps.
_FREEZE = 40
_RAISED = {"type": "WarmupLR", "params": {"warmup_num_steps": _FREEZE, "warmup_type": "linear", "warmup_max_lr": 1e-3}}
# Gradients of a rank alone are not clipped.
_SIGNS = _zero(stage=1) | {"gradient_clipping": 0.0, "scheduler": _RAISED}

GROUPS: dict[str, Group] = {
    "quantized": Group(
        # The model is small: all of its matrices are sharded.
        exact=_zero(stage=3, stage3_param_persistence_threshold=2048),
        cases={
            "zero_quantized_weights": _zero(zero_quantized_weights=True),
            "zero_quantized_gradients": _zero(zero_quantized_gradients=True),
            "both": _zero(zero_quantized_weights=True, zero_quantized_gradients=True),
        },
        ranks=(2, 4),
    ),
    "moments": Group(
        exact=_zero(stage=1, offload_optimizer={"device": "nvme", "nvme_path": "FOLDER"}),
        cases={kind: {"zstore": {"moments": kind}} for kind in ("bf16",)},
        ranks=(1,),
    ),
    "one_bit": Group(
        exact=_SIGNS,
        cases={
            "OneBitAdam": _optimizer("OneBitAdam", freeze_step=_FREEZE),
            "ZeroOneAdam": _optimizer("ZeroOneAdam", var_freeze_step=_FREEZE, local_step_clipper=1),
            "ZeroOneAdam, own steps": _optimizer(
                "ZeroOneAdam", var_freeze_step=_FREEZE, local_step_scaler=_FREEZE, local_step_clipper=4
            ),
        },
    ),
    "one_bit_lamb": Group(
        exact=_SIGNS | _optimizer("Lamb", lr=1e-3),
        cases={"OneBitLamb": _optimizer("OneBitLamb", lr=1e-3, freeze_step=_FREEZE)},
    ),
}
"""By area. A group's name is what `--groups` takes."""
