"""ZeRO++: matrices that travel as integers, second copies in groups of ranks, and the bytes of both by formula."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zstore
from tests.engine.bits import Case, compare_all, digest
from tests.engine.models import Base, Block, ids_of
from tests.engine.runs import make_config, moved_since
from zstore.engine.access.safe_access import safe_get_full_fp32_param, safe_get_full_grad
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras.zeropp import BLOCK_NUMEL, BlockCode, encoded_bytes
from zstore.errors import ConfigError
from zstore.testing.ranks import run_ranks

ROWS, WIDTH, STEPS = 96, 160, 2
"""A rank's rows of a matrix of 96 x 160 on four ranks are 3,840 elements: 15 blocks."""


@st.composite
def _coded(draw: st.DrawFn) -> tuple[BlockCode, torch.Tensor]:
    lengths = draw(st.lists(st.integers(1, 70).map(lambda n: 16 * n), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(draw(st.integers(1, 3)), sum(lengths), generator=generator)
    values *= 10.0 ** torch.randint(-30, 30, values.shape, generator=generator).float().mul(
        draw(st.sampled_from([0, 1]))
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return BlockCode(tuple(lengths), draw(st.sampled_from([4, 8]))), values.to(dtype)


@settings(max_examples=40, deadline=None)
@given(_coded())
def test_a_decoded_value_is_off_by_half_a_scale_at_most(coded: tuple[BlockCode, torch.Tensor]) -> None:
    code, values = coded
    encoded = code.encode(values)
    assert encoded.shape == (len(values), sum(n * code.bits // 8 + 4 * math.ceil(n / 256) for n in code.lengths))
    decoded = code.decode(encoded, torch.empty(values.shape))
    first = 0
    for length in code.lengths:
        for start in range(first, first + length, BLOCK_NUMEL):
            block = slice(start, min(start + BLOCK_NUMEL, first + length))
            exact = values[:, block].double()
            scale = exact.abs().amax(dim=1, keepdim=True) / (127 if code.bits == 8 else 7)
            error = (decoded[:, block].double() - exact).abs()
            assert (error <= scale / 2 * (1 + 1e-5) + 1e-38).all()
        first += length
    assert torch.equal(code.decode(encoded, torch.ones(values.shape), add=True), decoded + 1)


def test_a_block_with_a_value_that_is_not_finite_has_none_that_is() -> None:
    for value in (math.inf, -math.inf, math.nan):
        for bits in (4, 8):
            values = torch.ones(1, 3 * BLOCK_NUMEL)
            values[0, BLOCK_NUMEL + 5] = value
            decoded = BlockCode((3 * BLOCK_NUMEL,), bits).decode(
                BlockCode((3 * BLOCK_NUMEL,), bits).encode(values), values.clone()
            )
            finite = decoded.isfinite().view(3, BLOCK_NUMEL)
            assert finite.all(dim=1).tolist() == [True, False, True]
            assert not finite[1].any()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _config(zero: dict[str, Any], own: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    config = make_config(3, zstore={"journal": False} | (own or {}), scheduler=None, **keys)
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 200} | zero  # biases persist
    return config


def _train(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    seen: dict[str, str] = {}
    with zstore.initialize(model=_Net(), config=config)[0] as engine:
        dtype = next(engine.module.parameters()).dtype
        layer = engine.module.layers[0]
        layer.register_forward_pre_hook(lambda *_: seen.update(weight=digest(layer.weight.data.clone())))
        before = engine.statistics()
        for step in range(STEPS):
            before = engine.statistics()
            for micro in range(engine.gradient_accumulation_steps()):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(2, WIDTH, generator=generator).to(dtype)
                engine.backward(engine(x).float().square().mean())
                engine.step()
        after = engine.statistics()
        sent = {kind: after.sent_bytes[kind] - before.sent_bytes.get(kind, 0) for kind in after.sent_bytes}
        return {
            "sent": {kind: nbytes for kind, nbytes in sent.items() if nbytes and kind not in ("control", "broadcast")},
            "reach": [
                after.links[name].bytes - before.links[name].bytes if name in after.links else 0
                for name in ("within_group", "between_groups")
            ],
            "weight": seen["weight"],
            "masters": _masters(engine),
        }


def _one_backward(rank: int, config: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Return the bits of a weight as the first forward has it, and of its gradient's mean; masters before and after a save
    with these keys and a load without them."""
    torch.manual_seed(0)
    seen: dict[str, Any] = {}
    with zstore.initialize(model=_Net(), config=config)[0] as engine:
        layer = engine.module.layers[0]

        def look(*_: Any) -> None:
            with zstore.gather(layer.weight):  # for reading, where the values are not those of the rows at rest
                seen["weight"] = digest(layer.weight.data.clone())

        layer.register_forward_pre_hook(look)
        engine.backward(engine(_data(rank)).float().square().mean())
        seen["gradient"] = digest(safe_get_full_grad(layer.weight))
        engine.step()
        seen["masters"] = _masters(engine)
        if folder:
            engine.save_checkpoint(folder)
    if folder:
        with zstore.initialize(model=_Net(), config=_config({}))[0] as engine:
            engine.load_checkpoint(folder)
            seen["loaded"] = _masters(engine)
    return seen


def _data(rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()


def _masters(engine: Any) -> dict[str, str]:
    return {name: digest(safe_get_full_fp32_param(parameter)) for name, parameter in engine.module.named_parameters()}


QW, QG = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def _variants(folder: str) -> dict[str, dict[str, Any]]:
    nvme, cpu = {"device": "nvme", "nvme_path": folder}, {"device": "cpu"}
    return {
        "exact": _config({}),
        "both": _config(QW | QG),
        "both, in the backward, on the host": _config(
            QW | QG | {"offload_optimizer": cpu, "offload_param": cpu}, {"step_overlap": "backward"}
        ),
        "both, behind the step, on disk": _config(
            QW | QG | {"offload_optimizer": nvme, "offload_param": nvme, "allgather_bucket_size": 5000},
            {"step_overlap": "forward"},
        ),
        "gradients, 8 bits, stage 2": _config(QG | {"stage": 2}, {"quantized_gradient_bits": 8}),
    }


def _run_all(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    found = {name: _train(rank, config) for name, config in _variants(folder).items()}
    # Two machines of two ranks.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found["two hops"] = _train(rank, _config(QG))
    found["two hops and a second copy"] = _train(rank, _config(QW | QG | {"zero_hpz_partition_size": 2}))
    one = {"gradient_accumulation_steps": 1}
    found["one backward, two hops"] = _one_backward(rank, _config(QG, **one))
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    found["one backward"] = _one_backward(rank, _config(QW | QG, **one), f"{folder}/saved")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    found: list[dict[str, dict[str, Any]]] = run_ranks(_run_all, 4, str(tmp_path_factory.mktemp("quantized")))
    return found


def _trained(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: run for name, run in found.items() if "sent" in run}


def test_the_bytes_sent_are_those_of_the_formula(runs: list[dict[str, dict[str, Any]]]) -> None:
    for found in runs:
        for name in ("two hops", "two hops and a second copy"):
            assert sum(found[name]["reach"]) == sum(found[name]["sent"].values())
    matrices = 2 * ROWS * WIDTH
    # A rank's rows are padded to 16 elements: of the norm, and of two biases.
    vectors = sum(16 * math.ceil(n / 64) for n in (WIDTH, WIDTH, ROWS, WIDTH))
    code = {bits: 2 * encoded_bytes(ROWS * WIDTH // 4, bits) for bits in (4, 8)}
    assert code[8] == matrices / 4 * (1 + 4 / 256)
    assert code[4] == matrices / 4 * (1 / 2 + 4 / 256)
    forwards, others = 2, 3
    updated = others * 2 * vectors  # what persists is gathered after the update, in its own type
    gradients = forwards * others * 2 * vectors
    sent = runs[0]["both"]["sent"]
    # The last unit of the forward is there for the backward.
    last = encoded_bytes(ROWS * WIDTH // 4, 8)
    assert sent["all_gather"] == forwards * others * (2 * code[8] - last) + updated
    assert sent["reduce_scatter"] == forwards * others * code[4] + gradients
    assert runs[0]["two hops"]["sent"]["reduce_scatter"] == forwards * (1 * 2 + 1) * code[4] + gradients


def test_every_rank_computes_with_the_same_bits_and_they_repeat(runs: list[dict[str, dict[str, Any]]]) -> None:
    for name in _trained(runs[0]):
        assert len({found[name]["weight"] for found in runs}) == 1
        assert all(found[name]["masters"] == runs[0][name]["masters"] for found in runs)
    same = [run["masters"] for name, run in runs[0].items() if name.startswith("both,")]
    assert same == [runs[0]["both"]["masters"]] * 2
    assert runs[0]["both"]["masters"] != runs[0]["exact"]["masters"]


def _rounded(values: torch.Tensor, largest: int) -> torch.Tensor:
    """Return fp32 values as a code of blocks of 256 gives them back."""
    blocks = values.float().view(-1, 256)
    scale = blocks.abs().amax(dim=1, keepdim=True) / largest
    # Integers have one zero.
    return (((blocks / scale).round() + 0.0) * scale).view_as(values)


def test_weights_and_gradients_are_rounded(runs: list[dict[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = _Net().bfloat16()
    exact = net.layers[0].weight.detach()
    assert runs[0]["one backward"]["weight"] == digest(_rounded(exact, 127).bfloat16())
    assert runs[0]["one backward, two hops"]["weight"] == digest(exact)
    gradients = []
    for rank in range(4):
        net.zero_grad()
        net(_data(rank)).float().square().mean().backward()
        gradients.append(_rounded(net.layers[0].weight.grad, 7))
    near, far = gradients[0] + gradients[1], gradients[2] + gradients[3]
    mean = (_rounded(near / 2, 7) + _rounded(far / 2, 7)) / 2
    assert runs[0]["one backward, two hops"]["gradient"] == digest(mean.bfloat16().float())


def test_masters_stay_exact_and_a_checkpoint_loads_without_the_keys(runs: list[dict[str, dict[str, Any]]]) -> None:
    run = runs[0]["one backward"]
    assert run["loaded"] == run["masters"]


HPZ = {"zero_hpz_partition_size": 2}
RANKS = 4

CASES = [Case(3, "none", "fp32", 1, 0.0, overlap="backward", keys=HPZ, seed=6)]
MORE_CASES = [Case(3, "cpu", "bf16", 2, 0.25, parameters="nvme", overlap="forward", keys=HPZ, seed=5)]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.soak)], ids=["some", "more"])
def test_bits_are_those_of_the_plain_loop(cases: list[Case]) -> None:
    for differences in run_ranks(compare_all, RANKS, RANKS, cases):
        assert differences == []


def _step_bytes(rank: int, folder: str, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train two steps with each of `changes` to the ZeRO section; return what the second one sent and what is held, and
    planned."""
    found = []
    for keys in changes:
        torch.manual_seed(0)
        zero = {"stage3_param_persistence_threshold": 50} | keys
        zero |= {key: {"device": "nvme", "nvme_path": folder} for key in zero if key.startswith("offload")}
        config = _config(zero, {"step_overlap": "none"})
        with zstore.initialize(model=Base([Block(24) for _ in range(3)]), config=config)[0] as engine:
            with torch.inference_mode():  # later gathers write to the rows that it keeps
                engine(ids_of(0, rank))
            for step in range(2):
                before = engine.statistics()
                for _ in range(2):
                    engine.backward(engine(ids_of(step, rank)))
                    engine.step()
            now, plan = engine.statistics(), engine.training_state.plan
            records = engine.training_state.state.records
            links = {name: link.bytes for name, link in moved_since(engine, before).items()}
            second = plan.held.get("secondary parameters")
            row = {
                "sent": (links.get("within_group", 0), links.get("between_groups", 0)),
                "all": sum(links.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
                "state": now.held.optimizer_state,
                "second": now.held.secondary,
                "planned second": second.total if second is not None else 0,
                "own": sum(record.owned_numel for record in records),
            }
            found.append(row)
    return found


def test_second_copies_are_as_planned_and_fewer_bytes_leave_a_group(tmp_path: Path) -> None:
    offloads = {"offload_optimizer": {}, "offload_param": {}}
    by_rank = run_ranks(_step_bytes, RANKS, str(tmp_path), [{}, HPZ, HPZ | offloads])
    for full, hpz, offloaded in by_rank:
        for one in (hpz, offloaded):
            assert sum(one["sent"]) == one["all"]
            assert one["second"] == one["planned second"]
        # Of four gathers one is from all ranks, and of each tensor two of three other ranks are in another group.
        assert hpz["sent"][1] < full["all"] * 2 / 3 * 0.7
        assert offloaded["sent"] == hpz["sent"]
        assert hpz["state"] == full["state"] == 12 * full["own"]
    numel = sum(rank[0]["own"] for rank in by_rank)
    for group in (by_rank[:2], by_rank[2:]):
        assert 2 * numel > sum(one[1]["second"] for one in group) == sum(one[2]["second"] for one in group) > 0


@pytest.mark.parametrize(
    ("zero", "world_size", "message"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 3}, 8, "size 3 does not divide the world size 8; use 2 or 4 or 8"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, 1, "8 does not divide the world size 1; leave it out"),
        ({"stage": 3, "mics_shard_size": 2}, 4, "set zero_hpz_partition_size at stage 3"),
        ({"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}, 4, "quantized_gradient_bits to 8"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, 2, "zero_hpz_partition_size.* needs stage 3, got stage 2"),
    ],
)
def test_groups_that_cannot_be_are_refused(zero: dict[str, Any], world_size: int, message: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=message):
        load_config(config).resolve(ResolveContext(world_size=world_size))
