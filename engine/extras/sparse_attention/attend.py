"""Attention under a pattern.

[Note: three ways]
"flex" is `torch.nn.attention.flex_attention`, compiled once: on CUDA it has kernels for forward and backward that leave out
blocks of 128 x 128 in which nothing is attended to. "blocks" gathers for each block of queries the blocks of keys and values
that it attends to, and computes dense attention over them: forward and backward on every device, by torch's own kernels; its
time and memory are those of the present blocks. Rows with about as many blocks go together, padded to the longest.
"dense" is dense attention under the pattern's mask. All compute the same function; the order of their sums differs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from zstore.errors import UsageError

from .patterns import Layout, Pattern

Kernel = Literal["auto", "flex", "blocks", "dense"]

_DENSE_FROM = 0.5
"""Share of the pairs from which on gathering blocks costs more than it leaves out."""
_DENSE_BELOW_TOKENS = 512
_FLEX_BLOCK = 128
_TILE_TOKENS = 128
"""Queries that are computed together: fewer make many small products, more need more blocks."""


def attend(  # noqa: PLR0913 - those of scaled_dot_product_attention, and the pattern
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    *,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: Kernel = "auto",
) -> torch.Tensor:
    """Return attention [batch, heads, queries, head_dim] of `query` to `key` and `value` [batch, heads, keys, head_dim], for
    the pairs of tokens that the pattern allows.

    `mask`, bool, of a shape that broadcasts to [batch, heads, queries, keys], excludes more pairs: False is not attended to.
    `is_causal` excludes later tokens, as a unidirectional pattern does by itself. Heads of `key` and `value` may be fewer
    by a whole factor. Fewer queries than keys, as with a cache of keys: the queries are the last tokens. `scale` and
    `dropout_p` are those of `scaled_dot_product_attention`. For `kernel` see [Note: three ways].
    Raises UsageError for shapes that do not belong together, and for "flex" with a mask or dropout.
    """
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    if key.shape != value.shape[:3] + key.shape[3:] or heads % key.shape[1] or queries > keys:
        raise UsageError(
            "sparse attention: expected query [batch, heads, queries, head_dim] and key, value [batch, heads, keys, head_dim], "
            f"with as many or fewer heads and at least as many keys; got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if key.shape[1] != heads:
        key, value = (each.repeat_interleave(heads // key.shape[1], dim=1) for each in (key, value))
    shape = _Shape(pattern, heads, keys, is_causal or pattern.is_causal)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    chosen = _choose(kernel, query, shape, plain=mask is None and dropout_p == 0.0)
    if chosen == "flex":
        if mask is not None or dropout_p or queries != keys:
            raise UsageError(
                'sparse attention: kernel "flex" takes neither a mask nor dropout nor fewer queries than keys'
            )
        return _by_flex(query, key, value, shape, scale)
    if chosen == "blocks" and queries == keys:
        return _by_blocks(query, key, value, shape, mask, options)
    allowed = _dense_mask(shape, query.device)[:, :, keys - queries :]
    whole = allowed if mask is None else allowed & mask
    return F.scaled_dot_product_attention(query, key, value, attn_mask=whole, **options)


def dense_mask(
    pattern: Pattern, num_heads: int, num_tokens: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return which tokens attend to which: bool [1, heads or 1, queries, keys]."""
    shape = _Shape(pattern, num_heads, num_tokens, is_causal or pattern.is_causal)
    return _dense_mask(shape, torch.device(device)).clone()


def block_mask(
    pattern: Pattern, num_heads: int, num_tokens: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> Any:
    """Return the pattern as a `BlockMask` for `torch.nn.attention.flex_attention.flex_attention(block_mask=...)`."""
    shape = _Shape(pattern, num_heads, num_tokens, is_causal or pattern.is_causal)
    return _block_mask(shape, torch.device(device))


@dataclass(frozen=True)
class _Shape:
    """The key of masks that are kept."""

    pattern: Pattern
    heads: int
    tokens: int
    causal: bool

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.pattern.block)


@functools.lru_cache(maxsize=32)
def _layout(shape: _Shape) -> Layout:
    layout = shape.pattern.layout(shape.heads, shape.num_blocks)
    return layout & np.tri(shape.num_blocks, dtype=np.bool_) if shape.causal else layout


def _choose(kernel: Kernel, query: torch.Tensor, shape: _Shape, *, plain: bool) -> Kernel:
    if kernel != "auto":
        return kernel
    # Of the pairs that dense attention would compute.
    share = _layout(shape).mean() * (2 if shape.causal else 1)
    if share > _DENSE_FROM or shape.tokens < _DENSE_BELOW_TOKENS:
        return "dense"
    if query.device.type == "cuda" and plain and query.shape[2] == shape.tokens:
        return "flex"
    return "blocks"


# -- dense ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _dense_mask(shape: _Shape, device: torch.device) -> torch.Tensor:
    block = shape.pattern.block
    blocks = torch.from_numpy(_layout(shape)).to(device)
    whole = blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)[None, :, : shape.tokens, : shape.tokens]
    return whole.tril() if shape.causal else whole.contiguous()


# -- flex -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _block_mask(shape: _Shape, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = torch.from_numpy(_layout(shape)).to(device)
    size, causal, one = shape.pattern.block, shape.causal, blocks.shape[0] == 1

    def attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
        found = blocks[head * 0 if one else head, query // size, key // size]
        return found & (query >= key) if causal else found

    heads = None if one else shape.heads
    return create_block_mask(attends, None, heads, shape.tokens, shape.tokens, device, BLOCK_SIZE=_FLEX_BLOCK)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _by_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: _Shape, scale: float | None
) -> torch.Tensor:
    mixed: torch.Tensor = _compiled_flex()(query, key, value, block_mask=_block_mask(shape, query.device), scale=scale)
    return mixed


# -- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Tiles of queries that are computed together: of each head, or if heads are alike, of one for all."""

    tiles: torch.Tensor
    """[tiles]: which, counted over the heads."""
    columns: torch.Tensor
    """[tiles, most]: the blocks of keys that any query of a tile attends to, counted over the heads; padded with others."""
    mask: torch.Tensor
    """[tiles, tile's tokens, most * block]: whether a query attends to a key."""
    where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
    """[tiles], [tiles], [tiles, most]: head, tile and blocks of keys within the head."""


def _blocks_of_tile(block: int) -> int:
    return max(1, _TILE_TOKENS // block)


@functools.lru_cache(maxsize=8)
def _groups(shape: _Shape, device: torch.device) -> tuple[_Group, ...]:
    layout, each = _layout(shape), _blocks_of_tile(shape.pattern.block)
    tall = np.pad(layout, ((0, 0), (0, -shape.num_blocks % each), (0, 0)))
    rows = tall.reshape(len(layout), -1, each, shape.num_blocks)
    union: Layout = np.any(rows, axis=2)
    sizes = np.ceil(np.log2(union.sum(-1))).astype(int)
    found = []
    for size in np.unique(sizes):
        heads, tiles = np.nonzero(np.equal(sizes, size))
        most = int(union[heads, tiles].sum(-1).max())
        # Blocks that are attended to come first, in order.
        columns = np.argsort(~union[heads, tiles], axis=-1, kind="stable")[:, :most]
        allowed = np.take_along_axis(rows[heads, tiles], columns[:, None], -1)
        mask = _mask_of_tiles(shape, tiles, columns, allowed, device)
        numbers = torch.from_numpy(heads * union.shape[1] + tiles).to(device)
        places = torch.from_numpy(heads[:, None] * shape.num_blocks + columns).to(device)
        found.append(_Group(numbers, places, mask, (heads, tiles, columns)))
    return tuple(found)


def _mask_of_tiles(
    shape: _Shape,
    tiles: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    allowed: Layout,
    device: torch.device,
) -> torch.Tensor:
    """Return whether queries of `tiles` attend to keys of `columns`, as `allowed` says of their blocks."""
    block = shape.pattern.block
    mask = torch.from_numpy(allowed).to(device).repeat_interleave(block, 1).repeat_interleave(block, 2)
    size, within = mask.shape[1], torch.arange(block, device=device)
    keys = (torch.from_numpy(columns).to(device)[:, :, None] * block + within).flatten(1)[:, None]
    mask &= keys < shape.tokens
    if shape.causal:
        first = torch.from_numpy(tiles).to(device)[:, None] * size
        mask &= keys <= (first + torch.arange(size, device=device))[:, :, None]
    return mask


def _by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: _Shape,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    batch, heads, tokens, _ = query.shape
    block, layouts = shape.pattern.block, _layout(shape).shape[0]
    size = block * _blocks_of_tile(block)
    tiles = -(-tokens // size)
    # Heads that are alike are as many sequences of one head.
    sequences = torch.arange(batch * heads // layouts, device=query.device)
    queries = F.pad(query, (0, 0, 0, tiles * size - tokens)).reshape(len(sequences), layouts * tiles, size, -1)
    # A block is a row.
    rest = shape.num_blocks * block - tokens
    keys, values = (F.pad(each, (0, 0, 0, rest)).reshape(-1, block * each.shape[-1]) for each in (key, value))
    pieces = []
    for group in _groups(shape, query.device):
        places = sequences[:, None, None] * (layouts * shape.num_blocks) + group.columns
        near, mixed = (
            _rows(each, places).view(*places.shape[:2], -1, each.shape[1] // block) for each in (keys, values)
        )
        allowed = group.mask[None]
        if mask is not None:
            allowed = allowed & _mask_of_group(mask.expand(batch, heads, tokens, tokens), shape, group, size)
        own = queries.index_select(1, group.tiles)
        pieces.append(F.scaled_dot_product_attention(own, near, mixed, attn_mask=allowed, **options))
    order = torch.argsort(torch.cat([group.tiles for group in _groups(shape, query.device)]))
    whole = torch.cat(pieces, 1).index_select(1, order)
    return whole.reshape(batch, heads, tiles * size, -1)[:, :, :tokens]


def _rows(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table [rows, width] at `places`, of any shape. Its backward adds up a row's gradients in
    parallel, unlike that of indexing, one by one."""
    found: torch.Tensor = F.embedding(places, table)
    return found


def _mask_of_group(mask: torch.Tensor, shape: _Shape, group: _Group, size: int) -> torch.Tensor:
    """Return a group's part of a mask [batch, heads, queries, keys]: [sequences, tiles, tile's tokens, most * block]."""
    block, layouts = shape.pattern.block, _layout(shape).shape[0]
    padded = F.pad(mask, (0, shape.num_blocks * block - shape.tokens, 0, -shape.tokens % size), value=True)
    batch, heads_all = mask.shape[:2]
    cut = padded.view(batch, heads_all, -1, size, shape.num_blocks, block).transpose(3, 4)
    heads, tiles, columns = (torch.from_numpy(each).to(mask.device) for each in group.where)
    if layouts == 1:
        found = cut[:, :, tiles[:, None], columns].flatten(0, 1)
    else:
        found = cut[:, heads[:, None], tiles[:, None], columns]
    return found.transpose(2, 3).flatten(3)
