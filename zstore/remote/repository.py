"""The icechunk repository of a folder: which snapshot each version is, and its commit. Imports icechunk when it is opened.

[Note: versions]
`versions/` in a folder is an icechunk repository. A version is a snapshot: its root group's attributes have the commit record
and the place of the index, its arrays are the checkpoint's, each shard file one chunk, a virtual reference into a pack. The
branch `main` is the newest version. A tag of icechunk is a version's tag; icechunk gives a tag's name once and for all, so a
version that has a tag again is called `<tag>:<save>`. Of a save that was killed between its commit and its tag, `main` is the
version all the same, and the next save makes the tag.

The commit is one write of `main` on the condition that it has not changed since the save began.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..errors import CheckpointError, CorruptionError, StorageError, UsageError
from ..io.pool import Workers, num_cores
from .packs import PACKS_FOLDER, Extent
from .url import shown

VERSIONS_FOLDER = "versions"
BRANCH_FILE = f"{VERSIONS_FOLDER}/refs/branch.main/ref.json"
"""It is there as soon as the repository is."""
_BRANCH = "main"
_ATTRIBUTE = "zstore"
_YOUNG = datetime.timedelta(days=1)
"""Objects of a commit that is under way are not older."""
References = tuple[str, Sequence[tuple[int, Extent]], int]
"""An array's folder, the numbers and places of some of its shards, and how many extents it has."""
_S3_OPTIONS = {"key", "secret", "token", "anon", "endpoint_url", "client_kwargs"}
_AZURE_OPTIONS = {"account_name", "account_key", "sas_token", "connection_string"}
_S3_CLIENT_OPTIONS = {"endpoint_url", "region_name"}


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A version, as its snapshot has it."""

    id: str
    record: bytes
    """The commit record's file."""
    index: Extent
    index_sha256: str


class Repository:
    """The repository in the folder `root` of the file system `protocol`, as fsspec calls it by `options`."""

    def __init__(self, protocol: str, root: str, url: str, options: Mapping[str, Any]) -> None:
        self._protocol = protocol
        self._root = root
        self._url = url
        self._options = options

    # -- opening ----------------------------------------------------------------------------------------------------

    @cached_property
    def _icechunk(self) -> Any:
        return require_icechunk(self._url)

    @cached_property
    def _repository(self) -> Any:
        storage, config, access = self._opening()
        with self._telling("open"):
            return self._icechunk.Repository.open(storage, config, access)

    def create(self) -> None:
        """Make the repository, unless it is there."""
        storage, config, access = self._opening()
        with self._telling("make"), self._alone():
            if not self._icechunk.Repository.exists(storage):
                self._icechunk.Repository.create(storage, config, access).save_config()

    def _opening(self) -> tuple[Any, Any, Any]:
        """Return the storage, the config and the access to packs with which icechunk opens a repository."""
        icechunk = self._icechunk
        storage, store, credentials = _storage_of(icechunk, self._protocol, self._root, self._options)
        config = icechunk.RepositoryConfig.default()
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(self.packs_url, store))
        return storage, config, icechunk.containers_credentials({self.packs_url: credentials})

    @property
    def packs_url(self) -> str:
        """URL of the packs, as references have it."""
        return f"{self._protocol}://{self._root}/{PACKS_FOLDER}/"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold off other commits on a local file system, for which icechunk has no conditional write."""
        if self._protocol != "file":
            yield
            return
        Path(self._root).mkdir(parents=True, exist_ok=True)
        with open(os.path.join(self._root, f"{VERSIONS_FOLDER}.lock"), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._icechunk.IcechunkError as error:
            reason = str(error).strip().splitlines()[-1].removeprefix("`->").strip()
            raise StorageError(f"cannot {what} the repository of versions: {reason}", path=self._url) from error

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def newest_id(self) -> str:
        """Id of the snapshot that `main` is."""
        with self._telling("read"):
            return str(self._repository.lookup_branch(_BRANCH))

    def names(self) -> set[str]:
        """Return the names of all tags of icechunk, by one listing."""
        with self._telling("list"):
            return set(self._repository.list_tags())

    def branch_ids(self) -> list[str]:
        """Return the ids of the snapshots that branches are: `main`, and those that somebody made with icechunk."""
        with self._telling("list"):
            return [str(self._repository.lookup_branch(name)) for name in self._repository.list_branches()]

    def id_of(self, name: str) -> str | None:
        """Return the id of the snapshot with the tag of icechunk `name`; None if there is none."""
        try:
            return str(self._repository.lookup_tag(name))
        except self._icechunk.IcechunkError as error:
            if "ref not found" in str(error):
                return None
            with self._telling("read"):
                raise

    def read(self, snapshot_id: str) -> StoredVersion | None:
        """Return the version that a snapshot is; None if it is none, as the first of a repository."""
        with self._telling("read"):
            data = _get(self._repository.readonly_session(snapshot_id=snapshot_id).store, "zarr.json")
        found = {} if data is None else json.loads(data).get("attributes", {}).get(_ATTRIBUTE)
        if not found:
            return None
        try:
            *place, digest = found["index"]
            record = json.dumps(found["record"]).encode()
            return StoredVersion(id=snapshot_id, record=record, index=Extent(*place), index_sha256=digest)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{self._url}: snapshot {snapshot_id} is not one of zstore's") from error

    def documents(self, snapshot_id: str, folders: Iterable[str]) -> dict[str, bytes]:
        """Return the metadata of groups and arrays in a snapshot, by their folder, as the format has it."""
        with self._telling("read"):
            store = self._repository.readonly_session(snapshot_id=snapshot_id).store
            found = {folder: _get(store, f"{folder}/zarr.json") for folder in folders}
        return {folder: _with_separator(json.loads(data), ".") for folder, data in found.items() if data is not None}

    # -- committing -------------------------------------------------------------------------------------------------

    def begin(self) -> Any:
        """Return the session of a commit: it will fail if there is another one meanwhile."""
        with self._telling("begin a commit to"):
            return self._repository.writable_session(_BRANCH)

    def write(
        self,
        session: Any,
        attributes: Mapping[str, Any],
        documents: Mapping[str, Mapping[str, Any]] | None,
        references: Iterable[References],
    ) -> None:
        """Set the root's attributes and places of chunks, and unless `documents` is None, before that replace all groups and
        arrays, by their folder."""
        root = {"zarr_format": 3, "node_type": "group", "attributes": {_ATTRIBUTE: dict(attributes)}}
        with self._telling("write to"):
            if documents is not None:
                session.store.sync_clear()
                for folder, document in documents.items():
                    _set(session.store, f"{folder}/zarr.json", _with_separator(document, "/"))
            # A reference takes icechunk 8 us of a core; a session with changes cannot be forked.
            forks = [session.fork() for _ in range(num_cores())] if documents is None else []
            free = SimpleQueue[Any]()
            for each in forks or [session]:
                free.put(each)
            with Workers(free.qsize(), "zstore-refer") as workers:
                workers.run(partial(self._refer, free, each) for each in references)
            if forks:
                session.merge(*forks)
            _set(session.store, "zarr.json", json.dumps(root).encode())

    def _refer(self, free: SimpleQueue[Any], references: References) -> None:
        """Set the places of an array's chunks in a session that is `free`."""
        folder, chunks, ndim = references
        spec, packs, rest = self._icechunk.VirtualChunkSpec, self.packs_url, [0] * (ndim - 1)
        specs = [spec([row, *rest] if ndim else [], packs + pack, offset, size) for row, (pack, offset, size) in chunks]
        session = free.get()
        if specs:
            session.store.set_virtual_refs(f"/{folder}", specs, validate_containers=False)
        free.put(session)

    def commit(self, session: Any, message: str, metadata: Mapping[str, Any]) -> str:
        """Make the session's state the newest version; return the id of its snapshot.

        Raises CheckpointError if there was another commit since the session began.
        """
        conflict = self._icechunk.ConflictError
        with self._telling("commit to"), self._alone():
            try:
                if self._protocol == "file" and self.newest_id != session.snapshot_id:
                    raise conflict(session.snapshot_id, self.newest_id)
                return str(session.commit(message, dict(metadata)))
            except conflict as error:
                raise CheckpointError(
                    f"another save was committed to {self._url} since this one began: nothing of this one is visible; save "
                    "again"
                ) from error

    def tag(self, name: str, snapshot_id: str) -> None:
        """Give a snapshot a tag of icechunk whose name was never given."""
        with self._telling("tag a version in"):
            self._repository.create_tag(name, snapshot_id)

    def untag(self, name: str) -> None:
        """Remove a tag of icechunk; its name is not given again."""
        with self._telling("remove a tag in"):
            self._repository.delete_tag(name)

    def tidy(self) -> None:
        """Remove icechunk's objects of snapshots that neither a tag nor `main` is, if they are a day old."""
        now = datetime.datetime.now(datetime.UTC)
        with self._telling("tidy"), self._alone():
            self._repository.expire_snapshots(now)
            self._repository.garbage_collect(now - _YOUNG)


def require_icechunk(url: str) -> Any:
    """Return icechunk. Raises UsageError if it is not installed."""
    try:
        import icechunk
    except ImportError as error:
        raise UsageError(f"{shown(url)}: versions need the package icechunk: install zstore[versions]") from error
    return icechunk


def _storage_of(icechunk: Any, protocol: str, root: str, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the storage of the repository below `root`, the store of the packs, and the credentials for it.

    Raises UsageError for options that icechunk has no counterpart of.
    """
    bucket, _, above = root.partition("/")
    prefix = f"{above}/{VERSIONS_FOLDER}".lstrip("/")
    if protocol == "file":
        if "ICECHUNK_LOG" not in os.environ:
            icechunk.set_logs_filter("error")  # it warns of several committers, of which the lock lets in one
        return (
            icechunk.local_filesystem_storage(f"{root}/{VERSIONS_FOLDER}"),
            icechunk.local_filesystem_store(f"{root}/{PACKS_FOLDER}"),
            None,
        )
    if protocol == "gs":
        _require_known(options, {"token", "project"}, "gs://")
        token = options.get("token")
        own: dict[str, Any] = {"from_env": True} if token is None else {"service_account_file": token}
        own = {"anonymous": True} if token == "anon" else own
        credentials = icechunk.gcs_credentials(**own)
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, **own), icechunk.gcs_store(), credentials
    if protocol == "abfs":
        return _azure_storage_of(icechunk, bucket, prefix, options)
    client = options.get("client_kwargs") or {}
    _require_known(options, _S3_OPTIONS, "s3://")
    _require_known(client, _S3_CLIENT_OPTIONS, "client_kwargs of s3://")
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = options.get("endpoint_url") or client.get("endpoint_url") or environment
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    place = {
        "region": region or ("us-east-1" if endpoint else None),
        "endpoint_url": endpoint,
        "allow_http": str(endpoint).startswith("http://"),
        "force_path_style": bool(endpoint),
    }
    keys = {"access_key_id": options.get("key"), "secret_access_key": options.get("secret")}
    keys["session_token"] = options.get("token")
    own = {"from_env": True} if options.get("key") is None else keys
    own = {"anonymous": True} if options.get("anon") else own
    store = icechunk.s3_store(**place, anonymous=bool(options.get("anon")), s3_compatible=bool(endpoint))
    return icechunk.s3_storage(bucket=bucket, prefix=prefix, **place, **own), store, icechunk.s3_credentials(**own)


def _azure_storage_of(icechunk: Any, container: str, prefix: str, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    _require_known(options, _AZURE_OPTIONS, "abfs://")
    parts = [part.partition("=") for part in str(options.get("connection_string") or "").split(";") if part]
    told = {name: value for name, _, value in parts}
    account = options.get("account_name") or told.get("AccountName") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    own = {
        "access_key": options.get("account_key") or told.get("AccountKey"),
        "sas_token": options.get("sas_token") or told.get("SharedAccessSignature"),
    }
    own = {name: value for name, value in own.items() if value} or {"from_env": True}
    config: dict[str, str] = {}
    if endpoint := told.get("BlobEndpoint"):
        config = {"azure_storage_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}
    return (
        icechunk.azure_storage(account=account, container=container, prefix=prefix, config=config, **own),
        icechunk.ObjectStoreConfig.Azure({"account": account or "", **config}),
        icechunk.azure_credentials(**own),
    )


def _require_known(options: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(options.keys() - known):
        raise UsageError(
            f"storage options {unknown} of {what} cannot be passed on to icechunk, which takes {sorted(known)}: leave them "
            "out, with credentials in the environment, or save without versions"
        )


def _with_separator(document: Mapping[str, Any], separator: str) -> bytes:
    """Return a group's or array's document with the separator of chunk keys that the format has, `.`, or icechunk, `/`."""
    if "chunk_key_encoding" in document:
        document = {**document, "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}}}
    return json.dumps(document).encode()


def _get(store: Any, key: str) -> bytes | None:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync  # for callers with an event loop of their own, too

    found = sync(store.get(key, default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def _set(store: Any, key: str, data: bytes) -> None:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    sync(store.set(key, default_buffer_prototype().buffer.from_bytes(data)))
