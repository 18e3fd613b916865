"""The rules of 1-bit Adam, 0/1 Adam and 1-bit LAMB: one update of one parameter.

A rule sees whole parameters on every rank, and this rank's own gradient. The phase of an update says what ranks exchange in
it: "exact", gradients are averaged as for any optimizer; "compressed", the tensor that the rule gives to `compressed`;
"local", nothing. DeepSpeed's classes never correct the moments for starting at zero, as `bias_correction: false`.

An element whose gradients were all exactly 0 until the variance is frozen has no variance to divide by, and signs cannot say
0: it changes by weight decay alone. DeepSpeed has `exp_avg_mask` for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ...optim.kernel import FusedAdam
from ...optim.lamb import lamb_root, lamb_step

Phase = Literal["exact", "compressed", "local"]
Group = Mapping[str, Any]
"""The settings of a parameter's group."""
Compressed = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean over ranks of a tensor [numel] sent as signs and scales with error feedback: the same bits on every rank."""


@dataclass
class TensorState:
    """The state of one parameter on this rank. All tensors are fp32, 1-D [numel], changed in place."""

    shape: tuple[int, ...]
    """That of the parameter."""
    master: torch.Tensor
    slots: dict[str, torch.Tensor]
    """By the names of the rule's `slots`; zero at first."""
    scalars: dict[str, float]
    """By the names of the rule's `scalars`."""


class AdamRule:
    """1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888, algorithm 1): AdamW for `freeze_step` updates, and then
    with a frozen variance, so that the ranks send the momentum alone:

        momentum = compressed(beta1 * momentum + (1 - beta1) * gradient)
        weights -= lr * (momentum / (1 - beta1^t) / (sqrt(variance / (1 - beta2^f)) + eps) + weight_decay * weights)

    in update `t`, with `f` the number of updates of the variance. Without `bias_correction` both divisors are 1.
    """

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Tensors that it keeps, of the parameter's shape."""
    own_slots: ClassVar[tuple[str, ...]] = ()
    """Those of them that differ from rank to rank."""
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0, "variance_updates": 0.0}
    """Numbers that it keeps, as they start; `step` counts the updates."""

    def phase(self, group: Group, step: int) -> Phase:
        """Return the phase of update number `step`, from 1."""
        return "exact" if step <= group["freeze_step"] else "compressed"

    def update(self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        """Take one update: `gradient` [numel], fp32, may be changed; it is the mean over ranks in the phase "exact", else this
        rank's own. `compressed` is called once in the phase "compressed" and not in others."""
        scalars = state.scalars
        if not scalars["variance_updates"]:  # the state of an Adam, whose variance is of every update
            scalars["variance_updates"] = scalars["step"]
        scalars["step"] += 1
        phase = self.phase(group, int(scalars["step"]))
        if phase == "exact":
            scalars["variance_updates"] += 1
            self.exact(group, state, gradient)
        else:
            self.inexact(group, state, gradient, compressed if phase == "compressed" else None)

    def exact(self, group: Group, state: TensorState, gradient: torch.Tensor) -> None:
        """Take an update with the mean gradient: until the first of another kind, the engine's AdamW, its bits."""
        scalars, moment, variance = state.scalars, state.slots["exp_avg"], state.slots["exp_avg_sq"]
        if scalars["variance_updates"] == scalars["step"]:
            kernel = FusedAdam(decoupled=True, corrects=bool(group["bias_correction"]))
            kernel.start(group, {"step": scalars["step"] - 1}).tile(state.master, gradient, [moment, variance])
            return
        beta1, beta2 = map(float, group["betas"])
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._descend(group, state)

    def inexact(self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed | None) -> None:
        """Take an update with the rank's own gradient, in which the ranks exchange nothing without `compressed`."""
        self._momentum(group, state, gradient, compressed)
        self._descend(group, state)

    def _momentum(
        self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed | None
    ) -> None:
        """Add the gradient to the momentum, and average it over the ranks with `compressed`."""
        moment, beta1 = state.slots["exp_avg"], float(group["betas"][0])
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if compressed is not None:
            moment.copy_(compressed(moment))
        moment.masked_fill_(state.slots["exp_avg_sq"] == 0, 0.0)

    def _descend(self, group: Group, state: TensorState) -> None:
        """Take one step of AdamW with the moments as they are."""
        rate = float(group["lr"])
        state.master.mul_(1 - rate * float(group["weight_decay"]))
        divisor = _root(group, state)
        state.master.addcdiv_(state.slots["exp_avg"], divisor, value=-rate / _unbias(group, state))

    def restore(self, group: Group, state: TensorState) -> None:
        """Set the master of a loaded state from the rank's own slots, if it differs from rank to rank."""


def _root(group: Group, state: TensorState) -> torch.Tensor:
    """Return the divisor of the momentum: a new tensor."""
    seen = 1 - float(group["betas"][1]) ** state.scalars["variance_updates"] if group["bias_correction"] else 1.0
    return state.slots["exp_avg_sq"].sqrt().div_(math.sqrt(seen)).add_(float(group["eps"]))


def _unbias(group: Group, state: TensorState) -> float:
    """Return the bias correction of the momentum, since it started at zero."""
    return 1 - float(group["betas"][0]) ** state.scalars["step"] if group["bias_correction"] else 1.0


class ZeroOneRule(AdamRule):
    """0/1 Adam (Lu et al. 2022, https://arxiv.org/abs/2202.06009, algorithm 1, with DeepSpeed's choice of steps): AdamW that
    sends signs from the start, and later not in every step.

    Until update `var_freeze_step`, gradients are exact in updates that are multiples of `variance_interval`; they alone change
    the variance. In others only the momentum follows:

        momentum = beta1 * momentum + compressed((1 - beta1) * gradient)

    After it, each rank takes steps of its own, and in updates that are multiples of another interval the ranks meet. That
    interval starts at 1, doubles every `local_step_scaler` updates and is at most `local_step_clipper`. With the sum of the
    rates since the ranks met as `rates`, and the weights that they had then as `anchor`:

        momentum = beta1 * momentum + (1 - beta1) * gradient
        accumulator += lr * momentum;  weights = anchor - accumulator / divisor              (own steps)
        momentum = compressed(accumulator / rates)
        weights = anchor - rates * (momentum / divisor + weight_decay * anchor)              (when they meet)

    `divisor` and bias correction are those of 1-bit Adam. DeepSpeed's class lets weight decay into the momentum when ranks
    meet; here it is applied there, to the weights that ranks share.
    """

    slots = ("exp_avg", "exp_avg_sq", "anchor", "momentum_accumulator")
    own_slots = ("exp_avg", "momentum_accumulator")
    scalars: ClassVar[Mapping[str, float]] = {**AdamRule.scalars, "rates": 0.0}

    def phase(self, group: Group, step: int) -> Phase:
        frozen = group["var_freeze_step"]
        if step <= frozen:
            return "compressed" if step % variance_interval(step, group["var_update_scaler"]) else "exact"
        doublings = min((step - frozen - 1) // group["local_step_scaler"], 62)
        return "local" if step % min(group["local_step_clipper"], 2**doublings) else "compressed"

    def inexact(self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed | None) -> None:
        if state.scalars["step"] > group["var_freeze_step"]:
            self._own_step(group, state, gradient, compressed)
        elif compressed is not None:
            moment, beta1 = state.slots["exp_avg"], float(group["betas"][0])
            # Sent as the gain of the momentum, so that the errors have its unit when momenta are sent.
            moment.mul_(beta1).add_(compressed(gradient.mul_(1 - beta1)))
            moment.masked_fill_(state.slots["exp_avg_sq"] == 0, 0.0)
            self._descend(group, state)

    def _own_step(
        self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed | None
    ) -> None:
        """Take a step of the rank's own; with `compressed`, the ranks meet after it."""
        scalars = state.scalars
        moment, variance, anchor, accumulator = (state.slots[name] for name in self.slots)
        rate, start = float(group["lr"]), _unbias(group, state)
        if scalars["rates"] == 0:
            anchor.copy_(state.master)
        self._momentum(group, state, gradient, None)
        accumulator.add_(moment, alpha=rate / start)
        scalars["rates"] += rate
        if compressed is None:
            self.restore(group, state)
            return
        rates = scalars["rates"]
        # With rates of 0 nothing was accumulated, but momenta are the ranks' own all the same.
        mean = compressed(accumulator / rates if rates > 0 else moment / start)
        torch.mul(mean, start, out=moment).masked_fill_(variance == 0, 0.0)
        anchor.mul_(1 - rates * float(group["weight_decay"]))
        anchor.addcdiv_(moment, _root(group, state), value=-rates / start)
        state.master.copy_(anchor)
        accumulator.zero_()
        scalars["rates"] = 0.0

    def restore(self, group: Group, state: TensorState) -> None:
        if state.scalars["rates"] > 0:
            accumulator, divisor = state.slots["momentum_accumulator"], _root(group, state)
            torch.addcdiv(state.slots["anchor"], accumulator, divisor, value=-1.0, out=state.master)


def variance_interval(step: int, scaler: int) -> int:
    """Return the interval between updates of the variance that holds at `step`: 1, doubled after every `scaler` of them."""
    interval, last = 1, 0
    while True:
        last = (last // interval + scaler) * interval
        if step <= last:
            return interval
        interval *= 2


class LambRule(AdamRule):
    """1-bit LAMB (Li et al. 2021, https://arxiv.org/abs/2104.06069, algorithm 1, with DeepSpeed's limits): LAMB for
    `freeze_step` updates, then the momentum of 1-bit Adam, and a factor of the tensor's step that follows from the warm-up's:

        fresh = beta2 * fresh + (1 - beta2) * ((momentum - beta1 * last) / (1 - beta1))^2, with `last` the momentum before
        ratio = max over elements of (sqrt(variance) + eps) / (sqrt(fresh) + eps)
        weights -= lr * frozen * ratio * (momentum / (sqrt(variance) + eps) + weight_decay * weights)

    `frozen` is the average of the warm-up's factors, with decay `coeff_beta` and from 0, so that `freeze_step` should be well
    above `1 / (1 - coeff_beta)`; updates with a norm of 0 do not count. `fresh` starts as the variance at the freeze.
    `ratio` goes from `factor_min` to `factor_max`, and changes by at most its `factor_threshold`-th part in an update; with
    weight decay it is mixed with 1 by the part of the decay in the update. Bias correction is LAMB's; the ratio's variances
    are corrected too, each by its own number of updates. DeepSpeed's class scales momenta to one size before it sends all
    of them with one scale; here each tensor has scales of its own.
    """

    slots = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    scalars: ClassVar[Mapping[str, float]] = {**AdamRule.scalars, "lamb_coeff_freeze": 0.0, "last_factor": 0.0}

    def exact(self, group: Group, state: TensorState, gradient: torch.Tensor) -> None:
        scalars, shape = state.scalars, state.shape
        moment, variance = state.slots["exp_avg"].view(shape), state.slots["exp_avg_sq"].view(shape)
        step = scalars["step"]
        factor = float(lamb_step(state.master.view(shape), gradient.view(shape), moment, variance, step, group))
        scalars["last_factor"] = 0.0
        if factor > 0:
            beta = group["coeff_beta"]
            scalars["lamb_coeff_freeze"] = beta * scalars["lamb_coeff_freeze"] + (1 - beta) * factor

    def inexact(self, group: Group, state: TensorState, gradient: torch.Tensor, compressed: Compressed | None) -> None:
        scalars, (moment, variance, fresh) = state.scalars, (state.slots[name] for name in self.slots)
        if not scalars["last_factor"]:  # the first after the warm-up
            scalars["last_factor"] = 1.0
            fresh.copy_(variance)
        beta1, beta2 = map(float, group["betas"])
        last = moment.clone()
        self._momentum(group, state, gradient, compressed)
        rebuilt = torch.sub(moment, last, alpha=beta1, out=last).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(rebuilt, rebuilt, value=1 - beta2)
        divisor = lamb_root(variance, group)
        ratio, rate = float((divisor / lamb_root(fresh, group)).max()), float(group["lr"])
        if group["bias_correction"]:
            frozen = 1 - beta2 ** scalars["variance_updates"]
            ratio *= math.sqrt((1 - beta2 ** scalars["step"]) / frozen)
            rate *= math.sqrt(frozen) / _unbias(group, state)
        update = moment / divisor
        if group["weight_decay"] > 0:
            before = float(update.norm())
            update.add_(state.master, alpha=group["weight_decay"])
            part = min(1.0, before / max(float(update.norm()), 1e-38))
            ratio = ratio * part + 1 - part
        change, former = float(group["factor_threshold"]), scalars["last_factor"]
        ratio = min(max(ratio, float(group["factor_min"])), float(group["factor_max"]))
        scalars["last_factor"] = ratio = min(max(ratio, former * (1 - change)), former * (1 + change))
        # A tensor whose norms were 0 in the whole warm-up took its steps with factor 1.
        state.master.sub_(update, alpha=rate * ratio * (scalars["lamb_coeff_freeze"] or 1.0))
