"""The section `optimizer`: optimizers that a config may name, each with its own arguments and their defaults."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import create_model

from .keys import ConfigProblem, Section, Status, about, built, by_type
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
    """Arguments of every optimizer."""

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
_LION = (
    "Learning rate; the default is DeepSpeed's. Lion wants a rate of a tenth to a third of AdamW's.",
    "Weight of the moment in the update, and its decay; the default is DeepSpeed's, the paper has 0.99 for the second.",
    "Decoupled decay of the weights per step, times lr.",
)


def _params(name: str, texts: Mapping[str, str] | None = None, /, **defaults: Any) -> type[OptimizerParams]:
    """Return the section of an optimizer's arguments, of `_FIELDS`; `texts` describe some of them otherwise."""
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
    "Lion": _params(
        "Lion",
        dict(zip(("lr", "betas", "weight_decay"), _LION, strict=True)),
        lr=1e-3,
        betas=(0.9, 0.999),
        **_SGD,
    ),
}
"""By the names of their classes; extras add theirs."""


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
    params: Annotated[OptimizerParams, by_type(OPTIMIZERS, OptimizerParams)]

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Take other names of an optimizer for its usual one."""
        return _usual_name(data) if isinstance(data, Mapping) else data

    def contradictions(self, settings: Any) -> Iterator[ConfigProblem]:
        return self.params.conflicts(settings, self.type)

    @classmethod
    def section_at(cls, name: str, raw: object = None) -> SectionType | None:
        """Find it by other names of an optimizer, too."""
        return super().section_at(name, _usual_name(raw) if isinstance(raw, Mapping) else raw)
