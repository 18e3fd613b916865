"""Copying local files into an fsspec file system, a part at a time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PART_BYTES = 8 * 1024 * 1024
"""Bytes of a part; a file that is no larger goes in one request."""
_MOST_PARTS = 9000
"""S3 takes 10,000: larger files have larger parts."""
_MOST_PARTS_HELD = 4


def part_bytes(size: int) -> int:
    """Return the bytes of a part of a file of `size` bytes."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


def held_bytes(size: int) -> int:
    """Return about the most memory that the copying of a file of `size` bytes takes: a part is held as it was read, in the
    file's buffer and in the request, and may be copied once more on its way out."""
    return _MOST_PARTS_HELD * part_bytes(size)


def send_file(fs: Any, source: Path, target: str, advance: Callable[[int], None]) -> int:
    """Copy a file to the path `target` of `fs`, and return its bytes; holds about three parts of it in memory.

    `advance` is called with the bytes of each part, and all of them again, negative, if the copy fails.
    """
    done = 0
    size = os.stat(source).st_size
    nbytes = part_bytes(size)
    try:
        if size <= PART_BYTES:
            fs.pipe_file(target, b"".join(_parts(source, nbytes)))
            done = size
            advance(size)
        else:
            with _whole_or_nothing(fs.open(target, "wb", block_size=nbytes)) as out:
                for part in _parts(source, nbytes):
                    out.write(part)
                    done += len(part)
                    advance(len(part))
    except BaseException:
        advance(-done)
        raise
    return size


def _parts(source: Path, nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of a file, `nbytes` at most at a time."""
    done = 0
    with source.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while part := file.read(nbytes):
            done += len(part)
            yield part
        if done != size:
            raise OSError(f"{source} had {size} bytes and gave {done}: it was changed meanwhile")
        _forget(file.fileno())


@contextlib.contextmanager
def _whole_or_nothing(out: Any) -> Iterator[Any]:
    """Close `out` at the end of the block; if that or the block fails, leave nothing under its name."""
    try:
        yield out
        out.close()
    except BaseException:
        with contextlib.suppress(Exception):
            out.discard()
        # Otherwise it would be completed as it is when it is collected.
        with contextlib.suppress(Exception):
            out.closed = True
        raise


def _forget(fd: int) -> None:
    """Let the page cache drop the data that was read: nobody reads it again, and training needs the memory."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
