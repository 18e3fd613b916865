"""Ranks that talk over NCCL, each with a device of its own; the same over gloo shows, without a device, that the tests work."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import zstore
from tests.engine.bits import digest, engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def over_nccl(num_ranks: int) -> Any:
    """NCCL refuses two ranks on one device."""
    found = pytest.mark.skipif(num_ranks > NUM_DEVICES, reason=f"{num_ranks} ranks over NCCL need as many CUDA devices")
    return pytest.param("nccl", marks=[pytest.mark.cuda, found])


@contextmanager
def group(backend: str, rank: int, world_size: int, folder: str) -> Iterator[World]:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch_dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size)
    try:
        yield World.current()
    finally:
        torch_dist.destroy_process_group()


def config(stage: int, nvme: str, **keys: Any) -> dict[str, Any]:
    return make_config(stage, "nvme", nvme, "cpu" if stage == 3 else "none", gradient_clipping=0.25, **keys)


def trained(made: dict[str, Any], rank: int, model: nn.Module | None = None) -> tuple[list[float], dict[str, str]]:
    with start(made, model) as engine:
        return steps_of(engine, rank), engine_digests(engine)


def steps_of(engine: Any, rank: int) -> list[float]:
    losses = []
    for _ in range(2):
        for micro in range(engine.gradient_accumulation_steps()):
            (ids,) = batch(engine.global_steps, micro, rank)
            loss = engine(ids.to(engine.device))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


@pytest.mark.parametrize("backend", ["gloo", over_nccl(1)])
def test_one_rank_trains_as_a_process_alone(backend: str, nvme: Path, tmp_path: Path) -> None:
    with group(backend, 0, 1, str(tmp_path)) as world:
        assert world.backend == backend
        assert world.device.type == ("cuda" if backend == "nccl" else "cpu")
        found = [trained(config(stage, str(nvme)), 0) for stage in (1, 3)]
        coded = config(3, str(nvme))
        coded["zero_optimization"] |= QUANTIZED  # nothing is sent, so that it has the bits of the one before
        assert trained(coded, 0) == found[1]
    if backend == "gloo" and NUM_DEVICES:
        return  # alone it computes on the device
    assert found == [trained(config(stage, str(nvme)), 0) for stage in (1, 3)]


def _exchanged(world: World, rank: int) -> dict[str, Any]:
    values = world.all_gather_object({"rank": rank, "text": "x" * (5 + rank)})
    sent = torch.full((5,), float(rank + 1))
    world.broadcast(sent, source=1)  # of the host, wherever the backend's collectives are
    out = torch.empty(4, dtype=torch.bfloat16, device=world.device)
    world.all_gather(out, torch.full((2,), rank, dtype=torch.bfloat16, device=world.device))
    moved = torch.full((3,), rank, device=world.device)
    world.transfer(moved, 0, 1)
    try:
        world.raise_on_all_ranks(ValueError("mine") if rank == 1 else None)
        error = ""
    except Exception as raised:
        error = str(raised).partition(";")[0]
    return {"values": values, "sent": sent.tolist(), "out": out.tolist(), "moved": moved.tolist(), "error": error}


def _quantized(rank: int, keys: dict[str, Any], nvme: str) -> tuple[list[float], dict[str, int], str]:
    made = config(3, nvme)
    made["zero_optimization"] |= keys
    with start(made) as engine:
        losses = steps_of(engine, rank)
        sent = {kind: engine.statistics().sent_bytes[kind] for kind in ("all_gather", "reduce_scatter")}
        return losses, sent, digest(engine.get_full_parameter("blocks.0.up.weight"))  # type: ignore[arg-type]


def _on_two_ranks(rank: int, backend: str, folder: str, nvme: str) -> dict[str, Any]:
    torch_dist.destroy_process_group()
    os.environ["LOCAL_RANK"] = str(rank)
    with group(backend, rank, 2, folder) as world:
        found: dict[str, Any] = {"exchanged": _exchanged(world, rank)}
        plain = make_config(0, gradient_clipping=0.25)
        losses = [trained(plain, rank)[0], *(trained(config(stage, nvme), rank)[0] for stage in (1, 2, 3))]
        with zstore.Init(config=config(3, nvme)):
            net = make_net()
        with zstore.gather(net.embed.weight, modifier_rank=0), torch.no_grad():
            net.embed.weight.mul_(1.0 if rank == 0 else 7.0)  # rank 0's values count
        found["losses"] = [*losses, trained(config(3, nvme), rank, net)[0]]
        with start(config(3, nvme)) as engine:
            engine.save_checkpoint(f"{folder}/ckpt")
            found["saved"] = engine_digests(engine)
        with start(config(3, nvme), make_net(1)) as engine:
            engine.load_checkpoint(f"{folder}/ckpt")
            found["loaded"] = engine_digests(engine)
        found["quantized"] = [_quantized(rank, keys, nvme) for keys in ({}, QUANTIZED)]
        return found


QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@pytest.mark.parametrize("backend", ["gloo", over_nccl(2)])
def test_two_ranks_exchange_train_save_and_load(backend: str, nvme: Path, tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(dir=tmp_path)
    ranks = run_ranks(_on_two_ranks, 2, backend, folder, str(nvme), timeout_s=240)
    for rank, found in enumerate(ranks):
        assert found["exchanged"] == {
            "values": [{"rank": 0, "text": "xxxxx"}, {"rank": 1, "text": "xxxxxx"}],
            "sent": [2.0] * 5,
            "out": [0.0, 0.0, 1.0, 1.0],
            "moved": [0, 0, 0],
            "error": "mine" if rank else "rank 1 of 2 failed",
        }
        plain, *others = found["losses"]
        for other in others:
            assert other == pytest.approx(plain, rel=2e-2)
        assert found["loaded"] == found["saved"]
        (exact, whole, _), (losses, sent, bits) = found["quantized"]
        assert bits == ranks[0]["quantized"][1][2]
        assert losses == pytest.approx(exact, rel=2e-2)
        # Bytes and halves of bytes, with a scale for each 256 elements, for two bytes; biases stay whole.
        assert 0.5 < sent["all_gather"] / whole["all_gather"] < 0.75
        assert 0.25 < sent["reduce_scatter"] / whole["reduce_scatter"] < 0.6


@pytest.mark.parametrize(("visible", "expected"), [(4, 2), (1, 0)], ids=["all devices", "one device a rank"])
def test_nccl_is_told_which_device_the_rank_has(visible: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given.update(device=device))
    monkeypatch.setattr(torch_dist, "init_process_group", lambda backend, **keys: given.update(keys, backend=backend))
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # set by the call, and removed again
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    zstore.init_distributed()
    assert given["device"] == given["device_id"] == torch.device("cuda", expected)
    zstore.init_distributed("gloo")
    assert given["device_id"] is None
