"""The model as `zstore plan` sees it: shapes, units and width, from a model on the meta device or from four numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zstore.engine.plan.activations import Width
from zstore.engine.plan.needs import ParameterShape, shapes_of_model, units_of_model
from zstore.errors import ConfigError

from ..sample.models import Block, GptConfig, build_model

DEFAULT_VOCAB = 32_000
_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model without memory."""

    name: str
    module: nn.Module
    """On the meta device."""
    shapes: Sequence[ParameterShape]
    units: Sequence[Sequence[str]]
    """Names of the parameters that each unit gathers, in the order in which units run."""
    width: Width

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(one.shape) for one in self.shapes)

    @property
    def largest_unit_numel(self) -> int:
        """Elements of the unit that gathers most."""
        numel = {one.name: math.prod(one.shape) for one in self.shapes}
        return max((sum(numel[name] for name in unit) for unit in self.units), default=0)


def shape_of_model(name_or_path: str, precision: str, seq_length: int) -> ModelShape:
    """Return the shape of a shipped model, or of a transformers config; no weights are made.

    Raises ConfigError as `build_model` does, and for a config that does not give the width of its model.
    """
    with torch.device("meta"), _Unfilled():
        model = build_model(name_or_path, seq_length)
    width = Width.of(model)
    if width is None:
        raise ConfigError(
            f"{name_or_path}: expected a config with hidden_size, num_hidden_layers and vocab_size, got one without; plan "
            "by --params, --hidden and --layers"
        )
    return ModelShape(
        name=name_or_path,
        module=model,
        shapes=shapes_of_model(model, precision),
        units=units_of_model(model),
        width=width,
    )


def shape_of_numbers(num_parameters: int, hidden: int, num_layers: int, vocab_size: int, precision: str) -> ModelShape:
    """Return the shape of a GPT with a head of its own, whose projections are as wide as `num_parameters` asks for.

    Raises ConfigError if no such model is near that size.
    """
    fixed = 2 * vocab_size * hidden + 2 * hidden
    per_layer = (num_parameters - fixed) / num_layers
    # Attention has 4 h x h and their biases, two norms 4 h, the projections 2 h x f with h + f.
    wide = (per_layer - 4 * hidden * hidden - 9 * hidden) / (2 * hidden + 1)
    wide = round(wide / _MULTIPLE) * _MULTIPLE
    if wide < _MULTIPLE:
        least = fixed + num_layers * (4 * hidden * hidden + 9 * hidden + _MULTIPLE * (2 * hidden + 1))
        raise ConfigError(
            f"{num_layers} layers of width {hidden} with a vocabulary of {vocab_size} have at least {least:,} parameters, "
            f"got --params {num_parameters:,}: check the numbers"
        )
    with torch.device("meta"), _Unfilled():
        config = GptConfig(hidden=hidden, num_layers=num_layers, num_heads=1, mlp_width=wide)
        blocks = nn.ModuleList(Block(config) for _ in range(num_layers))
        # Given a weight, it draws no random values, for which torch would load its compiler.
        table = nn.Embedding(vocab_size, hidden, _weight=torch.empty(vocab_size, hidden))
        ends = table, nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)
        model = nn.ModuleDict({"wte": ends[0], "h": blocks, "ln_f": ends[1], "lm_head": ends[2]})
    return ModelShape(
        name=f"GPT, {num_layers} layers of width {hidden}, {wide} in between",
        module=model,
        shapes=shapes_of_model(model, precision),
        units=units_of_model(model),
        width=Width(hidden=hidden, num_layers=num_layers, vocab_size=vocab_size),
    )


class _Unfilled(TorchFunctionMode):
    """Leaves out random values for tensors without memory: torch imports its compiler to draw them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") == "normal_":
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)
