"""Any bytes of a model's safetensors files, without the files: cut into blocks, and read from the checkpoint.

[Note: blocks]
A range of a file's bytes is cut into blocks of bounded size, which follow each other without holes. A block is of
the header, or of elements of one or several weights; it ends with a stored chunk, if chunks are not larger than blocks,
so that none is read twice. A range may begin or end inside an element: the block has all of it, and is then cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..checkpoint.lookahead import cut_spans
from ..checkpoint.reader import ArraySource
from ..errors import CheckpointMismatchError
from ..format.arrays import Bytes, numpy_dtype
from .cast import Overflow
from .files import FileLayout, Weight
from .from_checkpoint import read_weight


@dataclass(frozen=True, kw_only=True)
class WeightPiece:
    """Flat elements `[first, stop)` of a weight."""

    weight: Weight
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in the file."""
        return (self.stop - self.first) * self.weight.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """Bytes that follow each other in a file: of the header, or of weights. See [Note: blocks]."""

    header: bytes = b""
    pieces: tuple[WeightPiece, ...] = ()
    skip: int = 0
    """Bytes before the wanted ones."""
    nbytes: int
    """Wanted bytes."""


def cut_blocks(
    source: ArraySource, layout: FileLayout, start: int, stop: int, block_bytes: int
) -> Iterator[TensorBlock]:
    """Yield bytes `[start, stop)` of a file in blocks that take at most `block_bytes` each, or one element."""
    if stop <= start:
        return
    header = layout.header[start : min(stop, len(layout.header))]
    for at in range(0, len(header), block_bytes):
        part = header[at : at + block_bytes]
        yield TensorBlock(header=part, nbytes=len(part))
    low = max(start, len(layout.header))
    pieces: list[WeightPiece] = []
    held, origin = 0, low
    for begin, piece in _pieces(source, layout, low, stop, block_bytes):
        if pieces and held + piece.nbytes > block_bytes:
            yield _block(pieces, origin, held, low, stop)
            pieces, held = [], 0
        if not pieces:
            origin = begin
        pieces.append(piece)
        held += piece.nbytes
    if pieces:
        yield _block(pieces, origin, held, low, stop)


def _block(pieces: list[WeightPiece], origin: int, held: int, low: int, stop: int) -> TensorBlock:
    skip = max(0, low - origin)
    return TensorBlock(pieces=tuple(pieces), skip=skip, nbytes=min(held, stop - origin) - skip)


def _pieces(
    source: ArraySource, layout: FileLayout, low: int, stop: int, block_bytes: int
) -> Iterator[tuple[int, WeightPiece]]:
    """Yield the elements that bytes `[low, stop)` of a file take, in order, with the place of the first in the file."""
    for number in range(max(0, bisect_right(layout.offsets, low) - 1), len(layout.weights)):
        weight, offset = layout.weights[number], layout.offsets[number]
        if offset >= stop:
            return
        size = weight.itemsize
        first = max(0, low - offset) // size
        last = min(weight.numel, -(-(stop - offset) // size))
        step = max(1, block_bytes // size)
        array = source.array(weight.array)
        for span in cut_spans(array, first, max(first, last), step * array.spec.itemsize):
            for at in range(span.first, span.stop, step):
                yield offset + at * size, WeightPiece(weight=weight, first=at, stop=min(at + step, span.stop))


def read_block(source: ArraySource, block: TensorBlock, overflow: Overflow) -> memoryview:
    """Return the bytes of a block: every chunk that it takes is verified.

    Raises CheckpointMismatchError if a value does not fit its type and `overflow` is "error", and the errors of reading.
    """
    if block.header:
        return memoryview(block.header)
    out: Bytes = np.empty(sum(piece.nbytes for piece in block.pieces), np.uint8)
    at = 0
    for piece in block.pieces:
        weight = piece.weight
        view = out[at : at + piece.nbytes].view(numpy_dtype(weight.dtype))
        lost = read_weight(source, weight, piece.first, view, overflow)
        if lost and overflow == "error":
            raise CheckpointMismatchError(
                f"{weight.name} has values that {weight.dtype} cannot hold ({lost} among elements {piece.first} to "
                f"{piece.stop}): choose bf16, or how they are written: overflow clamp or inf"
            )
        at += piece.nbytes
    return out.data[block.skip : block.skip + block.nbytes]
