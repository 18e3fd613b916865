"""1-bit Adam. Source: Tang et al. 2021, https://arxiv.org/abs/2102.02888, algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...optim.kernel import FusedAdam
from .rule import Compressed, Phase, TensorState


class AdamRule:
    """Adam with decoupled weight decay for `freeze_step` updates, and then with a frozen variance, so that the ranks send
    the momentum alone:

        momentum = compressed(beta1 * momentum + (1 - beta1) * gradient)
        weights -= lr * (momentum / (1 - beta1^t) / (sqrt(variance / (1 - beta2^f)) + eps) + weight_decay * weights)

    in update `t`, with `f` the last update of the variance. Without `bias_correction` both divisors are 1. DeepSpeed's
    class never corrects; corrected, the warm-up is Adam's and the size of the step is the same on both sides of the freeze.

    An element whose gradients were all exactly 0 until the freeze has no variance to divide by, and signs cannot say 0: it
    changes by weight decay alone. DeepSpeed has `exp_avg_mask` for this.
    """

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    own_slots: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._warm_up = WarmUp()

    def initial(self) -> dict[str, float]:
        """Return the scalars: `frozen_at` is the number of updates that the frozen variance has seen."""
        return {"step": 0.0, "frozen_at": 0.0}

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        return "exact" if step <= group["freeze_step"] else "compressed"

    def update(
        self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed
    ) -> None:
        scalars, moment, variance = state.scalars, state.slots["exp_avg"], state.slots["exp_avg_sq"]
        step = int(scalars["step"]) + 1
        scalars["step"] = float(step)
        if self.phase(group, step) == "exact":
            scalars["frozen_at"] = 0.0
            self._warm_up.step(group, state, gradient)
            return
        if scalars["frozen_at"] == 0:
            scalars["frozen_at"] = step - 1.0
        beta1 = float(group["betas"][0])
        unseen = variance == 0
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        moment.copy_(compressed(moment)).masked_fill_(unseen, 0.0)
        divisor = root(group, variance, scalars["frozen_at"])
        descend(group, state.master, moment, divisor, step)


class WarmUp:
    """The engine's own AdamW: its bits."""

    def __init__(self) -> None:
        self._kernels = {corrects: FusedAdam(decoupled=True, corrects=corrects) for corrects in (True, False)}

    def step(self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor) -> None:
        """Take update number `step` of the scalars, which counts it already."""
        kernel = self._kernels[bool(group["bias_correction"])]
        taken = kernel.start(group, {"step": state.scalars["step"] - 1})
        taken.tile(state.master, gradient, [state.slots["exp_avg"], state.slots["exp_avg_sq"]])


def root(group: Mapping[str, Any], variance: torch.Tensor, updates: float) -> torch.Tensor:
    """Return the divisor of a momentum: a new tensor, of a variance that has seen so many updates."""
    seen = 1 - float(group["betas"][1]) ** updates if group["bias_correction"] else 1.0
    return variance.sqrt().div_(math.sqrt(seen)).add_(float(group["eps"]))


def unbias(group: Mapping[str, Any], step: int) -> float:
    """Return the bias correction of the momentum after `step` updates, since it started at zero."""
    return 1 - float(group["betas"][0]) ** step if group["bias_correction"] else 1.0


def descend(
    group: Mapping[str, Any], weights: torch.Tensor, moment: torch.Tensor, divisor: torch.Tensor, step: int
) -> None:
    """Take one step of AdamW with the given tensors; `divisor` comes from `root`."""
    rate = float(group["lr"])
    weights.mul_(1 - rate * float(group["weight_decay"]))
    weights.addcdiv_(moment, divisor, value=-rate / unbias(group, step))
