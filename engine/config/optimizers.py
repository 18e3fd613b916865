"""The sections `optimizer` and `scheduler`: each optimizer and schedule that a config may name, with its arguments.

The schedules have DeepSpeed's keys and defaults.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from .keys import Notice, Section, Status, about, built
from .values import Auto, BelowOne, Bool, Count, Expects, OneOf, Position, Positive, Real, expected

_PASS = "to initialize(optimizer=...) and leave this section out"
_WHOLE = f"pass the object {_PASS}; it works at stage 0 without offload only, for its update needs whole tensors"

ALIASES = {
    **dict.fromkeys(("fusedadam", "cpuadam", "deepspeedcpuadam"), "Adam"),
    **dict.fromkeys(("cpuadagrad", "deepspeedcpuadagrad"), "Adagrad"),
    **dict.fromkeys(("fusedlion", "cpulion", "deepspeedcpulion"), "Lion"),
    "fusedlamb": "Lamb",
}
"""Names of DeepSpeed's classes, in small letters, and the type that does the same."""

_OTHERS = {
    "lbfgs": "it calls the model again within its step, which the engine cannot do; train with it in plain torch",
    "sparseadam": "it needs sparse gradients, which are not supported",
}

Moments = Literal["fp32", "bf16"]
_AVERAGES = frozenset({"exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "acc_delta", "exp_inf"})
_EXACT_WITH = {"square_avg": {"grad_avg"}, "exp_avg_sq": {"max_exp_avg_sq", "max_exp_avg_sqs"}}
"""Slots that stay in fp32 if other slots are present: centered RMSprop subtracts the square of a mean, which must not
be larger, and amsgrad's maximum would keep every rounding up."""


def reduced_slots(slots: Iterable[str]) -> set[str]:
    """Return the fp32 slots of an optimizer that "moments" in bf16 applies to: decaying averages, in which roundings do not add
    up."""
    all_slots = set(slots)
    return {slot for slot in all_slots & _AVERAGES if not all_slots & _EXACT_WITH.get(slot, set())}


Betas = Annotated[tuple[BelowOne, BelowOne], Expects("two numbers, each from 0 to below 1")]
Pair = Annotated[tuple[Real, Real], Expects("two numbers of at least 0")]


def advice_on(name: object) -> str:
    """Return the end of the message about an optimizer that configs cannot name."""
    known = _OTHERS.get(name.lower()) if isinstance(name, str) else None
    return "; " + (known or f"of another {_WHOLE}")


class OptimizerParams(Section):
    """Arguments of every optimizer."""

    whole_tensors: ClassVar[bool] = False
    """Whether its step needs whole tensors, which ranks exchange."""
    keeps_whole: ClassVar[bool] = False
    """Whether every rank keeps its whole state, and its own gradients, which have no common norm to clip by."""

    lr: Real | Auto | None = built(None)
    """Learning rate."""
    fp32_optimizer_states: Bool = built(True)
    """Keep moments in fp32; false: in bf16, as `zstore.moments` "bf16" does."""

    @classmethod
    def conflicts(cls, settings: Any, kind: str) -> Iterator[Notice]:
        """Yield errors of settings that cannot be combined with the optimizer `kind`."""
        return iter(())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, by name: the keys that act."""
        fields = type(self).model_fields.items()
        found = {name: getattr(self, name) for name, field in fields if about(field)[0] is Status.BUILT}
        del found["fp32_optimizer_states"]  # for the state, not for the class
        return found


class MomentParams(OptimizerParams):
    """Arguments of optimizers with two moments."""

    lr: Real | Auto = built(1e-3)
    """Learning rate; the default is DeepSpeed's."""
    betas: Betas | Auto = built((0.9, 0.999))
    """Decay of the two moments."""
    eps: Real | Auto = built(1e-8)
    """Added to the denominator."""


class AdamParams(MomentParams):
    """Arguments of Adam and AdamW."""

    weight_decay: Real | Auto | None = built(None)
    """Decay of the weights per step, times lr. Unset: 0, but 0.01 for AdamW with torch_adam, as torch has it."""
    adam_w_mode: Bool = built(True)
    """Decoupled weight decay (AdamW) for type Adam too; false: weight decay as a part of the gradient."""
    torch_adam: Bool = built(False)
    """torch's own Adam. The update is torch's in any case; this only chooses the default of weight_decay."""
    bias_correction: Bool = built(True)
    """Correct the moments for starting at zero; false: use them uncorrected."""
    amsgrad: Bool = built(False)
    """Use the largest second moment so far, which takes 4 bytes a parameter more."""
    maximize: Bool = built(False)
    """Ascend."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, and `bias_correction` if it is off."""
        found = super().arguments()
        for name in ("adam_w_mode", "torch_adam", *(("bias_correction",) if self.bias_correction else ())):
            del found[name]
        return found


_FIELDS: Mapping[str, tuple[Any, str]] = {
    "lr": (Real | Auto, "Learning rate; the default is torch's."),
    "betas": (Betas | Auto, "Decay of the two moments."),
    "eps": (Real | Auto, "Added to the denominator."),
    "weight_decay": (Real | Auto, "Decay of the weights, as a part of the gradient."),
    "momentum": (Real, "Momentum; 0: none is kept."),
    "dampening": (Real, "Dampening of the momentum."),
    "nesterov": (Bool, "Nesterov's momentum; needs momentum, and no dampening."),
    "lr_decay": (Real, "The rate is lr / (1 + (step - 1) x lr_decay)."),
    "initial_accumulator_value": (Real, "Initial value of the sum of squares."),
    "alpha": (Real, "Decay of the mean of squares."),
    "centered": (Bool, "Divide by an estimate of the variance, which keeps the mean of gradients too."),
    "momentum_decay": (Real, "Decay of the momentum's schedule."),
    "decoupled_weight_decay": (Bool, "Decay as in AdamW."),
    "rho": (BelowOne, "Decay of the two means of squares."),
    "lambd": (Real, "Decay of the weights and of the rate."),
    "t0": (Real, "Step at which averaging starts."),
    "etas": (Pair, "Factors by which a step size shrinks, below 1, and grows, above 1."),
    "step_sizes": (Pair, "Smallest and largest step size."),
    "maximize": (Bool, "Ascend."),
}
"""Types and descriptions of torch's arguments."""
_SGD = {"weight_decay": 0.0, "maximize": False}
_MOMENTS = {"betas": (0.9, 0.999), "eps": 1e-8, **_SGD}
_LION = {
    "lr": "Learning rate; the default is DeepSpeed's. Lion wants a rate of a tenth to a third of AdamW's.",
    "betas": "Weight of the moment in the update, and its decay; the default is DeepSpeed's, the paper has 0.99 for the "
    "second.",
    "weight_decay": "Decoupled decay of the weights per step, times lr.",
}


def _params(name: str, texts: Mapping[str, str] | None = None, /, **defaults: Any) -> type[OptimizerParams]:
    """Return the section of an optimizer's arguments, with fields of `_FIELDS`; `texts` replaces some descriptions."""
    fields: dict[str, Any] = {}
    for key, default in defaults.items():
        kind, text = _FIELDS[key]
        fields[key] = (kind, built(default, text=(texts or {}).get(key, text)))
    text = f"Arguments of {name}."
    return create_model(f"{name}Params", __base__=OptimizerParams, __doc__=text, __module__=__name__, **fields)


OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": _params("SGD", lr=1e-3, momentum=0.0, dampening=0.0, nesterov=False, **_SGD),
    "Adagrad": _params("Adagrad", lr=1e-2, lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, **_SGD),
    "RMSprop": _params("RMSprop", lr=1e-2, alpha=0.99, eps=1e-8, momentum=0.0, centered=False, **_SGD),
    "NAdam": _params("NAdam", lr=2e-3, momentum_decay=4e-3, decoupled_weight_decay=False, **_MOMENTS),
    "Adamax": _params("Adamax", {"betas": "Decay of the moment and of the largest gradient."}, lr=2e-3, **_MOMENTS),
    "RAdam": _params("RAdam", lr=1e-3, decoupled_weight_decay=False, **_MOMENTS),
    "Adadelta": _params("Adadelta", lr=1.0, rho=0.9, eps=1e-6, **_SGD),
    "ASGD": _params("ASGD", {"alpha": "Power of the rate's decay."}, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6, **_SGD),
    "Rprop": _params("Rprop", lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), maximize=False),
    "Lion": _params("Lion", _LION, lr=1e-3, betas=(0.9, 0.999), **_SGD),
}
"""The sections by class name; extras add their own."""


class OptimizerSection(Section):
    """The optimizer. Without this section one is passed to `initialize`."""

    variants: ClassVar[Mapping[str, Mapping[str, "type[Section]"]]] = {"params": OPTIMIZERS}

    type: Annotated[str, OneOf(advice_on, OPTIMIZERS)]
    """Name of the optimizer. Adam means AdamW unless adam_w_mode is false. FusedAdam, CPUAdam and DeepSpeedCPUAdam are other
    names of Adam, CPUAdagrad of Adagrad, FusedLion and CPULion of Lion, FusedLamb of Lamb."""
    params: OptimizerParams

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Replace other names of an optimizer by its usual one."""
        name = data.get("type") if isinstance(data, Mapping) else None
        usual = ALIASES.get(name.lower()) if isinstance(name, str) else None
        return data if usual is None else {**data, "type": usual}  # type: ignore[dict-item]

    @property
    def kind(self) -> str:
        """Name of the class: `type`, but AdamW for an Adam with decoupled weight decay."""
        return "AdamW" if isinstance(self.params, AdamParams) and self.params.adam_w_mode else self.type

    @property
    def default_weight_decay(self) -> float:
        """The weight decay if none is set: DeepSpeed's, or torch's with torch_adam."""
        return 0.01 if isinstance(self.params, AdamParams) and self.params.torch_adam and self.kind == "AdamW" else 0.0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, by name."""
        found = self.params.arguments()
        if isinstance(self.params, AdamParams) and self.params.weight_decay is None:
            found["weight_decay"] = self.default_weight_decay
        return found

    def notices(self, settings: Any) -> Iterator[Notice]:
        yield from self.params.conflicts(settings, self.type)
        if self.type == "AdamW" and isinstance(self.params, AdamParams) and not self.params.adam_w_mode:
            text = 'AdamW always decouples weight decay, as in DeepSpeed; write type "Adam" for the other'
            yield Notice(Status.NO_EFFECT, text, ("optimizer.params.adam_w_mode",))


ScheduleName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]

_PER_GROUP = ", or a list with one for each parameter group"
Rates = Annotated[Real | Annotated[tuple[Real, ...], Field(min_length=1)], Expects(f"{expected(Real)}{_PER_GROUP}")]
Momenta = Annotated[
    BelowOne | Annotated[tuple[BelowOne, ...], Field(min_length=1)], Expects(f"{expected(BelowOne)}{_PER_GROUP}")
]
WarmupType = Annotated[Literal["log", "linear"], OneOf()]


class SchedulerParams(Section):
    """Arguments of every schedule."""

    last_batch_iteration: Position = built(-1)
    """Step to start from; -1: the beginning. A loaded checkpoint has its own."""


class WarmupParams(SchedulerParams):
    """Arguments of a schedule that begins with a warm-up."""

    warmup_num_steps: Count | Auto = built(1000)
    """Steps of the warm-up; 1 counts as 2, as in DeepSpeed, and so does 0, which DeepSpeed refuses since 0.19. "auto": the
    caller's answer, else 1000; in `zstore train` at most a tenth of the steps."""
    warmup_type: WarmupType = built("log")
    """Shape of the rise, by default DeepSpeed's."""


class WarmupLRParams(WarmupParams):
    """The rate rises from the minimum to the maximum and stays there."""

    warmup_min_lr: Rates | Auto = built(0.0)
    """Learning rate at the first step. "auto": the caller's answer, else 0."""
    warmup_max_lr: Rates | Auto | None = built(None)
    """Learning rate after the warm-up. "auto": the optimizer's lr. Unset: each parameter group's own."""


class WarmupDecayLRParams(WarmupLRParams):
    """The rate rises from the minimum to the maximum, then falls back linearly."""

    total_num_steps: Positive | Auto
    """Step from which the rate is at its minimum. "auto": the caller's answer, as from `zstore train`; it has no default."""
    warmup_max_lr: Rates | Auto | None = built(0.001)
    """Learning rate after the warm-up. "auto": the optimizer's lr."""


class WarmupCosineLRParams(WarmupParams):
    """The rate rises to the lr of each group, then falls along half a cosine wave. It is 0 at the first step."""

    total_num_steps: Positive | Auto
    """Step at which the rate reaches its minimum. "auto": the caller's answer, as from `zstore train`; it has no default."""
    warmup_min_ratio: Real = built(0.0)
    """Fraction of the group's lr at the second step, at which the warm-up begins."""
    cos_min_ratio: Real = built(0.0001)
    """Fraction of the group's lr at the end, and from there on."""


class OneCycleParams(SchedulerParams):
    """The rate rises from the minimum to the maximum and falls back, once; then it decays. Momentum goes the other way."""

    cycle_min_lr: Rates
    """Learning rate at the beginning and at the end of the cycle."""
    cycle_max_lr: Rates
    """Learning rate in its middle."""
    decay_lr_rate: Real = built(0.0)
    """After the cycle the rate is cycle_min_lr / (1 + decay_lr_rate x intervals of decay_step_size)."""
    cycle_first_step_size: Positive = built(2000)
    """Steps of the rise."""
    cycle_second_step_size: Count | None = built(None)
    """Steps of the fall. Unset: as many as the rise has."""
    cycle_first_stair_count: Position = built(0)
    """Steps of the staircase of the rise; 0: linear."""
    cycle_second_stair_count: Position | None = built(None)
    """Steps of the staircase of the fall; 0: linear. Unset: as many as the rise has."""
    decay_step_size: Count = built(0)
    """Steps of an interval of decay after the cycle; 0: no decay."""
    cycle_momentum: Bool = built(True)
    """Cycle the optimizer's first beta, or its momentum if it has no betas. The second beta becomes 0.99, as in
    DeepSpeed."""
    cycle_min_mom: Momenta = built(0.8)
    """Momentum in the middle of the cycle, and at the first step."""
    cycle_max_mom: Momenta = built(0.9)
    """Momentum at the end of the cycle."""
    decay_mom_rate: Real = built(0.0)
    """After the cycle momentum is cycle_max_mom x (1 + decay_mom_rate x intervals of decay_step_size)."""


class LRRangeTestParams(SchedulerParams):
    """The rate grows without limit, to find the largest that works."""

    lr_range_test_min_lr: Rates = built(0.001)
    """Learning rate at the first step."""
    lr_range_test_step_size: Positive = built(2000)
    """Steps of an interval."""
    lr_range_test_step_rate: Real = built(1.0)
    """The rate is lr_range_test_min_lr x (1 + lr_range_test_step_rate x intervals)."""
    lr_range_test_staircase: Bool = built(False)
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
