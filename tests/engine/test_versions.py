"""Runs that save to a bucket as versions: ranks without a folder in common, and ranks that are killed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine.bits import engine_digests
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.folder import open_folder
from zstore.remote.versions import VersionsFolder
from zstore.testing.ranks import kill_ranks, run_ranks
from zstore.tools.cli import app

pytest.importorskip("icechunk", reason="extra versions")
pytest.importorskip("moto", reason="extra test")
pytest.importorskip("s3fs", reason="extra s3")

REQUESTS = 24
"""More than a rank makes in a save."""


@pytest.fixture
def url(server: dict[str, Any], tmp_path: Path) -> str:
    bucket = f"bucket-{os.urandom(4).hex()}"
    open_folder("s3://none", server).fs.mkdir(bucket)  # type: ignore[attr-defined]
    return f"s3://{bucket}/run"


def config_of(rank: int, base: Path, options: dict[str, Any], stage: int = 3, *, apart: bool = True) -> dict[str, Any]:
    folder = base / (f"machine-{rank}" if apart else "shared")
    return make_config(stage, zstore={"storage_options": options, "upload_folder": str(folder), "versions": True})


def _save_twice(rank: int, base: Path, options: dict[str, Any], url: str) -> dict[str, Any]:
    from transformers import GPT2Config

    loaded_from = base / f"hub-{rank}"
    loaded_from.mkdir()
    (loaded_from / "tokenizer.json").write_text('{"version": "1.0"}')
    with start(config_of(rank, base, options)) as engine:
        engine.module.config = GPT2Config(n_layer=3, name_or_path=str(loaded_from))
        step(engine)
        engine.save_checkpoint(url, client_state={"from": rank}, wait=False)
        step(engine)
        summary = engine.save_checkpoint(url).wait()
        digests = engine_digests(engine)
        step(engine)
        engine.load_checkpoint(url)
        return {"saved": digests, "loaded": engine_digests(engine), "url": summary.url, "path": str(summary.path)}


def test_ranks_without_a_folder_in_common_save_and_any_number_loads(
    server: dict[str, Any], url: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="extra hf")
    found = run_ranks(_save_twice, 2, tmp_path, server, url)
    for rank, each in enumerate(found):
        assert each["saved"] == each["loaded"]
        assert each["url"] == f"{url}/step-00000002"
        assert f"/machine-{rank}/" in each["path"]
        assert not list((tmp_path / f"machine-{rank}").glob("*/step-*"))
    folder = open_folder(url, server)
    assert [info.record.step for info in tags(folder)] == [1, 2]
    for info in tags(folder):
        with open_checkpoint(folder, info.tag) as reader:
            assert reader.missing_machines() == []
            assert verify_checkpoint(reader) == []
            assert json.loads(reader.folder.read_small("config.json"))["n_layer"] == 3
            assert reader.folder.read_small("tokenizer.json") == b'{"version": "1.0"}'
    with start(config_of(0, tmp_path, server, 1)) as engine:
        path, state = engine.load_checkpoint(url, tag="step-00000001")
        assert (path, state) == (f"{url}/step-00000001", {"from": 0})
        engine.load_checkpoint(url)
        assert engine.global_steps == 2
        engine.save_checkpoint(url, tag="one")
    assert [info.tag for info in tags(open_folder(url, server))] == ["step-00000001", "step-00000002", "one"]
    words = ["consolidate", f"{url}:step-00000002", str(tmp_path / "weights"), "--dtype", "fp32"]
    for key, value in server.items():
        words += ["--storage-option", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    assert CliRunner().invoke(app, words).exit_code == 0
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path / "weights").n_layer == 3
    assert (tmp_path / "weights/tokenizer.json").exists()


def _save_until_killed(
    rank: int, base: Path, options: dict[str, Any], url: str, points: list[int], apart: bool
) -> None:
    from tests.checkpoint.mortal_s3 import MortalFileSystem

    with start(config_of(rank, base, options, apart=apart)) as engine:
        step(engine)
        engine.save_checkpoint(url, tag="before", overwrite=True)
        step(engine)
        MortalFileSystem.kill_at = points[rank] if points[rank] >= 0 else None
        engine.save_checkpoint(url, tag="after", overwrite=True)


def _kill(server: dict[str, Any], url: str, base: Path, rank: int, request: int, *, apart: bool) -> bool:
    """Save, kill a rank in the next save, and see that nothing of that one is there; return whether it was killed."""
    points = [request if each == rank else -1 for each in range(2)]
    ended = kill_ranks(_save_until_killed, 2, base, server, url, points, apart, timeout_s=120)
    folder = open_folder(url, server)
    assert isinstance(folder, VersionsFolder)
    expected = ["before", "after"] if all(ended) else ["before"]
    assert [info.tag for info in tags(folder)] == expected, (rank, request)
    with open_checkpoint(folder) as reader:
        assert verify_checkpoint(reader) == []
    with start(config_of(0, base, server, 1)) as engine:  # the next save works
        engine.load_checkpoint(url, tag="before")
        engine.save_checkpoint(url, tag="next", overwrite=True)
    with open_checkpoint(open_folder(url, server), "next") as reader:
        assert verify_checkpoint(reader) == []
    return not all(ended)


@pytest.mark.parametrize(("rank", "request_number", "apart"), [(0, 3, True), (1, 0, True), (1, 4, False)])
def test_a_killed_rank_leaves_no_version(
    rank: int, request_number: int, apart: bool, server: dict[str, Any], url: str, tmp_path: Path
) -> None:
    assert _kill(server, url, tmp_path, rank, request_number, apart=apart)
    folder = open_folder(url, server)
    assert isinstance(folder, VersionsFolder)
    needed = {pack for version in folder.all().values() for pack in version.packs}
    folder.tidy(leftover_s=0)
    assert {path.rpartition("/")[2] for path in folder.fs.find(f"{folder.root}/packs")} == needed


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_ranks_that_are_killed_at_every_request(server: dict[str, Any], url: str, tmp_path: Path) -> None:
    rng, kills = random.Random(3), 0
    for number, (rank, request) in enumerate((rank, request) for request in range(REQUESTS) for rank in range(2)):
        kills += _kill(server, f"{url}/{number}", tmp_path / str(number), rank, request, apart=rng.random() < 0.5)
    assert kills > 12
