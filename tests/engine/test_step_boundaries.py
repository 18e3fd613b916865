"""Where a step ends, how micro-batches are summed and losses divided, and another batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zstore
from tests.engine.bits import STATIC_SCALE, assert_equal
from tests.engine.models import batch, make_net
from tests.engine.runs import constant_rate_config, make_config, start, state_of, step
from tests.reference import Reference
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


def micro_batch(engine: Engine, micro: int, **how: Any) -> None:
    engine.backward(engine(*batch(engine.global_steps, micro, 0)), **how)


def reference(accumulation: int = 2) -> Reference:
    return Reference(make_net(), 1, precision="bf16", accumulation=accumulation, adam={"lr": 1e-2, "weight_decay": 0.0})


def micro_batches(step: int, count: int) -> list[list[Any]]:
    return [[batch(step, micro, 0)] for micro in range(count)]


def test_what_was_accumulated_is_ended_after_its_last_micro_batch_too() -> None:
    """A loader that ends tells it when the last step() is over."""
    expected = reference(3)
    with start(constant_rate_config(gradient_accumulation_steps=3)) as engine:
        for micro in range(2):
            micro_batch(engine, micro)
            engine.step()
        with pytest.raises(UsageError, match="without engine"):
            engine.step()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        expected.step(micro_batches(0, 2))
        assert (engine.global_steps, engine.micro_steps) == (1, 3)
        assert_equal(engine, expected)
        with pytest.raises(UsageError, match="without engine"):
            engine.step()


def test_a_single_step_may_follow_all_backwards() -> None:
    expected = reference(3)
    with start(constant_rate_config(gradient_accumulation_steps=3)) as engine:
        engine.set_gradient_accumulation_boundary(False)
        for micro in range(2):
            micro_batch(engine, micro)
        engine.set_gradient_accumulation_boundary(True)
        micro_batch(engine, 2)
        engine.step()
        assert engine.global_steps == 1
        expected.step(micro_batches(0, 3))
        assert_equal(engine, expected)


def test_two_backwards_of_one_step_are_added_in_fp32() -> None:
    expected = reference(1)
    with start(constant_rate_config(gradient_accumulation_steps=1)) as engine:
        micro_batch(engine, 0)
        micro_batch(engine, 1)
        engine.step()
        expected.step(micro_batches(0, 2))
        assert engine.get_global_grad_norm() == expected.norm
        assert_equal(engine, expected)


def test_the_caller_names_boundaries_until_it_says_otherwise() -> None:
    """test_bits.py compares such steps with the plain loop."""
    with start(constant_rate_config()) as engine:
        for last, steps in ((False, 0), (True, 1), (True, 2), (False, 2), (True, 3)):
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            micro_batch(engine, 0)
            engine.step()
            assert (engine.global_steps, engine.was_step_applied()) == (steps, last)
        engine.set_gradient_accumulation_boundary(None)
        assert not engine.is_gradient_accumulation_boundary()
        step(engine)
        assert (engine.global_steps, engine.micro_steps) == (4, 7)
        with pytest.raises(UsageError, match="expected True, False or None, got 1"):
            engine.set_gradient_accumulation_boundary(1)  # type: ignore[arg-type]


def test_what_was_updated_within_the_backward_ends_its_step() -> None:
    keys: dict[str, Any] = {"zstore": {"step_overlap": "backward"}}
    with start(constant_rate_config(**keys)) as engine:
        engine.set_gradient_accumulation_boundary(True)
        micro_batch(engine, 0)
        with pytest.raises(UsageError, match=r"its backward has updated parameters; call step\(\) first"):
            engine.set_gradient_accumulation_boundary(False)
        engine.step()
        expected = reference()
        expected.step(micro_batches(0, 1))
        assert_equal(engine, expected)
        # Named after its backward, it is updated in step().
        engine.set_gradient_accumulation_boundary(False)
        micro_batch(engine, 0)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        expected.step(micro_batches(1, 1))
        assert_equal(engine, expected)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def test_a_failed_backward_forgets_the_micro_batches_that_the_caller_named() -> None:
    with start(constant_rate_config()) as engine, start(constant_rate_config()) as other:
        engine.set_gradient_accumulation_boundary(False)
        micro_batch(engine, 0)
        engine.step()
        loss = engine(*batch(0, 1, 0))
        loss.register_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.backward(loss)
        assert engine.micro_steps == 0
        for one in (engine, other):
            one.set_gradient_accumulation_boundary(None)
            step(one)
        assert state_of(engine) == state_of(other)


def test_a_loss_that_is_divided_already_is_not_divided_again() -> None:
    with start(constant_rate_config()) as engine, start(constant_rate_config()) as other:
        for micro in range(2):
            loss = engine(*batch(0, micro, 0))
            engine.backward(loss.float() / 2, scale_wrt_gas=False)
            engine.step()
        step(other)
        assert state_of(engine) == state_of(other)


def test_the_batch_size_changes_by_the_number_of_micro_batches() -> None:
    with start(constant_rate_config(gradient_accumulation_steps=1)) as engine:
        expected = reference(1)
        step(engine)
        expected.step(micro_batches(0, 1))
        engine.set_train_batch_size(6)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
        assert engine.gradient_accumulation_steps() == expected.accumulation + 2
        expected.accumulation = 3
        step(engine)
        expected.step(micro_batches(1, 3))
        assert (engine.global_steps, engine.training_state.samples) == (2, 8)
        assert_equal(engine, expected)
        engine.set_train_batch_size(2)
        expected.accumulation = 1
        step(engine)
        expected.step(micro_batches(2, 1))
        assert (engine.global_steps, engine.training_state.samples) == (3, 10)
        assert_equal(engine, expected)


@pytest.mark.parametrize("size", [0, -2, 3, 2.0, "4"])
def test_a_batch_size_that_micro_batches_do_not_divide_is_refused(size: Any) -> None:
    with start(constant_rate_config()) as engine:
        message = r"expected a multiple of 2, which is train_micro_batch_size_per_gpu 2 x world size 1; got"
        with pytest.raises(UsageError, match=message):
            engine.set_train_batch_size(size)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (4, 2)


def test_the_batch_size_does_not_change_within_a_step() -> None:
    with start(constant_rate_config()) as engine:
        micro_batch(engine, 0)
        with pytest.raises(UsageError, match="in the middle of a step, whose losses were divided by 2"):
            engine.set_train_batch_size(8)
        engine.step()
        with pytest.raises(UsageError, match="in the middle of a step"):
            engine.set_train_batch_size(8)


def _resize(rank: int) -> list[str]:
    messages = []
    with start(make_config(2)) as engine:
        for size in (8 + 4 * rank, 6):
            try:
                engine.set_train_batch_size(size)
            except UsageError as error:
                messages.append(str(error))
        engine.set_train_batch_size(4)
        step(engine)
        assert (engine.gradient_accumulation_steps(), engine.global_steps) == (1, 1)
    return messages


def test_ranks_agree_on_the_batch_size() -> None:
    for differ, indivisible in run_ranks(_resize, 2):
        assert "made different ones: rank 0: set_train_batch_size(8); rank 1: set_train_batch_size(12)" in differ
        assert "multiple of 4, which is train_micro_batch_size_per_gpu 2 x world size 2; got 6" in indivisible


class Constant(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return (self.weight * self.slope).sum()


# Of the sum of 1,024 such gradients bf16 reaches a quarter, and fp16, which rounds each addition down, seven eighths.
SLOPES = {"bf16": 1.0, "fp16": 1279 / 1024}
HOST = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("precision", "zero"), [("bf16", {"stage": 0}), ("fp16", HOST), ("bf16", HOST), ("fp16", {"stage": 3})], ids=str
)
def test_the_mean_of_1024_equal_gradients_is_that_gradient(precision: str, zero: dict[str, Any]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1024,
        "optimizer": {"type": "AdamW"},
        precision: {"enabled": True} | ({"loss_scale": STATIC_SCALE} if precision == "fp16" else {}),
        "zero_optimization": zero | {"stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,
    }
    with zstore.initialize(model=Constant(SLOPES[precision]), config=config)[0] as engine:
        for _ in range(1024):
            engine.backward(engine())
            engine.step()
        assert engine.global_steps == 1
        assert engine.get_global_grad_norm() == pytest.approx(2 * SLOPES[precision], rel=1e-6)


def _saved_within_a_step(rank: int, folder: str) -> None:
    for number, (stage, device, overlap) in enumerate([(2, "cpu", "forward"), (3, "nvme", "none")]):
        place, ckpt = f"{folder}/{number}", f"{folder}/{number}/ckpt"
        config = make_config(stage, device, place, gradient_accumulation_steps=3, zstore={"step_overlap": overlap})
        with start(config) as engine:
            step(engine)
            expected = state_of(engine)
            for micro in range(2):
                engine.backward(engine(*batch(1, micro, rank)))
                if micro == 0:
                    engine.save_checkpoint(ckpt, "in the first")
                    engine.step()
                    engine.save_checkpoint(ckpt, "after the first")
            engine.save_checkpoint(ckpt, "in the second")
            engine.step()
            engine.backward(engine(*batch(1, 2, rank)))
            engine.step()
            ended = state_of(engine)
        for tag in ("in the first", "after the first", "in the second"):
            with start(config) as engine:
                engine.load_checkpoint(ckpt, tag)
                assert state_of(engine) == expected, (stage, tag)
                step(engine)
                assert state_of(engine) == ended, (stage, tag)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_save_within_a_step_has_the_state_of_the_last_step(world_size: int, tmp_path: Path) -> None:
    run_ranks(_saved_within_a_step, world_size, str(tmp_path))
    config = constant_rate_config(bf16={"enabled": False}, gradient_accumulation_steps=3)
    data = TensorDataset(torch.ones(28, 8))
    engine, _, loader, _ = zstore.initialize(model=nn.Linear(8, 1), config=config, training_data=data)
    with engine:
        engine.backward(engine(next(iter(loader))[0]).mean())
        engine.step()
        with pytest.raises(UsageError, match=r"the loader from initialize\(\) has already consumed some"):
            engine.save_checkpoint(str(tmp_path / "x"))


def _sent_bytes(rank: int) -> list[list[int]]:
    found = []
    for stage in (0, 1, 3):
        found.append([])
        for name in (None, "bf16", "fp32"):
            keys = {} if name is None else {"communication_data_type": name}
            with start(make_config(stage, gradient_accumulation_steps=1, **keys)) as engine:
                step(engine)
                sent = engine.statistics().sent_bytes
            found[-1].append(sent["all_reduce" if stage == 0 else "reduce_scatter"])
    return found


def test_gradients_travel_in_the_type_that_is_asked_for() -> None:
    for by_stage in run_ranks(_sent_bytes, 2):
        for usual, narrow, wide in by_stage:
            assert usual == narrow == wide / 2 > 0


def test_few_gradients_are_there_in_the_parameters_type_at_a_time() -> None:
    model, seen = make_net(), []
    with start(constant_rate_config(), model) as engine:
        own = list(model.parameters())
        for parameter in own:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _: seen.append(sum(p.grad is not None for p in own))
                )
        step(engine)
    assert max(seen) == 1
    assert len(seen) > 20
