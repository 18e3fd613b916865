"""An object store behind an fsspec URL, `objects://bucket/key`, whose requests fail, wait or are counted as a test says.

Keys and whole objects: no folders, no renames; an object under way is not seen before its last part. The objects lie in a
local folder, one file each, so that several processes share them. It stands in for S3 where a test needs faults.
"""

import contextlib
import fnmatch
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

Kind = Literal["read", "write", "list", "ask", "remove"]
"""Requests: bytes of an object; a whole object, or a part of one; a listing; an object's size; its removal."""


@dataclass(kw_only=True)
class RequestFault:
    """What happens to requests of one kind, for keys that match `pattern`, before they are carried out."""

    kind: Kind
    pattern: str = "*"
    """Shell pattern of the whole key, bucket first."""
    first: int = 0
    """How many that match go well before."""
    times: int | None = 1
    """How many it then happens to; None: all of them."""
    error: Callable[[], Exception] | None = None
    """Makes what is raised."""
    gate: threading.Event | None = None
    """Waited for, at most a minute: the request is slow."""
    cut_bytes: int | None = None
    """Of a write, the object loses so many bytes at its end, and nobody is told; of a read, the answer does."""
    seen: int = 0

    def hits(self, kind: Kind, key: str) -> bool:
        """Count the request if it matches; tell whether it suffers."""
        if kind != self.kind or not fnmatch.fnmatch(key, self.pattern):
            return False
        number = self.seen - self.first
        self.seen += 1
        return number >= 0 and (self.times is None or number < self.times)


def unavailable() -> Exception:
    """Return what a store that is too busy answers, as no class that zstore knows."""
    return _UnavailableError("503 Slow Down")


def denied() -> Exception:
    """Return what a store answers to those who may not, as a class that tells that another try is of no use."""
    return PermissionError("403 Forbidden")


class _UnavailableError(Exception):
    """Not an OSError: client libraries raise their own."""


class ObjectFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The file system; `folder` is where its objects lie. One instance a process and folder."""

    protocol: ClassVar[str] = "objects"
    root_marker = ""

    def __init__(self, folder: str, deny_writes: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.faults: list[RequestFault] = []
        """Tests add to them."""
        if deny_writes is not None:
            self.faults.append(RequestFault(kind="write", pattern=deny_writes, times=None, error=denied))
        self.requests: Counter[Kind] = Counter()
        self.order: list[tuple[Kind, str]] = []
        """Every request: its kind and key."""
        self.read_bytes = 0
        self.most_at_once = 0
        """Writes under way at a time, at most."""
        self._writing = 0

    def step(self, kind: Kind, key: str) -> int:
        """Count a request and do what the faults say; returns the bytes that it loses."""
        with self._lock:
            self.requests[kind] += 1
            self.order.append((kind, key))
            hits = [fault for fault in self.faults if fault.hits(kind, key)]
        for fault in hits:
            if fault.gate is not None and not fault.gate.wait(60.0):
                raise TimeoutError(f"nobody opened the gate of {kind} {key}")
            if fault.error is not None:
                raise fault.error()
        return max((fault.cut_bytes or 0 for fault in hits), default=0)

    def objects(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry in os.scandir(self._folder):
            if not entry.name.startswith("."):
                found[unquote(entry.name)] = entry.stat().st_size
        return dict(sorted(found.items()))

    def object_path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def new_part(self) -> Path:
        return self._folder / f".{uuid.uuid4().hex}"

    def put(self, key: str, data: bytes) -> None:
        part = self.new_part()
        part.write_bytes(data)
        part.replace(self.object_path(key))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        key = self._strip_protocol(path)
        lost = self.step("read", key)
        data = self.object_path(key).read_bytes()[start:end]
        data = data[: len(data) - lost]
        with self._lock:
            self.read_bytes += len(data)
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        key = self._strip_protocol(path)
        with self.counted_write():
            lost = self.step("write", key)
            if mode == "create" and self.object_path(key).exists():
                raise FileExistsError(key)
            self.put(key, bytes(value)[: len(value) - lost])

    @contextlib.contextmanager
    def counted_write(self) -> Iterator[None]:
        with self._lock:
            self._writing += 1
            self.most_at_once = max(self.most_at_once, self._writing)
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        self.step("ask", key)
        keys = self.objects()
        if key in keys:
            return {"name": key, "size": keys[key], "type": "file"}
        if any(other.startswith(f"{key}/") for other in keys):
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        key = self._strip_protocol(path).rstrip("/")
        self.step("list", key)
        entries: dict[str, dict[str, Any]] = {}
        for other, size in self.objects().items():
            if key and not other.startswith(f"{key}/"):
                continue
            rest = other[len(key) + 1 if key else 0 :]
            name, deeper, _rest = rest.partition("/")
            full = f"{key}/{name}" if key else name
            entries[full] = {"name": full, "size": 0 if deeper else size, "type": "directory" if deeper else "file"}
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def rm_file(self, path: str) -> None:
        key = self._strip_protocol(path)
        self.step("remove", key)
        self.object_path(key).unlink(missing_ok=True)

    def _open(self, path: str, mode: str = "rb", block_size: int = 5 * 2**20, **_: Any) -> "_ObjectFile":
        return _ObjectFile(self, self._strip_protocol(path), mode=mode, block_size=block_size)


class _ObjectFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object that is written part by part, and seen after the last."""

    def _initiate_upload(self) -> None:
        self._parts = self.fs.new_part()

    def _upload_chunk(self, final: bool = False) -> bool:
        with self.fs.counted_write():
            lost = self.fs.step("write", self.path)
            with self._parts.open("ab") as file:
                file.write(self.buffer.getbuffer())
                if lost:
                    file.truncate(file.tell() - lost)
        if final:
            self._parts.replace(self.fs.object_path(self.path))
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start=start, end=end)
        return data

    def discard(self) -> None:
        self._parts.unlink(missing_ok=True)


fsspec.register_implementation(ObjectFileSystem.protocol, ObjectFileSystem, clobber=True)
