"""Operations of one thread that are not shared among torch's threads."""

import copy
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine import step_modes
from tests.engine.bits import Case, Rule, compare
from tests.engine.fake_device import FakeDevice
from tests.engine.runs import make_config, start, state_of, step
from zstore.engine.optim import changes
from zstore.errors import UsageError
from zstore.testing.faults import Fault, FaultyFiles


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_update_from_disk_leaves_the_threads_of_all_others(overlap: str, tmp_path: Path) -> None:
    config = make_config(
        3,
        "nvme",
        tmp_path,
        "nvme",
        gradient_accumulation_steps=1,
        zstore={"step_overlap": overlap},
        bf16={"enabled": False},
    )
    seen: list[int] = []
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
    own = {"gradient_clipping": clipping, "zstore": {"host_kernel": "torch", **keys}}
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
    assert alone
    assert all(alone)


def test_optimizers_that_several_threads_cannot_use_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of torch's classes keep one optimizer object for all tiles."""
    torch.set_num_threads(1)  # those of torch change the bits of gradients
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    rule = Rule(lambda named: torch.optim.RMSprop(named.values(), lr=1e-3))
    assert compare(Case(3, "nvme", "bf16", 1, 0.0, parameters="nvme"), 0, 1, rule=rule) == []


def test_several_threads_update_in_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    keys = {"offload_optimizer": {"pin_memory": True}, "offload_param": {"pin_memory": True}}
    case = Case(3, "nvme", "bf16", 1, 0.25, parameters="nvme", keys=keys)
    with FakeDevice() as device:
        assert compare(case, 0, 1, 2, _streams=device) == []
        assert device.num_under_way == 0


def test_several_threads_update_what_comes_from_a_disk(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    torch.set_num_threads(1)  # those of torch change the bits of gradients
    change, both = changes.Changes._pass, threading.Barrier(2)

    def begin(*args: Any, **keys: Any) -> None:
        both.wait(60)  # passes when two threads are at it
        change(*args, **keys)

    monkeypatch.setattr(changes.Changes, "_pass", begin)
    monkeypatch.setattr(changes, "num_consumers", lambda: 2)
    with start(step_modes.config("none", nvme), step_modes.make_model()) as engine:
        for _ in range(3):
            step_modes.step(engine)
        monkeypatch.undo()
        assert state_of(engine) == step_modes.expected(3)


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
        with pool.acquire(pool.nbytes):  # nothing is left of the others
            pass
