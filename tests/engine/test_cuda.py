"""The engine on one CUDA device: bits between tiers and step modes, precisions, checkpoints, pinned memory.

With ZSTORE_TEST_DEVICE=cpu those that know nothing of CUDA run on the CPU, so that a mistake in them shows without a device.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tests.engine.bits import ADAM, digest, engine_digests
from tests.engine.deep import SAMPLES, data, deep
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start
from tests.reference import Reference
from zstore.engine import Engine
from zstore.engine.extras.zeropp import BlockCode
from zstore.engine.runtime.device import CudaStreams
from zstore.engine.zero.norm import device_norms
from zstore.io.memory import PinnedSlabs, as_torch, clear_cuda_error
from zstore.optim import Offloaded

DEVICE = os.environ.get("ZSTORE_TEST_DEVICE", "cuda")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ZSTORE_TEST_LATE_COPIES=1 the device sleeps for a tenth of a millisecond before each copy beside the computation."""
    if DEVICE != "cuda" or not os.environ.get("ZSTORE_TEST_LATE_COPIES"):
        return
    copy = CudaStreams.copy

    def late(streams: CudaStreams, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Any) -> Any:
        with torch.cuda.stream(streams._down if streams.is_host(targets[0]) else streams._up):
            torch.cuda._sleep(200_000)
        return copy(streams, targets, sources, after)

    monkeypatch.setattr(CudaStreams, "copy", late)


knows_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="is of CUDA itself")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose order of sums changes from run to run would hide what the engine does; new memory is NaN, too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_norm_of_a_shard_has_the_same_bits_beside_others_and_at_any_address() -> None:
    sizes = [3, 4096, 4097, 3_000_001, 70_000, 65536 * 600, 1]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, *[torch.bfloat16] * 3, torch.float32]
    shards = [torch.randn(n, device=DEVICE).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    norms = [norm.item() for norm in device_norms(shards)]
    assert norms == [torch._foreach_norm([values], 2, torch.float32)[0].item() for values in shards]
    moved = [torch.cat([values[:1], values])[1:] for values in shards]
    assert [norm.item() for norm in device_norms(moved)] == norms
    apart = 1e-6 if DEVICE == "cuda" else 1e-2  # a CPU adds all squares of a tensor in a few sums
    assert norms == pytest.approx([values.double().norm().item() for values in shards], rel=apart)


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
    config = make_config(stage, tier, nvme, parameters, zstore={"step_overlap": overlap}, gradient_clipping=clip)
    del config["bf16"], config["scheduler"]
    config["optimizer"] = {"type": "AdamW", "params": ADAM}
    if precision != "fp32":
        config[precision] = {"enabled": True} | ({"loss_scale": 128.0} if precision == "fp16" else {})
    for section in ("offload_optimizer", "offload_param"):
        if section in config["zero_optimization"]:
            config["zero_optimization"][section]["pin_memory"] = True
    return config


def train(engine: Engine, steps: int = STEPS) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            (ids,) = batch(engine.global_steps, micro, 0)
            loss = engine(ids.to(engine.device))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def trained(config: dict[str, Any]) -> tuple[list[float], dict[str, str]]:
    with start(config) as engine:
        assert engine.device.type == DEVICE
        return train(engine), engine_digests(engine)


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
    how: dict[str, Any] = {"scale": 128.0 if precision == "fp16" else 1.0, "adam": ADAM}
    reference = Reference(make_net().to(DEVICE), 1, precision=precision, accumulation=2, clip=0.25, **how)
    for step in range(STEPS):
        reference.step([[(batch(step, micro, 0)[0].to(DEVICE),)] for micro in range(2)])
    expected = {name: digest(values.cpu()) for name, values in reference.arrays().items()}
    for case in ON_DEVICE:
        found = trained(config_of(nvme, *case, precision=precision))[1]
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("ratio", [1.0, 0.5])  # a part of the state may stay on the device
def test_updates_on_the_host_are_close_to_those_on_the_device(ratio: float, nvme: Path) -> None:
    config = config_of(nvme, *ON_HOST[0], precision="fp32")
    config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    here = trained(config_of(nvme, *ON_DEVICE[0], precision="fp32"))[0]
    assert trained(config)[0] == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize("case", [ON_DEVICE[0], ON_HOST[0], ON_HOST[3]])
def test_a_run_is_resumed_exactly(case: tuple[Any, ...], nvme: Path, tmp_path: Path) -> None:
    config = config_of(nvme, *case)
    with start(config) as engine:
        train(engine, 1)
        ticket = engine.save_checkpoint(str(tmp_path / "ckpt"), wait=False)
        train(engine, 1)
        ticket.wait()
        expected = engine_digests(engine)
        drawn = torch.rand(4, device=DEVICE)
    with start(config, make_net(1)) as engine:
        engine.load_checkpoint(str(tmp_path / "ckpt"))
        train(engine, 1)
        assert engine_digests(engine) == expected
        assert torch.equal(torch.rand(4, device=DEVICE), drawn)


@knows_cuda
def test_another_stream_than_the_usual_gives_the_same_bits(nvme: Path) -> None:
    for case in (ON_DEVICE[0], ON_HOST[2]):
        usual = trained(config_of(nvme, *case))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert trained(config_of(nvme, *case)) == usual


@knows_cuda
def test_buffers_and_state_are_pinned(nvme: Path) -> None:
    with start(config_of(nvme, *ON_HOST[2])) as engine:
        store = engine.training_state.state.store
        found = engine.statistics().store
        assert found.host_bytes + found.pool_bytes > found.pinned_bytes > found.pool_bytes
        assert found.fallbacks == ()
        tiles = store.tiles([["parameter/blocks.0.up.weight"]], "read")  # which crosses, as the master does not
        with contextlib.closing(tiles):
            assert all(as_torch(tile.views[0]).is_pinned() for tile in tiles)


@knows_cuda
def test_copies_beside_the_computation_come_after_it() -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    numel = 4 * 1024 * 1024
    there = torch.zeros(numel, device="cuda")
    pieces = [streams.empty_host(numel, torch.float32) for _ in range(4)]
    marks = []
    for piece in pieces:
        for _ in range(50):
            there = there + 1
        marks.append((streams.copy(piece, there, streams.record()), there))
    for number, (mark, _) in enumerate(marks, 1):
        streams.wait(mark)
        assert torch.equal(pieces[number - 1], torch.full((numel,), 50.0 * number))
    back = torch.empty_like(there)
    streams.wait(streams.copy(back, pieces[0], streams.record()))
    assert torch.equal(back, torch.full_like(back, 50.0))


@knows_cuda
def test_memory_that_cannot_be_registered_leaves_no_error_behind() -> None:
    slabs = PinnedSlabs()
    slab = slabs.make(1 << 21)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert slabs.pinned_bytes == slab.nbytes
    assert int(runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0)) != 0  # it is registered already
    clear_cuda_error()
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    slabs.close()
    assert int(runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0)) == 0
    assert int(runtime.cudaHostUnregister(slab.ctypes.data)) == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RAdam])
def test_other_optimizers_update_on_the_device_and_on_the_host(kind: Any, nvme: Path) -> None:
    found = []
    for case in (ON_DEVICE[0], ON_HOST[0], ON_HOST[3]):
        config = config_of(nvme, *case, precision="fp32")
        del config["optimizer"]
        net = make_net()
        with start(config, net, optimizer=kind(net.parameters(), lr=1e-2)) as engine:
            found.append((train(engine), engine_digests(engine)))
    on_device, on_host, on_disk = found
    assert on_disk == on_host
    assert on_host[0] == pytest.approx(on_device[0], rel=1e-4)


def test_gradients_that_wait_on_disk_give_the_same_bits(nvme: Path) -> None:
    config = config_of(nvme, *ON_HOST[3])
    config["zstore"]["host_budget_bytes"] = 7 << 19
    with start(config) as engine:
        assert engine.training_state.state.spilled
        found = train(engine), engine_digests(engine)
    assert found == trained(config_of(nvme, *ON_HOST[0]))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_activations_off_the_device_give_the_same_bits(tier: str, nvme: Path, tmp_path: Path) -> None:
    def after(**own: Any) -> dict[str, Any]:
        config = make_config(3, zstore={"journal": False, **own}, train_micro_batch_size_per_gpu=SAMPLES)
        with start(config, deep()) as engine:
            torch.manual_seed(0)
            for micro in range(4):
                engine.backward(engine(data(micro).to(engine.device)))
                engine.step()
            found = engine.statistics().activations
            leaves = bool(own) and (DEVICE == "cuda" or tier == "disk")  # on the CPU they are in host memory anyhow
            assert (found is not None and found.kept_bytes > 0) == leaves
            return engine_digests(engine)

    path = {"activations_path": str(tmp_path)} if tier == "disk" else {}
    assert after(activations=tier, **path) == after()


def test_moments_in_bf16_give_the_same_bits_in_host_memory_and_on_disk(nvme: Path) -> None:
    def run(case: tuple[Any, ...]) -> tuple[list[float], dict[str, str]]:
        config = config_of(nvme, *case)
        config["zstore"]["moments"] = "bf16"
        return trained(config)

    assert run(ON_HOST[0]) == run(ON_HOST[3])
    on_device = run(ON_DEVICE[0])
    assert run(ON_DEVICE[2]) == on_device
    assert on_device[0] == pytest.approx(run(ON_HOST[0])[0], rel=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # of inductor
def test_compiled_units_train_as_others(nvme: Path) -> None:
    config = config_of(nvme, *ON_HOST[3], precision="fp32")
    plain = trained(config)[0]
    with start(config) as engine:
        engine.compile()
        assert train(engine) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("coded_bits", [4, 8])
def test_a_code_of_the_device_is_that_of_the_host(coded_bits: int) -> None:
    code = BlockCode((256 * 7, 96), coded_bits)
    values = torch.randn(3, sum(code.lengths), generator=torch.Generator().manual_seed(0))
    here, there = code.encode(values), code.encode(values.to(DEVICE))
    assert torch.equal(there.cpu(), here)
    decoded = code.decode(there, torch.empty(values.shape, device=DEVICE))
    assert torch.equal(decoded.cpu(), code.decode(here, torch.empty(values.shape)))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_offloaded_optimizer_updates_shards_of_fsdp2(device: str, tmp_path: Path) -> None:
    """Its own update on the host is the truth: FSDP2 moves the shards there, and torch's AdamW has them."""

    def run(make: Callable[[nn.Module], torch.optim.Optimizer], **policy: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 601), nn.Tanh(), nn.Linear(601, 71)).to(DEVICE)
        for layer in (model[0], model[2]):
            fully_shard(layer, **policy)
        fully_shard(model, **policy)
        optimizer = make(model)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [p.full_tensor().detach().cpu().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        if isinstance(optimizer, Offloaded):
            optimizer.close()
        return found

    def offloaded(model: nn.Module) -> torch.optim.Optimizer:
        place = {"path": str(tmp_path)} if device == "nvme" else {}
        return Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-2, device=device, **place)

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch_dist.init_process_group(backend, init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        kept = run(offloaded)
        policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if DEVICE == "cuda" else {}
        moved = run(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), **policy)
    finally:
        torch_dist.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(kept, moved, strict=True))


@knows_cuda
def test_memory_of_the_device_is_given_back(nvme: Path) -> None:
    trained(config_of(nvme, *ON_HOST[3]))
    gc.collect()
    before = torch.cuda.memory_allocated()
    trained(config_of(nvme, *ON_HOST[3]))
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
