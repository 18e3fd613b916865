"""`zstore.checkpointing`: shares of a group's ranks, random streams, times; what `configure` and a config say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zstore
from tests.engine.deep import BLOCKS, INPUT_BYTES, SAMPLES, WIDTH, data, deep
from tests.engine.runs import make_config, start, state_of
from zstore import checkpointing
from zstore.engine.activations import checkpointing as process
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


class Mpu:
    """Tells of one model-parallel group of all ranks."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    process._process.__init__()  # type: ignore[misc]


def _train(stage: int, path: str, **own: Any) -> tuple[dict[str, Any], Any]:
    """Train two steps on the same data on every rank; return everything, and the counters of activations."""
    keys: dict[str, Any] = {"zstore": {"journal": False} | own, "train_micro_batch_size_per_gpu": SAMPLES}
    if own.get("activations") == "disk":
        keys["zstore"]["activations_path"] = path
    with start(make_config(stage, gradient_accumulation_steps=1, **keys), deep("zstore")) as engine:
        for number in range(2):
            torch.manual_seed(number)
            engine.backward(engine(data(number)))
            engine.step()
        return state_of(engine), engine.statistics().activations


SHARES: list[Any] = [
    ("one buffer", 0, {"contiguous_checkpointing": True, "num_checkpoints": BLOCKS - 1}, {}),
    ("in host memory", 0, {"checkpoint_in_cpu": True}, {}),
    ("on disk at stage 3", 3, {}, {"activations": "disk"}),
]
MORE_SHARES: list[Any] = [("shares", 0, {}, {})]


def _shares(rank: int, path: str, cases: list[Any]) -> list[str]:
    torch.set_num_threads(1)
    zstore.init_distributed("gloo")
    expected = {stage: _train(stage, path)[0] for stage in sorted({case[1] for case in cases})}
    different = []
    partitioned = {"partition_activations": True}
    for name, stage, keys, own in cases:
        checkpointing.configure(Mpu(), **partitioned, **keys)
        found, counted = _train(stage, path, **own)
        different += [f"{name}: {key}" for key, value in expected[stage].items() if found[key] != value]
        if own:
            # Half of each block's input, and the embedding's input, which no block of ours keeps.
            assert counted.kept_bytes == 2 * (INPUT_BYTES + BLOCKS * INPUT_BYTES // 2)
    checkpointing.reset()
    return different


@pytest.mark.parametrize("cases", [SHARES, pytest.param(MORE_SHARES, marks=pytest.mark.soak)], ids=["some", "more"])
def test_ranks_that_share_inputs_keep_a_part_each_and_the_bits(cases: list[Any], tmp_path: Any) -> None:
    assert run_ranks(_shares, 2, str(tmp_path), cases, timeout_s=120) == [[], []]


def test_named_random_streams_are_the_same_when_a_block_is_computed_again() -> None:
    def run(*, again: bool) -> tuple[torch.Tensor, torch.Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(7)
        tracker = checkpointing.get_cuda_rng_tracker()
        weight = torch.linspace(1, 2, WIDTH).requires_grad_()

        def block(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                return F.dropout(x * weight, 0.5).sin()

        x = torch.ones(4, WIDTH)
        for _ in range(2):
            x = checkpointing.checkpoint(block, x) if again else block(x)
        x.sum().backward()
        assert weight.grad is not None
        return weight.grad, tracker.get_states()["model-parallel-rng"]

    (gradient, state), (other, other_state) = run(again=False), run(again=True)
    assert torch.equal(gradient, other)
    assert torch.equal(state, other_state)
    tracker = checkpointing.get_cuda_rng_tracker()
    with pytest.raises(UsageError, match="no random stream 'other'"), tracker.fork("other"):
        pass
    with pytest.raises(UsageError, match="taken"):
        tracker.add("model-parallel-rng", 1)


def test_what_configure_was_told_holds_before_a_config() -> None:
    assert not checkpointing.is_configured()
    section = {"activation_checkpointing": {"profile": True, "cpu_checkpointing": True}}
    checkpointing.configure(None, section, synchronize=True)
    assert checkpointing.is_configured()
    chosen = process._process.choices
    assert (chosen.profile, chosen.in_cpu, chosen.synchronize, chosen.partition) == (True, True, True, False)
    x = torch.ones(2, WIDTH, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert process.block_times().blocks == process.block_times().recomputed == 1
    assert torch.equal(x.grad, torch.ones(2, WIDTH).cos())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="get_model_parallel_group"):
        checkpointing.configure(object())
    with pytest.raises(UsageError, match="num_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True, partition_activations=True)


@pytest.mark.parametrize(("asked", "waits"), [(True, 4), (False, 0)])
def test_a_boundary_waits_for_the_device_where_it_is_asked_to(
    asked: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"activation_checkpointing": {"synchronize_checkpoint_boundary": asked}}
    checkpointing.configure(None, section)
    checkpointing.get_cuda_rng_tracker().add("a stream", 1)  # for which a block is called anew, too
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    x = torch.ones(2, WIDTH, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(waited) == waits  # before and after, forward and again
