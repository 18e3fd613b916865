"""The hand-over between host and device, on a device of our own, and between threads: the bits of the plain loop."""

import copy
import errno
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine import step_modes
from tests.engine.bits import Case, Rule, compare
from tests.engine.fake_device import FakeDevice, HandOverError
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, moved_since, start, state_of, step
from zstore.engine.optim import changes
from zstore.engine.optim.update import Update
from zstore.errors import NonFiniteError, UsageError
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

STEPS = 2
# (stage, optimizer's tier, precision, accumulation, clip, parameters' tier, step mode)
CASES = [
    (3, "nvme", "bf16", 1, 0.25, "nvme", "none"),
    (3, "nvme", "fp16", 3, 0.0, "nvme", "forward"),
    (3, "nvme", "fp32", 1, 0.0, "cpu", "backward"),
    (2, "cpu", "bf16", 1, 0.0, "none", "backward"),
    (1, "cpu", "fp16", 3, 0.25, "none", "none"),
]


def case(stage: int, optimizer: str, *rest: Any) -> Case:
    precision, accumulation, clip, parameters, overlap = rest
    keys = {"offload_optimizer": {"pin_memory": True}}
    if parameters != "none":
        keys["offload_param"] = {"pin_memory": True}
    return Case(stage, optimizer, precision, accumulation, clip, parameters=parameters, overlap=overlap, keys=keys)


@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: "-".join(map(str, chosen)))
def test_bits_equal_the_plain_loop_after_a_resume_too(chosen: tuple[Any, ...]) -> None:
    for own in (None, {"host_budget_bytes": 40_000_000}) if chosen is CASES[0] else (None,):
        with FakeDevice() as device:
            assert compare(replace(case(*chosen), resume=1, own=own), 0, 1, STEPS, _streams=device) == []
            assert device.copies > 0
            assert device.num_under_way == 0
            assert device.pinned_peak_bytes > 0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_gradients_that_wait_in_another_type_than_they_come_in_cross_with_their_bits(tier: str) -> None:
    usual = case(2, tier, "bf16", 1, 0.25, "none", "none")
    for chosen in (
        replace(usual, counts=(1, 3)),
        replace(usual, counts=(3, 1)),
        replace(usual, types=("fp32", None)),
        replace(usual, types=("fp16", None), accumulation=2),
    ):
        with FakeDevice() as device:
            assert compare(chosen, 0, 1, STEPS, _streams=device) == []
            assert device.num_under_way == 0


def _compare_on_fakes(rank: int, world_size: int) -> list[list[str]]:
    found: list[list[str]] = []
    for chosen in (CASES[1], CASES[4]):
        with FakeDevice() as device:
            found.append(compare(case(*chosen), rank, world_size, STEPS, _streams=device))
    return found


def test_bits_equal_the_plain_loop_on_two_ranks() -> None:
    assert run_ranks(_compare_on_fakes, 2, 2) == [[[], []]] * 2


# What is left out, and a case in which it matters: gradients as they come, parameters before use, gradients of the
# update, new rows.
FORGOTTEN = [(what, CASES[0]) for what in ("down", "up", "event")]
FORGOTTEN += [("up", CASES[2]), ("down", CASES[3]), ("up", CASES[4])]


@pytest.mark.parametrize(("forgotten", "chosen"), FORGOTTEN)
def test_a_missing_step_of_the_hand_over_is_noticed(forgotten: str, chosen: tuple[Any, ...]) -> None:
    with FakeDevice([forgotten]) as device, suppress(HandOverError, NonFiniteError):
        assert compare(case(*chosen), 0, 1, STEPS, _streams=device) != []


def pinned(*args: Any, **keys: Any) -> dict[str, Any]:
    config = make_config(*args, **keys)
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"].setdefault(section, {"device": "none"})["pin_memory"] = True
    return config


@pytest.mark.parametrize(
    ("optimizer", "parameters", "mode"),
    [
        ("none", "none", "backward"),
        ("none", "cpu", "forward"),
        ("cpu", "none", "none"),
        ("cpu", "cpu", "backward"),
        ("cpu", "nvme", "none"),
        ("nvme", "nvme", "forward"),
        ("nvme", "nvme", "backward"),
    ],
)
def test_the_main_thread_waits_for_no_copy_in_forward_and_backward_and_no_host_memory_is_new(
    optimizer: str, parameters: str, mode: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pinned(3, optimizer, nvme, parameters, zstore={"step_overlap": mode}, gradient_accumulation_steps=1)
    admit, is_over = Update._admit, threading.Event()

    def admit_late(update: Any, *asked: Any) -> bool:
        # Else the number of gradients that wait for an update in the backward is another in every step.
        return is_over.wait(60) and admit(update, *asked)

    monkeypatch.setattr(Update, "_admit", admit_late)
    found: list[tuple[int, int]] = []
    with FakeDevice() as device, start(config, _streams=device) as engine:
        gradients = engine.training_state.gradients
        end_backward = gradients.end_backward
        waits: list[int] = []
        monkeypatch.setattr(gradients, "end_backward", lambda: (waits.append(device.main_waits), end_backward()))
        for number in range(5):
            copies_now = device.copies_now
            device.syncs.clear()
            before = device.main_waits
            loss = engine(*batch(number, 0, 0))
            is_over.clear()
            engine.backward(loss)
            is_over.set()
            engine.step()
            engine.training_state.update.wait()
            found.append((waits[-1] - before, device.allocations))
        assert device.copies_now == copies_now
    assert [wait for wait, _ in found] == [0] * 5
    # The norm's look is of other operations here; changes through .data are looked for where the update is in step().
    assert device.syncs <= {"equal in guard.py"}
    assert found[-1][1] <= found[1][1]


def test_as_much_host_memory_is_pinned_as_planned(nvme: Path) -> None:
    config = pinned(3, "cpu", own="cpu", gradient_accumulation_steps=1)
    with FakeDevice() as device, start(config, make_net(width=400, layers=4), _streams=device) as engine:
        for number in range(2):
            engine.backward(engine(*batch(number, 0, 0)))
            engine.step()
        held = engine.training_state.plan.held
        # Only what crosses to the device: masters and slots in host memory are changed there.
        planned = sum(held[kind].host for kind in ("parameters", "gradients", "buffers"))
        assert abs(device.pinned_bytes - planned) < planned / 100
    config = pinned(3, "nvme", nvme, "nvme", zstore={"step_overlap": "none", "host_budget_bytes": 40_000_000})
    with FakeDevice() as device, start(config, make_net(width=400, layers=4), _streams=device) as engine:
        engine.backward(engine(*batch(0, 0, 0)))
        values = [gradient.values for gradient in engine.training_state.gradients.by_record.values()]
        assert 0 < max(each.untyped_storage().nbytes() for each in values if each is not None) < 1 << 16


def test_a_unit_moves_by_one_copy_each_way_into_one_allocation_and_without_a_thread() -> None:
    config = pinned(3, "cpu", own="cpu", gradient_accumulation_steps=1, zstore={"step_overlap": "none"})
    with FakeDevice() as device, start(config, make_net(layers=4), _streams=device) as engine:
        engine.backward(engine(*batch(0, 0, 0)))
        units = engine.statistics().units
        num_gradients = device.copies - units.on_demand - units.gathered_ahead
        num_units = len(engine.training_state.hooks.units.all)  # type: ignore[union-attr]
        repr(list(engine.training_state.hooks.units.values))  # type: ignore[union-attr]  # freed memory is not read
        values = [gradient.values for gradient in engine.training_state.gradients.by_record.values()]
        allocations = {each.untyped_storage().data_ptr() for each in values if each is not None}
    assert 0 < len(allocations) == num_gradients <= num_units
    assert not any(thread.name.startswith("zstore-prefetch") for thread in threading.enumerate())


def test_what_crosses_is_counted() -> None:
    with FakeDevice() as device, start(pinned(1, "cpu"), _streams=device) as engine:
        step(engine)
        before = engine.statistics()
        step(engine)
        moved = moved_since(engine, before)
        numel = sum(record.owned_numel for record in engine.training_state.trained if "unused" not in record.name)
    # Gradients down, of each of two micro-batches, and parameters up, in 16 bits.
    assert moved["device_to_host"].bytes == 2 * 2 * numel
    assert moved["host_to_device"].bytes == 2 * numel


def test_a_checkpoint_names_the_share_that_the_device_updates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CPU and GPU round differently, so that a run with another share has other bits than the one that it goes on with."""

    def config(ratio: float) -> dict[str, Any]:
        made = make_config(2, "cpu")
        made["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        return made

    with FakeDevice() as device, start(config(0.5), _streams=device) as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path), "a")
    for ratio, warnings in ((0.5, 0), (1.0, 1)):
        caplog.clear()
        with FakeDevice() as device, start(config(ratio), _streams=device) as engine:
            engine.load_checkpoint(str(tmp_path), "a")
        assert caplog.text.count(f'with offload_optimizer "ratio": {ratio} from a checkpoint with 0.5') == warnings


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_update_from_disk_leaves_the_threads_of_all_others(overlap: str, tmp_path: Path) -> None:
    keys = {"gradient_accumulation_steps": 1, "zstore": {"step_overlap": overlap}, "bf16": {"enabled": False}}
    config, seen = make_config(3, "nvme", tmp_path, "nvme", **keys), list[int]()
    with zstore.initialize(model=nn.Linear(256, 256), config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 256)).sum())
            engine.step()
        engine.training_state.update.wait()
        assert engine.statistics().store.disk_write_bytes > 0
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(200)
    assert (seen, torch.get_num_threads()) == ([2], 2)


class _Weights(nn.Module):
    """Its gradient is what it is called with, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1536, 1024))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs).sum()


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(("clipping", "has_disk"), [(0.0, False), (1e-3, False), (0.0, True)])
def test_threads_take_tiles(clipping: float, has_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Weights()
    plain = copy.deepcopy(model)
    peer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    kernel, alone, meeting = torch._fused_adamw_, list[bool](), threading.Barrier(2, timeout=30)

    def counted(*args: object, **settings: object) -> None:
        alone.append(torch.get_num_threads() == 1)
        if len(alone) <= 2:
            meeting.wait()
        kernel(*args, **settings)

    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    config = {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": offload, "steps_per_print": 0}
    keys = {"activations": "disk", "activations_path": str(tmp_path)} if has_disk else {}
    own = {"gradient_clipping": clipping, "zstore": {"host_kernel": "torch", "step_overlap": "none", **keys}}
    with zstore.initialize(model=model, config=config | own)[0] as engine:
        assert engine.training_state.state.in_place(engine.training_state.trained[0]) is not None
        for _ in range(3):
            inputs = torch.randn(1536, 1024)
            plain(inputs).backward()
            with monkeypatch.context() as patch:
                patch.setattr(torch, "_fused_adamw_", counted)
                engine.backward(engine(inputs))
                engine.step()
            if clipping:
                norm = engine.get_global_grad_norm()
                plain.weight.grad.mul_(clipping / (norm + 1e-6))
            peer.step()
            peer.zero_grad()
            assert torch.equal(model.weight, plain.weight)
    assert set(alone) == {True}


def test_optimizers_that_several_threads_cannot_use_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of torch's classes keep one optimizer object for all tiles."""
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    rule = Rule(lambda named: torch.optim.RMSprop(named.values(), lr=1e-3))
    assert compare(Case(3, "nvme", "bf16", 1, 0.0, parameters="nvme"), 0, 1, rule=rule) == []


@pytest.mark.usefixtures("_two_threads")
def test_several_threads_update_in_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    with FakeDevice() as device:
        assert compare(case(*CASES[0]), 0, 1, STEPS, _streams=device) == []
        assert device.num_under_way == 0


def test_several_threads_update_what_comes_from_a_disk(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    change, both = changes.Changes._stream, threading.Barrier(2)

    def begin(*args: Any, **keys: Any) -> None:
        both.wait(60)  # passes when two threads are at it
        change(*args, **keys)

    monkeypatch.setattr(changes.Changes, "_stream", begin)
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    with start(step_modes.config("none", nvme), step_modes.make_model()) as engine:
        for _ in range(3):
            step_modes.step(engine)
        monkeypatch.undo()
        assert state_of(engine) == step_modes.expected(3)


@pytest.mark.usefixtures("_two_threads")
def test_an_error_of_one_of_several_threads_ends_the_step(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    files = FaultyFiles()
    with start(make_config(2, "nvme", nvme, gradient_accumulation_steps=1), _files=files) as engine:
        step(engine)
        files.inject(Fault(kind="write", pattern="*optimizer*", error_number=errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            step(engine)
        with pytest.raises(UsageError, match="the state is inconsistent"):
            step(engine)
        pool = engine.training_state.state.store.resources.pool
        pool.acquire(pool.nbytes).release()  # nothing is left of the others
