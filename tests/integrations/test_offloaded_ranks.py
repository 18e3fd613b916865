"""`zstore.optim.Offloaded` on FSDP2, tensor parallel meshes and DDP beside torch's own optimizer, through DCP; its page."""

import copy
import hashlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zstore.dcp
from tests import warm
from tests.pages import ROOT, blocks
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.optim import Offloaded, StoredTensor
from zstore.testing.ranks import run_ranks

AdamW = torch.optim.AdamW


def make_model() -> nn.Sequential:
    """Of its weights each of two ranks has enough rows for the disk, one rank one row more."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 601), nn.Tanh(), nn.Linear(601, 71))


def sharded() -> nn.Sequential:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel() -> nn.Sequential:
    mesh = init_device_mesh("cpu", (torch_dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 71))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, tp: int = 1) -> None:
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
    model(x.chunk(world_size // tp)[rank // tp]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    flat = {f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    return digest(get_model_state_dict(model)), digest(flat)


def app(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, **source: Any) -> None:
    state = app(model, optimizer)
    dcp.load(state, **source)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # DCP of torch 2.9
    found: dict[str, Any] = {}
    theirs = sharded()
    torchs = AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        step(theirs, torchs, number)
    found["torch"] = digests(theirs, torchs)
    ours = sharded()
    with Offloaded(AdamW, ours.parameters(), path=folder, lr=1e-2) as optimizer:
        for number in range(3):
            step(ours, optimizer, number)
        found["ours"] = digests(ours, optimizer)
        disk_bytes = optimizer.statistics().disk_bytes
        # Over more ranks parts are so small that they stay in memory.
        on_disk = 8 * sum(ours[i].weight.to_local().numel() for i in (0, 2))
        assert disk_bytes == (on_disk if torch_dist.get_world_size() == 2 else 0)
        dcp.save(app(ours, optimizer), checkpoint_id=f"{folder}/theirs")
        dcp.save(app(ours, optimizer), storage_writer=zstore.dcp.Writer(f"{folder}/ours/step-3"))
        full = get_optimizer_state_dict(
            ours, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if rank == 0:
            assert not isinstance(full["state"]["0.weight"]["exp_avg"], StoredTensor)
            found["full"] = full["state"]["0.weight"]["exp_avg"].shape
    dcp.save(app(theirs, torchs), checkpoint_id=f"{folder}/torchs")
    found["ddp"] = in_ddp(folder)
    found["two dims"] = on_two_dims(folder)
    found["other forms"] = flat_and_full()
    return found


def flat_and_full() -> bool:
    model = sharded()
    with Offloaded(AdamW, model.parameters(), device="cpu") as optimizer:
        step(model, optimizer, 0)
        before, weights = digests(model, optimizer), copy.deepcopy(get_model_state_dict(model))
        for options in (StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions(full_state_dict=True)):
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            step(model, optimizer, 1)
            assert digests(model, optimizer) != before
            set_model_state_dict(model, weights)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            if digests(model, optimizer) != before:
                return False
    return True


def on_two_dims(folder: str) -> list[tuple[str, str]]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of a view that tensor parallelism returns
    found = []
    for offloads in (False, True):
        model = tensor_parallel()
        if offloads:
            with Offloaded(AdamW, model.parameters(), path=folder, lr=1e-2) as optimizer:
                for number in range(3):
                    step(model, optimizer, number, tp=2)
                dcp.save(app(model, optimizer), checkpoint_id=f"{folder}/two-dims")
                found.append(digests(model, optimizer))
            with Offloaded(AdamW, model.parameters(), path=folder, lr=1e-2) as optimizer:
                load(model, optimizer, checkpoint_id=f"{folder}/two-dims")
                found.append(digests(model, optimizer))
        else:
            torchs = AdamW(model.parameters(), lr=1e-2, fused=True)
            for number in range(3):
                step(model, torchs, number, tp=2)
            found.append(digests(model, torchs))
    return found


def in_ddp(folder: str) -> bool:
    ours, theirs = make_model(), make_model()
    wrapped = [DistributedDataParallel(model) for model in (ours, theirs)]
    torchs = AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with Offloaded(AdamW, ours.parameters(), path=folder, lr=1e-2) as optimizer:
        for number in range(3):
            step(wrapped[0], optimizer, number)
            step(wrapped[1], torchs, number)
    return digest(ours.state_dict()) == digest(theirs.state_dict())


def resume(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sources: dict[str, dict[str, Any]] = {
        "theirs": {"checkpoint_id": f"{folder}/theirs"},
        "torchs": {"checkpoint_id": f"{folder}/torchs"},
        "ours": {"storage_reader": zstore.dcp.Reader(f"{folder}/ours/step-3")},
    }
    for name, source in sources.items():
        model = sharded()
        with Offloaded(AdamW, model.parameters(), path=folder, lr=1.0) as optimizer:
            load(model, optimizer, **source)
            loaded = digests(model, optimizer)
            step(model, optimizer, 3)
            found[name] = loaded, digests(model, optimizer)
    model = sharded()
    torchs = AdamW(model.parameters(), lr=1.0, fused=True)
    load(model, torchs, **sources["theirs"])
    loaded = digests(model, torchs)
    step(model, torchs, 3)
    found["into torch"] = loaded, digests(model, torchs)
    return found


def test_fsdp2_has_the_bits_of_torch_and_resumes_at_another_world_size(tmp_path: Path) -> None:
    trained = run_ranks(train_and_save, 2, str(tmp_path))
    for found in trained:
        assert found["ours"] == found["torch"] == trained[0]["torch"]
        assert found["ddp"]
        assert found["other forms"]
        assert len(set(found["two dims"])) == 1
    assert trained[0]["full"] == (601, 64)
    with open_checkpoint(tmp_path / "ours/step-3") as saved:
        assert verify_checkpoint(saved) == []
    for found in run_ranks(resume, 1, str(tmp_path)):
        assert {loaded for loaded, _ in found.values()} == {trained[0]["torch"]}
        assert len({after for _, after in found.values()}) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {}
    for block in blocks("docs/offloaded-optimizer.md"):
        exec(block, names)
    assert len(list(tmp_path.rglob("optimizer.pt"))) == len(list(tmp_path.rglob("step-3"))) == 1


def test_the_plain_loop_trains(tmp_path: Path) -> None:
    ran = warm.run(
        [sys.executable, str(ROOT / "examples/plain_loop.py"), "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2, ran.stdout
    assert (tmp_path / "checkpoint.pt").is_file()


def test_the_loop_of_fsdp2_trains(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = [str(ROOT / "examples/fsdp2_offloaded.py"), "--out", str(tmp_path), "--steps", "6"]
    ran = warm.run([*launch, *script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    first, last = (float(found) for found in re.findall(r"loss ([\d.]+)", str(ran.stdout)))
    assert last < first
