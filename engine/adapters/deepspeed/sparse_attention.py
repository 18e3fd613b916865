"""`deepspeed.ops.sparse_attention`: its configs, whose layouts are those of zstore's patterns, and `SparseSelfAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zstore.engine.extras.sparse_attention.attend import attend, layout_of, pattern_of
from zstore.errors import UsageError

from .names import by_place


class SparsityConfig:
    """A pattern for `num_heads` heads; the other arguments are those of the config's section `sparse_attention`, by name or
    in the `order` of DeepSpeed's."""

    mode, order = "dense", ""

    def __init__(self, *values: Any, **given: Any) -> None:
        order = f"num_heads block different_layout_per_head {self.order}"
        named = by_place(type(self).__name__, order, values, given)
        self.num_heads = int(named.pop("num_heads"))
        self.pattern = pattern_of(self.mode, **named)
        self.block = self.pattern.block
        self.different_layout_per_head = self.pattern.different_layout_per_head

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Return which blocks attend to which: int64 [heads, blocks, blocks] of 0 and 1.

        Raises ValueError if `seq_len` is not a multiple of the block.
        """
        if seq_len % self.block:
            raise ValueError(f"expected a sequence of a multiple of block ({self.block}) tokens, got {seq_len}")
        layout = layout_of(self.pattern, self.num_heads, seq_len // self.block)
        return layout.long().expand(self.num_heads, -1, -1).contiguous()


class DenseSparsityConfig(SparsityConfig):
    """The mode "dense"."""


class FixedSparsityConfig(SparsityConfig):
    """The mode "fixed"."""

    mode = "fixed"
    order = "num_local_blocks num_global_blocks attention horizontal_global_attention num_different_global_patterns"


class VariableSparsityConfig(SparsityConfig):
    """The mode "variable"."""

    mode = "variable"
    order = (
        "num_random_blocks local_window_blocks global_block_indices global_block_end_indices attention "
        "horizontal_global_attention"
    )


class BigBirdSparsityConfig(SparsityConfig):
    """The mode "bigbird"."""

    mode = "bigbird"
    order = "num_random_blocks num_sliding_window_blocks num_global_blocks attention"


class BSLongformerSparsityConfig(SparsityConfig):
    """The mode "bslongformer"."""

    mode = "bslongformer"
    order = "num_sliding_window_blocks global_block_indices global_block_end_indices attention"


class SparseSelfAttention(nn.Module):
    """Attention under a pattern. Masks are 1 or 0 if their mode is "mul", and 0 or largely negative if it is "add"."""

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config or SparsityConfig(num_heads=4)
        self._modes = (key_padding_mask_mode, attn_mask_mode)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [batch, heads, tokens, head_dim] of tensors of that shape.

        `key_padding_mask` [batch, tokens], `attn_mask` [tokens, tokens]. Raises UsageError for `rpe`.
        """
        if rpe is not None:
            raise UsageError("SparseSelfAttention: rpe is not supported; add positions to query and key")
        mask = None if key_padding_mask is None else _allowed(key_padding_mask, self._modes[0])[:, None, None, :]
        if attn_mask is not None:
            whole = _allowed(attn_mask, self._modes[1])
            mask = whole if mask is None else mask & whole
        return attend(query, key, value, self.sparsity_config.pattern, mask=mask)


def _allowed(mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the positions that a mask lets attend, as booleans."""
    return mask > -1000 if mode == "add" else mask != 0
