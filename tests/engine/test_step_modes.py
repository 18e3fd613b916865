"""The step modes `backward` and `forward`: the bits of `none`, whatever a loop does, or an error on every rank."""

import _thread
import errno
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zstore
from tests import warm
from tests.engine.bits import SPILLS, Case, Model, compare, engine_digests
from tests.engine.runs import start, state_of
from tests.engine.step_modes import WIDTH, Branches, config, data, expected, held, make_model, opening, plain, say, step
from zstore.checkpoint.reader import tags
from zstore.engine import Engine
from zstore.engine.optim import update
from zstore.engine.optim.tickets import TicketState
from zstore.engine.optim.update import Update, UpdatePhase
from zstore.errors import CheckpointError, NonFiniteError, RankError, StorageError, UsageError
from zstore.io.files import OpenFile
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks


@pytest.fixture(params=["forward", "backward"])
def behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A step mode whose update is in the background: of `backward` what the backward has not updated, which is all."""
    if request.param == "backward":
        monkeypatch.setattr(Update, "_admit", lambda *asked: False)
    mode: str = request.param
    return mode


def test_what_changes_after_step_is_of_the_next_step(behind: str, nvme: Path) -> None:
    with held(behind, nvme) as (engine, files):
        files.close_gate()
        step(engine)
        files.arrived(1)
        before = [dict(group) for group in engine.optimizer.param_groups]
        for group in engine.optimizer.param_groups:
            group |= {"lr": 7.0, "betas": (0.1, 0.2), "weight_decay": 3.0, "eps": 1.0}
        for record, scalars in engine.training_state.state.scalars.items():
            assert scalars == {"step": 0.0 if "unused" in record.name else 2.0}
        files.open_gate()
        engine.training_state.update.wait()
        for group, values in zip(engine.optimizer.param_groups, before, strict=True):
            group.update(values)
        assert state_of(engine) == expected(2)


WAYS: dict[str, Callable[[Engine], Any]] = {
    "forward": lambda engine: engine(*data(5)),
    "no_grad": lambda engine: torch.no_grad()(engine)(*data(5)),
    "eval": lambda engine: engine.eval()(*data(5)),
    "the model": lambda engine: engine.module(*data(5)),
    "a part": lambda engine: engine.module.blocks[0](torch.ones(2, WIDTH, dtype=torch.bfloat16)),
}


def test_any_forward_applies_the_update(behind: str, nvme: Path) -> None:
    with start(plain(), make_model()) as other, held(behind, nvme) as (engine, files):
        step(other)
        residence = engine.training_state.hooks.units
        for way in WAYS.values():
            files.close_gate()
            step(engine)
            # The gate opens when somebody waits for an update: what does not, reads old values.
            residence.fetcher.ready = opening(files, engine.training_state.update.tickets.wait_for)
            step(other)
            assert torch.equal(way(engine), way(other))
            engine.train()
            other.train()
        files.open_gate()
        assert state_of(engine) == state_of(other)


ORDERS = [[0, 1, 2, 3], [0, 2], [3, 1], [1, 1, 0], [0, 1, 2, 3]]
"""Layers that go unused keep every bit, though weight decay would change them."""


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layers_that_come_and_go_have_the_bits_of_the_plain_loop(reentrant: bool | None) -> None:
    orders = ORDERS if reentrant is not True else [[1, 1, 0, 2], [1, 1, 0], [1, 2, 0]]
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    model = Model(partial(Branches, reentrant), lambda step, *_: (x.clone(), orders[step % len(orders)]))
    on_disk = Case(3, "nvme", "bf16", 1, 0.0, threshold=0, parameters="nvme", overlap="backward")
    for case in (on_disk, replace(on_disk, overlap="forward"), Case(0, "none", "bf16", 1, 0.0, overlap="backward")):
        assert compare(case, 0, 1, len(orders), model=model) == []


def _gathered(engine: Engine) -> torch.Tensor:
    with zstore.gather(engine.module.blocks[0].up.weight):
        return engine.module.blocks[0].up.weight.clone()


READERS: dict[str, Callable[[Engine, Path], Any]] = {
    "parameter": lambda engine, _: engine.get_full_parameter("blocks.0.up.weight"),
    "slot": lambda engine, _: engine.get_optimizer_state("blocks.0.up.weight", "exp_avg"),
    "gather": lambda engine, _: _gathered(engine),
    "weights": lambda engine, folder: load_file(engine.save_16bit_model(folder)[0])["blocks.1.up.weight"],
    "state dict": lambda engine, _: engine.module_state_dict()["blocks.0.up.weight"],
}


def test_readers_see_the_finished_step(behind: str, nvme: Path, tmp_path: Path) -> None:
    with start(plain(), make_model()) as other, held(behind, nvme) as (engine, files):
        step(other)
        updater = engine.training_state.update
        updater.join = opening(files, updater.join)  # type: ignore[method-assign]
        for name, read in READERS.items():
            engine.training_state.update.wait()
            files.close_gate()
            step(engine)
            step(other)
            assert torch.equal(read(engine, tmp_path / name), read(other, tmp_path / f"{name} of none")), name


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_ctrl_c_while_waiting(mode: str, nvme: Path) -> None:
    with held(mode, nvme) as (engine, files):
        updater = engine.training_state.update
        original, interrupter = updater.join, threading.Thread(target=_thread.interrupt_main)

        def interrupted() -> Any:
            if interrupter.ident is None:
                interrupter.start()
            else:
                files.open_gate()
            return original()

        files.close_gate()
        if mode == "forward":
            step(engine)
        else:
            engine.backward(engine(*data(1)))
        updater.join = interrupted  # type: ignore[method-assign]
        # The backward of a loss that gathers nothing, or step(), waits for the update.
        waits = engine.step if mode == "backward" else lambda: engine.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(KeyboardInterrupt):
            waits()
        if mode == "backward":  # what was changed cannot be taken back
            with pytest.raises(UsageError, match="the state is inconsistent"):
                engine.save_checkpoint(str(nvme / "ckpt"))
        else:
            files.open_gate()
            step(engine)
            assert state_of(engine) == expected(3)


def _pins(engine: Engine) -> int:
    store = engine.training_state.state.store
    disk = sum(shard.current.pins for shard in store._tiers_by_name["disk"]._shards.values())  # type: ignore[union-attr]
    return disk + sum(store._tiers_by_name["host"]._pins.values()) + sum(store._tiers_by_name["device"]._pins.values())


def test_a_save_takes_what_the_update_finishes(behind: str, nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    with held(behind, nvme) as (engine, files):
        files.close_gate()
        step(engine)
        ticket = engine.save_checkpoint(folder, "behind", wait=False)
        files.arrived(1)
        assert not ticket.done()
        assert list(tags(folder)) == []
        files.open_gate()
        # A further step, and the save is what the step before left.
        step(engine)
        ticket.wait()
        assert state_of(engine) == expected(3)
        assert _pins(engine) == 0
        engine.load_checkpoint(folder)
        assert state_of(engine) == expected(2)


class HeldFaults(FaultyFiles):
    """Faulty files whose writes of optimizer state wait while `gate` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _pwritev(self, file: OpenFile, data: Any, offset: int) -> int:
        if "optimizer" in file.path:
            self.gate.wait()
        return super()._pwritev(file, data, offset)


def test_a_failed_update_fails_the_save_and_a_load_mends(behind: str, nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    files = HeldFaults()
    with start(config(behind, nvme), make_model(), _files=files) as engine:
        step(engine)
        engine.save_checkpoint(folder, "good")
        files.gate.clear()
        # Of the run's own files: a save writes metadata below a folder of that name as well.
        files.inject(Fault(kind="write", pattern=f"{nvme}/*optimizer*", error_number=errno.EIO, times=None))
        step(engine)
        ticket = engine.save_checkpoint(folder, "bad", wait=False)
        files.gate.set()
        with pytest.raises(UsageError, match=r"its update failed, so there is nothing to save: .*Input/output"):
            ticket.wait()
        files.heal()
        assert [info.tag for info in tags(folder)] == ["good"]
        assert _pins(engine) == 0
        with pytest.raises(StorageError):
            step(engine)
        # The failed save, of which the engine's caller has not heard, keeps it from no load.
        with pytest.raises(UsageError, match="load a whole checkpoint"):
            engine.load_checkpoint(folder, load_module_only=True)
        with pytest.raises(UsageError, match="the state is inconsistent"):
            engine.save_checkpoint(folder, "torn")
        engine.load_checkpoint(folder)
        assert state_of(engine) == expected(1)
        step(engine)
        assert state_of(engine) == expected(2)


def test_a_save_given_up_leaves_no_pin(behind: str, nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    with held(behind, nvme) as (engine, files):
        files.close_gate()
        step(engine)
        ticket = engine.save_checkpoint(folder, wait=False)
        ticket.cancel()
        files.open_gate()
        with pytest.raises(CheckpointError, match="cancelled"):
            engine.wait_for_checkpoint()
        engine.training_state.update.wait()
        assert _pins(engine) == 0


def _non_finite(rank: int, folder: str) -> str:
    with start(config("backward", folder), make_model()) as engine:
        step(engine)
        step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", "2")
        before = engine_digests(engine)
        # Only rank 0's rows of one parameter are bad, late in the backward.
        engine.module.embed.weight.register_hook(lambda g: g * torch.inf if rank == 0 else g)
        with pytest.raises(NonFiniteError) as caught:
            step(engine)
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
                            lambda: any(ticket.has_started for ticket in update.tickets.by_record.values()), timeout=200
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
            with pytest.raises(UsageError, match=r"was called after the backward updated some of its parameters"):
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
        with pytest.raises(UsageError, match=r"group 0: lr was .* in the backward and is 0.5 at step\(\)"):
            engine.step()
        with pytest.raises(UsageError, match="the state is inconsistent"):
            step(engine)
        engine.load_checkpoint(str(tmp_path))
        step(engine)
        assert state_of(engine) == expected(2)
        engine.backward(engine(*data(2)))
        with pytest.raises(UsageError, match=r"between backward\(\) and step\(\): .* call step\(\)"):
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
                (RuntimeError, UsageError), match=r"modified by an inplace|was called after the backward"
            ) as caught:
                engine.backward(loss)
            # The update may not have begun with anything yet.
            assert engine.training_state.update.torn == ("parameters were already updated: load" in say(caught.value))


def test_gradients_are_freed_as_they_are_used(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    monkeypatch.setattr(update, "MIN_PENDING_BYTES", 0)
    torch.manual_seed(0)
    model = Branches()
    model.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])
    model.order = list(range(16))
    tight = {"zstore": {"step_overlap": "backward", "host_budget_bytes": SPILLS}}  # not all state has room beside them
    with start(config("backward", nvme, **tight), model) as engine:
        gradients, plan = engine.training_state.gradients, engine.training_state.plan
        assert (plan.settings.stores_gradients, plan.held["gradients"].total) == (False, 0)
        most: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: most.append(gradients.held_bytes()))
        for _ in range(2):
            most.clear()
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            engine.step()
        assert 0 < max(most) <= 4 * gradients.largest_unit_bytes
        assert gradients.held_bytes() == 0


def test_backward_waits_for_no_update_if_memory_holds_gradients(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    monkeypatch.setattr(update, "MIN_PENDING_BYTES", 0)
    monkeypatch.setattr(update, "_MAX_PENDING_UNITS", 0)
    with held("backward", nvme) as (engine, files):
        training = engine.training_state
        assert training.plan.held["gradients"].host == 2 * sum(record.owned_numel for record in training.trained)
        files.close_gate()
        engine.backward(engine(*data(1)))  # its update goes no further than the gate
        files.arrived(1)
        assert TicketState.FINAL in [ticket.state for ticket in training.update.tickets.by_record.values()]
        files.open_gate()
        engine.step()
        assert state_of(engine) == expected(2)


@pytest.mark.parametrize("threshold", [0, 10**6])  # parameters are gathered before use, or resident
def test_the_rest_is_updated_in_the_forwards_order(threshold: int, monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    admit, done = Update._admit, dict[str, UpdatePhase]()
    monkeypatch.setattr(Update, "_admit", lambda self, one, wait: "blocks.1" in one.name and admit(self, one, wait))
    with start(config("backward", nvme, threshold=threshold), make_model()) as engine:
        updater, note = engine.training_state.update, engine.training_state.update.tickets.mark_done
        updater.tickets.mark_done = lambda one: (done.update({one.name: updater.phase}), note(one))  # type: ignore[method-assign, assignment, func-returns-value]
        step(engine)
        updater.wait()
        trained = [one.name for one in engine.training_state.trained if "unused" not in one.name]
        left = [name for name, phase in done.items() if phase is UpdatePhase.IN_BACKGROUND]
        assert left == ([name for name in trained if name in left] if threshold == 0 else [])
        assert threshold or done.keys() == {*trained}
        step(engine)
        assert state_of(engine) == expected(2)


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
    done = warm.run([sys.executable, "-c", LEFT_OPEN, str(nvme)], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.returncode) == ("the end\n", 1), done.stderr
    assert done.stderr.strip().endswith("ValueError: before step()")
    assert not list(nvme.rglob("*.shard"))
