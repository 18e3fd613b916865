"""`deepspeed.zero.TiledLinear`: a linear layer in tiles, which are gathered one after another at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError

from .runtime import partition_uniform
from .zero import GatheredParameters


class TiledLinear(nn.Module):
    """A linear layer as `linears[row][column]`, each a layer made by `linear_cls` and called in that order.

    If a block of the model has more elements than `stage3_max_live_parameters`, each tile is gathered by itself. The last
    of a row has the bias. `input_is_already_split` takes a list of inputs, one for each column; without `combine_out_splits`
    the outputs are a list, one for each row. Raises UsageError for more tiles than features.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise UsageError(f"TiledLinear({name}_splits={splits}): expected from 1 to {name}_features={features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears: Any = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, rows, bias=bias and stop == in_features, **kwargs)
                for start, stop in pairwise(self.in_parts)
            )
            for rows in (stop - start for start, stop in pairwise(self.out_parts))
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the output, of the last dimension's features."""
        inputs = input_
        if not self.input_is_already_split or self.in_splits == 1:
            inputs = input_.split([stop - start for start, stop in pairwise(self.in_parts)], dim=-1)
        if len(inputs) != self.in_splits:
            raise UsageError(f"TiledLinear: expected {self.in_splits} inputs, one for each column, got {len(inputs)}")
        outputs = []
        for row in self.linears:
            first, *others = (linear(part) for linear, part in zip(row, inputs, strict=True))
            outputs.append(sum(others, first))
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a layer of the same shape; at stage 3 rank 0's count (all ranks)."""
        for row, (top, end) in zip(self.linears, pairwise(self.out_parts), strict=True):
            for linear, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                with torch.no_grad(), GatheredParameters(linear.parameters(), modifier_rank=0):
                    linear.weight.copy_(other.weight[top:end, left:right])
                    if linear.bias is not None:
                        linear.bias.copy_(other.bias[top:end])
