"""Whole tensors by name, and parameters gathered and changed, against the plain loop that was changed the same way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import zstore
from tests.engine.bits import Case, Run, engine_digests
from tests.engine.models import batch
from zstore.engine import Engine
from zstore.engine.access import safe_access
from zstore.errors import RankError, UsageError
from zstore.testing.ranks import run_ranks

CASES = {
    1: [
        Case(0, "none", "fp32", 1, 0.0),
        Case(3, "nvme", "bf16", 2, 0.25, parameters="nvme"),
        Case(1, "nvme", "bf16", 1, 0.0),
    ],
    2: [
        Case(0, "none", "bf16", 1, 0.0),
        Case(1, "cpu", "fp32", 2, 0.0),
        Case(3, "none", "fp32", 1, 0.0),
        Case(3, "cpu", "bf16", 1, 0.0, parameters="cpu"),
    ],
    3: [Case(3, "nvme", "bf16", 1, 0.25, 40_000, parameters="cpu"), Case(2, "cpu", "fp16", 2, 0.0)],
}
CHANGED = ("embed.weight", "blocks.0.up.weight", "blocks.1.gain", "mix", "frozen.weight")


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and found.dtype == expected.dtype and torch.equal(found, expected)


def check_reading(run: Run) -> None:
    engine, reference = run.engine, run.reference
    names = [name for name, _ in engine.module.named_parameters()]
    assert all(engine.get_gradient(name) is None for name in names)

    def gradients(batches: list[list[Any]]) -> None:
        expected = reference._accumulated(batches)
        for name in names:
            found = engine.get_gradient(name)
            if name in expected:
                assert same(found, expected[name].float() / reference.scale), name
                assert (engine.get_gradient(name, rank0_only=True) is None) == (run.rank > 0)
            else:
                assert found is None, name

    assert run.step() == []
    assert run.step(gradients) == []
    assert run.differences() == []  # to look at gradients changes nothing
    assert all(engine.get_gradient(name) is None for name in names)
    for name, parameter in run.parameters.items():
        assert same(engine.get_full_parameter(name), reference.masters.get(name, parameter).detach())
        if name in reference.masters:
            for slot in ("exp_avg", "exp_avg_sq"):
                state = reference.optimizer.state[reference.masters[name]].get(slot, torch.zeros(parameter.shape))
                assert same(engine.get_optimizer_state(name, slot), state)
            step = engine.get_optimizer_state(name, "step")
            assert (step.shape, float(step)) == ((), 0.0 if name.startswith("unused") else 2.0)
    assert same(engine.get_full_parameter("head.weight"), reference.masters["embed.weight"].detach())
    assert same(engine.get_full_parameter("module.head.weight"), reference.masters["embed.weight"].detach())
    first = engine.get_full_parameter("mix", rank0_only=True)
    assert same(first, reference.masters["mix"].detach()) if run.rank == 0 else first is None
    state = engine.module_state_dict()
    if run.rank == 0 or run.case.stage < 3:
        expected = reference.model.state_dict()
        assert list(state) == list(expected)
        assert all(same(state[name], value) for name, value in expected.items())
    else:
        assert state == {}
    assert run.differences() == []


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with Run(CASES[1][0], 0, 1) as run:
        engine = run.engine
        with pytest.raises(UsageError, match=r"no parameter 'blocks.0.up.wait'; did you mean 'blocks.0.up.weight'"):
            engine.get_full_parameter("blocks.0.up.wait")
        with pytest.raises(UsageError, match=r"no parameter 'xyz'; there are 'start', .* and \d+ more"):
            engine.get_gradient("xyz")
        with pytest.raises(UsageError, match=r"has no 'exp_avg_sqr' of parameter 'mix'; did you mean 'exp_avg_sq'"):
            engine.get_optimizer_state("mix", "exp_avg_sqr")
        with pytest.raises(UsageError, match=r"'frozen.weight' is not trained"):
            engine.get_optimizer_state("frozen.weight", "exp_avg")
        with pytest.raises(UsageError, match=r"'mix': expected values of shape \(2, 3, 56\), got \(2,\)"):
            engine.set_full_parameter("mix", torch.zeros(2))


def check_gathered_changes(run: Run) -> None:
    engine, last = run.engine, run.world_size - 1
    parameters = dict(engine.module.named_parameters())
    assert run.step() == []
    before = {name: p.detach().clone() for name, p in run.parameters.items()}
    with zstore.gather(engine.module):
        assert all(torch.equal(parameters[name], before[name]) for name in before)
        kept = parameters["blocks.0.up.weight"].detach()
    assert torch.equal(kept, before["blocks.0.up.weight"])  # what was taken in the block stays valid
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "embed.weight": lambda p: p[3:5].zero_(),
        "blocks.0.up.weight": lambda p: p.mul_(1.5),
        "blocks.1.gain": lambda p: p.fill_(0.75),
        "frozen.weight": lambda p: p.neg_(),
    }
    with zstore.gather([parameters[name] for name in (*changes, "mix", "norm.weight")], modifier_rank=last):
        for name, change in changes.items():
            if run.rank == last:
                change(parameters[name].data)
            elif name == "blocks.0.up.weight":
                parameters[name].data.fill_(99.0)  # another rank's values do not count
        if run.rank == last:
            parameters["mix"].data = torch.full((2, 3, 56), 0.125, dtype=parameters["mix"].dtype)
    for name, change in changes.items():
        run.change(name, change)
    run.change("mix", lambda p: p.fill_(0.125))
    assert run.differences() == []
    assert run.step() == []
    with zstore.gather(parameters["start"], modifier_rank=0):
        with zstore.gather([parameters["start"], parameters["norm.bias"]], modifier_rank=last), torch.no_grad():
            parameters["start"].add_(1.0)
        assert torch.equal(parameters["start"], run.parameters["start"] + 1)
    run.change("start", lambda p: p.add_(1.0))
    assert run.step() == []
    assert run.differences() == []


def check_setting(run: Run) -> None:
    engine, reference = run.engine, run.reference
    assert run.step() == []
    generator = torch.Generator().manual_seed(7)
    for name in CHANGED:
        parameter = run.parameters[name]
        values = torch.randn(parameter.shape, generator=generator)
        engine.set_full_parameter(name, values if run.rank == 0 else None)
        parameter.data.copy_(values)
        if name in reference.masters:
            reference.masters[name].data.copy_(values)  # all digits, not the rounded ones
            moment = torch.rand(parameter.shape, generator=generator)
            engine.set_optimizer_state(name, "exp_avg_sq", moment.numpy() if run.rank == 0 else torch.ones_like(moment))
            engine.set_optimizer_state(name, "step", 5 if run.rank == 0 else None)
            state = reference.optimizer.state[reference.masters[name]]
            state["exp_avg_sq"].copy_(moment)
            state["step"].fill_(5.0)
    assert run.step() == []
    assert run.step() == []
    assert run.differences() == []


def check_training_in_a_block(run: Run) -> None:
    engine = run.engine
    up, embed = engine.module.blocks[0].up.weight, engine.module.embed.weight

    def change(*_: Any) -> None:
        with zstore.gather(up, modifier_rank=0):
            pass

    handle = engine.module.norm.register_forward_pre_hook(change)
    with pytest.raises(UsageError, match="within a forward: parameters can be changed between steps only"):
        engine(*batch(0, 0, run.rank))
    handle.remove()
    batches = run.batches()
    for micro in batches:
        # A graph made before the block, one made in it, and a backward on either side.
        loss = engine(*micro[run.rank])
        with zstore.gather([up, embed]):
            with torch.no_grad():
                engine(*micro[run.rank])
            engine.backward(loss)
            with pytest.raises(UsageError, match=r"engine.step\(\) within `with zstore.gather"):
                engine.step()
        engine.step()
    run.reference.step(batches)
    batches = run.batches()
    for micro in batches:
        with zstore.gather(engine.module):
            loss = engine(*micro[run.rank])
        engine.backward(loss)
        engine.step()
    run.reference.step(batches)
    assert run.differences() == []


def spoil(parameter: nn.Parameter, rank: int) -> None:
    parameter.data.zero_()
    _ = 1 / (1 - rank)


def check_refusals(run: Run) -> None:
    engine = run.engine
    up = engine.module.blocks[0].up.weight
    before = engine_digests(engine)
    is_its_own_master = run.case.precision == "fp32" and run.case.tier == "none" and run.case.stage < 3
    if not is_its_own_master:
        with pytest.raises(UsageError, match=r"is read-only, but 'blocks.0.up"), zstore.gather(up), torch.no_grad():
            up.fill_(7.0)
        assert engine_digests(engine) == before
        with zstore.gather(up):
            assert torch.equal(up, run.parameters["blocks.0.up.weight"])
    with pytest.raises(UsageError, match=rf"modifier_rank=9\): there are ranks 0 to {run.world_size - 1}"):
        zstore.gather(up, modifier_rank=9).__enter__()
    with (
        pytest.raises((UsageError, RankError), match=r"'blocks.0.up.weight' has shape \(2, 2\) at the end of gather"),
        zstore.gather(up, modifier_rank=0),
    ):
        up.data = torch.zeros(2, 2, dtype=up.dtype)
    assert up.shape == (168, 56)
    for error in (ZeroDivisionError, GeneratorExit):  # the second if a generator is closed in the block
        with pytest.raises(error), zstore.gather(engine.module):
            raise error
    if run.world_size > 1:
        names = ["mix", "start"] if run.rank else ["start", "mix"]
        with pytest.raises(UsageError, match="all ranks have to make the same call"):
            engine.get_full_parameter(names[0])
        with (
            pytest.raises(ZeroDivisionError if run.rank == 1 else RankError),
            zstore.gather(engine.module.embed.weight, modifier_rank=0),
        ):
            spoil(engine.module.embed.weight, run.rank)
        assert is_its_own_master or engine_digests(engine) == before
    assert run.step() == []
    assert run.step() == []
    assert run.differences() == []


def check_state_dicts(run: Run) -> None:
    model, expected = run.engine.module, run.reference.model.state_dict()
    if run.engine.training_state.hooks is not None:
        for call in (model.state_dict, run.engine.state_dict, model.blocks[0].state_dict):
            with pytest.raises(UsageError, match=r"call engine.module_state_dict\(\)"):
                call()
        with pytest.raises(UsageError, match="load before initialize"):
            model.load_state_dict(expected)
    with zstore.gather(model):
        found = model.state_dict()
    assert all(same(found[name], value) for name, value in expected.items())
    changed = {name: value + 1 if name != "shift" else value for name, value in expected.items()}
    with torch.inference_mode(), zstore.gather(model, modifier_rank=0):  # later writes need ordinary tensors
        model.load_state_dict(changed)
    for name in run.parameters:
        run.change(name, lambda p: p.add_(1))
    assert run.step() == []
    assert run.differences() == []


def test_parameters_without_an_engine_are_left_alone() -> None:
    linear = nn.Linear(3, 2)
    with zstore.gather(linear, modifier_rank=5), torch.no_grad():
        linear.weight.fill_(2.0)
    assert linear.weight.unique().tolist() == [2.0]
    with zstore.gather([]):
        pass
    with pytest.raises(UsageError, match="gather\\(\\) expects parameters, or a module, got str"):
        zstore.gather(["weight"]).__enter__()  # type: ignore[list-item]
    with Run(CASES[1][0], 0, 1) as run:
        model = run.engine.module
    with zstore.gather(model, modifier_rank=3):
        pass


def test_optimizer_state_that_the_first_step_makes() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"train_batch_size": 2, "steps_per_print": 0}
    with zstore.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        with pytest.raises(UsageError, match="set it after a step"):
            engine.set_optimizer_state("weight", "momentum_buffer", torch.ones(4, 4))
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
        engine.set_optimizer_state("weight", "momentum_buffer", torch.ones(4, 4))
        assert same(engine.get_optimizer_state("weight", "momentum_buffer"), torch.ones(4, 4))


def check_deepspeeds_names(run: Run) -> None:
    weight = run.engine.module.blocks[1].down.weight
    assert run.step(lambda _: _check_gradient(run.engine, weight)) == []
    master = run.engine.get_full_parameter("blocks.1.down.weight")
    assert same(safe_access.safe_get_full_fp32_param(weight), master)
    safe_access.safe_set_full_fp32_param(weight, master * 3)
    assert same(safe_access.safe_get_full_fp32_param(weight), master * 3)
    safe_access.safe_set_full_optimizer_state(weight, master, "exp_avg")
    assert same(safe_access.safe_get_full_optimizer_state(weight, "exp_avg"), master)
    for other in (run.engine.module.frozen.weight, nn.Parameter(torch.zeros(1))):
        assert safe_access.safe_get_full_fp32_param(other) is None
        assert safe_access.safe_get_full_grad(other) is None
        with pytest.raises(UsageError, match="is not trained by any open engine"):
            safe_access.safe_set_full_fp32_param(other, torch.zeros(1))


def _check_gradient(engine: Engine, weight: nn.Parameter) -> None:
    expected = engine.get_gradient("blocks.1.down.weight")
    assert same(safe_access.safe_get_full_grad(weight), expected)


_ANYWHERE = [check_training_in_a_block, check_refusals, check_state_dicts]
CHECKS: dict[int, list[Callable[[Run], None]]] = {
    1: [check_reading, check_setting, *_ANYWHERE],
    2: [check_reading, check_gathered_changes, *_ANYWHERE, check_deepspeeds_names],
    3: [check_setting],
}


def _check(rank: int, world_size: int) -> None:
    for check in CHECKS[world_size]:
        for case in CASES[world_size]:
            with Run(case, rank, world_size) as run:
                try:
                    check(run)
                except BaseException as error:
                    error.add_note(f"in {check.__name__}, {case}")
                    raise


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_whole_tensors_and_blocks_are_those_of_the_plain_loop(world_size: int) -> None:
    run_ranks(_check, world_size, world_size)
