"""Engines that save to a service and go on from it, behind training, on several ranks; and the commands that do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.runs import ADAM, make_config, start, state_of, step, whole
from tests.serve.conftest import Serve
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools.train.command import train_command
from zstore.tools.train.config import TrainOptions

TOKEN = "secret-of-the-tests"


@pytest.fixture
def url(tmp_path: Path, serve: Serve) -> str:
    (tmp_path / "runs").mkdir()
    return serve(tmp_path / "runs", token=TOKEN) + "/run"


def make(tmp_path: Path, stage: int = 1, token: str = TOKEN, **own: Any) -> dict[str, Any]:
    own = {"storage_options": {"token": token}, "upload_folder": str(tmp_path / "local"), **own}
    return make_config(stage, zstore=own)


def _train(rank: int, tmp_path: Path, url: str) -> int:
    with start(make(tmp_path, 3, keep=2)) as engine:
        for number in range(3):
            step(engine)
            engine.save_checkpoint(url, wait=number == 2)
        return int(engine.global_steps)


def test_two_ranks_save_to_a_service_and_one_goes_on(tmp_path: Path, url: str) -> None:
    assert run_ranks(_train, 2, tmp_path, url) == [3, 3]
    assert whole(tmp_path / "runs/run") == ["step-00000002", "step-00000003"]
    assert not list((tmp_path / "local").glob("*/step-*"))
    with start(make(tmp_path)) as engine:
        path, _ = engine.load_checkpoint(url)
        assert path == f"{url}/step-00000003"
        step(engine)
        expected = state_of(engine)
        engine.save_checkpoint(url, tag="again")
    with start(make(tmp_path, 2)) as engine:
        engine.load_checkpoint(url, tag="again")
        assert {**state_of(engine), "counters": ()} == {**expected, "counters": ()}
    (journal,) = (tmp_path / "runs/run").glob("journal-*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert [line["kind"] for line in lines].count("start") >= 2
    of_ranks = [
        line for line in lines if line["kind"] == "save" and line["state"] == "uploaded" and line["tag"] != "again"
    ]
    shards = [path.stat().st_size for path in (tmp_path / "runs/run/step-00000002").rglob("c.*")]
    assert of_ranks[0]["uploaded_bytes"] == sum(shards), "of both ranks, the first time all of it"
    assert ("uploaded", "again") in [(line["state"], line["tag"]) for line in lines if line["kind"] == "save"]
    assert whole(tmp_path / "runs/run") == ["step-00000002", "step-00000003", "again"]


def test_what_is_wrong_surfaces(tmp_path: Path, url: str) -> None:
    with start(make(tmp_path, token="other")) as engine:
        step(engine)
        ticket = engine.save_checkpoint(url, wait=False)
        with pytest.raises(UsageError, match="does not accept the token"):
            ticket.wait()
        with pytest.raises(UsageError, match="does not accept the token"):
            engine.wait_for_checkpoint()
        with pytest.raises(UsageError, match=r"a run of a service: name it as http://.*/one"):
            engine.save_checkpoint(f"{url[:-3]}one/inside")
    assert not list((tmp_path / "local").glob("*/*.tmp-*"))


def test_the_command_trains_to_a_service_and_goes_on_from_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, config = tmp_path / "text.txt", tmp_path / "ds.json"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    own = {"keep": 1, "upload_folder": str(tmp_path / "local")}
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": ADAM, "zstore": own}))
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 300}))
    options: dict[str, Any] = {"model": str(model), "data": text, "config": config, "save": url}
    with pytest.raises(UsageError, match="needs a token"):
        train_command(TrainOptions(**options, steps=2, save_every=1, seq_len=16))
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)
    train_command(TrainOptions(**options, steps=2, save_every=1, seq_len=16))
    train_command(TrainOptions(**options, steps=3, save_every=1, resume="auto"))
    assert whole(tmp_path / "runs/run") == ["step-00000003"]
