"""A bucket of `s3_server`, with the URL of a run in it and the commands that reach it."""

from __future__ import annotations

import importlib
import json
import uuid
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.checkpoint.checkpoints import World, wait_all
from zstore.checkpoint.handle import SaveHandle
from zstore.checkpoint.names import new_save_id
from zstore.remote.folder import open_folder
from zstore.remote.save import UploadOptions, save_to_url
from zstore.remote.upload import place_of
from zstore.remote.versions import VersionsFolder
from zstore.tools.cli import app


class Bucket:
    """A bucket, new unless it is named, the URL of a run in it, and a local folder; with `versions` saves make versions."""

    versions = False

    def __init__(self, options: dict[str, Any], tmp_path: Path, *, name: str = "") -> None:
        self.name = name or f"bucket-{uuid.uuid4().hex[:8]}"
        self.url = f"s3://{self.name}/runs/one"
        self.options = options
        self.local = tmp_path / "local"
        self.fs = open_folder("s3://no-bucket", options).fs  # type: ignore[attr-defined]
        if not name:
            self.fs.mkdir(self.name)

    def save(self, world: World, *, step: int = 1, **fields: Any) -> list[Any]:
        save_id = new_save_id()
        handles: list[SaveHandle] = [
            save_to_url(
                world.request(self.local, rank, save_id, step=step, **{"run_id": "run", **fields}),
                UploadOptions(folder=place_of(self.url, self.options, versions=self.versions)),
            )
            for rank in range(len(world.stores))
        ]
        return wait_all(handles)  # type: ignore[arg-type]

    def run(self, *words: str, code: int = 0) -> Any:
        options = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.options.items()
        ]
        result = CliRunner().invoke(app, [*words, *(word for one in options for word in ("--storage-option", one))])
        assert result.exit_code == code, result.output
        return result


class VersionedBucket(Bucket):
    """A bucket that is saved to as versions."""

    versions = True

    @property
    def folder(self) -> VersionsFolder:
        folder = open_folder(self.url, self.options)
        assert isinstance(folder, VersionsFolder)
        return folder

    def packs(self) -> dict[str, int]:
        self.fs.invalidate_cache()
        found = self.fs.find(f"{self.name}/runs/one/packs", detail=True)
        return {path.rpartition("/")[2]: entry["size"] for path, entry in found.items()}

    def icechunk(self) -> Any:
        """Open the repository with icechunk alone."""
        icechunk = importlib.import_module("icechunk")  # extra versions
        keys = {"access_key_id": "testing", "secret_access_key": "testing"}
        endpoint = self.options["client_kwargs"]["endpoint_url"]
        storage = icechunk.s3_storage(
            bucket=self.name,
            prefix="runs/one/versions",
            region="us-east-1",
            endpoint_url=endpoint,
            allow_http=True,
            force_path_style=True,
            **keys,
        )
        access = icechunk.containers_credentials({f"{self.url}/packs/": icechunk.s3_credentials(**keys)})
        return icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)
