"""0/1 Adam. Source: Lu et al. 2022, https://arxiv.org/abs/2202.06009, algorithm 1, with DeepSpeed's choice of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .adam import WarmUp, descend, root, unbias
from .rule import Compressed, Phase, TensorState


class ZeroOneRule:
    """Adam with decoupled weight decay that sends signs from the start, and later not in every step.

    Until update `var_freeze_step`, gradients are exact in updates that are multiples of an interval, which starts at 1 and
    doubles after every `var_update_scaler` of them; they alone change the variance. In others, ranks send
    `(1 - beta1) * gradient`, compressed, and only the momentum follows:

        momentum = beta1 * momentum + compressed((1 - beta1) * gradient)

    After it, each rank takes steps of its own, and in updates that are multiples of another interval the ranks meet. That
    interval starts at 1, doubles every `local_step_scaler` updates and is at most `local_step_clipper`. With the sum of the
    rates since the ranks met as `rates`, and the weights that they had then as `anchor`:

        momentum = beta1 * momentum + (1 - beta1) * gradient
        accumulator += lr * momentum;  weights = anchor - accumulator / divisor              (own steps)
        momentum = compressed(accumulator / rates)
        weights = anchor - rates * (momentum / divisor + weight_decay * anchor)              (when they meet)

    `divisor` is `sqrt(variance) + eps`; bias correction is that of Adam, the variance's by the number of its updates.
    DeepSpeed's class never corrects, and lets weight decay into the momentum when ranks meet; here it is applied there, to
    the weights that ranks share. An element with a variance of 0 changes by weight decay alone.
    """

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "anchor", "momentum_accumulator")
    own_slots: tuple[str, ...] = ("exp_avg", "momentum_accumulator")

    def __init__(self) -> None:
        self._warm_up = WarmUp()

    def initial(self) -> dict[str, float]:
        """Return the scalars: `variance_updates` counts those of the variance, `rates` is their sum since the ranks met."""
        return {"step": 0.0, "variance_updates": 0.0, "rates": 0.0}

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        frozen = group["var_freeze_step"]
        if step <= frozen:
            return "compressed" if step % variance_interval(step, group["var_update_scaler"]) else "exact"
        doublings = min((step - frozen - 1) // group["local_step_scaler"], 62)
        return "local" if step % min(group["local_step_clipper"], 2**doublings) else "compressed"

    def update(
        self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed
    ) -> None:
        """Change a tensor. `anchor` is the same on every rank after every update; the master follows from it and from the
        rank's own slots."""
        scalars = state.scalars
        if scalars["variance_updates"] == 0:  # the state of an Adam, whose variance is of every update
            scalars["variance_updates"] = scalars["step"]
        scalars["step"] += 1
        step = int(scalars["step"])
        phase = self.phase(group, step)
        if step > group["var_freeze_step"]:
            self._own_step(group, state, gradient, compressed if phase == "compressed" else None)
        elif phase == "exact":
            self._exact_step(group, state, gradient)
        else:
            moment, variance = state.slots["exp_avg"], state.slots["exp_avg_sq"]
            beta1 = float(group["betas"][0])
            # Sent as the gain of the momentum, so that the errors have its unit when momenta are sent.
            sent = compressed(gradient.mul_(1 - beta1))
            moment.mul_(beta1).add_(sent).masked_fill_(variance == 0, 0.0)
            descend(group, state.master, moment, root(group, variance, scalars["variance_updates"]), step)

    def _exact_step(self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor) -> None:
        scalars, moment, variance = state.scalars, state.slots["exp_avg"], state.slots["exp_avg_sq"]
        step = int(scalars["step"])
        scalars["variance_updates"] += 1
        if scalars["variance_updates"] == step:
            self._warm_up.step(group, state, gradient)
            return
        beta1, beta2 = map(float, group["betas"])
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        descend(group, state.master, moment, root(group, variance, scalars["variance_updates"]), step)

    @staticmethod
    def _own_step(
        group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed | None
    ) -> None:
        """Take a step of the rank's own; with `compressed`, the ranks meet after it."""
        scalars = state.scalars
        moment, variance, anchor, accumulator = (state.slots[name] for name in ZeroOneRule.slots)
        beta1, rate = float(group["betas"][0]), float(group["lr"])
        start = unbias(group, int(scalars["step"]))
        unseen = variance == 0
        if scalars["rates"] == 0:
            anchor.copy_(state.master)
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1).masked_fill_(unseen, 0.0)
        accumulator.add_(moment, alpha=rate / start)
        scalars["rates"] += rate
        divisor, rates = root(group, variance, scalars["variance_updates"]), scalars["rates"]
        if compressed is None:
            torch.addcdiv(anchor, accumulator, divisor, value=-1.0, out=state.master)
            return
        # With rates of 0 nothing was accumulated, but momenta are the ranks' own all the same.
        mean = compressed(accumulator / rates if rates > 0 else moment / start)
        torch.mul(mean, start, out=moment).masked_fill_(unseen, 0.0)
        anchor.mul_(1 - rates * float(group["weight_decay"]))
        anchor.addcdiv_(moment, divisor, value=-rates / start)
        state.master.copy_(anchor)
        accumulator.zero_()
        scalars["rates"] = 0.0


def variance_interval(step: int, scaler: int) -> int:
    """Return the interval between updates of the variance that holds at `step`."""
    interval, last = 1, 0
    while True:
        last = (last // interval + scaler) * interval
        if step <= last:
            return interval
        interval *= 2
