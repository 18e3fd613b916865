"""The step mode `backward`: the bits of `none`, or an error on every rank where they cannot be had; and how both modes end."""

import errno
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from tests.engine.bits import engine_digests
from tests.engine.runs import start, state_of
from tests.engine.step_modes import (
    WIDTH,
    Branches,
    config,
    data,
    end,
    expected,
    held,
    make_model,
    opening,
    plain,
    say,
    step,
)
from zstore.engine import Engine
from zstore.engine.optim import update
from zstore.errors import NonFiniteError, RankError, UsageError
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks


def _non_finite(rank: int, folder: str) -> str:
    with start(config("backward", folder), make_model()) as engine:
        step(engine)
        step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", "2")
        before = engine_digests(engine)
        loss = engine(*data(2))
        # Only rank 0's rows of one parameter are bad, late in the backward.
        engine.module.embed.weight.register_hook(lambda g: g * torch.inf if rank == 0 else g)
        with pytest.raises(NonFiniteError) as caught:
            end(engine, loss)
        for call in (lambda: step(engine), lambda: engine.save_checkpoint(f"{folder}/torn")):
            with pytest.raises((UsageError, RankError), match="the state is inconsistent"):
                call()
        engine.load_checkpoint(f"{folder}/ckpt")
        assert engine_digests(engine) == before
        return str(caught.value)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_gradients_that_are_not_finite_tear_the_state_on_every_rank(world_size: int, nvme: Path) -> None:
    for message in run_ranks(_non_finite, world_size, str(nvme)):
        assert 'with "step_overlap": "backward" parameters changed before this was detected: load' in message


def _fails(rank: int, folder: str) -> tuple[bool, bool]:
    torn = []
    with start(config("backward", folder), make_model()) as engine:
        step(engine)
        before = engine_digests(engine)
        for where in ("head", "embed"):  # the first and the last of the backward

            def fail(gradient: torch.Tensor, where: str = where) -> None:
                update = engine.training_state.update
                if where == "embed" and engine.world_size == 1:  # with more ranks, what was sent counts
                    with update.tickets._changed:
                        assert update.tickets._changed.wait_for(
                            lambda: any(ticket.is_begun for ticket in update.tickets.of.values()), timeout=200
                        )
                raise ValueError("in the middle")

            loss = engine(*data(1))
            logits = engine.module.norm if where == "head" else engine.module.blocks[0]
            handle = logits.register_forward_hook(lambda module, args, out, fail=fail: out.register_hook(fail) and None)
            loss = engine(*data(1))
            with pytest.raises(ValueError, match="in the middle") as caught:
                engine.backward(loss)
            handle.remove()
            torn.append(engine.training_state.update.torn)
            assert torn[-1] == ("parameters were already updated: load a checkpoint" in say(caught.value))
            if not torn[-1]:
                assert engine_digests(engine) == before
    return torn[0], torn[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_fails_counts_as_torn_once_something_was_updated(world_size: int, nvme: Path) -> None:
    assert run_ranks(_fails, world_size, str(nvme)) == [(False, True)] * world_size


def test_what_a_loop_must_not_do_within_the_step(nvme: Path, tmp_path: Path) -> None:
    def engine_of(mode: str = "backward") -> Engine:
        engine = start(config(mode, nvme), make_model())
        step(engine)
        return engine

    with engine_of() as engine:
        loss = engine(*data(1))
        engine.backward(loss)
        with pytest.raises(UsageError, match="a second backward before step"):
            engine.backward(loss * 2)
        for call in (engine, engine.module, lambda ids: engine.module.blocks[0](torch.ones(1, WIDTH).bfloat16())):
            with pytest.raises(
                UsageError, match=r"is called after the backward updated parameters of it, and before step"
            ):
                call(*data(1))
        with pytest.raises(UsageError, match="between backward"):
            engine.get_full_parameter("start")
        with pytest.raises(UsageError, match="the state is being changed then"):
            engine.save_checkpoint(str(tmp_path))
        engine.step()
        assert state_of(engine) == expected(2)
    with engine_of() as engine:
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine(*data(1)))
        engine.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(UsageError, match=r"group 0: lr was .* at the backward and is 0.5 at step\(\)"):
            engine.step()
        with pytest.raises(UsageError, match="the state is inconsistent"):
            step(engine)
        engine.load_checkpoint(str(tmp_path))
        step(engine)
        assert state_of(engine) == expected(2)
        engine.backward(engine(*data(2)))
        with pytest.raises(
            UsageError, match=r"a part of a checkpoint between backward\(\) and step\(\): .* call step\(\)"
        ):
            engine.load_checkpoint(str(tmp_path), load_module_only=True)
        engine.load_checkpoint(str(tmp_path))  # between backward and step
        assert state_of(engine) == expected(1)
    unused = config("backward", nvme)
    unused["zero_optimization"]["ignore_unused_parameters"] = False
    with start(unused, make_model()) as engine:
        engine.backward(engine(*data(0)))
        with pytest.raises(UsageError, match=r"'unused.weight'.*parameters changed before this was detected"):
            engine.step()
        with pytest.raises(UsageError, match="the state is inconsistent"):
            step(engine)


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_reads_a_parameter_after_its_update_is_an_error(offloaded: bool, nvme: Path) -> None:
    given = config("backward", nvme) if offloaded else plain(zstore={"step_overlap": "backward"})
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    for change in ({"reads": 2}, {"order": [2, 0, 1, 2, 3], "reentrant": True}):
        torch.manual_seed(0)
        model = Branches()
        with start(given, model) as engine:
            for _ in range(2):
                engine.backward(engine(x.clone()))
                engine.step()
            vars(model).update(change)
            loss = engine(x.clone())
            with pytest.raises(
                (RuntimeError, UsageError), match=r"modified by an inplace|is called after the backward"
            ) as caught:
                engine.backward(loss)
            # The update may not have begun with anything yet.
            assert engine.training_state.update.torn == ("parameters were already updated: load" in say(caught.value))


def test_gradients_are_freed_as_they_are_used(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    monkeypatch.setattr(update, "LEAST_WAITING_BYTES", 0)
    torch.manual_seed(0)
    model = Branches()
    model.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])
    model.order = list(range(16))
    with start(config("backward", nvme), model) as engine:
        gradients = engine.training_state.gradients
        most: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: most.append(gradients.held_bytes()))
        for _ in range(2):
            most.clear()
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            engine.step()
        assert 0 < max(most) <= 4 * gradients.largest_unit_bytes
        assert gradients.held_bytes() == 0


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_close_with_an_update_under_way(mode: str, nvme: Path) -> None:
    with held(mode, nvme) as (engine, files):
        updater = engine.training_state.update
        updater.join = opening(files, updater.join)  # type: ignore[method-assign]
        files.close_gate()
        engine.backward(engine(*data(1)))
        if mode == "forward":
            engine.step()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zstore-update")]
    assert not list(nvme.rglob("*.shard"))


def test_a_failed_update_is_told_at_the_end(nvme: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    with start(config("forward", nvme), make_model(), _files=files) as engine:
        step(engine)
        engine.training_state.update.wait()
        files.inject(Fault(kind="write", pattern="*optimizer*", error_number=errno.EIO))
        step(engine)
    assert "the last update failed and its error was never raised" in caplog.text


LEFT_OPEN = """
import sys
from pathlib import Path
from tests.engine.step_modes import config, data, make_model, step
from tests.engine.runs import start
engines = []
for mode in ("forward", "backward"):
    folder = Path(sys.argv[1]) / mode
    folder.mkdir()
    engines.append(start(config(mode, folder), make_model()))
    step(engines[-1])
    step(engines[-1])
engines[1].backward(engines[1](*data(2)))
print("the end")
raise ValueError("before step()")
"""


def test_the_interpreter_ends_with_engines_left_open(nvme: Path) -> None:
    done = warm.run(
        [sys.executable, "-c", LEFT_OPEN, str(nvme)], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.returncode) == ("the end\n", 1), done.stderr
    assert done.stderr.strip().endswith("ValueError: before step()")
    assert not list(nvme.rglob("*.shard"))
