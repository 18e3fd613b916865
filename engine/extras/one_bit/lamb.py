"""1-bit LAMB. Source: Li et al. 2021, https://arxiv.org/abs/2104.06069, algorithm 1, with DeepSpeed's limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...optim.lamb import lamb_root, lamb_step
from .rule import Compressed, Phase, TensorState


class LambRule:
    """LAMB for `freeze_step` updates, and then with a frozen variance, as 1-bit Adam, and with a factor of the tensor's
    step that follows from the warm-up's:

        momentum = compressed(beta1 * last + (1 - beta1) * gradient), with `last` the momentum before
        fresh = beta2 * fresh + (1 - beta2) * ((momentum - beta1 * last) / (1 - beta1))^2
        ratio = max over elements of (sqrt(variance) + eps) / (sqrt(fresh) + eps)
        weights -= lr * frozen * ratio * (momentum / (sqrt(variance) + eps) + weight_decay * weights)

    `frozen` is the average of the warm-up's factors, with decay `coeff_beta` and from 0, so that `freeze_step` should be well
    above `1 / (1 - coeff_beta)`; updates with a norm of 0 do not count. `fresh` starts as the variance at the freeze.
    `ratio` goes from `factor_min` to `factor_max`, and changes by at most its `factor_threshold`-th part in an update; with
    weight decay it is mixed with 1 by the part of the decay in the update. Bias correction is LAMB's; the ratio's variances
    are corrected too, each by its own number of updates. DeepSpeed's class never corrects. It also scales momenta to one size
    before it sends all of them with one scale; here each tensor has scales of its own.

    An element with a variance of 0 at the freeze changes by weight decay alone.
    """

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    own_slots: tuple[str, ...] = ()

    def initial(self) -> dict[str, float]:
        """Return the scalars: `frozen_at` is the number of updates that the frozen variance has seen."""
        return {"step": 0.0, "frozen_at": 0.0, "lamb_coeff_freeze": 0.0, "last_factor": 1.0}

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        return "exact" if step <= group["freeze_step"] else "compressed"

    def update(
        self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed
    ) -> None:
        scalars, slots = state.scalars, state.slots
        scalars["step"] += 1
        if self.phase(group, int(scalars["step"])) == "exact":
            scalars["frozen_at"] = 0.0
            weights, gradient = state.master.view(state.shape), gradient.view(state.shape)
            moment, variance = slots["exp_avg"].view(state.shape), slots["exp_avg_sq"].view(state.shape)
            factor = float(lamb_step(weights, gradient, moment, variance, scalars["step"], group))
            if factor > 0:
                beta = group["coeff_beta"]
                scalars["lamb_coeff_freeze"] = beta * scalars["lamb_coeff_freeze"] + (1 - beta) * factor
            return
        if scalars["frozen_at"] == 0:
            scalars |= {"frozen_at": scalars["step"] - 1, "last_factor": 1.0}
            slots["exp_avg_sq_fresh"].copy_(slots["exp_avg_sq"])
        self._compressed_step(group, state, gradient, compressed)

    def _compressed_step(
        self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed
    ) -> None:
        scalars, (moment, variance, fresh) = state.scalars, (state.slots[name] for name in self.slots)
        beta1, beta2 = map(float, group["betas"])
        last = moment.clone()
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        moment.copy_(compressed(moment)).masked_fill_(variance == 0, 0.0)
        rebuilt = torch.sub(moment, last, alpha=beta1, out=last).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(rebuilt, rebuilt, value=1 - beta2)
        divisor = lamb_root(variance, group)
        ratio = float((divisor / lamb_root(fresh, group)).max())
        rate = float(group["lr"])
        if group["bias_correction"]:
            frozen = 1 - beta2 ** scalars["frozen_at"]
            ratio *= math.sqrt((1 - beta2 ** scalars["step"]) / frozen)
            rate *= math.sqrt(frozen) / (1 - beta1 ** scalars["step"])
        update = moment / divisor
        if group["weight_decay"] > 0:
            before = float(update.norm())
            update.add_(state.master, alpha=group["weight_decay"])
            part = min(1.0, before / max(float(update.norm()), 1e-38))
            ratio = ratio * part + 1 - part
        scalars["last_factor"] = ratio = self._limited(group, ratio, scalars["last_factor"])
        # A tensor whose norms were 0 in the whole warm-up took its steps with factor 1.
        state.master.sub_(update, alpha=rate * ratio * (scalars["lamb_coeff_freeze"] or 1.0))

    @staticmethod
    def _limited(group: Mapping[str, Any], ratio: float, last: float) -> float:
        """Return the ratio within its limits, and close to the last one."""
        change = float(group["factor_threshold"])
        ratio = min(max(ratio, float(group["factor_min"])), float(group["factor_max"]))
        return min(max(ratio, last * (1 - change)), last * (1 + change))
