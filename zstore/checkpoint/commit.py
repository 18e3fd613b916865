"""Rank 0's part of a save: begin, commit or abort; and the removal of the leftovers of dead saves, which are
distinguished from running saves by their locks.

[Note: the order of a commit]
    1  <tag>.lock-<id>      created, and locked while the save runs
    2  <tag>.tmp-<id>/      created; the other ranks see it if the folder is shared
    3  shards, metadata, manifests in it: every file and folder is made durable
    4  zstore.json          in it, made durable
    5  <tag> -> <tag>.old-<id>          only if a committed checkpoint is replaced
    6  <tag>.tmp-<id> -> <tag>          the commit
    7  `latest` replaced; the parent folder made durable; the set-aside and older checkpoints removed; the lock removed

If one flush of the file system is enough for 3 and 4 (`Flush`), the new `latest` is written before it too.

After a crash before 6, the tag's name is unused or still the previous checkpoint's; between 5 and 6, a scan uses the
set-aside checkpoint for the tag, and the next save renames it back; after 6, the checkpoint is complete, `latest` is
outdated (it is only a hint), and the next save removes the leftovers. Each removal begins with a rename to
`<tag>.tmp-<id>`, so that a partly removed checkpoint never looks like a complete one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointExistsError, StorageError
from ..io.files import Files, Flush, make_read_only
from .catalog import TagInfo, check_tag_is_free, default_tag, is_committed, reporting_to, scan, with_commit_time
from .folder import folder_at
from .format import Record
from .layout import (
    ABORT_FILE,
    LATEST_FILE,
    LOCK,
    MANIFEST_FOLDER,
    RECORD_FILE,
    SET_ASIDE,
    TEMPORARY,
    new_save_id,
    parse_working_name,
    tag_folder,
    working_name,
)
from .retention import Keep, retire

try:
    import fcntl
except ImportError:  # Windows: saving is not supported there
    fcntl = None  # type: ignore[assignment]


_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
REPLACED_NOT_REMOVED = "the checkpoint is committed, but the checkpoint that it replaced could not be removed"
LATEST_NOT_UPDATED = f"the checkpoint is committed, but `{LATEST_FILE}` could not be replaced"
REMOTE_LOCK_TTL_S = 24 * 3600
"""If file locks are not supported, a save on another machine counts as running for this long."""


class SaveLock:
    """Locks the new lock file `path`, which names the process, until `release()`, or the end of the `with` block or the
    process. Waits while another process holds it. Raises StorageError if it cannot be created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            try:
                self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise _not_writable(path.parent, error.errno) from error
            _flock(self._fd, wait=True)
            # A sweep may have removed the file as a leftover between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(self._fd).st_ino:
                    break
            os.close(self._fd)
        os.pwrite(self._fd, owner_json(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if fcntl is not None:
            # Explicitly, because a forked child, such as a data loader's worker, shares the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _not_writable(folder: Path, error_number: int | None) -> StorageError:
    text = "cannot write to the folder: choose one that this user can write to"
    return StorageError(text, path=str(folder), errno=error_number)


@contextlib.contextmanager
def owner_has_ended(path: Path) -> Iterator[bool]:
    """Yield whether the save that created the lock file `path` has ended; without the file, it has. If so, the lock is
    held during the block, so that no save with that lock file can begin."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # another user's
        yield False
        return
    try:
        locked = _flock(fd, wait=False)
        yield not _owner_is_alive(fd) if locked is None else locked
    finally:
        os.close(fd)


def _flock(fd: int, *, wait: bool) -> bool | None:
    """Acquire the lock and return whether that succeeded; None if the system or the file system does not support locks."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    return None


def _owner_is_alive(fd: int) -> bool:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner = json.loads(os.pread(fd, 4096, 0))
        if owner["host"] == socket.gethostname():
            return not process_has_ended(owner)
    return time.time() - os.fstat(fd).st_mtime < REMOTE_LOCK_TTL_S


def owner_json(**extra: str | int) -> bytes:
    """Return the content of a lock file: a description of this process, with the `extra` fields."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **extra}).encode()


def process_has_ended(owner: Mapping[str, Any]) -> bool:
    """Return whether the process that owns a lock ran on this machine and has ended."""
    pid = int(owner["pid"])
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: a process of another user
        return isinstance(error, ProcessLookupError)
    return False


class Committer:
    """One save into `folder` under `tag`. Calls, all by rank 0: `check`, `begin`, then `commit` or `abort`."""

    def __init__(self, files: Files, folder: Path, tag: str, save_id: str) -> None:
        self.folder = folder
        name = tag_folder(tag)
        self.target = folder / name
        self.temporary = folder / working_name(name, TEMPORARY, save_id)
        self.lock_path = folder / working_name(name, LOCK, save_id)
        self._tag = tag
        self._new_latest = folder / working_name(LATEST_FILE, TEMPORARY, save_id)
        self._set_aside = folder / working_name(name, SET_ASIDE, save_id)
        self._files = files
        self._lock: SaveLock | None = None

    def check(self, *, overwrite: bool, run: str = "") -> TagInfo | None:
        """Check that the save may begin; runs in the caller's thread, and changes nothing except that it creates `folder`.

        Returns the checkpoint that the save will replace. Raises CheckpointExistsError for a committed tag (unless
        `overwrite`, or the checkpoint belongs to run `run`), StorageError if the folder cannot be created.
        """
        if not self.folder.is_dir():
            self._files.make_folder(self.folder)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise _not_writable(self.folder, errno.EACCES)
        return check_tag_is_free(self.folder, self._tag, overwrite=overwrite, run=run)

    def begin(self, move: Callable[[Path], object] | None = None) -> None:
        """Create the temporary folder and its lock. Not for the caller's thread: a busy file-system journal may delay it.
        `move` renames an existing folder to the temporary one."""
        self._lock = SaveLock(self.lock_path)
        try:
            if move is not None:
                move(self.temporary)
            self._files.make_folder(self.temporary / MANIFEST_FOLDER)
        except BaseException:
            self.close()
            raise

    def commit(self, record: Record, flush: Flush | None = None, keep: Keep | None = None) -> list[str]:
        """Publish the temporary folder, whose files are durable, or are made durable by `flush`, with `record`; then
        apply `keep` to the checkpoints of its run. Returns what failed after the commit. Sets `record.committed_ns`
        unless it is set."""
        record = record if record.committed_ns else with_commit_time(record, self.folder)
        path = self.temporary / RECORD_FILE
        self._files.write_small(path, record.encode(), sync=flush is None)
        make_read_only(path)
        messages: list[str] = []
        if self.target.is_dir() and not (self.target / RECORD_FILE).exists():
            # Other programs' files are kept next to the checkpoint's.
            shutil.copytree(self.target, self.temporary, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
        if flush is None:
            self._files.sync_folder(self.temporary)
        else:
            self._write_latest(record, messages, sync=False)
            flush.sync()
        replaces = self.target.exists()
        if replaces:
            self._files.rename(self.target, self._set_aside)
        try:
            self._files.rename(self.temporary, self.target)
        except BaseException:
            if replaces:
                self._files.rename(self._set_aside, self.target)
            raise
        # From here on, failures do not harm the checkpoint; they become messages.
        if flush is None:
            self._write_latest(record, messages)
        with reporting_to(messages, LATEST_NOT_UPDATED):
            if record.is_latest and not messages:
                self._files.rename(self._new_latest, self.folder / LATEST_FILE)
        if messages:  # `latest` names an older checkpoint, as if the user had gone back to it
            with contextlib.suppress(StorageError):
                self._files.unlink(self.folder / LATEST_FILE)
        # The tag and `latest`.
        self._files.sync_folder(self.folder)
        with reporting_to(messages, REPLACED_NOT_REMOVED):
            if replaces:
                discard(self._files, self._set_aside)
        if keep is not None:
            remove = lambda info: discard(self._files, info.path)  # noqa: E731
            messages += retire(self.folder, keep=keep, run=record.run, remove=remove)
        return messages

    def _write_latest(self, record: Record, messages: list[str], *, sync: bool = True) -> None:
        """Write the new content of `latest` to a temporary file."""
        with reporting_to(messages, LATEST_NOT_UPDATED):
            if record.is_latest:
                self._files.write_small(self._new_latest, f"{self._tag}\n".encode(), sync=sync)

    def abort(self, reason: str, *, is_only_rank: bool) -> None:
        """Write the reason for the other ranks, unless `is_only_rank`, and remove the save's files. Never raises. Files
        that cannot be removed now are swept by the next save."""
        with contextlib.suppress(OSError):
            self._files.unlink(self._new_latest)
        with contextlib.suppress(OSError):
            if is_only_rank:
                self._files.remove_tree(self.temporary)
            elif self.temporary.is_dir():
                with contextlib.suppress(OSError):
                    self._files.write_small(self.temporary / ABORT_FILE, json.dumps({"reason": reason}).encode())
                for entry in list(os.scandir(self.temporary)):
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            self._files.remove_tree(entry.path)
                        elif entry.name != ABORT_FILE:
                            self._files.unlink(entry.path)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()


def abort_reason(path: Path) -> str | None:
    """Return the reason in the file that an aborting rank wrote; None if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(path.read_bytes())
        return str(document.get("reason")) if isinstance(document, dict) else None
    return None


def discard(files: Files, path: Path) -> None:
    """Remove a folder so that a partly removed folder never looks like a checkpoint."""
    parsed = parse_working_name(path.name)
    if parsed is None or parsed[1] != TEMPORARY:
        temporary = path.with_name(working_name(parsed[0] if parsed else path.name, TEMPORARY, new_save_id()))
        files.rename(path, temporary)
        path = temporary
    files.remove_tree(path)


@contextlib.contextmanager
def temporary_folder(files: Files, parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, named after `name`, and remove it at the end. First sweeps the leftovers of dead
    processes for the same name."""
    files.make_folder(parent)
    sweep(files, parent, only=name)
    save_id = new_save_id()
    temporary = parent / working_name(name, TEMPORARY, save_id)
    with SaveLock(parent / working_name(name, LOCK, save_id)):
        try:
            files.make_folder(temporary)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                files.remove_tree(temporary)


@contextlib.contextmanager
def new_folder(files: Files, target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `target` when the block ends, and removed if the block raises. The
    caller makes the files in it durable. Raises CheckpointExistsError if `target` exists."""
    if target.exists() or target.is_symlink():
        raise CheckpointExistsError(f"{target} already exists: remove it, or choose another folder to write to")
    with temporary_folder(files, target.parent, target.name) as temporary:
        yield temporary
        files.sync_folder(temporary)
        files.rename(temporary, target)
        files.sync_folder(target.parent)


def sweep(files: Files, folder: Path, *, only: str | None = None) -> list[str]:
    """Remove the leftovers of dead saves in `folder` (by default of all tags, else of the tag folder `only`), and
    rename set-aside checkpoints back. Returns a message for each file or folder that could not be removed."""
    by_save: dict[str, list[tuple[str, str, Path]]] = {}
    for name in os.listdir(folder):
        parsed = parse_working_name(name)
        if parsed is not None and only in (None, parsed[0]):
            by_save.setdefault(parsed[2], []).append((parsed[1], parsed[0], folder / name))
    messages: list[str] = []
    for save_id, leftovers in by_save.items():
        # The lock last: if other files could not be removed, it still shows that their owner has ended.
        leftovers.sort(key=lambda entry: (entry[0] == LOCK, entry[0]))
        locks = [path for kind, _, path in leftovers if kind == LOCK]
        with owner_has_ended(locks[0]) if locks else contextlib.nullcontext(True) as dead:
            if dead:
                if locks:
                    messages.extend(_drop_stale_latest(files, folder, save_id))
                messages.extend(_sweep_save(files, leftovers))
    return messages


def _drop_stale_latest(files: Files, folder: Path, save_id: str) -> list[str]:
    """Remove `latest` if the dead save `save_id` committed the newest checkpoint but did not update it: without the
    lock it would look as if the user had gone back to an older one."""
    messages: list[str] = []
    with reporting_to(messages, LATEST_NOT_UPDATED):
        catalog = scan(folder)
        if catalog.tags and catalog.tags[-1].record.id == save_id:
            selected, note = default_tag(folder_at(folder), catalog)
            if note and selected.record.id == save_id:
                files.unlink(folder / LATEST_FILE)
    return messages


def _sweep_save(files: Files, leftovers: Sequence[tuple[str, str, Path]]) -> list[str]:
    messages: list[str] = []
    for kind, name, path in leftovers:
        target = path.with_name(name)
        with reporting_to(messages, "leftovers of an earlier save could not be removed"):
            if kind == SET_ASIDE and not is_committed(target):
                if not target.exists() and is_committed(path):
                    files.rename(path, target)
                    files.sync_folder(target.parent)
            elif path.is_dir():
                discard(files, path)
            else:
                files.unlink(path)
    return messages
