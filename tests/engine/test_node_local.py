"""Checkpoints on drives of each machine's own: two processes with different folders stand for two machines."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zstore
from tests.engine.bits import engine_digests
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.errors import CheckpointError, ZstoreError
from zstore.open.sources import PARTS_VARIABLE, open_source
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command
from zstore.tools.diff import diff_command
from zstore.tools.opening import Common
from zstore.tools.verify import verify_command

TAG = "step-00000001"


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return make_config(stage) | {"checkpoint": {"use_node_local_storage": True}} | more


def _run(rank: int, base: str) -> dict[str, Any]:
    """Save at several stages, with and without the key, load again; and everything that must be an error."""
    found: dict[str, Any] = {}
    own = Path(base) / f"machine-{rank}"
    for stage in (1, 3):
        with start(config_of(stage)) as engine:
            step(engine)
            notes = {"best": torch.arange(5.0) + rank, "rank": rank}
            engine.save_checkpoint(str(own / f"stage-{stage}"), client_state=notes)
            shared = make_config(stage)
            saved = engine_digests(engine)
            step(engine)
            engine.save_checkpoint(str(own / f"stage-{stage}"))
            later = engine_digests(engine)
        with start(config_of(stage)) as engine:
            path, state = engine.load_checkpoint(str(own / f"stage-{stage}"))
            found[f"newest-{stage}"] = path, engine_digests(engine) == later
            path, state = engine.load_checkpoint(str(own / f"stage-{stage}"), tag=TAG)
            found[f"first-{stage}"] = engine_digests(engine) == saved, state["best"].tolist(), state["rank"]
        with start(shared) as engine:
            engine.load_checkpoint(str(own / f"stage-{stage}"), tag=TAG)
            engine.save_checkpoint(f"{base}/shared-{stage}")
    # The commit of one machine alone does not count.
    torch.distributed.barrier()
    if rank == 1:
        shutil.copytree(own / "stage-3", own / "torn")
        shutil.rmtree(own / "torn/step-00000002")
    else:
        shutil.copytree(own / "stage-3", own / "torn")
    torch.distributed.barrier()
    with start(config_of(3)) as engine:
        path, _ = engine.load_checkpoint(str(own / "torn"))
        found["torn"] = path
        for name, folder, tag in (("tag", "torn", "step-00000002"), ("none", f"only-{rank}", None)):
            if name == "none" and rank == 0:
                shutil.copytree(own / "stage-3", own / "only-0")
            with contextlib.suppress(FileNotFoundError):
                try:
                    engine.load_checkpoint(str(own / folder), tag=tag)
                except ZstoreError as error:
                    found[name] = f"{type(error).__name__}: {error}"
    files = FaultyFiles(faults=(Fault(kind="write", pattern="*/failing/*", error_number=errno.EIO),) if rank else ())
    with start(config_of(3), _files=files) as engine:
        step(engine)
        try:
            engine.save_checkpoint(str(own / "failing"))
        except ZstoreError as error:
            found["failing"] = str(error)
    found["left"] = [path.name for path in (own / "failing").iterdir() if not path.name.startswith("journal")]
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def ran(base: Path) -> list[dict[str, Any]]:
    return run_ranks(_run, 2, str(base))


def test_each_machine_loads_its_own_part(ran: list[dict[str, Any]], base: Path) -> None:
    for rank, found in enumerate(ran):
        for stage in (1, 3):
            assert found[f"newest-{stage}"] == (f"{base}/machine-{rank}/stage-{stage}/step-00000002", True)
            assert found[f"first-{stage}"] == (True, [0, 1, 2, 3, 4], 0)  # rank 0's count, and each machine has them
        assert found["torn"].endswith("torn/step-00000001")


def test_what_is_missing_is_named(ran: list[dict[str, Any]]) -> None:
    for found in ran:
        assert "checkpoint 'step-00000002' is not on all machines: rank 1 on" in found["tag"]
        assert "ZSTORE_PARTS" in found["tag"]
        assert "no checkpoint is on all machines: rank 1 on" in found["none"]


def test_a_save_that_fails_on_one_machine_is_on_none(ran: list[dict[str, Any]]) -> None:
    for found in ran:
        assert "failing" in found
        assert found["left"] == []


def test_parts_are_read_together_wherever_they_are(
    ran: list[dict[str, Any]],
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (base / f"machine-{rank}/stage-3" for rank in (0, 1))
    both = Common(also=[str(two)])
    assert verify_command(str(one), both, tag=TAG) == 0
    assert verify_command(str(one), tag=TAG) == 1
    faults = capsys.readouterr().out.splitlines()
    assert len(faults) == 1, faults
    assert re_machine(faults[0], 1)
    assert consolidate_command(str(one / TAG), tmp_path / "weights", "fp32", common=both) == 0
    with pytest.raises(
        CheckpointError, match=r"part of machine .* \(rank 1; it saved in .*machine-1/stage-3\) is not here"
    ):
        consolidate_command(str(one / TAG), tmp_path / "none", "fp32")
    with pytest.raises(CheckpointError, match="rank 0; it saved"):
        consolidate_command(str(two / TAG), tmp_path / "none", "fp32")
    with open_source(one, TAG, also=[two]) as parts, open_checkpoint(base / "shared-3") as whole:
        assert parts.arrays.keys() == {*whole.arrays, "client/best"}
        for name in whole.arrays:
            assert np.array_equal(parts.read_array(name), whole.read_array(name)), name
    with (
        zstore.open_checkpoint(one, TAG) as opened,
        pytest.raises(CheckpointError, match="zarr-python needs them in one"),
    ):
        opened.zarr()
    # Copied into one folder they are a checkpoint like any other.
    shutil.copytree(one, tmp_path / "merged")
    for path in (path.relative_to(two) for path in two.rglob("*") if path.is_file()):
        if not (tmp_path / "merged" / path).exists():
            shutil.copy(two / path, tmp_path / "merged" / path)
    assert verify_command(str(tmp_path / "merged"), tag=TAG) == 0
    monkeypatch.setenv(PARTS_VARIABLE, str(two))
    assert diff_command(f"{one}:{TAG}", f"{tmp_path}/merged:{TAG}", values=True) == 0
    with zstore.open_checkpoint(tmp_path / "merged", TAG) as opened:
        assert len(list(opened.zarr().group_keys())) >= 2
    assert [info.tag for info in tags(one)] == [TAG, "step-00000002"]
    with start(make_config(2)) as engine:  # one process, another stage
        engine.load_checkpoint(str(one), tag=TAG)
        assert engine.global_steps == 1


def re_machine(line: str, rank: int) -> bool:
    return f"(rank {rank}; it saved in " in line and "--also FOLDER" in line
