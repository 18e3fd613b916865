"""Checkpoints that are uploaded to a service: the same bytes arrive, nothing half-made is seen, only changes are sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import World, open_world, wait_all
from tests.serve.conftest import Serve
from zstore.checkpoint.names import new_save_id
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.save import UploadOptions, save_to_url
from zstore.remote.upload import place_of

Array = npt.NDArray[Any]
RNG = np.random.default_rng(5)
TOKEN = "secret"
OPTIONS = {"token": TOKEN}


def make_arrays() -> dict[str, Array]:
    return {
        "model/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
        "model/frozen": RNG.standard_normal((900, 40)).astype(np.float32),
        "optimizer/exp_avg/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
    }


@pytest.fixture
def url(tmp_path: Path, serve: Serve) -> str:
    """A service over the empty folder `runs`."""
    (tmp_path / "runs").mkdir()
    return serve(tmp_path / "runs", token=TOKEN, allow_actions=True)


def digests(folder: Path) -> dict[str, str]:
    """The content of every file of a checkpoint; of the record all that a commit does not set."""
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    record = json.loads((folder / "zstore.json").read_bytes())
    for key in ("committed_ns", "digest"):
        del record[key]
    return found | {"zstore.json": json.dumps(record)}


def save(world: World, local: Path, url: str, **fields: Any) -> list[Any]:
    save_id = new_save_id()
    options = UploadOptions(folder=place_of(url, OPTIONS), keep_local=fields.pop("keep_local", True))
    return wait_all(
        [
            save_to_url(world.request(local, rank, save_id, **{"run_id": "run", "timeout_s": 60.0, **fields}), options)
            for rank in range(len(world.stores))
        ]
    )


def whole(folder: Path) -> list[str]:
    found = [info.tag for info in tags(folder)]
    for tag in found:
        with open_checkpoint(folder, tag) as opened:
            assert verify_checkpoint(opened) == []
    return found


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(make_arrays(), world_size=request.param, small={"buffer/n": np.array(7)}) as world:
        yield world


def test_a_save_arrives_with_the_same_bytes(tmp_path: Path, url: str, world: World) -> None:
    summary = save(world, tmp_path / "local", f"{url}/one")[0]
    assert summary.url == f"{url}/one/step-00000001"
    arrived = tmp_path / "runs" / "one" / "step-00000001"
    assert digests(arrived) == digests(summary.path)
    assert whole(arrived.parent) == ["step-00000001"]
    assert {path.name for path in arrived.parent.iterdir()} == {"latest", "step-00000001"}
