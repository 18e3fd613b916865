"""The engine on one CUDA device: bits between tiers and step modes, precisions, checkpoints, pinned memory, NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from tests.engine_models import batch, make_net
from tests.engine_runs import make_config, start
from tests.reference import Reference
from tests.test_engine_bits import ADAM, digest, rows_at_rest
from zstore.dist import World
from zstore.engine import Engine
from zstore.engine.lanes import CudaLane
from zstore.engine.tensors import as_torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (stage, optimizer's tier, parameters' tier, step mode); the state is updated on the host.
ON_HOST = [
    (1, "cpu", "none", "none"),
    (2, "nvme", "none", "forward"),
    (3, "cpu", "cpu", "forward"),
    (3, "nvme", "nvme", "none"),
    (3, "nvme", "cpu", "forward"),
]
ON_DEVICE = [(0, "none", "none", "none"), (1, "none", "none", "forward"), (3, "none", "none", "none")]
STEPS = 2


def config_of(
    nvme: Path, stage: int, tier: str, parameters: str, overlap: str, *, precision: str = "bf16", clip: float = 0.25
) -> dict[str, Any]:
    config = make_config(stage, tier, nvme, zstore={"step_overlap": overlap}, gradient_clipping=clip)
    del config["bf16"], config["scheduler"]
    config["optimizer"] = {"type": "AdamW", "params": ADAM}
    if precision != "fp32":
        config[precision] = {"enabled": True} | ({"loss_scale": 128.0} if precision == "fp16" else {})
    zero = config["zero_optimization"]
    if tier != "none":
        zero["offload_optimizer"]["pin_memory"] = True
    if parameters != "none":
        zero["offload_param"] = {"device": parameters, "pin_memory": True}
        if parameters == "nvme":
            zero["offload_param"]["nvme_path"] = str(nvme)
    return config


def train(engine: Engine, steps: int = STEPS) -> list[float]:
    """Return the losses."""
    losses: list[float] = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            (ids,) = batch(engine.global_steps, micro, 0)
            loss = engine(ids.to(engine.device))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def bits(engine: Engine) -> dict[str, str]:
    """Return the hash of every array and of every parameter's rows."""
    training = engine.training_state
    training.complete()
    found: dict[str, str] = {}
    for record in training.state.records:
        found[record.name] = digest(rows_at_rest(engine, record).cpu())
        if record.group is not None:
            for name in training.state.arrays_of(record):
                found[name] = digest(as_torch(training.state.store.read(name).wait()))
    return found


def trained(config: dict[str, Any]) -> tuple[list[float], dict[str, str]]:
    with start(config) as engine:
        assert engine.device.type == "cuda"
        return train(engine), bits(engine)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_host_disk_and_step_modes_give_the_same_bits(precision: str, nvme: Path) -> None:
    first, *others = [trained(config_of(nvme, *case, precision=precision)) for case in ON_HOST]
    for other in others:
        assert other == first


def test_updates_within_the_backward_give_the_same_bits(nvme: Path) -> None:
    for tiers in [("cpu", "none"), ("nvme", "nvme"), ("none", "none")]:
        within, behind = (
            trained(config_of(nvme, 3, *tiers, overlap, clip=0.0) | {"gradient_accumulation_steps": 1})
            for overlap in ("backward", "none")
        )
        assert within == behind


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_device_gives_the_bits_of_a_plain_loop_on_it(precision: str, nvme: Path) -> None:
    reference = Reference(
        make_net().cuda(),
        1,
        precision=precision,
        accumulation=2,
        clip=0.25,
        scale=128.0 if precision == "fp16" else 1.0,
        adam=ADAM,
    )
    for step in range(STEPS):
        reference.step([[(batch(step, micro, 0)[0].cuda(),)] for micro in range(2)])
    expected = {name: digest(values.cpu()) for name, values in reference.arrays().items()}
    for case in ON_DEVICE:
        found = trained(config_of(nvme, *case, precision=precision))[1]
        assert {name: found[name] for name in expected} == expected


def test_updates_on_the_host_are_close_to_those_on_the_device(nvme: Path) -> None:
    here = trained(config_of(nvme, *ON_DEVICE[0], precision="fp32"))[0]
    there = trained(config_of(nvme, *ON_HOST[0], precision="fp32"))[0]
    assert there == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize("case", [ON_DEVICE[0], ON_HOST[0], ON_HOST[3]])
def test_a_run_is_resumed_exactly(case: tuple[Any, ...], nvme: Path, tmp_path: Path) -> None:
    config = config_of(nvme, *case)
    with start(config) as engine:
        train(engine, 1)
        ticket = engine.save_checkpoint(str(tmp_path / "ckpt"), wait=False)
        train(engine, 1)
        ticket.wait()
        expected = bits(engine)
        drawn = torch.rand(4, device="cuda")
    with start(config, make_net(1)) as engine:
        engine.load_checkpoint(str(tmp_path / "ckpt"))
        train(engine, 1)
        assert bits(engine) == expected
        assert torch.equal(torch.rand(4, device="cuda"), drawn)


def test_another_stream_than_the_usual_gives_the_same_bits(nvme: Path) -> None:
    for case in (ON_DEVICE[0], ON_HOST[2]):
        usual = trained(config_of(nvme, *case))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert trained(config_of(nvme, *case)) == usual


def test_buffers_and_state_are_pinned(nvme: Path) -> None:
    with start(config_of(nvme, *ON_HOST[2])) as engine:
        store = engine.training_state.state.store
        found = engine.statistics().store
        assert found.pinned_bytes >= found.host_bytes + found.pool_bytes
        assert found.fallbacks == ()
        tiles = store.stream([["model/blocks.0.up.weight"]], "read")
        with contextlib.closing(tiles):
            assert all(as_torch(tile.views[0]).is_pinned() for tile in tiles)


def test_copies_beside_the_computation_come_after_it() -> None:
    lane = CudaLane(torch.device("cuda", 0))
    numel = 4 * 1024 * 1024
    there = torch.zeros(numel, device="cuda")
    pieces = [lane.empty_host(numel, torch.float32) for _ in range(4)]
    marks = []
    for piece in pieces:
        for _ in range(50):
            there = there + 1
        marks.append((lane.copy(piece, there, lane.mark()), there))
    for number, (mark, _) in enumerate(marks, 1):
        lane.wait(mark)
        assert torch.equal(pieces[number - 1], torch.full((numel,), 50.0 * number))
    back = torch.empty_like(there)
    lane.wait(lane.copy(back, pieces[0], lane.mark()))
    assert torch.equal(back, torch.full_like(back, 50.0))


@contextmanager
def nccl(folder: Path) -> Iterator[World]:
    torch.cuda.set_device(0)
    torch_dist.init_process_group("nccl", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        yield World.current()
    finally:
        torch_dist.destroy_process_group()


def test_nccl_on_one_rank(nvme: Path, tmp_path: Path) -> None:
    case = config_of(nvme, *ON_HOST[3])
    alone = trained(case)
    with nccl(tmp_path) as world:
        assert (world.backend, world.device) == ("nccl", torch.device("cuda", 0))
        send = torch.arange(8, dtype=torch.bfloat16, device="cuda").view(1, 8)
        mean = torch.empty(8, dtype=torch.bfloat16, device="cuda")
        world.reduce_scatter_mean(mean, send, kind="reduce_scatter").wait()
        assert torch.equal(mean, send[0])
        assert trained(case) == alone
