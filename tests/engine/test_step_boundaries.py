"""Where a step ends: the micro-batches that the caller names, how a loss is divided, and another batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.bits import assert_equal
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


def test_a_short_accumulation_that_the_caller_ends_is_a_step_and_can_be_saved(tmp_path: Path) -> None:
    expected = reference()
    with start(constant_rate_config()) as engine:
        # An epoch of three micro-batches, as loops name the ends of steps.
        for micro, last in ((0, False), (1, True)):
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            micro_batch(engine, micro)
            engine.step()
        engine.set_gradient_accumulation_boundary(True)
        micro_batch(engine, 0)
        engine.step()
        assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (2, 3, True)
        engine.save_checkpoint(str(tmp_path))
        state = state_of(engine)
        expected.step(micro_batches(0, 2))
        expected.step(micro_batches(1, 1))
        assert_equal(engine, expected)
        # The next micro-batch begins a step of its own.
        engine.set_gradient_accumulation_boundary(False)
        micro_batch(engine, 0)
        engine.step()
        assert (engine.global_steps, engine.was_step_applied()) == (2, False)
        engine.set_gradient_accumulation_boundary(True)
        micro_batch(engine, 1)
        engine.step()
        expected.step(micro_batches(2, 2))
        assert_equal(engine, expected)
        after = state_of(engine)
    with start(constant_rate_config(), make_net(1)) as resumed:
        resumed.load_checkpoint(str(tmp_path))
        assert state_of(resumed) == state
        step(resumed)
        assert state_of(resumed) == after


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
    with start(constant_rate_config()) as engine:
        engine.set_gradient_accumulation_boundary(True)
        for _ in range(3):
            micro_batch(engine, 0)
            engine.step()
        assert engine.global_steps == 3
        engine.set_gradient_accumulation_boundary(None)
        assert not engine.is_gradient_accumulation_boundary()
        step(engine)
        assert (engine.global_steps, engine.micro_steps) == (4, 5)
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


# -- another batch size -----------------------------------------------------------------------------------------------


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
        assert (
            "expected a multiple of 4, which is train_micro_batch_size_per_gpu 2 x world size 2; got 6" in indivisible
        )
