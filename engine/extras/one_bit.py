"""1-bit Adam, 0/1 Adam and 1-bit LAMB: optimizers that send signs. Every rank updates whole tensors, by a rule.

[Note: rules]
A rule updates one parameter: it gets the whole parameter on every rank, and this rank's gradient. The phase of an update
determines what ranks exchange: "exact", the mean gradient; "compressed", the tensor that the rule passes to `compressed`;
"local", nothing. DeepSpeed's classes never correct the moments for starting at zero, as with `bias_correction: false`.

An element whose gradients were all exactly 0 until the variance was frozen has no variance to divide by, and signs cannot
encode 0, so only weight decay changes it.

[Note: the state of one rank]
Masters and shared slots are whole and equal on all ranks, and are in the store like other state. State that differs by rank
(compression errors and local slots) is in this object, and in checkpoints as one row per rank, which rank 0 writes with the
client state. At a different world size each rank starts from the mean of the rows, which preserves the sum of the errors;
server errors, whose chunks depend on the world size, start from zero.

The phase of a parameter depends on its own number of updates: as with any optimizer, a step skips it if no rank has a
gradient. A rank that fails also aborts the exchanges in which other ranks wait.

[Note: two phases]
The mean of tensors sent as signs, with error feedback (https://arxiv.org/abs/2102.02888, section 4); rank r averages
chunk r.
1. Each rank adds the worker error (the compression error of its last messages), sends each chunk as signs and a scale to the
   rank that averages it, and keeps the new error.
2. That rank sums the messages in rank order, divides, adds the server error (the compression error of its last mean), sends
   the mean as signs and a scale to all, and keeps the new error.
All ranks decode the same bytes, so their values are bit-identical. The scale is the mean of absolute values, for which the
compression error is smaller than the message, so errors do not grow (https://arxiv.org/abs/1901.09847, lemma 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch

from zstore.format import optimizer_array, round_up
from zstore.io.memory import as_torch
from zstore.ranks.world import World, on_device

from ..optim.changes import Changes
from ..optim.kernel import FusedAdam, Kernel, ParameterStep, Scalars
from ..optim.rules import Kind, Rule, Stepper, register, whole_gradient
from ..optim.state import OptimizerState
from ..params.record import ParameterRecord
from ..plan.plan import Slots, TensorSlot
from .whole_tensors import lamb_root, lamb_step

Phase = Literal["exact", "compressed", "local"]
Group = Mapping[str, Any]
"""Settings of a parameter group."""
Compressed = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean over ranks of a tensor [numel], sent as signs and scales with error feedback, bit-identical on all
ranks."""

_SIGNS_PER_BYTE = 8
_SCALE_BYTES = 4


@dataclass
class TensorState:
    """The state of one parameter on this rank. All tensors are fp32, 1-D [numel], changed in place."""

    group: Group
    scalars: Scalars
    master: torch.Tensor
    slots: dict[str, torch.Tensor]
    """Tensors by the names of the rule's `slots` and `local_slots`; initially zero."""

    def update_momentum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Update the momentum with the gradient, and return the momentum."""
        beta1 = self.group["betas"][0]
        return self.slots["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)

    def set_momentum(self, values: torch.Tensor) -> None:
        """Set the momentum, but to 0 in elements that have no variance."""
        self.slots["exp_avg"].copy_(values).masked_fill_(self.slots["exp_avg_sq"] == 0, 0.0)

    def bias_correction(self) -> float:
        """Return the factor by which the momentum is too small for having started at zero."""
        return 1 - self.group["betas"][0] ** self.scalars["step"] if self.group["bias_correction"] else 1.0

    def divisor(self) -> torch.Tensor:
        """Return the divisor of the momentum, as a new tensor."""
        num_updates, beta2 = self.scalars["variance_updates"], self.group["betas"][1]
        root = math.sqrt(1 - beta2**num_updates) if self.group["bias_correction"] else 1.0
        return self.slots["exp_avg_sq"].sqrt().div_(root).add_(self.group["eps"])

    def adamw_step(self) -> None:
        """Take an AdamW step with the current moments."""
        rate = float(self.group["lr"])
        self.master.mul_(1 - rate * self.group["weight_decay"])
        self.master.addcdiv_(self.slots["exp_avg"], self.divisor(), value=-rate / self.bias_correction())


class AdamRule(Kernel):
    """1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888, algorithm 1): AdamW for `freeze_step` updates, then
    AdamW with a frozen variance, so that ranks send only the momentum:

        momentum = compressed(beta1 * momentum + (1 - beta1) * gradient)
        weights -= lr * (momentum / (1 - beta1^t) / (sqrt(variance / (1 - beta2^f)) + eps) + weight_decay * weights)

    in update `t`, with `f` the number of updates of the variance. Without `bias_correction` both divisors are 1.
    """

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    local_slots: ClassVar[tuple[str, ...]] = ()
    """Slots that differ between ranks, and therefore are not in the store."""
    scalar_names: ClassVar[tuple[str, ...]] = ("step", "variance_updates")
    """Names of the scalars of the state, initially 0; `step` counts the updates."""

    def initial(self) -> Scalars:
        return dict.fromkeys(self.scalar_names, 0.0)

    def start(self, group: Group, scalars: Scalars) -> ParameterStep:
        """Return the scalars; `update` takes and counts the step."""
        return ParameterStep(scalars)

    def phase(self, group: Group, step: int) -> Phase:
        """Return the phase of update number `step`, from 1."""
        return "exact" if step <= group["freeze_step"] else "compressed"

    def update(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        """Take one update. `gradient` [numel], fp32, may be modified; it is the mean over ranks in phase "exact", else this
        rank's gradient. `compressed` is called once in phase "compressed", otherwise never."""
        scalars = state.scalars
        # State loaded from Adam has only the step count, since every update also updated the variance.
        scalars["variance_updates"] = scalars["variance_updates"] or scalars["step"]
        scalars["step"] += 1
        if self.phase(state.group, int(scalars["step"])) == "exact":
            scalars["variance_updates"] += 1
            self.exact_update(state, gradient)
        else:
            self.compressed_update(state, gradient, compressed)

    def exact_update(self, state: TensorState, gradient: torch.Tensor) -> None:
        """Take an update with the mean gradient: until the first compressed update, bit-identical to the engine's AdamW."""
        group, step, variance = state.group, state.scalars["step"], state.slots["exp_avg_sq"]
        if state.scalars["variance_updates"] == step:
            kernel = FusedAdam(decoupled=True, corrects=group["bias_correction"]).start(group, {"step": step - 1})
            kernel.tiles([state.master], [gradient], [[state.slots["exp_avg"], variance]])
            return
        state.update_momentum(gradient)
        variance.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
        state.adamw_step()

    def compressed_update(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        """Take an update with this rank's gradient."""
        state.set_momentum(compressed(state.update_momentum(gradient)))
        state.adamw_step()

    def restore(self, state: TensorState) -> None:
        """Set the master of a loaded state from the rank's local slots, if masters differ by rank."""


class ZeroOneRule(AdamRule):
    """0/1 Adam (Lu et al. 2022, https://arxiv.org/abs/2202.06009, algorithm 1, with DeepSpeed's choice of steps): AdamW
    that sends signs from the start, and later not in every step.

    Until update `var_freeze_step`, gradients are exact at an interval that doubles after `var_update_scaler` exact updates;
    only these change the variance. In others `momentum = beta1 * momentum + compressed((1 - beta1) * gradient)`. Afterwards
    each rank takes local steps, and the ranks synchronize at another interval: it starts at 1, doubles every
    `local_step_scaler` updates and is at most `local_step_clipper`. With `rates`, the sum of the learning rates since the last
    synchronization, and `anchor`, the weights at that time:

        momentum = beta1 * momentum + (1 - beta1) * gradient
        accumulator += lr * momentum;  weights = anchor - accumulator / divisor              (local steps)
        momentum = compressed(accumulator / rates)
        weights = anchor - rates * (momentum / divisor + weight_decay * anchor)              (synchronization)

    `divisor` and bias correction are those of 1-bit Adam. DeepSpeed adds weight decay to the momentum when synchronizing.
    """

    slots = ("exp_avg_sq", "anchor")
    local_slots = ("exp_avg", "momentum_accumulator")
    scalar_names = (*AdamRule.scalar_names, "rates")

    def phase(self, group: Group, step: int) -> Phase:
        frozen, interval, last_update = group["var_freeze_step"], 1, group["var_update_scaler"]
        if step > frozen:
            doublings = min((step - frozen - 1) // group["local_step_scaler"], 62)
            return "local" if step % min(group["local_step_clipper"], 2**doublings) else "compressed"
        while step > last_update:
            interval *= 2
            last_update = (last_update // interval + group["var_update_scaler"]) * interval
        return "compressed" if step % interval else "exact"

    def compressed_update(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        group, scalars, moment, anchor = state.group, state.scalars, state.slots["exp_avg"], state.slots["anchor"]
        if scalars["step"] <= group["var_freeze_step"]:
            # The change of the momentum is sent, so that errors have the same scale when momenta are sent later.
            change = compressed(gradient.mul_(1 - group["betas"][0]))
            state.set_momentum(moment.mul_(group["betas"][0]).add_(change))
            state.adamw_step()
            return
        if scalars["rates"] == 0:
            anchor.copy_(state.master)
        state.set_momentum(state.update_momentum(gradient))
        rate, correction, accumulator = float(group["lr"]), state.bias_correction(), state.slots["momentum_accumulator"]
        accumulator.add_(moment, alpha=rate / correction)
        scalars["rates"] = rates = scalars["rates"] + rate
        if self.phase(group, int(scalars["step"])) == "local":
            self.restore(state)
            return
        # If all rates were 0, nothing was accumulated, but momenta still differ by rank.
        state.set_momentum(compressed(accumulator / rates if rates > 0 else moment / correction) * correction)
        anchor.mul_(1 - rates * group["weight_decay"]).addcdiv_(moment, state.divisor(), value=-rates / correction)
        state.master.copy_(anchor)
        accumulator.zero_()
        scalars["rates"] = 0.0

    def restore(self, state: TensorState) -> None:
        if state.scalars["rates"] > 0:
            anchor, accumulator = state.slots["anchor"], state.slots["momentum_accumulator"]
            torch.addcdiv(anchor, accumulator, state.divisor(), value=-1.0, out=state.master)


class LambRule(AdamRule):
    """1-bit LAMB (Li et al. 2021, https://arxiv.org/abs/2104.06069, algorithm 1, with DeepSpeed's limits): LAMB for
    `freeze_step` updates, then the momentum of 1-bit Adam, and a factor of the tensor's step that is derived from the
    warm-up's factors, where `previous` is the momentum before the update:

        fresh = beta2 * fresh + (1 - beta2) * ((momentum - beta1 * previous) / (1 - beta1))^2
        ratio = max over elements of (sqrt(variance) + eps) / (sqrt(fresh) + eps)
        weights -= lr * frozen * ratio * (momentum / (sqrt(variance) + eps) + weight_decay * weights)

    `frozen` is the average of the warm-up's factors, with decay `coeff_beta` and starting at 0; updates with a norm of 0 do
    not count. `fresh` starts as the variance at the freeze. `ratio` is clamped to [`factor_min`, `factor_max`], and changes by
    at most a fraction `factor_threshold` per update; with weight decay it is interpolated with 1 by the share of the decay in
    the update. Bias correction is LAMB's; the ratio's variances are corrected too, each by its own number of updates.
    """

    slots = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    scalar_names = (*AdamRule.scalar_names, "lamb_coeff_freeze", "last_factor")

    def exact_update(self, state: TensorState, gradient: torch.Tensor) -> None:
        scalars, (moment, variance, _) = state.scalars, (state.slots[name] for name in self.slots)
        factor = float(lamb_step(state.master, gradient, moment, variance, scalars["step"], state.group))
        scalars["last_factor"] = 0.0
        if factor > 0:
            beta = state.group["coeff_beta"]
            scalars["lamb_coeff_freeze"] = beta * scalars["lamb_coeff_freeze"] + (1 - beta) * factor

    def compressed_update(self, state: TensorState, gradient: torch.Tensor, compressed: Compressed) -> None:
        group, scalars, (moment, variance, fresh) = state.group, state.scalars, (state.slots[n] for n in self.slots)
        if not scalars["last_factor"]:  # the first after the warm-up
            scalars["last_factor"] = 1.0
            fresh.copy_(variance)
        (beta1, beta2), rate, previous = group["betas"], float(group["lr"]), moment.clone()
        state.set_momentum(compressed(state.update_momentum(gradient)))
        gradient_estimate = torch.sub(moment, previous, alpha=beta1, out=previous).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient_estimate, gradient_estimate, value=1 - beta2)
        divisor = lamb_root(variance, group)
        ratio = float((divisor / lamb_root(fresh, group)).max())
        if group["bias_correction"]:
            frozen = 1 - beta2 ** scalars["variance_updates"]
            ratio *= math.sqrt((1 - beta2 ** scalars["step"]) / frozen)
            rate *= math.sqrt(frozen) / state.bias_correction()
        update = moment / divisor
        if group["weight_decay"] > 0:
            norm_before = float(update.norm())
            update.add_(state.master, alpha=group["weight_decay"])
            fraction = min(1.0, norm_before / max(float(update.norm()), 1e-38))
            ratio = ratio * fraction + 1 - fraction
        change, last_factor = group["factor_threshold"], scalars["last_factor"]
        ratio = min(max(ratio, group["factor_min"]), group["factor_max"])
        scalars["last_factor"] = ratio = min(max(ratio, last_factor * (1 - change)), last_factor * (1 + change))
        # A tensor whose norms were 0 throughout the warm-up is updated with factor 1.
        state.master.sub_(update, alpha=rate * ratio * (scalars["lamb_coeff_freeze"] or 1.0))


def chunk_numel(numel: int, world_size: int) -> int:
    """Return the number of elements of a tensor that each rank averages, padded to whole bytes of signs."""
    return round_up(-(-numel // world_size), _SIGNS_PER_BYTE)


def encode(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return `rows` [k, n] (fp32, n a multiple of 8) as bytes [k, n / 8 + 4]: signs, lowest bit first and with zero as
    positive, then the scale, computed over the first `counts` elements of each row; the others are padding."""
    bits = (rows >= 0).view(rows.shape[0], -1, _SIGNS_PER_BYTE).to(torch.uint8)
    shifts = torch.arange(_SIGNS_PER_BYTE, dtype=torch.uint8, device=rows.device)
    signs = (bits << shifts).sum(dim=2, dtype=torch.uint8)
    scales = rows.abs().sum(dim=1) / on_device([max(count, 1) for count in counts], torch.float32, rows.device)
    return torch.cat([signs, scales.view(-1, 1).view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Return the values [k, n], fp32, of bytes [k, n / 8 + 4]: plus or minus the row's scale."""
    scales = encoded[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    shifts = torch.arange(_SIGNS_PER_BYTE, dtype=torch.uint8, device=encoded.device)
    bits = (encoded[:, :-_SCALE_BYTES].unsqueeze(2) >> shifts) & 1
    return torch.where(bits.view(encoded.shape[0], -1).bool(), scales, -scales)


def compressed_mean(world: World, errors: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` [numel], fp32, over the ranks by both phases, bit-identical on all ranks (all ranks).
    Updates `errors`, fp32: worker_error [numel] and server_error [chunk_numel]. See [Note: two phases]."""
    if world.world_size == 1:
        return values
    worker, server = errors["worker_error"], errors["server_error"]
    ranks, numel, chunk = world.world_size, values.numel(), server.numel()
    counts = [min(max(numel - rank * chunk, 0), chunk) for rank in range(ranks)]
    matrix = torch.zeros(ranks, chunk, device=values.device)
    torch.add(values, worker, out=matrix.view(-1)[:numel])
    sent = encode(matrix, counts)
    torch.sub(matrix.view(-1)[:numel], decode(sent).view(-1)[:numel], out=worker)
    received = torch.empty_like(sent)
    world.all_to_all(received, sent, kind="all_to_all").wait()
    mean, count = torch.zeros_like(server), counts[world.rank]
    for row in decode(received):  # in rank order on every device
        mean += row
    mean.div_(ranks).add_(server)[count:] = 0
    encoded = encode(mean.view(1, -1), [count])
    torch.sub(mean, decode(encoded).view(-1), out=server)[count:] = 0
    world.all_gather(received.view(-1), encoded.view(-1))
    return decode(received).view(-1)[:numel]


def error_numels(numel: int, world_size: int) -> dict[str, int]:
    """Return the elements of a rank's compression errors for a tensor, by name; empty if nothing is sent."""
    if world_size == 1 or not numel:
        return {}
    return {"worker_error": numel, "server_error": chunk_numel(numel, world_size)}


class OneBitStep(Stepper):
    """The update for optimizers that send signs (all ranks). See [Note: the state of one rank]."""

    keeps_state = owns_gradients = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState, world: World) -> None:
        self._groups = client.param_groups
        self._state = state
        self._world = world
        self.name = type(client).__name__
        self.local: dict[ParameterRecord, dict[str, torch.Tensor]] = {}
        """State by parameter that differs between ranks, 1-D."""
        for record in (record for record in state.scalars if record.numel):
            sizes = dict.fromkeys(self._rule_of(record)[0].local_slots, record.numel)
            sizes |= error_numels(record.numel, world.world_size)
            self.local[record] = {name: torch.zeros(size, device=record.full.device) for name, size in sizes.items()}

    def _rule_of(self, record: ParameterRecord) -> tuple[AdamRule, int]:
        """Return the rule of a parameter, and the index of its group."""
        return cast("tuple[AdamRule, int]", self._state.kernel_of(record))

    def averaged(self) -> set[ParameterRecord]:
        records = set()
        for record, scalars in self._state.scalars.items():
            rule, group = self._rule_of(record)
            if rule.phase(self._groups[group], int(scalars["step"]) + 1) == "exact":
                records.add(record)
        return records

    def agreed_norm(self, norm: float) -> float:
        """Return the root mean square of the ranks' norms, since their gradients may differ."""
        local_norm = torch.tensor([norm], dtype=torch.float64, device=self._world.device)
        norms = local_norm.new_empty(self._world.world_size)
        self._world.all_gather(norms, local_norm, kind="control")
        return float(norms.square().mean().sqrt())

    def run(self, changes: Changes) -> None:
        records = [record for record in changes.records if record.numel]

        def step() -> None:
            for record in records:
                rule, state = self._load(record, changes.settings.groups)
                gradient = whole_gradient(self._state, changes, record, state.master)
                rule.update(state, gradient, partial(compressed_mean, self._world, self.local[record]))
                self._store_back(record, state)

        try:
            with torch.no_grad():
                self._state.change_in_one_pass([self._state.array_names[record] for record in records], step)
        except Exception as error:
            self._world.watch.report_error(error)  # other ranks wait in an exchange
            raise

    def _load(self, record: ParameterRecord, groups: Sequence[Mapping[str, Any]]) -> tuple[AdamRule, TensorState]:
        """Return a parameter's rule and the state that it updates."""
        rule, group = self._rule_of(record)
        memory = self._state.store.memory
        slots = {name: as_torch(memory(optimizer_array(name, record.name))) for name in rule.slots} | self.local[record]
        scalars = {**rule.initial(), **self._state.scalars[record]}  # state of AdamW has only the step count
        return rule, TensorState(groups[group], scalars, self._state.whole_master(record), slots)

    def _store_back(self, record: ParameterRecord, state: TensorState) -> None:
        self._state.scalars[record] = state.scalars
        if not self._state.is_master(record):
            self._state.transfers.copy_into(record.owned(), state.master)

    def state(self) -> dict[str, Any]:
        """Return the state that differs between ranks as rows by parameter name on rank 0, {} on other ranks (all ranks)."""
        result: dict[str, Any] = {}
        for record, local in self.local.items():
            entry = result[record.name] = {}
            for name, tensor in local.items():
                rows = tensor.new_empty(self._world.world_size, tensor.numel())
                self._world.all_gather(rows.view(-1), tensor)
                if self._world.rank == 0:
                    entry[name] = rows.cpu()
        return result

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for record, local in self.local.items():
                for name, target in local.items():
                    rows = saved.get(record.name, {}).get(name, torch.zeros(1, target.numel()))
                    row = rows[self._world.rank] if len(rows) == self._world.world_size else rows.mean(dim=0)
                    target.copy_(row if row.shape == target.shape else torch.zeros_like(target))
                rule, state = self._load(record, self._groups)
                rule.restore(state)
                self._store_back(record, state)


class OneBitAdam(torch.optim.Optimizer):
    """Parameter groups of 1-bit Adam, created from a config."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, since the engine takes the steps."""


class ZeroOneAdam(OneBitAdam):
    """Parameter groups of 0/1 Adam."""


class OneBitLamb(OneBitAdam):
    """Parameter groups of 1-bit LAMB."""


RULES: dict[Kind, AdamRule] = {OneBitAdam: AdamRule(), ZeroOneAdam: ZeroOneRule(), OneBitLamb: LambRule()}


def _slots(kernel: Kernel, shape: Sequence[int], world_size: int) -> Slots:
    """Return a rank's arrays for a parameter of `shape`."""
    sent = (TensorSlot(name, (numel,)) for name, numel in error_numels(math.prod(shape), world_size).items())
    return (*kernel.slots, *cast("AdamRule", kernel).local_slots, *sent)


register(
    Rule(
        kinds=tuple(RULES),
        kernel=lambda kind, _: RULES[kind],
        stepper=OneBitStep,
        slots=_slots,
        make=lambda kind, groups, arguments, _: kind(groups, dict(arguments)),
    )
)
