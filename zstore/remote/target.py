"""The target of an upload: a file system behind a URL, or a service of zstore."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.names import METADATA_FILE
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.retention import Keep, retire
from ..errors import BudgetError
from ..io.pool import Workers
from .commit import RemoteCommitter, remove_checkpoint
from .fsspec_folder import RemoteFolder
from .send import held_bytes, part_bytes
from .uploaded import common_files, shard_files

NUM_THREADS = 4
"""Files that one process uploads at a time; to a file system each takes about three parts of 8 MiB in memory."""

Advance = Callable[[int], None]


class UploadTarget(ABC):
    """One checkpoint on its way. Calls:

    (rank 0)       `begin`; `offer`, once metadata and manifests are there
    (other ranks)  `join` with rank 0's `ticket`
    (each rank)    `send`
    (rank 0)       `commit` and `retire`, or `abort` if anything fails
    """

    def __init__(self, location: str, tag: str, save_id: str) -> None:
        self.location = location
        """URL of the tag, as people name it."""
        self._tag = tag
        self._save_id = save_id

    @abstractmethod
    def begin(self, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None) -> list[str]:
        """Prepare the upload; return messages for the user. `retire` goes by `keep`.

        Raises CheckpointExistsError for a committed tag (unless `overwrite`, or with `replaces_own` if the same run saved
        it), here or from `offer`.
        """

    @abstractmethod
    def offer(self, reader: CheckpointReader) -> None:
        """Announce the files to upload."""

    @abstractmethod
    def ticket(self) -> Mapping[str, Any]:
        """Return the facts that other ranks need to `join`, as JSON."""

    @abstractmethod
    def join(self, ticket: Mapping[str, Any]) -> None:
        """Take part in rank 0's upload."""

    @abstractmethod
    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        """Send `files`, their bytes by path, from the folder `top`; return the bytes that went. They are those of `rank`, None:
        of all ranks."""

    @abstractmethod
    def commit(self, reader: CheckpointReader) -> list[str]:
        """Publish the checkpoint, once every rank has sent its files; return a message for each failure after that."""

    def retire(self) -> list[str]:
        """Remove the checkpoints that `keep` does not keep; return a message for each checkpoint that could not be removed.

        A target that does so as it commits has none left.
        """
        return []

    @abstractmethod
    def abort(self, *, ended: bool = True, cancelled: bool = False) -> None:
        """Give up. Never raises. `ended`: no rank sends any more; `cancelled`: nobody will resume it."""

    @abstractmethod
    def files_at_a_time(self, largest_bytes: int, memory_bytes: int | None) -> int:
        """Return how many files go at a time, the largest of which has so many bytes, in so much memory.

        Raises BudgetError if that is too little for one.
        """


class FileSystemTarget(UploadTarget):
    """An upload into the folder of checkpoints `folder` of a file system. See [Note: the order of an upload]."""

    def __init__(self, folder: RemoteFolder, tag: str, save_id: str, run_id: str) -> None:
        self._committer = RemoteCommitter(folder, tag, save_id, run_id)
        super().__init__(self._committer.location, tag, save_id)
        self._run_id = run_id
        self._keep: Keep | None = None

    def begin(self, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None) -> list[str]:
        self._keep = keep
        return self._committer.begin(overwrite=overwrite, replaces_own=replaces_own)

    def offer(self, reader: CheckpointReader) -> None:
        """Do nothing: files go to their final places."""

    def ticket(self) -> Mapping[str, Any]:
        return {"slot": self._committer.slot}

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._committer.slot = str(ticket["slot"])

    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        send = self._committer.target.send
        return sum(workers.run([partial(send, top / file, file, advance) for file in files]))

    def commit(self, reader: CheckpointReader) -> list[str]:
        """That all files arrived is checked by a listing."""
        sizes = common_files(reader) | shard_files(reader, range(reader.record.world_size))
        return self._committer.commit(reader.record, reader.folder.read_small(METADATA_FILE), sizes)

    def retire(self) -> list[str]:
        if self._keep is None:
            return []
        folder = self._committer.folder
        return retire(folder, keep=self._keep, run=self._run_id, remove=partial(remove_checkpoint, folder))

    def abort(self, *, ended: bool = True, cancelled: bool = False) -> None:
        """The sent files are removed."""
        self._committer.abort(ended=ended)

    def files_at_a_time(self, largest_bytes: int, memory_bytes: int | None) -> int:
        return files_at_a_time(largest_bytes, memory_bytes)


def files_at_a_time(largest_bytes: int, memory_bytes: int | None) -> int:
    """Return how many files go to a file system at a time, the largest of which has so many bytes."""
    if memory_bytes is None:
        return NUM_THREADS
    each = held_bytes(largest_bytes)
    if each > memory_bytes:
        raise BudgetError(
            f"a file of {largest_bytes} bytes is uploaded in parts of {part_bytes(largest_bytes)}, which takes about {each} "
            f"bytes of memory, but {memory_bytes} are available: allow more"
        )
    return min(NUM_THREADS, memory_bytes // each)
