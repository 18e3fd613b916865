"""The engine saves to URLs and loads from them: behind training, on several ranks, at another stage and world size."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.object_store import ObjectFileSystem, RequestFault
from tests.engine.runs import ADAM, make_config, start, state_of, step
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.errors import CheckpointError, CheckpointNotFoundError, RankError
from zstore.journal import run_of
from zstore.remote.service import open_folder
from zstore.testing.ranks import run_ranks
from zstore.tools.train import TrainOptions, train_command

URL = "objects://bucket/run"


def remote_config(tmp_path: Path, stage: int = 1, tier: str = "none", **own: Any) -> dict[str, Any]:
    own = {"storage_options": {"folder": str(tmp_path / "objects")}, "upload_folder": str(tmp_path / "local"), **own}
    nvme = tmp_path / "nvme"
    nvme.mkdir(exist_ok=True)
    return make_config(stage, tier, nvme, zstore=own)


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[ObjectFileSystem]:
    yield open_folder(URL, {"folder": str(tmp_path / "objects")}).fs
    ObjectFileSystem.clear_instance_cache()


def test_a_run_goes_on_from_a_url_with_the_same_bits(
    tmp_path: Path, fs: ObjectFileSystem, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State on disk is linked beside its drive, and not written again. No home folder is needed."""
    monkeypatch.setattr(Path, "expanduser", None)
    with start(remote_config(tmp_path, 2, "nvme", upload_folder=None)) as engine:
        step(engine)
        summary = engine.save_checkpoint(URL, client_state={"note": "here"}).wait()
        assert summary.url == f"{URL}/step-00000001"
        assert summary.path.is_relative_to(tmp_path / "nvme" / "zstore-uploads")
        assert not summary.path.exists()
        assert summary.num_linked > 0
        step(engine)
        expected = state_of(engine)
    with start(remote_config(tmp_path, 1, "nvme")) as engine:
        path, state = engine.load_checkpoint(URL)
        assert (path, state) == (f"{URL}/step-00000001", {"note": "here"})
        step(engine)
        assert state_of(engine) == expected
    assert "% more than needed, since chunks are read whole" in caplog.text


def test_training_goes_on_while_the_upload_waits(tmp_path: Path, fs: ObjectFileSystem) -> None:
    gate = threading.Event()
    fs.faults.append(RequestFault(kind="write", pattern="*/c.*", times=None, gate=gate))
    with start(remote_config(tmp_path)) as engine:
        step(engine)
        saved = state_of(engine)
        ticket = engine.save_checkpoint(URL, wait=False)
        step(engine)
        step(engine)
        assert not ticket.done()
        gate.set()
        engine.wait_for_checkpoint()
        assert ticket.done()
        engine.load_checkpoint(URL)
        assert state_of(engine) == saved


def test_an_upload_that_fails_surfaces_and_the_next_save_goes_on(tmp_path: Path, fs: ObjectFileSystem) -> None:
    fs.faults.append(RequestFault(kind="write", pattern="*/c.*", times=None, error=lambda: PermissionError("no key")))
    with start(remote_config(tmp_path)) as engine:
        step(engine)
        ticket = engine.save_checkpoint(URL, wait=False)
        for call in (ticket.wait, engine.wait_for_checkpoint):
            with pytest.raises(CheckpointError, match=r"was not saved to .* no key"):
                call()
        engine.save_checkpoint(URL, wait=False)
        with pytest.raises(CheckpointError, match=r"was not saved to .* no key"):
            engine.save_checkpoint(URL)
        fs.faults.clear()
        step(engine)
        engine.save_checkpoint(URL)
    with open_checkpoint(open_folder(URL, {"folder": str(tmp_path / "objects")})) as saved:
        assert saved.record.step == 2


def _train(rank: int, tmp_path: Path, load: bool) -> dict[str, Any]:
    import tests.checkpoint.object_store  # noqa: F401 - makes the protocol known

    message = ""
    if not load:
        config = remote_config(tmp_path)
        config["zstore"]["storage_options"]["deny_writes"] = "*/c.1*"
        with start(config) as engine:
            step(engine)
            ticket = engine.save_checkpoint(URL, wait=False)
            with pytest.raises(CheckpointError) as raised:
                ticket.wait()
            message = str(raised.value)
            with pytest.raises((CheckpointError, RankError)):
                engine.wait_for_checkpoint()
    with start(remote_config(tmp_path, 3)) as engine:
        if load:
            engine.load_checkpoint(URL)
        step(engine)
        if not load:
            engine.save_checkpoint(URL)
        return {"message": message, "steps": engine.global_steps}


def test_two_ranks_save_to_a_url_and_one_goes_on(tmp_path: Path, fs: ObjectFileSystem) -> None:
    for told in run_ranks(_train, 2, tmp_path, False):  # a save that fails on one rank surfaces on every rank
        assert f"{URL}/step-00000001" in told["message"]
        assert "403 Forbidden" in told["message"]
    with start(remote_config(tmp_path)) as engine:
        engine.load_checkpoint(URL)
        assert engine.global_steps == 1
        engine.save_checkpoint(URL, tag="again")
    assert run_ranks(_train, 2, tmp_path, True)[1]["steps"] == 2


def _die_while_uploading(rank: int, tmp_path: Path) -> str:
    import tests.checkpoint.object_store  # noqa: F401

    config = remote_config(tmp_path)
    if rank == 0:

        def die() -> Exception:
            until((tmp_path / "begun").exists)  # else the other's call of the save fails
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        store = open_folder(URL, config["zstore"]["storage_options"]).fs
        store.faults.append(RequestFault(kind="write", pattern="*/zarr.json", first=1, error=die))
    engine = start(config)
    step(engine)
    handle = engine.save_checkpoint(URL, wait=False)
    if rank == 1:
        (tmp_path / "begun").touch()
    try:
        handle.wait()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_killed_while_it_uploads_is_told_to_the_others(tmp_path: Path, fs: ObjectFileSystem) -> None:
    message = run_ranks(_die_while_uploading, 2, tmp_path, may_die=[0])[1]
    assert f"{URL}/step-00000001" in message
    assert any(name.startswith("bucket/run/step-00000001/") for name in fs.objects())
    with start(remote_config(tmp_path)) as engine:
        assert engine.load_checkpoint(URL) == (None, {})
        step(engine)
        engine.save_checkpoint(URL, tag="after")
    names = {name.split("/")[2] for name in fs.objects()}
    assert {name for name in names if run_of(name) is None} == {"after", "latest"}


def test_the_command_trains_to_a_url_and_goes_on_from_it(tmp_path: Path, fs: ObjectFileSystem) -> None:
    text, config, model = tmp_path / "text.txt", tmp_path / "ds.json", tmp_path / "model.json"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    own = {"keep": 1, "upload_folder": str(tmp_path / "local")}
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": ADAM, "zstore": own}))
    model.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 300}))
    options: dict[str, Any] = {"config": config, "model": str(model), "data": text, "save": URL}
    options |= {"metrics": tmp_path / "metrics", "storage_option": (f"folder={tmp_path / 'objects'}",)}

    def train(steps: int, **more: Any) -> list[float]:
        options["metrics"].unlink(missing_ok=True)
        train_command(TrainOptions(**options, steps=steps, **more))
        return [json.loads(line)["loss"] for line in options["metrics"].read_text().splitlines()]

    whole = train(3, seed=3, seq_len=16)
    for name in [name for name in fs.objects() if name.startswith("bucket/run/")]:
        fs.rm_file(name)
    assert train(2, seed=3, seq_len=16) == whole[:2]
    assert train(3, resume=f"{URL}@step-00000002") == whole[2:]
    assert [info.tag for info in tags(open_folder(URL, {"folder": str(tmp_path / "objects")}))] == ["step-00000003"]
    assert train(4, resume="auto")
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint with the tag 'nowhere'"):
        train(5, resume=f"{URL}@nowhere")


def test_storage_options_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(zstore={"storage_options": {"secret": "opensesame"}}, dump_state=True)
    with start(config):
        pass
    assert "storage_options" in caplog.text
    assert "opensesame" not in caplog.text
