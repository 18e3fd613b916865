"""Entries of torch.distributed.checkpoint that are not tensors: their kinds, and the places of their bytes. No torch.

[Note: bytes in pickles]
torch.save pickles with protocol 2, which knows no `bytes`: they are stored as text of one character each, in UTF-8, so that
those from 128 on take two bytes. The text is gone through once, to count them and to note how many come before each block
of it; then any range of them is decoded from the blocks that it touches. Later protocols have them as they are.
Anything else is looked into if it is small, and otherwise kept as the pickle that it is.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointMismatchError, CorruptionError
from ..format.arrays import Bytes
from ..io.files import Files
from .dcp_values import BYTES, PICKLE, NotPlainError, RecordRoom, encode_value
from .torchfile import find_pickle, load_torch_file, opened_file

_MOST_LOADED_BYTES = 4 * 1024 * 1024
"""Longer pickles are not looked into."""
_MOST_VALUES, _MOST_VALUES_BYTES = 2**19, 32 * 1024 * 1024
"""Most that the values of one checkpoint may take: half of a record's limit."""
_BLOCK_BYTES = 1024 * 1024
_AROUND_BYTES = 64
"""More than a pickle of `bytes` has before them, or behind."""

_TEXT = re.compile(rb"\x80\x02c_codecs\nencode\n(?:q.)?\(?X(.{4})", re.DOTALL)
_TEXT_END = re.compile(rb"(?:q.)?X\x06\x00\x00\x00latin1(?:q.)?[\x86t](?:q.)?R(?:q.)?\.", re.DOTALL)
_RAW = re.compile(rb"\x80[\x03-\x05](?:\x95.{8})?(?:C(.)|B(.{4})|\x8e(.{8}))", re.DOTALL)
_RAW_END = re.compile(rb"(?:\x95.{8})?(?:\x94|q.)?\.", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes `[offset, offset + nbytes)` of a file: a block of a tensor, or an entry."""

    path: Path
    offset: int
    nbytes: int

    def read(self, files: Files, first: int, out: Bytes) -> None:
        """Fill `out` with them, from number `first` on. Raises StorageError if the file is shorter now."""
        with files.opened(self.path) as file:
            files.read_into(file, out, self.offset + first)

    def load(self, files: Files, first: int, stop: int) -> Bytes:
        """Return bytes `[first, stop)` of them."""
        out = np.empty(stop - first, np.uint8)
        self.read(files, first, out)
        return out


class TextBytes:
    """Bytes that are stored in a file as text. See [Note: bytes in pickles]. Raises CorruptionError if they are not."""

    def __init__(self, files: Files, place: FileRange) -> None:
        self._place = place
        self._starts = [0]
        """How many bytes come before each block of the text."""
        decode = codecs.getincrementaldecoder("utf-8")().decode  # a block may end inside of a character
        try:
            for at in range(0, place.nbytes, _BLOCK_BYTES):
                text = place.load(files, at, min(at + _BLOCK_BYTES, place.nbytes))
                decode(text.tobytes()).encode("latin1")
                self._starts.append(self._starts[-1] + int(np.count_nonzero((text & 0xC0) != 0x80)))
            decode(b"", final=True)
        except UnicodeError as error:
            raise self._damaged() from error

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self._starts[-1]

    def read(self, files: Files, first: int, out: Bytes) -> None:
        done = 0
        while done < out.size:
            block = bisect_right(self._starts, first + done) - 1
            at = block * _BLOCK_BYTES
            # With the byte behind the block. Half a character, at the begin or the end, is left out.
            text = self._place.load(files, at, min(at + _BLOCK_BYTES + 1, self._place.nbytes)).tobytes()
            decoded = text.decode("utf-8", "ignore").encode("latin1", "ignore")
            some = decoded[first + done - self._starts[block] :][: out.size - done]
            if not some:
                raise self._damaged()
            out[done : done + len(some)] = np.frombuffer(some, np.uint8)
            done += len(some)

    def _damaged(self) -> CorruptionError:
        return CorruptionError(
            f"{self._place.path}: the bytes at {self._place.offset} are not the encoding of bytes: the file is damaged"
        )


@dataclass(frozen=True)
class LoadedBytes:
    """A few bytes that are unpickled again whenever they are read."""

    place: FileRange
    nbytes: int

    def read(self, files: Files, first: int, out: Bytes) -> None:
        value = load_torch_file(self.place.path, part=(self.place.offset, self.place.nbytes))
        if type(value) is not bytes or len(value) != self.nbytes:
            raise CorruptionError(f"{self.place.path} changed while it was read")
        out[:] = np.frombuffer(value, np.uint8)[first : first + out.size]


Opaque = FileRange | TextBytes | LoadedBytes
"""The bytes of an entry, read from their file."""


class PickledEntries:
    """Looks into the entries of one checkpoint. They may not overlap: otherwise many could be made of few bytes."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._room = RecordRoom(_MOST_VALUES, _MOST_VALUES_BYTES)
        self._left: dict[Path, int] = {}
        """Bytes of each file that no entry has claimed yet."""

    def look(self, place: FileRange) -> tuple[str, Any]:
        """Return an empty kind and JSON for plain data, otherwise the kind and the `Opaque`.

        Raises CorruptionError if the entry is missing or damaged, or the file has less than its entries.
        """
        self._claim(place)
        offset, nbytes = find_pickle(place.path, (place.offset, place.nbytes))
        found = self._bytes_in(FileRange(path=place.path, offset=offset, nbytes=nbytes))
        if found is not None:
            return BYTES, found
        if nbytes <= _MOST_LOADED_BYTES:
            with contextlib.suppress(NotPlainError, CheckpointMismatchError):
                value = load_torch_file(place.path, part=(place.offset, place.nbytes))
                if type(value) is bytes:
                    return BYTES, LoadedBytes(place, len(value))
                return "", encode_value(value, self._room)
        return PICKLE, place

    def _claim(self, place: FileRange) -> None:
        if place.path not in self._left:
            with opened_file(place.path) as (_, size):
                self._left[place.path] = size
        self._left[place.path] -= place.nbytes
        if self._left[place.path] < 0:
            raise CorruptionError(
                f"{place.path} is shorter than the entries in it, or they overlap: it is truncated or "
                "damaged; copy it again"
            )

    def _bytes_in(self, pickled: FileRange) -> FileRange | TextBytes | None:
        """Return the bytes that a pickle is of; None if it is of something else."""
        head = pickled.load(self._files, 0, min(_AROUND_BYTES, pickled.nbytes)).tobytes()
        for begin, end in ((_TEXT, _TEXT_END), (_RAW, _RAW_END)):
            match = begin.match(head)
            if match is None:
                continue
            size = int.from_bytes(next(group for group in match.groups() if group is not None), "little")
            stop = match.end() + size
            if not 0 < pickled.nbytes - stop <= _AROUND_BYTES:
                continue
            if end.fullmatch(pickled.load(self._files, stop, pickled.nbytes).tobytes()):
                content = FileRange(path=pickled.path, offset=pickled.offset + match.end(), nbytes=size)
                return TextBytes(self._files, content) if begin is _TEXT else content
        return None
