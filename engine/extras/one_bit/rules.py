"""The rules of 1-bit Adam, 0/1 Adam and 1-bit LAMB: one update of one parameter.

A rule sees whole parameters on every rank, and this rank's own gradient. The phase of an update says what ranks exchange in
it: "exact", gradients are averaged as for any optimizer; "compressed", the tensor that the rule gives to `compressed`;
"local", nothing. DeepSpeed's classes never correct the moments for starting at zero, as `bias_correction: false`.

An element whose gradients were all exactly 0 until the variance is frozen has no variance to divide by, and signs cannot say
0: it changes by weight decay alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ...optim.kernel import FusedAdam, Kernel, ParameterStep, Scalars, WholeStep
from ...optim.lamb import lamb_root, lamb_step

Phase = Literal["exact", "compressed", "local"]
Group = Mapping[str, Any]
"""The settings of a parameter's group."""
Compressed = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean over ranks of a tensor [numel] sent as signs and scales with error feedback: the same bits on every rank."""


@dataclass
class TensorState:
    """The state of one parameter on this rank. All tensors are fp32, 1-D [numel], changed in place."""

    group: Group
    scalars: Scalars
    master: torch.Tensor
    slots: dict[str, torch.Tensor]
    """By the names of the rule's `slots` and `own_slots`; zero at first."""

    def follow(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the momentum, once it has the gradient."""
        beta1 = self.group["betas"][0]
        return self.slots["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)

    def set_momentum(self, values: torch.Tensor) -> None:
        """Set the momentum of the elements that have a variance."""
        self.slots["exp_avg"].copy_(values).masked_fill_(self.slots["exp_avg_sq"] == 0, 0.0)

    def unbias(self) -> float:
        """Return the bias correction of the momentum, since it started at zero."""
        return 1 - self.group["betas"][0] ** self.scalars["step"] if self.group["bias_correction"] else 1.0

    def divisor(self) -> torch.Tensor:
        """Return the divisor of the momentum: a new tensor."""
        seen, beta2 = self.scalars["variance_updates"], self.group["betas"][1]
        root = math.sqrt(1 - beta2**seen) if self.group["bias_correction"] else 1.0
        return self.slots["exp_avg_sq"].sqrt().div_(root).add_(self.group["eps"])

    def descend(self) -> None:
        """Take one step of AdamW with the moments as they are."""
        rate = float(self.group["lr"])
        self.master.mul_(1 - rate * self.group["weight_decay"])
        self.master.addcdiv_(self.slots["exp_avg"], self.divisor(), value=-rate / self.unbias())


class AdamRule(Kernel):
    """1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888, algorithm 1): AdamW for `freeze_step` updates, and then
    with a frozen variance, so that the ranks send the momentum alone:

        momentum = compressed(beta1 * momentum + (1 - beta1) * gradient)
        weights -= lr * (momentum / (1 - beta1^t) / (sqrt(variance / (1 - beta2^f)) + eps) + weight_decay * weights)

    in update `t`, with `f` the number of updates of the variance. Without `bias_correction` both divisors are 1.
    """

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    own_slots: ClassVar[tuple[str, ...]] = ()
    """Slots that differ from rank to rank, and so are not in the store."""
    numbers: ClassVar[tuple[str, ...]] = ("step", "variance_updates")
    """Scalars that it keeps, from 0; `step` counts the updates."""

    def initial(self) -> Scalars:
        return dict.fromkeys(self.numbers, 0.0)

    def start(self, group: Group, scalars: Scalars) -> ParameterStep:
        """The step was taken, and counted, by `update`."""
        return WholeStep(scalars)

    def phase(self, group: Group, step: int) -> Phase:
        """Return the phase of update number `step`, from 1."""
        return "exact" if step <= group["freeze_step"] else "compressed"

    def update(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        """Take one update: `gradient` [numel], fp32, may be changed; it is the mean over ranks in the phase "exact", else this
        rank's own. `compressed` is called once in the phase "compressed" and not in others."""
        scalars = state.scalars
        # The state of an Adam has the step count alone: its variance is of every update.
        scalars["variance_updates"] = scalars["variance_updates"] or scalars["step"]
        scalars["step"] += 1
        if self.phase(state.group, int(scalars["step"])) == "exact":
            scalars["variance_updates"] += 1
            self.exact(state, gradient)
        else:
            self.inexact(state, gradient, compressed)

    def exact(self, state: TensorState, gradient: torch.Tensor) -> None:
        """Take an update with the mean gradient: until the first of another kind, the engine's AdamW, its bits."""
        group, step, variance = state.group, state.scalars["step"], state.slots["exp_avg_sq"]
        if state.scalars["variance_updates"] == step:
            kernel = FusedAdam(decoupled=True, corrects=group["bias_correction"]).start(group, {"step": step - 1})
            kernel.tile(state.master, gradient, [state.slots["exp_avg"], variance])
            return
        state.follow(gradient)
        variance.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
        state.descend()

    def inexact(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        """Take an update with the rank's own gradient."""
        state.set_momentum(compressed(state.follow(gradient)))
        state.descend()

    def restore(self, state: TensorState) -> None:
        """Set the master of a loaded state from the rank's own slots, if it differs from rank to rank."""


class ZeroOneRule(AdamRule):
    """0/1 Adam (Lu et al. 2022, https://arxiv.org/abs/2202.06009, algorithm 1, with DeepSpeed's choice of steps): AdamW that
    sends signs from the start, and later not in every step.

    Until update `var_freeze_step`, gradients are exact at an interval that doubles after `var_update_scaler` of them; they
    alone change the variance. In others `momentum = beta1 * momentum + compressed((1 - beta1) * gradient)`. After it, each
    rank takes steps of its own, and the ranks meet at another interval: it starts at 1, doubles every `local_step_scaler`
    updates and is at most `local_step_clipper`. With the sum of the rates since the ranks met as `rates`, and the weights
    that they had then as `anchor`:

        momentum = beta1 * momentum + (1 - beta1) * gradient
        accumulator += lr * momentum;  weights = anchor - accumulator / divisor              (own steps)
        momentum = compressed(accumulator / rates)
        weights = anchor - rates * (momentum / divisor + weight_decay * anchor)              (when they meet)

    `divisor` and bias correction are those of 1-bit Adam. DeepSpeed lets weight decay into the momentum when ranks meet.
    """

    slots = ("exp_avg_sq", "anchor")
    own_slots = ("exp_avg", "momentum_accumulator")
    numbers = (*AdamRule.numbers, "rates")

    def phase(self, group: Group, step: int) -> Phase:
        frozen, interval, last = group["var_freeze_step"], 1, group["var_update_scaler"]
        if step > frozen:
            doublings = min((step - frozen - 1) // group["local_step_scaler"], 62)
            return "local" if step % min(group["local_step_clipper"], 2**doublings) else "compressed"
        while step > last:
            interval *= 2
            last = (last // interval + group["var_update_scaler"]) * interval
        return "compressed" if step % interval else "exact"

    def inexact(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        group, scalars, moment, anchor = state.group, state.scalars, state.slots["exp_avg"], state.slots["anchor"]
        if scalars["step"] <= group["var_freeze_step"]:
            # Sent as the gain of the momentum, so that the errors have its unit when momenta are sent.
            gain = compressed(gradient.mul_(1 - group["betas"][0]))
            state.set_momentum(moment.mul_(group["betas"][0]).add_(gain))
            state.descend()
            return
        if scalars["rates"] == 0:
            anchor.copy_(state.master)
        state.set_momentum(state.follow(gradient))
        rate, start, accumulator = float(group["lr"]), state.unbias(), state.slots["momentum_accumulator"]
        accumulator.add_(moment, alpha=rate / start)
        scalars["rates"] = rates = scalars["rates"] + rate
        if self.phase(group, int(scalars["step"])) == "local":
            self.restore(state)
            return
        # With rates of 0 nothing was accumulated, but momenta are the ranks' own all the same.
        state.set_momentum(compressed(accumulator / rates if rates > 0 else moment / start) * start)
        anchor.mul_(1 - rates * group["weight_decay"]).addcdiv_(moment, state.divisor(), value=-rates / start)
        state.master.copy_(anchor)
        accumulator.zero_()
        scalars["rates"] = 0.0

    def restore(self, state: TensorState) -> None:
        if state.scalars["rates"] > 0:
            anchor, accumulator = state.slots["anchor"], state.slots["momentum_accumulator"]
            torch.addcdiv(anchor, accumulator, state.divisor(), value=-1.0, out=state.master)


class LambRule(AdamRule):
    """1-bit LAMB (Li et al. 2021, https://arxiv.org/abs/2104.06069, algorithm 1, with DeepSpeed's limits): LAMB for
    `freeze_step` updates, then the momentum of 1-bit Adam, and a factor of the tensor's step that follows from the warm-up's:

        fresh = beta2 * fresh + (1 - beta2) * ((momentum - beta1 * last) / (1 - beta1))^2, with `last` the momentum before
        ratio = max over elements of (sqrt(variance) + eps) / (sqrt(fresh) + eps)
        weights -= lr * frozen * ratio * (momentum / (sqrt(variance) + eps) + weight_decay * weights)

    `frozen` is the average of the warm-up's factors, with decay `coeff_beta` and from 0; updates with a norm of 0 do not
    count. `fresh` starts as the variance at the freeze. `ratio` goes from `factor_min` to `factor_max`, and changes by at most
    its `factor_threshold`-th part in an update; with weight decay it is mixed with 1 by the part of the decay in the update.
    Bias correction is LAMB's; the ratio's variances are corrected too, each by its own number of updates.
    """

    slots = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    numbers = (*AdamRule.numbers, "lamb_coeff_freeze", "last_factor")

    def exact(self, state: TensorState, gradient: torch.Tensor) -> None:
        scalars, (moment, variance, _) = state.scalars, (state.slots[name] for name in self.slots)
        factor = float(lamb_step(state.master, gradient, moment, variance, scalars["step"], state.group))
        scalars["last_factor"] = 0.0
        if factor > 0:
            beta = state.group["coeff_beta"]
            scalars["lamb_coeff_freeze"] = beta * scalars["lamb_coeff_freeze"] + (1 - beta) * factor

    def inexact(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        group, scalars, (moment, variance, fresh) = state.group, state.scalars, (state.slots[n] for n in self.slots)
        if not scalars["last_factor"]:  # the first after the warm-up
            scalars["last_factor"] = 1.0
            fresh.copy_(variance)
        (beta1, beta2), rate, last = group["betas"], float(group["lr"]), moment.clone()
        state.set_momentum(compressed(state.follow(gradient)))
        rebuilt = torch.sub(moment, last, alpha=beta1, out=last).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(rebuilt, rebuilt, value=1 - beta2)
        divisor = lamb_root(variance, group)
        ratio = float((divisor / lamb_root(fresh, group)).max())
        if group["bias_correction"]:
            frozen = 1 - beta2 ** scalars["variance_updates"]
            ratio *= math.sqrt((1 - beta2 ** scalars["step"]) / frozen)
            rate *= math.sqrt(frozen) / state.unbias()
        update = moment / divisor
        if group["weight_decay"] > 0:
            before = float(update.norm())
            update.add_(state.master, alpha=group["weight_decay"])
            part = min(1.0, before / max(float(update.norm()), 1e-38))
            ratio = ratio * part + 1 - part
        change, former = group["factor_threshold"], scalars["last_factor"]
        ratio = min(max(ratio, group["factor_min"]), group["factor_max"])
        scalars["last_factor"] = ratio = min(max(ratio, former * (1 - change)), former * (1 + change))
        # A tensor whose norms were 0 in the whole warm-up took its steps with factor 1.
        state.master.sub_(update, alpha=rate * ratio * (scalars["lamb_coeff_freeze"] or 1.0))
