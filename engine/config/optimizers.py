"""The section `optimizer`: optimizers that a config may name, each with its own arguments and their defaults."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator
from pydantic_core.core_schema import ValidationInfo

from .keys import ConfigProblem, Section, Status, about, built
from .values import Auto, BelowOne, Bool, OneOf, Real, Words

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
"""Slots that stay in fp32 beside others: centered RMSprop subtracts the square of a mean, which must not be larger, and in
amsgrad's maximum every rounding up would stay."""


def reduced_slots(slots: Iterable[str]) -> set[str]:
    """Return those of an optimizer's fp32 slots that moments in bf16 mean: averages that forget, so that roundings do not add
    up."""
    all_slots = set(slots)
    return {slot for slot in all_slots & _AVERAGES if not all_slots & _EXACT_WITH.get(slot, set())}


Betas = Annotated[tuple[BelowOne, BelowOne], Words("two numbers, each from 0 to below 1")]
Pair = Annotated[tuple[Real, Real], Words("two numbers of at least 0")]


def advice_on(name: object) -> str:
    """Return the end of the message about an optimizer that cannot be named."""
    known = _OTHERS.get(name.lower()) if isinstance(name, str) else None
    return "; " + (known or f"of another {_WHOLE}")


class OptimizerParams(Section):
    """Arguments of an optimizer."""

    whole_tensors: ClassVar[bool] = False
    """Whether its step needs whole tensors, which ranks exchange."""
    keeps_whole: ClassVar[bool] = False
    """Whether every rank keeps its whole state, and gradients of its own, of which there is no norm to clip by."""

    lr: Real | Auto | None = built(None)
    """Learning rate."""
    fp32_optimizer_states: Bool = built(True)
    """Keep moments in fp32; false: in bf16, as `zstore.moments` "bf16" does."""

    @classmethod
    def conflicts(cls, settings: Any, kind: str) -> Iterator[ConfigProblem]:
        """Yield the settings that the optimizer `kind`, with these arguments, cannot be combined with."""
        return iter(())

    def arguments(self) -> dict[str, Any]:
        """Return the keys that act, by name: arguments of the class."""
        fields = type(self).model_fields.items()
        found = {name: getattr(self, name) for name, field in fields if about(field)[0] is Status.BUILT}
        del found["fp32_optimizer_states"]  # the state's, not the class's
        return found


class MomentParams(OptimizerParams):
    """Arguments of those that keep two moments."""

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
    """Correct the moments for starting at zero; false: use them as they are."""
    amsgrad: Bool = built(False)
    """Use the largest second moment seen, which is kept too: 4 bytes a parameter more."""
    maximize: Bool = built(False)
    """Ascend."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, and `bias_correction` if it is off."""
        found = super().arguments()
        for name in ("adam_w_mode", "torch_adam", *(("bias_correction",) if self.bias_correction else ())):
            del found[name]
        return found


class _Decayed(OptimizerParams):
    """Arguments that most have."""

    weight_decay: Real | Auto = built(0.0)
    """Decay of the weights, as a part of the gradient."""
    maximize: Bool = built(False)
    """Ascend."""


class SGDParams(_Decayed):
    """Arguments of SGD. Without momentum nothing is kept beside the master."""

    lr: Real | Auto = built(1e-3)
    """Learning rate; the default is torch's."""
    momentum: Real = built(0.0)
    """Momentum; 0: none is kept."""
    dampening: Real = built(0.0)
    """Dampening of the momentum."""
    nesterov: Bool = built(False)
    """Nesterov's momentum; needs momentum, and no dampening."""


class AdagradParams(_Decayed):
    """Arguments of Adagrad."""

    lr: Real | Auto = built(1e-2)
    """Learning rate; the default is torch's and DeepSpeed's."""
    lr_decay: Real = built(0.0)
    """The rate is lr / (1 + (step - 1) x lr_decay)."""
    initial_accumulator_value: Real = built(0.0)
    """Initial value of the sum of squares."""
    eps: Real | Auto = built(1e-10)
    """Added to the denominator."""


class RMSpropParams(_Decayed):
    """Arguments of RMSprop."""

    lr: Real | Auto = built(1e-2)
    """Learning rate; the default is torch's."""
    alpha: Real = built(0.99)
    """Decay of the mean of squares."""
    eps: Real | Auto = built(1e-8)
    """Added to the denominator."""
    momentum: Real = built(0.0)
    """Momentum; 0: none is kept."""
    centered: Bool = built(False)
    """Divide by an estimate of the variance, which keeps the mean of gradients too."""


class NAdamParams(MomentParams, _Decayed):
    """Arguments of NAdam."""

    lr: Real | Auto = built(2e-3)
    """Learning rate; the default is torch's."""
    momentum_decay: Real = built(4e-3)
    """Decay of the momentum's schedule."""
    decoupled_weight_decay: Bool = built(False)
    """Decay as in AdamW."""


class AdamaxParams(MomentParams, _Decayed):
    """Arguments of Adamax."""

    lr: Real | Auto = built(2e-3)
    """Learning rate; the default is torch's."""
    betas: Betas | Auto = built((0.9, 0.999))
    """Decay of the moment and of the largest gradient."""


class RAdamParams(MomentParams, _Decayed):
    """Arguments of RAdam."""

    decoupled_weight_decay: Bool = built(False)
    """Decay as in AdamW."""


class AdadeltaParams(_Decayed):
    """Arguments of Adadelta."""

    lr: Real | Auto = built(1.0)
    """Factor of the update; the default is torch's."""
    rho: BelowOne = built(0.9)
    """Decay of the two means of squares."""
    eps: Real | Auto = built(1e-6)
    """Added to numerator and denominator."""


class ASGDParams(_Decayed):
    """Arguments of ASGD."""

    lr: Real | Auto = built(1e-2)
    """Learning rate; the default is torch's."""
    lambd: Real = built(1e-4)
    """Decay of the weights and of the rate."""
    alpha: Real = built(0.75)
    """Power of the rate's decay."""
    t0: Real = built(1e6)
    """Step at which averaging starts."""


class RpropParams(OptimizerParams):
    """Arguments of Rprop."""

    lr: Real | Auto = built(1e-2)
    """First step size; the default is torch's."""
    etas: Pair = built((0.5, 1.2))
    """Factors by which a step size shrinks, below 1, and grows, above 1."""
    step_sizes: Pair = built((1e-6, 50.0))
    """Smallest and largest step size."""
    maximize: Bool = built(False)
    """Ascend."""


class LionParams(OptimizerParams):
    """Arguments of Lion, which keeps one moment: 4 bytes a parameter."""

    lr: Real | Auto = built(1e-3)
    """Learning rate; the default is DeepSpeed's. Lion wants a rate of a tenth to a third of AdamW's."""
    betas: Betas | Auto = built((0.9, 0.999))
    """Weight of the moment in the update, and its decay; the default is DeepSpeed's, the paper has 0.99 for the second."""
    weight_decay: Real | Auto = built(0.0)
    """Decoupled decay of the weights per step, times lr."""
    maximize: Bool = built(False)
    """Ascend."""


OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "RMSprop": RMSpropParams,
    "NAdam": NAdamParams,
    "Adamax": AdamaxParams,
    "RAdam": RAdamParams,
    "Adadelta": AdadeltaParams,
    "ASGD": ASGDParams,
    "Rprop": RpropParams,
    "Lion": LionParams,
}
"""By the names of their classes; extras add theirs."""


def _by_type(value: object, info: ValidationInfo) -> object:
    """Read the arguments as the optimizer's own; if its name is wrong, only that is reported."""
    kind = OPTIMIZERS.get(info.data.get("type", ""))
    return OptimizerParams() if kind is None else kind.model_validate(value)


def _usual_name(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the section as written, with the usual name of the optimizer."""
    name = data.get("type")
    usual = ALIASES.get(name.lower()) if isinstance(name, str) else None
    return {**data} if usual is None else {**data, "type": usual}


SectionType = type[Section]


class OptimizerSection(Section):
    """The optimizer. Without this section one is passed to `initialize`."""

    variants: ClassVar[Mapping[str, Mapping[str, "type[Section]"]]] = {"params": OPTIMIZERS}

    type: Annotated[str, OneOf(advice_on, OPTIMIZERS)]
    """Name of the optimizer. Adam means AdamW unless adam_w_mode is false; FusedAdam, CPUAdam and DeepSpeedCPUAdam are
    other names of Adam, CPUAdagrad of Adagrad, FusedLion and CPULion of Lion, FusedLamb of Lamb: there is one update on
    every device."""
    params: Annotated[OptimizerParams, PlainValidator(_by_type)]

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Take missing arguments for none, and other names of an optimizer for its usual one."""
        if not isinstance(data, Mapping):
            return data
        found = _usual_name(data)
        return found if found.get("params") is not None else found | {"params": {}}

    def contradictions(self, settings: Any) -> Iterator[ConfigProblem]:
        return self.params.conflicts(settings, self.type)

    @classmethod
    def section_at(cls, name: str, raw: object = None) -> SectionType | None:
        """Find it by other names of an optimizer, too."""
        return super().section_at(name, _usual_name(raw) if isinstance(raw, Mapping) else raw)
