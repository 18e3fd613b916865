"""Layouts of patterns, their masks, attention under them, and its use in models.

A sequence is cut into blocks of `block` tokens, the last of which may be short. For each pair of blocks, a layout says
whether queries of one attend to keys of the other. Sources: fixed, Child et al., "Generating Long Sequences with Sparse
Transformers" (arXiv 1904.10509); bigbird, Zaheer et al. (arXiv 2007.14062); bslongformer, Beltagy et al. (arXiv 2004.05150)
at the granularity of blocks.
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

_UNSUPPORTED = ("softcap", "position_bias", "s_aux")
"""Arguments of transformers' attention that are refused."""


def pattern_of(mode: str, **arguments: Any) -> Pattern:
    """Return the pattern of a mode, with arguments as in the config's section. Raises ConfigError for others."""
    given = {name: value for name, value in arguments.items() if value is not None}
    settings: Any = load_config({"sparse_attention": {"mode": mode, **given}}, name="sparse attention").settings
    pattern: Pattern = settings.sparse_attention
    return pattern


@functools.lru_cache(maxsize=32)
def layout_of(pattern: Pattern, num_heads: int, num_blocks: int) -> torch.Tensor:
    """Return which blocks of keys each block of queries attends to: bool [heads, queries, keys], with 1 head if all are
    equal. Every block attends to itself. The caller must not change it."""
    heads = range(num_heads if pattern.different_layout_per_head else 1)
    found = torch.stack([_layout_of_head(pattern, head, num_blocks) for head in heads])
    found |= torch.eye(num_blocks, dtype=torch.bool)
    found = found.tril() if pattern.is_causal else found
    return found[:1] if bool((found == found[:1]).all()) else found


def _layout_of_head(pattern: Pattern, head: int, num_blocks: int) -> torch.Tensor:
    if pattern.mode == "dense":
        return torch.ones(num_blocks, num_blocks, dtype=torch.bool)
    if pattern.mode == "fixed":
        return _fixed(pattern, head, num_blocks)
    chosen: torch.Tensor
    if pattern.mode == "variable":
        sizes = pattern.argument("local_window_blocks")
        sizes = torch.tensor([*sizes, *[sizes[-1]] * num_blocks])  # the last repeats
        window = torch.arange(len(sizes)).repeat_interleave(sizes)[:num_blocks]
        chosen = window[:, None] == window
    else:
        index = torch.arange(num_blocks)
        chosen = (index[:, None] - index).abs() <= pattern.argument("num_sliding_window_blocks") // 2
    if pattern.mode != "bslongformer":
        generator, count = torch.Generator().manual_seed(head), pattern.argument("num_random_blocks")
        for row in range(num_blocks if count else 0):
            among = row + 1 if pattern.is_causal else num_blocks
            chosen[row, torch.randperm(among, generator=generator)[:count]] = True
    if pattern.mode == "bigbird":
        ranges = [(0, pattern.argument("num_global_blocks"))]
    else:
        starts, ends = pattern.argument("global_block_indices"), pattern.argument("global_block_end_indices")
        ranges = list(zip(starts, ends or [start + 1 for start in starts], strict=True))
    for start, stop in ranges:
        chosen[:, start:stop] = True
        if pattern.mode != "variable" or pattern.argument("horizontal_global_attention"):
            chosen[start:stop] = True
    return chosen


def _fixed(pattern: Pattern, head: int, num_blocks: int) -> torch.Tensor:
    """Return local windows, and in each window the global blocks, to which all later (or all) blocks attend."""
    local, each = pattern.argument("num_local_blocks"), pattern.argument("num_global_blocks")
    window = torch.arange(num_blocks) // local
    chosen: torch.Tensor = window[:, None] == window
    place = local - (1 + head % pattern.argument("num_different_global_patterns")) * each
    for start in range(0, num_blocks, local):
        first = min(start + place, max(num_blocks - each, 0))
        chosen[:, first : first + each] = True
        if pattern.argument("horizontal_global_attention"):
            chosen[first : first + each] = True
    return chosen


@functools.lru_cache(maxsize=8)
def dense_mask(pattern: Pattern, num_heads: int, num_tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return which tokens attend to which: bool [1, heads or 1, queries, keys]. The caller must not change it."""
    blocks = layout_of(pattern, num_heads, -(-num_tokens // pattern.block)).to(device)
    whole = blocks.repeat_interleave(pattern.block, 1).repeat_interleave(pattern.block, 2)
    whole = whole[None, :, :num_tokens, :num_tokens]
    return whole.tril() if pattern.is_causal else whole.contiguous()


@functools.lru_cache(maxsize=8)
def block_mask(pattern: Pattern, num_heads: int, num_tokens: int, device: torch.device | str = "cpu") -> BlockMask:
    """Return the pattern as the `block_mask` of `torch.nn.attention.flex_attention.flex_attention`."""
    blocks = layout_of(pattern, num_heads, -(-num_tokens // pattern.block)).to(device)
    size, causal, heads = pattern.block, pattern.is_causal, None if len(blocks) == 1 else num_heads

    def attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
        found = blocks[head * 0 if heads is None else head, query // size, key // size]
        return found & (query >= key) if causal else found

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

    `mask`, bool, of a shape that broadcasts to [batch, heads, queries, keys], excludes more pairs, where it is False.
    `is_causal` excludes later tokens, as unidirectional patterns always do. `key` and `value` may have fewer heads by a
    whole factor. Fewer queries than keys, as with a cache of keys, are the last tokens. `scale` and `dropout_p` are as in
    `scaled_dot_product_attention`.

    On CUDA this is flex_attention, which skips empty blocks; on other devices, and with a mask, dropout or fewer queries,
    dense attention under the pattern's mask. Raises UsageError for shapes that do not fit together.
    """
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    if key.shape != value.shape[:3] + key.shape[3:] or heads % key.shape[1] or queries > keys:
        raise UsageError(
            "sparse attention: expected query [batch, heads, queries, head_dim] and key, value [batch, heads, keys, head_dim], "
            f"with as many or fewer heads and at least as many keys; got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if is_causal and not pattern.is_causal:
        pattern = pattern.model_copy(update={"attention": "unidirectional"})
    grouped = key.shape[1] != heads
    if query.device.type == "cuda" and mask is None and dropout_p == 0.0 and queries == keys:
        blocks = block_mask(pattern, heads, keys, query.device)
        mixed: torch.Tensor = _compiled_flex()(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped)
        return mixed
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

    These are modules with `use_attention(attend)`, as in zstore's models, and transformers models whose attention
    transformers can exchange; their attention to another sequence stays dense. Raises UsageError if no module is either.
    """
    count = 0
    inner: set[nn.Module] = set()
    for module in model.modules():
        known: Any = module
        if callable(getattr(module, "use_attention", None)):
            known.use_attention(partial(attend, pattern=pattern))
            count += 1
        elif callable(getattr(module, "set_attn_implementation", None)) and module not in inner:
            _use_in_transformers(module, pattern)
            inner.update(module.modules())
            count += 1
    if not count:
        raise UsageError(
            f"sparse_attention: {type(model).__name__} has no attention that can be exchanged: call "
            "zstore.attention.attend(query, key, value, pattern) in its forward and take the section out of the config, "
            "or give its attention modules a method use_attention(attend)"
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
            f"sparse_attention: transformers cannot exchange the attention of {type(model).__name__}: {error}; "
            "take the section out of the config"
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
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        given = [name for name in _UNSUPPORTED if others.get(name) is not None]
        if given:
            raise UsageError(f"sparse_attention: {type(module).__name__} needs {given[0]}, which is not supported")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
        if not causal and query.shape[2] != key.shape[2]:  # attention to another sequence
            options |= {"attn_mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
            mixed = F.scaled_dot_product_attention(query, key, value, **options)
        else:
            mixed = attend(query, key, value, pattern, mask=mask, is_causal=causal and mask is None, **options)
        return mixed.transpose(1, 2).contiguous(), None

    return forward
