"""A bucket of `s3_server`, with the URL of a run in it and the commands that reach it."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.checkpoint.checkpoints import ThreadBoard, World, wait_all
from zstore.checkpoint.handle import SaveHandle
from zstore.checkpoint.names import new_save_id
from zstore.remote.bucket import UrlFolder
from zstore.remote.save import save_to_url
from zstore.remote.service import open_folder
from zstore.remote.upload import place_of
from zstore.tools.cli import app


class Bucket:
    """A bucket, new unless it is named, the URL of a run in it, and a local folder."""

    def __init__(self, options: dict[str, Any], tmp_path: Path, *, name: str = "") -> None:
        self.name = name or f"bucket-{uuid.uuid4().hex[:8]}"
        self.url = f"s3://{self.name}/runs/one"
        self.options = options
        self.local = tmp_path / "local"
        self.fs = open_folder("s3://no-bucket", options).fs  # type: ignore[attr-defined]
        if not name:
            self.fs.mkdir(self.name)

    def save(self, world: World, *, step: int = 1, **fields: Any) -> list[Any]:
        save_id, board = new_save_id(), ThreadBoard()
        handles: list[SaveHandle] = [
            save_to_url(
                world.request(self.local, rank, save_id, step=step, **{"run_id": "run", **fields}),
                place_of(self.url, self.options),
                board,
            )
            for rank in range(len(world.stores))
        ]
        return wait_all(handles)  # type: ignore[arg-type]

    @property
    def folder(self) -> UrlFolder:
        return open_folder(self.url, self.options)

    def run(self, *words: str, code: int = 0) -> Any:
        options = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.options.items()
        ]
        result = CliRunner().invoke(app, [*words, *(word for one in options for word in ("--storage-option", one))])
        assert result.exit_code == code, result.output
        return result
