"""Base class for checkpoints of other software. No torch."""

from __future__ import annotations

import stat
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy.typing as npt

from ..checkpoint.format import Record
from ..checkpoint.layout import array_path, step_tag, tag_text
from ..checkpoint.reader import ArraySource, StoredArray
from ..errors import CheckpointMismatchError, CorruptionError, UsageError, ZstoreError, storage_error
from ..format.arrays import ArraySpec, Bytes, make_grid
from ..io.files import Files
from ..io.shards import IoResources


class ForeignSource(ArraySource):
    """A checkpoint in `folder` with the arrays `specs`, each in a single piece. Subclasses implement `_fill`.

    It has no state of individual ranks. If the files have no checksums, damage is not detected.
    """

    def __init__(
        self, folder: Path, record: Record, specs: Iterable[ArraySpec], resources: IoResources | None, files: Files
    ) -> None:
        arrays = {
            spec.name: StoredArray(spec=spec, grid=make_grid(spec.stored_shape, 1), folder=array_path(spec.name))
            for spec in specs
        }
        super().__init__(str(folder), record.tag, record, resources)
        self.arrays = arrays
        self._files = files
        self._lock = threading.Lock()
        self._read_bytes = 0

    @property
    def read_bytes(self) -> int:
        """Total bytes of arrays read."""
        with self._lock:
            return self._read_bytes

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        target = self.checked_target(name, first, stop, out)
        if first == stop:
            return
        self._fill(name, first, stop, target)
        with self._lock:
            self._read_bytes += target.size

    @abstractmethod
    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        """Read flat elements `[first, stop)`, at least one, of array `name` into `out`, which has their size in bytes."""


def record_of(folder: Path, step: int = 0, state: Mapping[str, Any] | None = None) -> Record:
    """Return a record for a folder that has none; the tag is the folder's name if that is a valid tag."""
    try:
        tag = tag_text(folder.resolve().name)
    except UsageError:
        tag = step_tag(step)
    return Record(
        id="",
        tag=tag,
        step=step,
        world_size=1,
        training_world_size=1,
        metadata_sha256="",
        manifest_sha256=(),
        state=state or {},
    )


@contextmanager
def opened_file(path: Path, kind: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of this `kind`, yield it with its size, and name it in errors raised by the block.

    Raises StorageError if it cannot be read, CorruptionError if it is missing or not a file, or if the block fails otherwise.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            raise CorruptionError(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file, status.st_size
    except (CheckpointMismatchError, CorruptionError) as error:
        if str(path.parent) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except ZstoreError:
        raise
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing: copy it again") from error
    except OSError as error:
        raise storage_error(error, "the file cannot be read", path=str(path)) from error
    except Exception as error:
        raise CorruptionError(
            f"{path} is not a valid {kind}, or is damaged ({type(error).__name__}: {error!s:.200}): copy it again"
        ) from error
