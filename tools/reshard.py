"""`zstore reshard`: the same state laid out for another number of ranks, or compressed, here or behind a URL. No torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint.reader import CheckpointReader, open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.source import ArraySource
from zstore.checkpoint.usage import count_files
from zstore.errors import UsageError
from zstore.remote.upload import upload_checkpoint
from zstore.remote.url import is_url, shown
from zstore.sizes import format_bytes, format_count

from .opening import DEFAULTS, Common, no_overwriting, open_location, print_json, reading
from .progress import Progress


def reshard_command(
    ckpt: str | os.PathLike[str],
    out: Path | None,
    world_size: int | None = None,
    *,
    tag: str | None = None,
    codec: str = "none",
    to: str | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt`, of a folder `tag` or the newest, laid out for `world_size` ranks (default: as many as it
    has) into the folder `out`, its chunks compressed with `codec`; return the exit code.

    With `to` it is then uploaded to the folder of checkpoints at that URL; without `out` it lies in a temporary folder
    meanwhile, and where neither layout nor codec is asked for a checkpoint on this machine is uploaded as it is. The tag
    stays the same. With `json`, one object: `path` (null where nothing of it stays on this machine), what was read and
    written, and with `to` also `url` and `upload`. Raises CheckpointExistsError where `out` or `to` has it already.
    """
    if to is None and out is None:
        raise UsageError("give the folder to write as OUT, or a URL to upload to with --to")
    if to is not None and not is_url(to):
        raise UsageError(f"--to {to}: expected a URL like s3://bucket/run; give a local folder as OUT")
    with _folder(out) as folder:
        with open_location(ckpt, common, tag) as source:
            ranks = source.record.world_size if world_size is None else world_size
            job = _Job(source, ranks, codec, folder, out, to)
            path = job.as_it_is() if (world_size, codec) == (None, "none") else None
            plan = job.plan(path)
            document: dict[str, Any] = {"path": str(path), "world_size": ranks, "codec": codec}
            if path is None:
                path, facts = job.run(plan)
                document |= {"path": None if out is None else str(path), **facts}
                plan = []
        if to is not None:  # the source's buffers are given back
            upload = _upload(path, to, common, plan)
            document = {**upload["upload"], **document, **upload}
    if common.json:
        print_json(document)
    return 0


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="zstore-reshard-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class _Job:
    """One resharding, into `folder`: `out`, or where that is None a temporary one."""

    source: ArraySource
    ranks: int
    codec: str
    folder: Path
    out: Path | None
    to: str | None

    @property
    def total_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.spec.nbytes for array in self.source.arrays.values())

    def as_it_is(self) -> Path | None:
        """Return the folder that can be uploaded without writing another, None where there is none."""
        source = self.source
        if self.out is None and isinstance(source, CheckpointReader) and source.folder.is_local:
            return source.path
        return None

    def plan(self, path: Path | None) -> list[str]:
        """Return what is done, in words: with the checkpoint in `path` as it is, or written anew."""
        what = f"plan: {format_count(len(self.source.arrays), 'array')}, {format_bytes(self.total_bytes)} of array data"
        if path is not None:
            return [f"{what}, uploaded unchanged from {path} to {shown(str(self.to))}"]
        how = "" if self.codec == "none" else f", compressed with {self.codec}"
        where = "a temporary folder" if self.out is None else str(self.out)
        then = "" if self.to is None else f", and from there to {shown(self.to)}"
        notes = [f"not carried over: {note}" for note in self.source.notes]
        return [
            f"{what}, from {self.source.record.world_size} to {format_count(self.ranks, 'rank')}{how}, into {where}{then}",
            *notes,
        ]

    def run(self, plan: list[str]) -> tuple[Path, dict[str, Any]]:
        """Write it; return the tag's folder, and what was done as JSON."""
        source = self.source
        with Progress(f"reshard {source.location}", self.total_bytes) as progress:
            for line in plan:
                progress.say(line)
            with no_overwriting(self.folder, source.tag):
                path = reshard_checkpoint(source, self.folder, self.ranks, progress.advance, codec=self.codec)
            read = reading(progress, source)
            file_bytes = _file_bytes(path)
            num_files, size_bytes = count_files(path)
            ratio = self.total_bytes / file_bytes if file_bytes else 1.0
            progress.say(
                f"wrote {path if self.out is not None else source.tag} for {format_count(self.ranks, 'rank')}: "
                f"{format_bytes(size_bytes)} on disk in {format_count(num_files, 'file')}"
                + ("" if self.codec == "none" else f", the array data compressed {ratio:.2f} times")
            )
        return path, {"file_bytes": file_bytes, "size_bytes": size_bytes, **read, **progress.summary()}


def _file_bytes(path: Path) -> int:
    with open_checkpoint(path) as written:
        return sum(array.file_bytes for array in written.arrays.values())


def _upload(path: Path, url: str, common: Common, plan: list[str]) -> dict[str, Any]:
    with Progress(f"upload {path.name} to {shown(url)}", _file_bytes(path)) as progress:
        for line in plan:
            progress.say(line)
        place, messages = upload_checkpoint(
            path,
            url,
            common.storage_options,
            advance=progress.advance,
            memory_bytes=None if common.memory_bytes is None else common.free_bytes,
        )
        for message in messages:
            progress.say(message)
        progress.say(f"uploaded to {place}")
    return {"url": place, "upload": progress.summary()}
