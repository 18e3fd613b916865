"""Sparse attention: layouts of patterns, their masks, attention with them, and its use in models.

A sequence is split into blocks of `block` tokens, the last of which may be shorter. For each pair of blocks, a layout says
whether queries of one attend to keys of the other. Sources: fixed, Child et al., "Generating Long Sequences with Sparse
Transformers" (arXiv 1904.10509); bigbird, Zaheer et al. (arXiv 2007.14062); bslongformer, Beltagy et al. (arXiv 2004.05150)
at block granularity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from zstore.errors import UsageError

from ..config.config import load_config
from .sections import Pattern

_UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias", "s_aux")
"""Arguments of transformers' attention that are not supported."""


def pattern_of(mode: str, **arguments: Any) -> Pattern:
    """Return the pattern of a mode, with arguments as in the config section. Raises ConfigError for other arguments."""
    given = {name: value for name, value in arguments.items() if value is not None}
    settings: Any = load_config({"sparse_attention": {"mode": mode, **given}}, name="sparse attention").settings
    pattern: Pattern = settings.sparse_attention
    return pattern


@functools.lru_cache(maxsize=32)
def layout_of(pattern: Pattern, num_heads: int, num_blocks: int) -> torch.Tensor:
    """Return which key blocks each query block attends to: bool [heads, queries, keys], with 1 head if all are equal. Every
    block attends to itself. The caller must not change it."""
    heads = range(num_heads if pattern.different_layout_per_head else 1)
    layout = torch.stack([_layout_of_head(pattern, head, num_blocks) for head in heads])
    layout |= torch.eye(num_blocks, dtype=torch.bool)
    layout = layout.tril() if pattern.is_causal else layout
    return layout[:1] if bool((layout == layout[:1]).all()) else layout


def _layout_of_head(pattern: Pattern, head: int, num_blocks: int) -> torch.Tensor:
    if pattern.mode == "dense":
        return torch.ones(num_blocks, num_blocks, dtype=torch.bool)
    if pattern.mode == "fixed":
        return _fixed_layout(pattern, head, num_blocks)
    layout: torch.Tensor
    if pattern.mode == "variable":
        sizes = pattern.argument("local_window_blocks")
        sizes = torch.tensor([*sizes, *[sizes[-1]] * num_blocks])  # the last size repeats
        window = torch.arange(len(sizes)).repeat_interleave(sizes)[:num_blocks]
        layout = window[:, None] == window
    else:
        index = torch.arange(num_blocks)
        layout = (index[:, None] - index).abs() <= pattern.argument("num_sliding_window_blocks") // 2
    if pattern.mode != "bslongformer":
        generator, count = torch.Generator().manual_seed(head), pattern.argument("num_random_blocks")
        for row in range(num_blocks if count else 0):
            num_candidates = row + 1 if pattern.is_causal else num_blocks
            layout[row, torch.randperm(num_candidates, generator=generator)[:count]] = True
    if pattern.mode == "bigbird":
        ranges = [(0, pattern.argument("num_global_blocks"))]
    else:
        starts, ends = pattern.argument("global_block_indices"), pattern.argument("global_block_end_indices")
        ranges = list(zip(starts, ends or [start + 1 for start in starts], strict=True))
    for start, stop in ranges:
        layout[:, start:stop] = True
        if pattern.mode != "variable" or pattern.argument("horizontal_global_attention"):
            layout[start:stop] = True
    return layout


def _fixed_layout(pattern: Pattern, head: int, num_blocks: int) -> torch.Tensor:
    """Return local windows, with global blocks in each window to which all later (or all) blocks attend."""
    num_local, num_global = pattern.argument("num_local_blocks"), pattern.argument("num_global_blocks")
    window = torch.arange(num_blocks) // num_local
    layout: torch.Tensor = window[:, None] == window
    offset = num_local - (1 + head % pattern.argument("num_different_global_patterns")) * num_global
    for start in range(0, num_blocks, num_local):
        first = min(start + offset, max(num_blocks - num_global, 0))
        layout[:, first : first + num_global] = True
        if pattern.argument("horizontal_global_attention"):
            layout[first : first + num_global] = True
    return layout


@functools.lru_cache(maxsize=8)
def dense_mask(pattern: Pattern, num_heads: int, num_tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return which tokens attend to which: bool [1, heads or 1, queries, keys]. The caller must not change it."""
    blocks = layout_of(pattern, num_heads, -(-num_tokens // pattern.block)).to(device)
    mask = blocks.repeat_interleave(pattern.block, 1).repeat_interleave(pattern.block, 2)
    mask = mask[None, :, :num_tokens, :num_tokens]
    return mask.tril() if pattern.is_causal else mask.contiguous()


@functools.lru_cache(maxsize=8)
def block_mask(pattern: Pattern, num_heads: int, num_tokens: int, device: torch.device | str = "cpu") -> BlockMask:
    """Return the pattern as the `block_mask` of `torch.nn.attention.flex_attention.flex_attention`."""
    blocks = layout_of(pattern, num_heads, -(-num_tokens // pattern.block)).to(device)
    size, causal, heads = pattern.block, pattern.is_causal, None if len(blocks) == 1 else num_heads

    def attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
        allowed = blocks[head * 0 if heads is None else head, query // size, key // size]
        return allowed & (query >= key) if causal else allowed

    return create_block_mask(attends, None, heads, num_tokens, num_tokens, device)


def attend(  # noqa: PLR0913 - as scaled_dot_product_attention, with the pattern
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    *,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention [batch, heads, queries, head_dim] of `query` to `key` and `value` [batch, heads, keys, head_dim],
    for the pairs of tokens that the pattern allows.

    `mask`, bool, of a shape that broadcasts to [batch, heads, queries, keys], excludes further pairs (False). `is_causal`
    excludes later tokens, as unidirectional patterns always do. The number of heads of `key` and `value` may be a divisor of
    that of `query`. If there are fewer queries than keys, as with a KV cache, they are the last tokens. `scale` and
    `dropout_p` are as in `scaled_dot_product_attention`.

    On CUDA this is flex_attention, which skips empty blocks; on other devices, and with a mask, dropout or fewer queries,
    dense attention with the pattern's mask. Raises UsageError for inconsistent shapes.
    """
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    if key.shape != value.shape[:3] + key.shape[3:] or heads % key.shape[1] or queries > keys:
        raise UsageError(
            "sparse attention: expected query [batch, heads, queries, head_dim] and key, value [batch, heads, keys, head_dim], "
            f"with a divisor of its heads and at least as many keys; got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if is_causal and not pattern.is_causal:
        pattern = pattern.model_copy(update={"attention": "unidirectional"})
    grouped = key.shape[1] != heads
    if query.device.type == "cuda" and mask is None and dropout_p == 0.0 and queries == keys:
        blocks = block_mask(pattern, heads, keys, query.device)
        output: torch.Tensor = _compiled_flex()(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped)
        return output
    allowed = dense_mask(pattern, heads, keys, query.device)[:, :, keys - queries :]
    allowed = allowed if mask is None else allowed & mask
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout_p, scale=scale, enable_gqa=grouped
    )


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def apply(model: nn.Module, pattern: Pattern) -> int:
    """Use `pattern` for the attention in `model`; return the number of modules or transformers models that use it.

    These are modules with `use_attention(attend)`, as in zstore's models, and transformers models whose attention can be
    replaced; their cross-attention stays dense. Raises UsageError if there are none.
    """
    count = 0
    nested: set[nn.Module] = set()
    for module in model.modules():
        candidate: Any = module
        if callable(getattr(module, "use_attention", None)):
            candidate.use_attention(partial(attend, pattern=pattern))
            count += 1
        elif callable(getattr(module, "set_attn_implementation", None)) and module not in nested:
            _use_in_transformers(module, pattern)
            nested.update(module.modules())
            count += 1
    if not count:
        raise UsageError(
            f"sparse_attention: {type(model).__name__} has no attention that can be replaced: call "
            "zstore.attention.attend(query, key, value, pattern) in its forward and remove the section from the config, "
            "or add a method use_attention(attend) to its attention modules"
        )
    return count


def _use_in_transformers(model: Any, pattern: Pattern) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"zstore_sparse_{abs(hash(pattern)):x}"
    AttentionInterface.register(name, _transformers_attention(pattern))
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        model.set_attn_implementation(name)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"sparse_attention: transformers cannot replace the attention of {type(model).__name__}: {error}; "
            "remove the section from the config"
        ) from error


def _transformers_attention(pattern: Pattern) -> Callable[..., tuple[torch.Tensor, None]]:
    def forward(  # noqa: PLR0913, PLR0917 - the arguments of transformers' call
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        found = [name for name in _UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
        if found:
            raise UsageError(f"sparse_attention: {type(module).__name__} needs {found[0]}, which is not supported")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
        if not causal and query.shape[2] != key.shape[2]:  # cross-attention
            options |= {"attn_mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
            output = F.scaled_dot_product_attention(query, key, value, **options)
        else:
            output = attend(query, key, value, pattern, mask=mask, is_causal=causal and mask is None, **options)
        return output.transpose(1, 2).contiguous(), None

    return forward
