"""Masters as bf16 weights and what these lack: every bit of the plain loop, in less memory and traffic."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zstore
from tests.engine.bits import Case, compare_all, digest, engine_digests
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.split import complete_master
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.optim.split_master import join_master, split_master
from zstore.errors import CheckpointMismatchError, ConfigError
from zstore.format.partition import make_grid
from zstore.testing.ranks import run_ranks
from zstore.weights.from_checkpoint import list_weights, write_weights
from zstore.weights.layout import plan_files

FORMAT = Path(__file__).parents[2] / "docs/format.md"
SPLIT = {"zstore": {"split_master": True}}

# -- the bits ---------------------------------------------------------------------------------------------------------

EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def taken_apart(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check that masters of these bits come back, and return the parts."""
    master = bits.view(torch.float32)
    weight = torch.empty(bits.shape, dtype=torch.bfloat16)
    low = torch.empty(bits.shape, dtype=torch.uint16)
    ties = torch.full((-(-bits.numel() // 8),), 0xFF, dtype=torch.uint8)
    split_master(master, weight, low, ties, torch.empty_like(bits))
    out = join_master(weight, low, ties, torch.empty_like(master), torch.empty_like(bits))
    assert torch.equal(out.view(torch.int32), bits)
    return weight, low, ties


def test_every_weight_with_every_edge_comes_back() -> None:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in EDGES:
        bits = high + low
        weight, _, ties = taken_apart(bits)
        number = ~bits.view(torch.float32).isnan()
        # numpy's own rounding is the other truth: ties, denormals, infinities and what rounds to them.
        with np.errstate(invalid="ignore"):
            expected = bits.numpy().view(np.float32).astype(ml_dtypes.bfloat16).view(np.int16)
        assert torch.equal(weight.view(torch.int16)[number], torch.from_numpy(expected)[number])
        finite = bits.view(torch.float32).isfinite().numpy()
        rounded_down = np.unpackbits(ties.numpy(), bitorder="little").astype(bool)
        even = (bits.numpy() >> 16) % 2 == 0
        assert (rounded_down[finite] == (even if low == 0x8000 else np.zeros_like(even))[finite]).all()
        quiet = high & 0x7F_0000 != 0
        assert weight[~number & quiet].isnan().all()


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(0, 2**32 - 1))
def test_any_bits_come_back(bits: list[int], seed: int) -> None:
    taken_apart(torch.tensor(bits, dtype=torch.int32))
    generator = torch.Generator().manual_seed(seed)
    taken_apart(torch.randint(-(2**31), 2**31, (999,), generator=generator).to(torch.int32))


def test_bits_lie_as_the_format_says() -> None:
    bits = torch.zeros(19, dtype=torch.int32)
    bits[[2, 8, 18]] = 0x3F80_8000
    bits[3] = 0x3F81_8000
    weight, low, ties = taken_apart(bits)
    assert ties.tolist() == [0b100, 0b1, 0b100]
    assert weight[:4].view(torch.int16).tolist() == [0, 0, 0x3F80, 0x3F82]
    assert low.view(torch.int16)[:4].tolist() == [0, 0, -0x8000, -0x8000]


@pytest.mark.parametrize("shape", [(1,), (70_001,), (3, 5), (1000, 77), (2, 2**20), (3, 300_001), (0,), (4, 0)])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_packed_chunks_hold_the_bits_of_the_elements_chunks(shape: tuple[int, ...], world_size: int) -> None:
    grid = make_grid(shape, world_size)
    packed = grid.packed()
    assert packed.num_shards == grid.num_shards
    for shard in range(grid.num_shards):
        assert packed.present_chunks(shard) == grid.present_chunks(shard)
        assert packed.shard_valid_numel(shard) == -(-grid.shard_valid_numel(shard) // 8)
    if grid.num_shards:
        assert (packed.shard_numel * 8, packed.chunk_numel * 8) == (grid.shard_numel, grid.chunk_numel)


# -- training ---------------------------------------------------------------------------------------------------------

# (stage, optimizer's tier, parameters' tier, accumulation, clip, bucket, threshold, step mode)
CASES = [
    (0, "none", "none", 1, 0.25, 500_000_000, 100, "none"),
    (1, "nvme", "none", 3, 0.0, 500_000_000, 100, "forward"),
    (1, "none", "none", 1, 0.0, 40_000, 100, "none"),
    (2, "cpu", "none", 1, 0.25, 500_000_000, 100, "forward"),
    (2, "nvme", "none", 3, 0.0, 40_000, 100, "backward"),
    (3, "none", "none", 3, 0.0, 500_000_000, 1000, "backward"),
    (3, "nvme", "none", 1, 0.25, 500_000_000, 0, "forward"),
    (3, "none", "cpu", 1, 0.0, 500_000_000, 100, "none"),
    (3, "nvme", "nvme", 1, 0.25, 500_000_000, 0, "forward"),
    (3, "cpu", "nvme", 3, 0.0, 40_000, 100, "backward"),
    (3, "nvme", "cpu", 1, 0.0, 500_000_000, 1000, "none"),
]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_bits_equal_the_plain_loop(world_size: int) -> None:
    cases = [
        asdict(Case(stage, tier, "bf16", *rest, parameters=parameters, overlap=overlap, split=True))
        for stage, tier, parameters, *rest, overlap in CASES
    ]
    for failed in run_ranks(compare_all, world_size, world_size, cases):
        assert failed == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_client_optimizer_gives_the_same_bits(kind: type[torch.optim.Optimizer]) -> None:
    found = []
    for keys in (SPLIT, {}):
        model = nn.Linear(33, 7)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 231).view(7, 33))
            model.bias.zero_()
        config = {k: v for k, v in make_config(1, **keys).items() if k not in ("optimizer", "scheduler")}
        engine = zstore.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)[0]
        with engine:
            for _ in range(4):
                engine.backward(engine(torch.ones(2, 33, dtype=torch.bfloat16)).float().square().mean())
                engine.step()
            found.append(engine_digests(engine))
    assert found[0] == found[1]


def test_only_trained_bf16_parameters_are_split() -> None:
    with start(make_config(**SPLIT)) as engine:
        state = engine.training_state.state
        split = [record.name for record in state.records if state.is_split(record)]
        assert split == [record.name for record in state.records if record.group is not None]
        names = state.store.names()
        assert "model/frozen.weight" in names
        assert "optimizer/master_low/frozen.weight" not in names
        assert {state.store.spec(f"model/{name}").dtype for name in split} == {"bfloat16"}


@pytest.mark.parametrize(
    "keys", [{"bf16": {"enabled": False}}, {"bf16": {"enabled": False}, "fp16": {"enabled": True}}]
)
def test_another_precision_is_an_error(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="split_master: true needs bf16"):
        start(make_config(**SPLIT, **keys))


def test_traffic_is_ten_and_an_eighth_each_way(nvme: Path) -> None:
    """A weight of long rows has the largest chunks, so that little of the traffic is padding."""
    model = nn.Linear(2**19, 8, bias=False)
    numel = model.weight.numel()
    config = make_config(1, "nvme", nvme, gradient_accumulation_steps=1)
    moved: dict[bool, float] = {}
    for split in (True, False):
        with start(config | {"zstore": {"split_master": split}}, model) as engine:
            x = torch.ones(2, 2**19, dtype=torch.bfloat16)
            links: dict[str, dict[str, Any]] = {}
            for _ in range(2):  # the first step does not read the zeros that slots begin as
                before = engine.statistics()
                engine.backward(engine(x).float().mean())
                engine.step()
                engine.training_state.pending.complete()
                links = engine.statistics().links_since(before)
            counted = links["optimizer_read"]["bytes"] + links["optimizer_write"]["bytes"]
            plan = engine.training_state.plan.traffic
            assert counted == plan["optimizer state"].total
            moved[split] = counted / numel
    assert 20.25 < moved[True] <= 20.4
    assert 24 < moved[False] <= 24.2


# -- checkpoints ------------------------------------------------------------------------------------------------------


def masters(engine: Engine) -> dict[str, str]:
    names = [record.name for record in engine.training_state.state.records]
    found = {name: engine.get_full_parameter(name) for name in names}
    return {name: digest(value.reshape(-1)) for name, value in found.items() if value is not None}


def run_of(rank: int, folder: str, nvme: str, saves: bool, loads: bool, stage: int) -> bool:
    """Train with masters split or not, save, go on; load into a run with masters split or not, and go on alike."""
    options = {True: SPLIT, False: {}}
    with start(make_config(stage, "nvme", nvme, **options[saves])) as engine:
        step(engine)
        engine.save_checkpoint(folder)
        at_save = engine_digests(engine)
        step(engine)
        expected = engine_digests(engine), masters(engine)
    with start(make_config(stage, "cpu", **options[loads])) as engine:
        engine.load_checkpoint(folder)
        loaded = engine_digests(engine)
        step(engine)
        found = engine_digests(engine), masters(engine)
    return (loaded, found) == (at_save, expected)


@pytest.mark.parametrize(
    ("world_size", "stage", "saves", "loads"),
    [
        pytest.param(1, 1, True, True, marks=pytest.mark.soak),
        (1, 1, True, False),
        (1, 1, False, True),
        pytest.param(2, 3, True, True, marks=pytest.mark.soak),
        (2, 3, True, False),
        pytest.param(2, 3, False, True, marks=pytest.mark.soak),
    ],
)
def test_load_with_and_without(
    tmp_path: Path, nvme: Path, saves: bool, loads: bool, world_size: int, stage: int
) -> None:
    folder = str(tmp_path / "ckpt")
    assert all(run_ranks(run_of, world_size, folder, str(nvme), saves, loads, stage))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of split masters and one of whole ones, of the same training."""
    for name, keys in (("split", SPLIT), ("whole", {})):
        with start(make_config(**keys)) as engine:
            step(engine)
            engine.save_checkpoint(tmp_path / name, tag="t")
    return tmp_path


def test_module_alone_brings_the_whole_master(saved: Path) -> None:
    with start(make_config()) as engine, start(make_config(**SPLIT)) as other:
        engine.load_checkpoint(saved / "split", load_module_only=True)
        other.load_checkpoint(saved / "whole", load_module_only=True)
        found = masters(engine)
        assert found == masters(other)
        engine.load_checkpoint(saved / "whole")
        assert found == masters(engine)


def test_files_are_smaller_and_whole(saved: Path) -> None:
    with open_checkpoint(saved / "split") as split, open_checkpoint(saved / "whole") as whole:
        assert verify_checkpoint(split) == []
        name = "embed.weight"
        numel = split.array(f"model/{name}").spec.numel
        weight = split.read_array(f"model/{name}").reshape(-1)
        master = complete_master(split, f"model/{name}", 0, weight)
        assert master is not None
        assert master.tobytes() == whole.read_array(f"model/{name}").tobytes()
        part = complete_master(split, f"model/{name}", 13, weight[13:40])
        assert part is not None
        assert part.tobytes() == master[13:40].tobytes()
        assert split.array(f"optimizer/master_tie/{name}").spec.shape == (-(-numel // 8),)
        assert complete_master(whole, f"model/{name}", 0, master) is None
        # What the format says, by the words of its page.
        names: dict[str, Any] = {"np": np}
        exec(re.findall(r"```python\n(def join_master.*?)```", FORMAT.read_text(), re.DOTALL)[0], names)
        parts = [split.read_array(f"optimizer/master_{part}/{name}").reshape(-1) for part in ("low", "tie")]
        assert names["join_master"](weight, *parts).tobytes() == master.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_those_of_whole_masters(saved: Path, dtype: str) -> None:
    written = []
    for name in ("split", "whole"):
        folder = saved / f"{name}-weights"
        folder.mkdir()
        with open_checkpoint(saved / name) as reader:
            layouts = plan_files(list_weights(reader, dtype), 10**9)
            write_weights(reader, layouts, folder, overflow="error", advance=lambda _: None)
        written.append((folder / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def test_resharded_masters_load(saved: Path) -> None:
    with open_checkpoint(saved / "split") as reader:
        reshard_checkpoint(reader, saved / "two", 2)
    with start(make_config()) as engine, start(make_config(**SPLIT)) as other:
        engine.load_checkpoint(saved / "two")
        other.load_checkpoint(saved / "two")
        assert engine_digests(engine) == engine_digests(other)


def test_a_master_that_lacks_a_part_is_refused(saved: Path) -> None:
    with open_checkpoint(saved / "split") as reader, start(make_config()) as engine:
        del reader.arrays["optimizer/master_tie/embed.weight"]
        with pytest.raises(CheckpointMismatchError, match=r"the master of 'embed.weight' is split: expected arrays"):
            complete_master(reader, "model/embed.weight", 0, np.empty(1, ml_dtypes.bfloat16))
        assert engine.global_steps == 0
