"""The model as `zstore plan` sees it: shapes, units and width, from a model on the meta device or from four numbers;
and the state that an optimizer keeps of each parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from zstore.engine.config.config import DTYPES, OptimizerConfig
from zstore.engine.plan.activations import Width
from zstore.engine.plan.needs import ParameterShape
from zstore.engine.plan.plan import ADAM_SLOTS, Slots
from zstore.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


DEFAULT_VOCAB = 32_000
_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model without memory."""

    name: str
    make_module: Callable[[], nn.Module]
    """Makes it on the meta device."""
    shapes: Sequence[ParameterShape]
    units: Sequence[Sequence[str]]
    """Names of the parameters that each unit gathers, in the order in which units run."""
    width: Width

    @cached_property
    def module(self) -> nn.Module:
        """The model on the meta device."""
        return self.make_module()

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(one.shape) for one in self.shapes)

    @cached_property
    def largest_unit_numel(self) -> int:
        """Elements of the unit that gathers most."""
        numel = {one.name: math.prod(one.shape) for one in self.shapes}
        return max((sum(numel[name] for name in unit) for unit in self.units), default=0)


def shape_of_model(name_or_path: str, precision: str, seq_length: int) -> ModelShape:
    """Return the shape of a shipped model, or of a transformers config; no weights are made.

    Raises ConfigError as `build_model` does, and for a config that does not give the width of its model.
    """
    from zstore.engine.plan.run import shapes_of_model, units_of_model

    from ..sample.models import build_model, on_meta

    with on_meta():
        model = build_model(name_or_path, seq_length)
    width = Width.of(model)
    if width is None:
        raise ConfigError(
            f"{name_or_path}: expected a config with hidden_size, num_hidden_layers and vocab_size, got one without; plan "
            "by --params, --hidden and --layers"
        )
    return ModelShape(
        name=name_or_path,
        make_module=lambda: model,
        shapes=shapes_of_model(model, precision),
        units=units_of_model(model),
        width=width,
    )


def shape_of_numbers(num_parameters: int, hidden: int, num_layers: int, vocab_size: int, precision: str) -> ModelShape:
    """Return the shape of a GPT with a head of its own, whose projections are as wide as `num_parameters` asks for.

    Raises ConfigError if no such model is near that size.
    """
    shapes = partial(_shapes, hidden, num_layers, vocab_size)

    def count(wide: int) -> int:
        return sum(map(math.prod, shapes(wide).values()))

    least = count(_MULTIPLE)
    wide = _MULTIPLE * round((num_parameters - count(0)) / (least - count(0)))
    if wide < _MULTIPLE:
        raise ConfigError(
            f"{num_layers} layers of width {hidden} with a vocabulary of {vocab_size} have at least {least:,} parameters, "
            f"got --params {num_parameters:,}: check the numbers"
        )
    names = shapes(wide)
    units = [[name for name in names if name.startswith(f"h.{layer}.")] for layer in range(num_layers)]
    return ModelShape(
        name=f"GPT, {num_layers} layers of width {hidden}, {wide} in between",
        make_module=partial(_gpt, hidden, num_layers, vocab_size, wide),
        shapes=[ParameterShape(name=name, shape=shape, dtype=DTYPES[precision]) for name, shape in names.items()],
        units=[["wte.weight"], *units, ["ln_f.weight", "ln_f.bias"], ["lm_head.weight"]],
        width=Width(hidden=hidden, num_layers=num_layers, vocab_size=vocab_size),
    )


def _shapes(hidden: int, num_layers: int, vocab_size: int, wide: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of `_gpt`."""
    projections = (
        {"c_attn": (3 * hidden, hidden), "c_proj": (hidden, hidden)},
        {"c_fc": (wide, hidden), "c_proj": (hidden, wide)},
    )
    block: dict[str, tuple[int, ...]] = {}
    for norm, name, weights in zip(("ln_1", "ln_2"), ("attn", "mlp"), projections, strict=True):
        block |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        for each, shape in weights.items():
            block |= {f"{name}.{each}.weight": shape, f"{name}.{each}.bias": shape[:1]}
    blocks = {f"h.{layer}.{name}": shape for layer in range(num_layers) for name, shape in block.items()}
    ends = {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,), "lm_head.weight": (vocab_size, hidden)}
    return {"wte.weight": (vocab_size, hidden), **blocks, **ends}


def _gpt(hidden: int, num_layers: int, vocab_size: int, wide: int) -> nn.Module:
    """Return a GPT with a head of its own on the meta device."""
    from torch import empty, nn

    from ..sample.models import Block, GptConfig, on_meta

    config = GptConfig(hidden=hidden, num_layers=num_layers, num_heads=1, mlp_width=wide)
    with on_meta():
        blocks = nn.ModuleList(Block(config) for _ in range(num_layers))
        # Given a weight, it draws no random values, for which torch would load its compiler.
        table = nn.Embedding(vocab_size, hidden, _weight=empty(vocab_size, hidden))
        ends = table, nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)
        return nn.ModuleDict({"wte": ends[0], "h": blocks, "ln_f": ends[1], "lm_head": ends[2]})


ADAM = OptimizerConfig(kind="AdamW", arguments={})
"""Planned if a config leaves the optimizer to the script."""


def slots_of(model: ModelShape, optimizer: OptimizerConfig | None) -> Mapping[str, Slots]:
    """Return the slots of each parameter of a model, by its name. Only for optimizers other than a usual Adam that
    loads torch, whose classes tell their slots.

    Raises ConfigError for arguments that the optimizer does not take.
    """
    kind = optimizer or ADAM
    if kind.kind in ("Adam", "AdamW") and not (kind.arguments.get("amsgrad") or kind.arguments.get("maximize")):
        return dict.fromkeys((one.name for one in model.shapes), ADAM_SLOTS)
    return slots_of_module(model.module, kind)


def slots_of_module(module: nn.Module, optimizer: OptimizerConfig | None) -> Mapping[str, Slots]:
    """Return the same for a model on the meta device, as its optimizer has them."""
    from zstore.engine.extras import register_parts
    from zstore.engine.optim.optimizer import optimizer_from_config
    from zstore.engine.optim.rules import kernels_for, rule_of
    from zstore.engine.params.record import named_parameters

    register_parts()
    with _without_compiler():
        made = optimizer_from_config(optimizer or ADAM, None, module)
    rule = rule_of(type(made))
    kernels = kernels_for(rule, type(made), made.param_groups)
    of = {
        parameter: kernel
        for group, kernel in zip(made.param_groups, kernels, strict=True)
        for parameter in group["params"]
    }
    return {name: rule.slots(of[parameter], parameter.shape) for name, _, parameter in named_parameters(module)}


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let optimizers take groups of parameters undecorated: torch's decorator imports its compiler, for a second."""
    from torch.optim import Optimizer

    decorated = Optimizer.add_param_group
    Optimizer.add_param_group = inspect.unwrap(decorated)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = decorated  # type: ignore[method-assign]
