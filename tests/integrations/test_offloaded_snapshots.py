"""Snapshots of an offloaded optimizer after every step, and loops that go on from them."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zstore.dcp
from tests.integrations.offloaded_kills import Loop, Run
from zstore.checkpoint.catalog import TagInfo
from zstore.checkpoint.reader import CheckpointReader, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.optim import Offloaded
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
STEPS, STOP = 3, 2
AdamW = torch.optim.AdamW


def straight(run: Run, folder: Path) -> str:
    loop = Loop.make(run, folder, durable=False)
    for _ in range(STEPS):
        loop.step()
    digest = loop.digest()
    loop.optimizer.close()
    return digest


def resumed(run: Run, folder: Path, stop: int = STOP) -> str:
    """Return the digest of a loop that ended after `stop` steps and went on in new memory."""
    loop = Loop.make(run, folder, durable=True)
    assert loop.resume() == 0
    for step in range(stop):
        loop.step()
        assert loop.optimizer.durable_step in (step or None, step + 1)
    loop.optimizer.wait_for_snapshot()
    assert loop.optimizer.durable_step == stop
    loop.optimizer.close()
    loop = Loop.make(run, folder, durable=True)
    assert loop.resume() == loop.optimizer.durable_step == stop
    for _ in range(STEPS - stop):
        loop.step()
    digest = loop.digest()
    loop.optimizer.close()
    return digest


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(overlap="forward", clip=0.5, dtype="bfloat16", frees=True), marks=pytest.mark.soak),
        Run(device="cpu", overlap="backward", kind="NAdam"),
    ],
    ids=lambda run: f"{run.device} {run.overlap} {run.kind}",
)
def test_a_loop_goes_on_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    assert resumed(run, tmp_path / "durable") == straight(run, tmp_path / "straight")


def snapshot_of(folder: Path) -> TagInfo:
    (info,) = tags(folder / "state/zstore-run/steps")
    return info


def test_a_snapshot_is_a_checkpoint_that_links_what_rests_on_disk(tmp_path: Path) -> None:
    loop = Loop.make(Run(dtype="bfloat16"), tmp_path / "state", durable=True)
    for _ in range(2):
        loop.step()
    loop.optimizer.wait_for_snapshot()
    info = snapshot_of(tmp_path)
    assert info.record.step == 2
    with CheckpointReader(info) as reader:
        assert not verify_checkpoint(reader)
        shared = {
            name
            for name in reader.arrays
            if any(path.stat().st_nlink > 1 for path in (info.path / name).rglob("*") if path.is_file())
        }
    large = {f"optimizer/{slot}/parameter-{n}" for slot in ("master", "exp_avg", "exp_avg_sq") for n in (0, 2)}
    assert shared == large
    state: dict[str, Any] = {"model": {"parameter-0": torch.empty(601, 64, dtype=torch.bfloat16)}}
    dcp.load(state, storage_reader=zstore.dcp.Reader(info.path), no_dist=True)
    first = next(loop.model.parameters())
    assert torch.equal(state["model"]["parameter-0"], first)
    loop.optimizer.close()
    assert snapshot_of(tmp_path).tag == info.tag


def test_a_snapshot_loads_as_a_checkpoint_of_another_loop(tmp_path: Path) -> None:
    model = nn.Linear(64, 300)
    with Offloaded(AdamW, model.named_parameters(), path=tmp_path, durability="step") as optimizer:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    other = nn.Linear(64, 300)
    plain = AdamW(other.parameters())
    weights, state = get_state_dict(other, plain)
    (info,) = tags(tmp_path / "zstore-run/steps")
    dcp.load({"model": weights, "optim": state}, storage_reader=zstore.dcp.Reader(info.path), no_dist=True)
    set_state_dict(other, plain, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(other.weight, model.weight)
    assert plain.state[other.weight]["step"] == 1


def test_what_cannot_be_kept_or_resumed_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)

    def make(model: nn.Module, **more: Any) -> Offloaded:
        return Offloaded(AdamW, model.named_parameters(), path=tmp_path, **more)

    with pytest.raises(UsageError, match='expected "none" or "step"'):
        make(model, durability="checkpoint")
    with pytest.raises(UsageError, match="set that too"):
        make(model, durability_path=tmp_path)
    with pytest.raises(UsageError, match="needs a folder"):
        Offloaded(AdamW, model.parameters(), device="cpu", durability="step")
    with make(model) as optimizer, pytest.raises(UsageError, match='durability="step"'):
        optimizer.resume()

    model(torch.ones(1, 4)).sum().backward()
    with make(model, durability="step") as optimizer:
        optimizer.loop_state = {"data": object()}
        with pytest.raises(UsageError, match="loop_state: expected tensors, numbers"):
            optimizer.step()
        optimizer.loop_state = {"seen": (1, torch.ones(2))}
        optimizer.step()
    with make(model, durability="step") as optimizer:
        before = model.weight.clone()
        with pytest.raises(UsageError, match=r"'step-00000002' of an earlier process: call optimizer.resume\(\)"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        found = optimizer.resume()
        assert found is not None
        assert (found.step, found.loop_state["seen"][0]) == (2, 1)
    optimizer = make(nn.Linear(4, 2, bias=False), durability="step")
    with optimizer, pytest.raises(CheckpointMismatchError, match=r"has model\.bias, optim\.state\.bias"):
        optimizer.resume()


def test_a_full_drive_is_raised_by_the_next_step_before_it_changes_anything(tmp_path: Path) -> None:
    files = FaultyFiles()
    loop = Loop.make(Run(), tmp_path / "state", durable=True, files=files)
    loop.step()
    loop.optimizer.wait_for_snapshot()
    files.inject(Fault(kind="write", pattern="*/model/*", error_number=errno.ENOSPC))
    loop.step()
    digest = loop.digest()
    with pytest.raises(OSError, match="space") as raised:
        loop.step()
    assert "nothing has changed since" in str(raised.value.__notes__)
    loop.optimizer.zero_grad()
    assert loop.digest() == digest
    assert snapshot_of(tmp_path).record.step == 1
    loop.step()
    loop.optimizer.close()
    assert snapshot_of(tmp_path).record.step == 3


def test_after_a_power_cut_a_snapshot_counts_where_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    loop = Loop.make(Run(), folder, durable=True)
    loop.step()
    loop.optimizer.close()
    monkeypatch.setattr("zstore.engine.checkpoint.snapshot_folder.boot_id", lambda: "another")
    loop = Loop.make(Run(), folder, durable=True)
    assert loop.resume() == 1
    loop.optimizer.close()
    info = snapshot_of(tmp_path)
    files = (path for path in (info.path / "model").rglob("*") if path.name != "zarr.json" and path.is_file())
    shard = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    loop = Loop.make(Run(), folder, durable=True)
    assert loop.resume() == 0
    assert "incomplete, as after a power cut" in caplog.text
    loop.step()
    loop.optimizer.close()
    assert [info.record.step for info in tags(folder / "zstore-run/steps")] == [1]


def _on_ranks(rank: int, fields: dict[str, Any], folder: str) -> list[str]:
    run, base = Run(**fields), Path(folder)
    return [straight(run, base / f"straight-{rank}"), resumed(run, base / "state")]


@pytest.mark.parametrize(
    "run",
    [
        Run(world_size=2, parallel="ddp", clip=0.5),
        pytest.param(Run(world_size=2, parallel="fsdp", dtype="bfloat16", overlap="forward"), marks=pytest.mark.soak),
    ],
    ids=lambda run: run.parallel,
)
def test_all_ranks_go_on_from_one_snapshot(run: Run, tmp_path: Path) -> None:
    for expected, got in run_ranks(_on_ranks, 2, dataclasses.asdict(run), str(tmp_path), timeout_s=60):
        assert got == expected
    with CheckpointReader(snapshot_of(tmp_path)) as reader:
        assert not verify_checkpoint(reader)
