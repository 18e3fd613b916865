"""Changes of weights in bf16: changed elements by position, in one file for each rank. Pure numpy.

[Note: a file of changes]
    patches, each from an even offset on: new values (2 bytes each), then gaps (1 or 2 bytes each)
    table, JSON: {name: [[first, stop, offset, values, gaps, bytes of a gap, crc32c], ...]}
    length of the table in bytes (u64)
All little-endian. A patch has flat elements `[first, stop)` of a tensor: its values are the new bits of the changed ones, and
a gap is the number of unchanged elements before the next changed one. The largest gap of its type stands for as many unchanged
elements and no change. The crc32c is that of all elements of the patch after the change, so that together they are a checksum
of the weights' content. A tensor's patches are applied in order; a later one may cover elements of a former one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError

Bits = npt.NDArray[np.uint16]
"""Elements in bf16, by their bits."""
_BYTE_GAPS_FROM = 64
"""Elements of a patch for each changed one, from which on gaps of one byte take more than those of two."""


def encode(old: Bits, new: Bits) -> tuple[Bits, npt.NDArray[Any]]:
    """Return the values and the gaps of the elements in which `new` differs from `old`, both 1-D, of one length."""
    changed = _differing(old, new)
    gaps = changed.copy()
    gaps[1:] -= changed[:-1] + 1
    kind = np.dtype("<u1" if changed.size * _BYTE_GAPS_FROM >= new.size else "<u2")
    most = np.iinfo(kind).max
    if gaps.size and gaps.max() >= most:
        skips, rest = np.divmod(gaps, most)
        at = np.arange(gaps.size) + np.cumsum(skips)
        gaps = np.full(at[-1] + 1, most)
        gaps[at] = rest
    return new[changed], gaps.astype(kind)


def _differing(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    """Return the positions of differing elements: eight are looked at together, since most are equal."""
    differ = np.zeros(-(-old.size // 8) * 8, bool)
    np.not_equal(old, new, out=differ[: old.size])
    eights = differ.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    at = np.flatnonzero(eights[some].view(bool))
    found: npt.NDArray[np.int64] = some[at >> 3] * 8 + (at & 7)
    return found


def decode(gaps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the positions of the changed elements in their patch."""
    most = np.iinfo(gaps.dtype).max
    changes = gaps != most
    ends = np.cumsum(gaps, dtype=np.int64) + np.cumsum(changes, dtype=np.int64)
    found: npt.NDArray[np.int64] = ends[changes] - 1
    return found


class DeltaWriter:
    """Writes the patches of one rank as they come, from any thread, to `file`. See [Note: a file of changes]."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._table: dict[str, list[list[int]]] = {}
        self.nbytes = 0
        """Bytes so far."""
        self.crc = 0
        """crc32c of them."""

    def add(self, name: str, first: int, old: Bits, new: Bits, crc: int) -> None:
        """Write what changed of flat elements from `first` on of a tensor; `crc` is the crc32c of `new`.

        Raises OSError if it cannot be written; nothing may be added after that.
        """
        values, gaps = encode(old, new)
        data = values.tobytes() + gaps.tobytes()
        with self._lock:
            row = [first, first + new.size, self.nbytes, values.size, gaps.size, gaps.itemsize, crc]
            self._table.setdefault(name, []).append(row)
            self._write(data + b"\0" * (len(data) % 2))

    def finish(self) -> None:
        """Write the table; nothing may be added after that."""
        table = json.dumps(self._table, separators=(",", ":")).encode()
        self._write(table + len(table).to_bytes(8, "little"))
        self._file.flush()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.nbytes += len(data)
        self.crc = crc32c(data, self.crc)


@dataclass(frozen=True, eq=False, kw_only=True)
class Patch:
    """What changed of flat elements `[first, stop)` of a tensor."""

    first: int
    stop: int
    values: Bits
    gaps: npt.NDArray[Any]
    crc: int
    source: Path

    def apply(self, bits: Bits) -> None:
        """Change `bits`, the elements `[first, stop)`. Raises CorruptionError if the patch cannot be one of them."""
        at = decode(self.gaps)
        if at.size != self.values.size or (at.size and at[-1] >= bits.size):
            raise CorruptionError(f"{self.source} changes elements that are not in the range that it names")
        bits[at] = self.values

    def check(self, bits: Bits) -> bool:
        """Return whether the changed elements are those that were published."""
        return crc32c(bits.data) == self.crc


def read_delta(path: Path, size: int, crc: int) -> dict[str, list[Patch]]:
    """Return the patches in a file of changes, mapped into memory, by tensor, in their order.

    Raises CorruptionError unless the file has `size` bytes with that crc32c, and is one of changes.
    """
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if data.size != size or size < 8 or crc32c(data.data) != crc:
        raise CorruptionError(
            f"{path} has {data.size} bytes and is not the file of {size} bytes that was published: take it again"
        )
    end = size - 8
    try:
        table = json.loads(data[end - int(data[end:].view("<u8")[0]) : end].tobytes())
        return {name: [_patch(data, path, row) for row in rows] for name, rows in table.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{path} is not a file of changed weights: {error!s:.200}") from error


def _patch(data: npt.NDArray[np.uint8], path: Path, row: list[int]) -> Patch:
    first, stop, at, values, gaps, width, crc = row
    middle, end = at + 2 * values, at + 2 * values + width * gaps
    if not (0 <= first <= stop and 0 <= at <= middle <= end <= data.size):
        raise ValueError(f"a patch of elements {first} to {stop} at bytes {at} to {end} of {data.size}")
    kind = np.dtype(f"<u{width}")
    return Patch(
        first=first,
        stop=stop,
        values=data[at:middle].view("<u2"),
        gaps=data[middle:end].view(kind),
        crc=crc,
        source=path,
    )


Spans = Iterator[tuple[int, int, list[Patch]]]


def spans_of(patches: Sequence[Patch]) -> Spans:
    """Yield `(first, stop, patches)` of a tensor: ranges that do not overlap, rising, with their patches in the order in which
    they are applied. Usually all versions have the same ranges."""
    order = sorted(range(len(patches)), key=lambda number: patches[number].first)
    at = 0
    while at < len(order):
        begin, first, stop = at, patches[order[at]].first, patches[order[at]].stop
        while at < len(order) and ((patch := patches[order[at]]).first < stop or patch.first == first):
            stop = max(stop, patch.stop)
            at += 1
        yield first, stop, [patches[number] for number in sorted(order[begin:at])]


def fold(name: str, first: int, bits: Bits, patches: Sequence[Patch]) -> None:
    """Apply the patches of a span to its elements, `bits`, which begin at flat element `first` of tensor `name`, in one pass.

    Raises CorruptionError if the result is not what was published.
    """
    last = {(patch.first, patch.stop): patch for patch in patches}
    for patch in patches:
        part = bits[patch.first - first : patch.stop - first]
        if part.size != patch.stop - patch.first:
            raise CorruptionError(f"{patch.source} changes elements up to {patch.stop} of {name!r}, which has fewer")
        patch.apply(part)
        if last[patch.first, patch.stop] is patch and not patch.check(part):
            raise CorruptionError(
                f"{name!r}: elements {patch.first} to {patch.stop} after {patch.source} differ from what was published: the "
                "weights that the changes were applied to are not those of its base version"
            )
