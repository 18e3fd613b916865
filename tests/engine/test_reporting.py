"""Lines in the log: what they say, when, and that a plain script sees each of them once."""

import contextlib
import gc
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step
from zstore.engine.runtime.process import CollectorPause, FrozenObjects, show_messages
from zstore.errors import format_bytes
from zstore.testing.ranks import run_ranks

LOGGER = logging.getLogger("zstore")


@contextlib.contextmanager
def bare_logging() -> Iterator[None]:
    """Logging as a plain script has it: nothing configured. Not a fixture: pytest adds handlers after those."""
    root = logging.getLogger()
    before = root.handlers, root.level, LOGGER.handlers, LOGGER.level
    root.handlers, LOGGER.handlers = [], []
    root.setLevel(logging.WARNING)
    LOGGER.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers, level, LOGGER.handlers, own_level = before
        root.setLevel(level)
        LOGGER.setLevel(own_level)


def test_messages_are_seen_once_whoever_configures_logging_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging():
        show_messages()
        show_messages()
        LOGGER.info("one")
        LOGGER.debug("not this")
        assert re.fullmatch(r"\d\d:\d\d:\d\d zstore INFO: one\n", capsys.readouterr().err)
        logging.basicConfig(format="root: %(message)s")
        LOGGER.info("two")
        assert capsys.readouterr().err == "root: two\n"
        logging.getLogger().handlers.clear()
        own = logging.StreamHandler(sys.stderr)
        LOGGER.addHandler(own)
        LOGGER.info("three")
        assert capsys.readouterr().err == "three\n"
        LOGGER.removeHandler(own)
        LOGGER.setLevel(logging.WARNING)
        LOGGER.info("not this")
        LOGGER.warning("four")
        assert capsys.readouterr().err.endswith("zstore WARNING: four\n")


@pytest.mark.parametrize("configured", [True, False])
def test_what_was_set_before_stays(configured: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging():
        if configured:
            logging.basicConfig(format="zstore WARNING: %(message)s", level=logging.WARNING)
        else:
            LOGGER.setLevel(logging.WARNING)
        show_messages()
        LOGGER.info("not this")
        LOGGER.warning("one")
        assert re.fullmatch(r"(\d\d:\d\d:\d\d )?zstore WARNING: one\n", capsys.readouterr().err)
        assert not configured or (LOGGER.handlers, LOGGER.level) == ([], logging.NOTSET)


def test_a_plain_script_sees_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging(), start(make_config(steps_per_print=2, wall_clock_breakdown=True)) as engine:
        for _ in range(4):
            step(engine)
    lines = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines() if " zstore INFO: step" in line]
    assert lines == ["step 2", "step 2", "step 4", "step 4"]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_a_line_of_progress_has_the_mean_loss_of_the_step_s_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    expected = []
    with start(make_config(steps_per_print=2)) as engine:
        for count in (1, 2, 1, 3):
            losses = []
            for micro in range(count):
                engine.set_gradient_accumulation_boundary(micro == count - 1)
                loss = engine(*batch(engine.global_steps, micro, 0))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            known = f"loss {sum(losses) / count:.4f}, lr {engine.get_lr()[0]:.3g}"
            norm = engine.get_global_grad_norm()
            expected.append(f"step {engine.global_steps}: {known}, gradient norm {norm:.4g}, skipped 0")
    assert lines_of(caplog) == expected[1::2]


def test_wall_clock_breakdown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with start(make_config(steps_per_print=2, wall_clock_breakdown=True)) as engine:
        for _ in range(4):
            step(engine)
        done = engine.statistics()
    lines = [line for line in lines_of(caplog) if "forward" in line]
    pattern = r"step (\d): forward ([\d.]+) ms, backward ([\d.]+) ms, step ([\d.]+) ms, mean of 2 steps"
    rows = [[float(text) for text in re.fullmatch(pattern, line).groups()] for line in lines]
    assert [row[0] for row in rows] == [2, 4]
    for column, seconds in enumerate((done.forward_s, done.backward_s, done.optimizer_s), start=1):
        # Each line has the mean of its own steps; rounded to 0.1 ms.
        assert sum(row[column] for row in rows) * 2 == pytest.approx(1e3 * seconds, abs=0.5)


def test_phases_wait_for_the_device_at_both_ends_where_they_are_to_be_printed() -> None:
    calls: list[str] = []
    with start(make_config(gradient_accumulation_steps=1)) as engine:
        engine.report.wait = lambda: calls.append("wait")
        engine.module.register_forward_pre_hook(lambda *_: calls.append("forward"))
        loss = engine(*batch(0, 0, 0))
        assert calls == ["wait", "forward", "wait"]
        assert engine.report.times.forward_s > 0
        assert engine.report.times.backward_s == engine.report.times.optimizer_s == 0
        calls.clear()
        engine.backward(loss)
        engine.step()
        assert calls == ["wait"] * 4
        assert min(engine.report.times.backward_s, engine.report.times.optimizer_s) > 0


def test_memory_breakdown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with start(make_config(3, "nvme", tmp_path, steps_per_print=2, memory_breakdown=True)) as engine:
        step(engine)
        step(engine)
        memory = engine.statistics().store
    (line,) = [line for line in lines_of(caplog) if line.startswith("step 2: state on device")]
    found = re.fullmatch(
        r"step 2: state on device ([\d.]+ \w+), host ([\d.]+ \w+), disk ([\d.]+ \w+); buffers 134.22 MB, "
        r"at most ([\d.]+ \w+) in use; peak of the process ([\d.]+ \w+)",
        line,
    )
    assert memory.disk_bytes > memory.host_bytes > 0
    assert found[3] == format_bytes(memory.disk_bytes)


def test_dump_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = {"dump_state": True, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": 4}
    with start(make_config(3, "nvme", tmp_path, **keys)):
        pass
    (text,) = [line for line in lines_of(caplog) if line.startswith("state at startup:\n")]
    text = text.removeprefix("state at startup:\n")
    printed, end = json.JSONDecoder().raw_decode(text)
    # As resolved, and the keys that act alone.
    assert printed["train_micro_batch_size_per_gpu"] == 2
    assert printed["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert printed["zero_optimization"]["offload_optimizer"]["nvme_path"] == [str(tmp_path)]
    assert "amp" not in printed
    assert text[end:].startswith("\nstate on device ")


def _lines(rank: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage().split("\n")[0])  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    keys = {"dump_state": True, "wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1}
    with start(make_config(3, **keys)) as engine:
        step(engine)
    return [line.split(" ")[2] for line in lines if line.startswith(("step", "state"))]


def test_rank_0_alone_speaks() -> None:
    assert run_ranks(_lines, 2) == [["startup:", "loss", "forward", "state"], []]


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_the_collector_stands_still_until_the_end_and_steps_need_none() -> None:
    assert gc.isenabled()
    with start(make_config(disable_python_gc=True)) as engine:
        assert not gc.isenabled()
        step(engine)
        before = live_tensors()
        for _ in range(3):
            step(engine)
        assert live_tensors() <= before
        with start(make_config(disable_python_gc=True), make_net()):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with start(make_config()):
        assert gc.isenabled()


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that froze nothing before its first engine."""
    monkeypatch.setattr(FrozenObjects, "frozen_before", None)
    gc.unfreeze()
    gc.collect()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_there_when_an_engine_is_made_is_frozen_until_its_end() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with start(make_config()) as engine:
        assert gc.is_tracked(cycle)
        assert not any(thing is cycle for thing in gc.get_objects())
        step(engine)
        with start(make_config(), make_net()):  # one of several may be dropped, and must then be found
            assert any(thing is cycle for thing in gc.get_objects())
    assert any(thing is cycle for thing in gc.get_objects())


@pytest.mark.usefixtures("nothing_frozen")
def test_what_the_application_froze_stays_frozen() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    gc.freeze()
    with start(make_config()) as engine:
        step(engine)
        with start(make_config(), make_net()):
            pass
    assert not any(thing is cycle for thing in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
def test_a_collector_that_was_off_stays_off() -> None:
    pause = CollectorPause()
    pause.end()
    pause.end()
    assert not gc.isenabled()
