"""The step modes `backward` and `forward`: the bits of `none`, whatever a loop does, and errors where that cannot be."""

import _thread
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import Case, Model, compare
from tests.engine.runs import start, state_of
from tests.engine.step_modes import WIDTH, Branches, config, data, expected, held, make_model, opening, plain, step
from zstore.checkpoint.reader import tags
from zstore.engine import Engine
from zstore.errors import CheckpointError, StorageError, UsageError
from zstore.io.files import OpenFile
from zstore.testing.faults import Fault, FaultyFiles


def test_what_changes_after_step_is_of_the_next_step(nvme: Path) -> None:
    with held("forward", nvme) as (engine, files):
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


def test_any_forward_applies_the_update(nvme: Path) -> None:
    with start(plain(), make_model()) as other, held("forward", nvme) as (engine, files):
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


def _exported(engine: Engine, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(engine.save_16bit_model(folder)[0])


READERS: dict[str, Callable[[Engine, Path], Any]] = {
    "parameter": lambda engine, _: engine.get_full_parameter("blocks.0.up.weight"),
    "slot": lambda engine, _: engine.get_optimizer_state("blocks.0.up.weight", "exp_avg"),
    "gather": lambda engine, _: _gathered(engine),
    "weights": lambda engine, folder: _exported(engine, folder)["blocks.1.up.weight"],
    "state dict": lambda engine, _: engine.module_state_dict()["blocks.0.up.weight"],
}


def test_readers_see_the_finished_step(nvme: Path, tmp_path: Path) -> None:
    with start(plain(), make_model()) as other, held("forward", nvme) as (engine, files):
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
    """Return the pins that are left on this run's arrays."""
    store = engine.training_state.state.store
    disk = sum(shard.current.pins for shard in store._homes["disk"]._shards.values())  # type: ignore[union-attr]
    return disk + sum(store._homes["host"]._pins.values()) + sum(store._homes["device"]._pins.values())


def test_a_save_takes_what_the_update_finishes(nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    with held("forward", nvme) as (engine, files):
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


def test_a_failed_update_fails_the_save_and_a_load_mends(nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    files = HeldFaults()
    with start(config("forward", nvme), make_model(), _files=files) as engine:
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


def test_a_save_given_up_leaves_no_pin(nvme: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    with held("forward", nvme) as (engine, files):
        files.close_gate()
        step(engine)
        ticket = engine.save_checkpoint(folder, wait=False)
        ticket.cancel()
        files.open_gate()
        with pytest.raises(CheckpointError, match="cancelled"):
            engine.wait_for_checkpoint()
        engine.training_state.update.wait()
        assert _pins(engine) == 0
