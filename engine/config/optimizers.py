"""The sections `optimizer` and `scheduler`: each optimizer and schedule that a config may name, with its arguments.

The schedules have DeepSpeed's keys and defaults.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from .keys import Notice, Section, Status, option, status_of
from .values import Auto, BelowOne, Bool, Count, Expects, OneOf, Position, Positive, Real, expected

_PASS_TO = "to initialize(optimizer=...) and leave this section out"
_PASS_OBJECT = f"pass the object {_PASS_TO}; it works only at stage 0 without offload, as it needs whole tensors"

ALIASES = {
    **dict.fromkeys(("fusedadam", "cpuadam", "deepspeedcpuadam"), "Adam"),
    **dict.fromkeys(("cpuadagrad", "deepspeedcpuadagrad"), "Adagrad"),
    **dict.fromkeys(("fusedlion", "cpulion", "deepspeedcpulion"), "Lion"),
    "fusedlamb": "Lamb",
}
"""DeepSpeed's class names, in lower case, and the equivalent type."""

_UNSUPPORTED = {
    "lbfgs": "it calls the model again within its step, which the engine cannot do; train with it in plain torch",
    "sparseadam": "it needs sparse gradients, which are not supported",
}

Moments = Literal["fp32", "bf16"]
_DECAYING_AVERAGES = frozenset({"exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "acc_delta", "exp_inf"})
_FP32_IF_PRESENT = {"square_avg": {"grad_avg"}, "exp_avg_sq": {"max_exp_avg_sq", "max_exp_avg_sqs"}}
"""Slots that stay in fp32 if one of these slots is present: centered RMSprop subtracts the square of a mean, which must
not be larger, and amsgrad's maximum would retain every upward rounding."""


def reduced_slots(slots: Iterable[str]) -> set[str]:
    """Return the slots of an optimizer that bf16 moments apply to: decaying averages, in which rounding errors do not
    accumulate."""
    all_slots = set(slots)
    return {slot for slot in all_slots & _DECAYING_AVERAGES if not all_slots & _FP32_IF_PRESENT.get(slot, set())}


Betas = Annotated[tuple[BelowOne, BelowOne], Expects("two numbers, each from 0 to below 1")]
Pair = Annotated[tuple[Real, Real], Expects("two numbers of at least 0")]


def unsupported_advice(name: object) -> str:
    """Return the end of the message about an optimizer that configs cannot name."""
    reason = _UNSUPPORTED.get(name.lower()) if isinstance(name, str) else None
    return "; " + (reason or f"for any other optimizer {_PASS_OBJECT}")


class OptimizerParams(Section):
    """Arguments of every optimizer."""

    whole_tensors: ClassVar[bool] = False
    """Whether its step needs whole tensors, which are exchanged between ranks."""
    replicates_state: ClassVar[bool] = False
    """Whether every rank holds a full copy of the state, and its own gradients, which have no common norm to clip by."""

    lr: Real | Auto | None = option(None)
    """Learning rate."""
    fp32_optimizer_states: Bool = option(True)
    """Keep moments in fp32; false: in bf16, as `zstore.moments` "bf16" does."""

    @classmethod
    def conflicts(cls, settings: Any, kind: str) -> Iterator[Notice]:
        """Yield errors of settings that cannot be combined with the optimizer `kind`."""
        return iter(())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, by name: the keys that take effect."""
        fields = type(self).model_fields.items()
        arguments = {name: getattr(self, name) for name, field in fields if status_of(field)[0] is Status.ACTIVE}
        del arguments["fp32_optimizer_states"]  # not an argument of the class
        return arguments


class MomentParams(OptimizerParams):
    """Arguments of optimizers with two moments."""

    lr: Real | Auto = option(1e-3)
    """Learning rate; the default is DeepSpeed's."""
    betas: Betas | Auto = option((0.9, 0.999))
    """Decay rates of the two moments."""
    eps: Real | Auto = option(1e-8)
    """Added to the denominator."""


class AdamParams(MomentParams):
    """Arguments of Adam and AdamW."""

    weight_decay: Real | Auto | None = option(None)
    """Weight decay per step, multiplied by lr. Unset: 0, but 0.01 (torch's default) for AdamW with torch_adam."""
    adam_w_mode: Bool = option(True)
    """Decoupled weight decay (AdamW) for type Adam too; false: weight decay is part of the gradient."""
    torch_adam: Bool = option(False)
    """Use torch's own Adam. The update is torch's in any case; this only selects the default of weight_decay."""
    bias_correction: Bool = option(True)
    """Correct the moments for starting at zero; false: use them uncorrected."""
    amsgrad: Bool = option(False)
    """Use the running maximum of the second moment, which takes 4 more bytes per parameter."""
    maximize: Bool = option(False)
    """Maximize the loss instead of minimizing it."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, and `bias_correction` if it is off."""
        arguments = super().arguments()
        for name in ("adam_w_mode", "torch_adam", *(("bias_correction",) if self.bias_correction else ())):
            del arguments[name]
        return arguments


_TORCH_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "lr": (Real | Auto, "Learning rate; the default is torch's."),
    "betas": (Betas | Auto, "Decay rates of the two moments."),
    "eps": (Real | Auto, "Added to the denominator."),
    "weight_decay": (Real | Auto, "Weight decay, as part of the gradient."),
    "momentum": (Real, "Momentum; 0: no momentum is stored."),
    "dampening": (Real, "Dampening of the momentum."),
    "nesterov": (Bool, "Use Nesterov momentum; needs momentum, and no dampening."),
    "lr_decay": (Real, "The learning rate is lr / (1 + (step - 1) x lr_decay)."),
    "initial_accumulator_value": (Real, "Initial value of the sum of squares."),
    "alpha": (Real, "Decay rate of the mean of squares."),
    "centered": (Bool, "Divide by an estimate of the variance, for which the mean of gradients is stored too."),
    "momentum_decay": (Real, "Decay rate of the momentum schedule."),
    "decoupled_weight_decay": (Bool, "Decouple weight decay, as in AdamW."),
    "rho": (BelowOne, "Decay rate of the two means of squares."),
    "lambd": (Real, "Decay of the weights and of the learning rate."),
    "t0": (Real, "Step at which averaging starts."),
    "etas": (Pair, "Factors by which a step size shrinks (below 1) and grows (above 1)."),
    "step_sizes": (Pair, "Smallest and largest step size."),
    "maximize": (Bool, "Maximize the loss instead of minimizing it."),
}
"""Types and descriptions of torch's arguments."""
_SGD = {"weight_decay": 0.0, "maximize": False}
_ADAPTIVE = {"betas": (0.9, 0.999), "eps": 1e-8, **_SGD}
_LION_TEXTS = {
    "lr": "Learning rate; the default is DeepSpeed's. Lion needs a tenth to a third of AdamW's rate.",
    "betas": "Weight of the moment in the update, and its decay; the default is DeepSpeed's; the paper uses 0.99 for the "
    "second.",
    "weight_decay": "Decoupled weight decay per step, multiplied by lr.",
}


def _params(name: str, texts: Mapping[str, str] | None = None, /, **defaults: Any) -> type[OptimizerParams]:
    """Return the section of an optimizer's arguments, with fields of `_TORCH_ARGUMENTS`; `texts` replaces some descriptions."""
    fields: dict[str, Any] = {}
    for key, default in defaults.items():
        kind, text = _TORCH_ARGUMENTS[key]
        fields[key] = (kind, option(default, text=(texts or {}).get(key, text)))
    text = f"Arguments of {name}."
    return create_model(f"{name}Params", __base__=OptimizerParams, __doc__=text, __module__=__name__, **fields)


OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": _params("SGD", lr=1e-3, momentum=0.0, dampening=0.0, nesterov=False, **_SGD),
    "Adagrad": _params("Adagrad", lr=1e-2, lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, **_SGD),
    "RMSprop": _params("RMSprop", lr=1e-2, alpha=0.99, eps=1e-8, momentum=0.0, centered=False, **_SGD),
    "NAdam": _params("NAdam", lr=2e-3, momentum_decay=4e-3, decoupled_weight_decay=False, **_ADAPTIVE),
    "Adamax": _params("Adamax", {"betas": "Decay rates of moment and largest gradient."}, lr=2e-3, **_ADAPTIVE),
    "RAdam": _params("RAdam", lr=1e-3, decoupled_weight_decay=False, **_ADAPTIVE),
    "Adadelta": _params("Adadelta", lr=1.0, rho=0.9, eps=1e-6, **_SGD),
    "ASGD": _params("ASGD", {"alpha": "Exponent of the decay."}, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6, **_SGD),
    "Rprop": _params("Rprop", lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), maximize=False),
    "Lion": _params("Lion", _LION_TEXTS, lr=1e-3, betas=(0.9, 0.999), **_SGD),
}
"""The sections by class name; extras add their own."""


class OptimizerSection(Section):
    """The optimizer. Without this section, pass one to `initialize`."""

    variants: ClassVar[Mapping[str, Mapping[str, "type[Section]"]]] = {"params": OPTIMIZERS}

    type: Annotated[str, OneOf(unsupported_advice, OPTIMIZERS)]
    """Name of the optimizer. Adam means AdamW unless adam_w_mode is false. FusedAdam, CPUAdam and DeepSpeedCPUAdam are other
    names of Adam, CPUAdagrad of Adagrad, FusedLion and CPULion of Lion, FusedLamb of Lamb."""
    params: OptimizerParams

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Replace an alias of an optimizer by its canonical name."""
        name = data.get("type") if isinstance(data, Mapping) else None
        canonical = ALIASES.get(name.lower()) if isinstance(name, str) else None
        return data if canonical is None else {**data, "type": canonical}  # type: ignore[dict-item]

    @property
    def kind(self) -> str:
        """Class name: `type`, but AdamW for Adam with decoupled weight decay."""
        return "AdamW" if isinstance(self.params, AdamParams) and self.params.adam_w_mode else self.type

    @property
    def default_weight_decay(self) -> float:
        """The weight decay if none is set: DeepSpeed's default, or torch's with torch_adam."""
        return 0.01 if isinstance(self.params, AdamParams) and self.params.torch_adam and self.kind == "AdamW" else 0.0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, by name."""
        arguments = self.params.arguments()
        if isinstance(self.params, AdamParams) and self.params.weight_decay is None:
            arguments["weight_decay"] = self.default_weight_decay
        return arguments

    def notices(self, settings: Any) -> Iterator[Notice]:
        yield from self.params.conflicts(settings, self.type)
        if self.type == "AdamW" and isinstance(self.params, AdamParams) and not self.params.adam_w_mode:
            text = 'AdamW always decouples weight decay, as in DeepSpeed; write type "Adam" for coupled weight decay'
            yield Notice(Status.NO_EFFECT, text, ("optimizer.params.adam_w_mode",))


ScheduleName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]

_PER_GROUP = ", or a list with one per parameter group"
Rates = Annotated[Real | Annotated[tuple[Real, ...], Field(min_length=1)], Expects(f"{expected(Real)}{_PER_GROUP}")]
Momenta = Annotated[
    BelowOne | Annotated[tuple[BelowOne, ...], Field(min_length=1)], Expects(f"{expected(BelowOne)}{_PER_GROUP}")
]
WarmupType = Annotated[Literal["log", "linear"], OneOf()]


class SchedulerParams(Section):
    """Arguments of every schedule."""

    last_batch_iteration: Position = option(-1)
    """Step to start from; -1: the beginning. A loaded checkpoint overrides it."""


class WarmupParams(SchedulerParams):
    """Arguments of a schedule that begins with a warm-up."""

    warmup_num_steps: Count | Auto = option(1000)
    """Steps of the warm-up; 1 means 2, as in DeepSpeed, and so does 0, which DeepSpeed rejects since 0.19. "auto": the
    caller's value, else 1000; in `zstore train`, at most a tenth of the steps."""
    warmup_type: WarmupType = option("log")
    """Shape of the warm-up; the default is DeepSpeed's."""


class WarmupLRParams(WarmupParams):
    """The rate rises from the minimum to the maximum and stays there."""

    warmup_min_lr: Rates | Auto = option(0.0)
    """Learning rate at the first step. "auto": the caller's value, else 0."""
    warmup_max_lr: Rates | Auto | None = option(None)
    """Learning rate after the warm-up. "auto": the optimizer's lr. Unset: each parameter group's own."""


class WarmupDecayLRParams(WarmupLRParams):
    """The rate rises from the minimum to the maximum, then falls back linearly."""

    total_num_steps: Positive | Auto
    """Step from which the rate is at its minimum. "auto": the caller's value, as from `zstore train`; there is no default."""
    warmup_max_lr: Rates | Auto | None = option(0.001)
    """Learning rate after the warm-up. "auto": the optimizer's lr."""


class WarmupCosineLRParams(WarmupParams):
    """The rate rises to the lr of each group, then falls along half a cosine wave. It is 0 at the first step."""

    total_num_steps: Positive | Auto
    """Step at which the rate reaches its minimum. "auto": the caller's value, as from `zstore train`; there is no default."""
    warmup_min_ratio: Real = option(0.0)
    """Fraction of the group's lr at the second step, at which the warm-up begins."""
    cos_min_ratio: Real = option(0.0001)
    """Fraction of the group's lr at the end and afterwards."""


class OneCycleParams(SchedulerParams):
    """The rate rises from the minimum to the maximum and falls back, once; then it decays. Momentum moves inversely."""

    cycle_min_lr: Rates
    """Learning rate at the beginning and at the end of the cycle."""
    cycle_max_lr: Rates
    """Learning rate in the middle of the cycle."""
    decay_lr_rate: Real = option(0.0)
    """After the cycle the rate is cycle_min_lr / (1 + decay_lr_rate x intervals of decay_step_size)."""
    cycle_first_step_size: Positive = option(2000)
    """Number of steps of the rise."""
    cycle_second_step_size: Count | None = option(None)
    """Number of steps of the fall. Unset: as many as in the rise."""
    cycle_first_stair_count: Position = option(0)
    """Number of stairs in the rise; 0: linear."""
    cycle_second_stair_count: Position | None = option(None)
    """Number of stairs in the fall; 0: linear. Unset: as many as in the rise."""
    decay_step_size: Count = option(0)
    """Length in steps of a decay interval after the cycle; 0: no decay."""
    cycle_momentum: Bool = option(True)
    """Cycle the optimizer's first beta, or its momentum if it has no betas. The second beta becomes 0.99, as in
    DeepSpeed."""
    cycle_min_mom: Momenta = option(0.8)
    """Momentum in the middle of the cycle, and at the first step."""
    cycle_max_mom: Momenta = option(0.9)
    """Momentum at the end of the cycle."""
    decay_mom_rate: Real = option(0.0)
    """After the cycle momentum is cycle_max_mom x (1 + decay_mom_rate x intervals of decay_step_size)."""


class LRRangeTestParams(SchedulerParams):
    """The rate grows without limit, to find the largest that works."""

    lr_range_test_min_lr: Rates = option(0.001)
    """Learning rate at the first step."""
    lr_range_test_step_size: Positive = option(2000)
    """Length of an interval in steps."""
    lr_range_test_step_rate: Real = option(1.0)
    """The rate is lr_range_test_min_lr x (1 + lr_range_test_step_rate x intervals)."""
    lr_range_test_staircase: Bool = option(False)
    """Count whole intervals only."""


SCHEDULES: Mapping[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
_OTHER_SCHEDULES = "; or pass any other scheduler to initialize(lr_scheduler=...) and leave this section out"


class SchedulerSection(Section):
    """The learning rate's schedule, stepped by `engine.step()`."""

    variants: ClassVar[Mapping[str, Mapping[str, type[Section]]]] = {"params": SCHEDULES}

    type: Annotated[ScheduleName, OneOf(lambda _: _OTHER_SCHEDULES)]
    """Name of the schedule."""
    params: SchedulerParams
