"""A loop of Accelerate on zstore beside itself with Accelerate alone, in one run."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader

import zstore.accelerate
from tests.integrations.trainers import Texts, config, llama
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.testing.ranks import run_ranks

# The order of the samples follows from seed and epoch.
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "cpu": True,
    "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True),
}


def _schedule(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))


class _Loop:
    """A loop as Accelerate's documents have it."""

    def __init__(self, accelerator: Any, *, samples: int = 14) -> None:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.accelerator = accelerator
        loaders = DataLoader(Texts(samples), batch_size=2, shuffle=True), DataLoader(Texts(5, seed=3), batch_size=2)
        # accelerate advances a schedule once for each rank.
        schedule = _schedule(optimizer, 16 * accelerator.num_processes)
        self.model, self.optimizer, self.loader, self.held_out, self.schedule = accelerator.prepare(
            model, optimizer, *loaders, schedule
        )
        self.losses: list[float] = []

    def epoch(self, number: int) -> None:
        accelerator = self.accelerator
        self.model.train()
        self.loader.set_epoch(number)
        for batch in self.loader:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.losses.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(accelerator.gather(loss.detach()).mean().item())
        self.losses.append(self.optimizer.param_groups[0]["lr"])
        self.model.eval()
        with torch.no_grad():
            found = [self.accelerator.gather_for_metrics(self.model(**batch).logits) for batch in self.held_out]
        assert sum(map(len, found)) == 5
        self.losses.append(torch.cat(found).float().square().mean().item())


def _ours(place: Path, **changes: Any) -> Any:
    wanted = config(place / "nvme", **changes)
    del wanted["optimizer"]
    return zstore.accelerate.Accelerator(zstore_config=wanted, project_dir=place / "project", **SETTINGS)


def _beside(rank: int, folder: str, world_size: int) -> list[float]:
    warnings.simplefilter("default")
    place = Path(folder)
    plain = _Loop(accelerate.Accelerator(**SETTINGS))
    ours = _Loop(_ours(place))
    for loop in (plain, ours):
        loop.epoch(0)
    ours.accelerator.save_state(os.fspath(place / "state"))
    for loop in (plain, ours):
        loop.epoch(1)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    ours.accelerator.save_model(ours.model, place / "weights")
    state = ours.accelerator.get_state_dict(ours.model)
    whole = ours.accelerator.unwrap_model(ours.model)
    whole.save_pretrained(place / "saved", state_dict=state, is_main_process=rank == 0)
    expected = plain.accelerator.unwrap_model(plain.model).state_dict()
    if rank == 0:
        for where in ("weights", "saved"):
            found = type(whole).from_pretrained(place / where).state_dict()
            torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-5)
    rest = ours.losses[len(ours.losses) // 2 :]
    ours.accelerator.free_memory()
    resumed = _Loop(_ours(place))
    resumed.accelerator.load_state(os.fspath(place / "state"))
    resumed.epoch(1)
    assert resumed.losses == rest
    return rest


def _named_by_the_config(rank: int, folder: str) -> None:
    """Placeholders stand for what the config names; another world size loads the state."""
    warnings.simplefilter("default")
    place = Path(folder)
    named = config(place / "nvme")
    named["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
    accelerator = zstore.accelerate.Accelerator(zstore_config=named, cpu=True)
    model = llama()
    placeholder = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = DataLoader(Texts(16), batch_size=2)
    schedule = DummyScheduler(placeholder, total_num_steps=10, warmup_num_steps=3)
    model, optimizer, loader, schedule = accelerator.prepare(model, placeholder, loader, schedule)
    rates = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert rates == pytest.approx([0.0, 0.0, 0.00063, 0.001], rel=1e-2)
    accelerator.backward(model(**batch).loss)
    optimizer.zero_grad()  # forgets it
    with pytest.raises(UsageError, match="without"):
        optimizer.step()
    with pytest.raises(UsageError, match="one model is trained"):
        accelerator.prepare(other := llama(1), torch.optim.AdamW(other.parameters()))
    reference = accelerator.prepare(other)
    assert reference.optimizer is None
    reference.eval()
    with torch.no_grad():
        loss = accelerator.reduce(reference(**batch).loss, "mean")
    assert math.isfinite(loss.item())
    accelerator.free_memory()
    two = _Loop(_ours(place), samples=14)
    two.accelerator.load_state(os.fspath(place / "state"))
    two.epoch(1)
    other = place / f"other-{rank}"
    other.mkdir()
    (other / "optimizer.bin").touch()
    with pytest.raises(CheckpointMismatchError, match="without zstore"):
        two.accelerator.load_state(os.fspath(other))


def test_a_loop_of_accelerate_has_its_losses_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, 1, os.fspath(tmp_path), 1)
    run_ranks(_named_by_the_config, 2, os.fspath(tmp_path))


def test_a_loop_of_accelerate_at_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, 2, os.fspath(tmp_path), 2)


def test_arguments_that_zstore_does_not_serve_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = config(tmp_path, device="cpu")
    make = zstore.accelerate.Accelerator
    with pytest.raises(ConfigError, match="ZSTORE_CONFIG"):
        make()
    with pytest.raises(UsageError, match="data parallel"):
        make(parallelism_config=object(), zstore_config=wanted)
    with pytest.raises(ConfigError, match="mixed_precision"):
        make(mixed_precision="bf16", zstore_config={**wanted, "bf16": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps is 4, .* is 2"):
        make(gradient_accumulation_steps=2, cpu=True, zstore_config={**wanted, "gradient_accumulation_steps": 4})
    with pytest.raises(UsageError, match="fp8"):
        make(mixed_precision="fp8", zstore_config=wanted)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="FSDP"):
        make(zstore_config=wanted)


def _images(accelerator: Any) -> tuple[list[float], set[torch.dtype]]:
    """Train a small convolutional network on images in fp32, as accelerate's example of computer vision does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, types = [], set()
    for number in range(6):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number % 2))
        outputs = model(images)
        types.add(outputs.dtype)
        loss = torch.nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 2, 3]))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        types.add(model(images).dtype)
    return losses, types


@pytest.mark.parametrize("stage", [0, 3])
def test_float_inputs_are_cast_and_outputs_are_fp32_in_mixed_precision(stage: int) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    plain, types = _images(accelerate.Accelerator(cpu=True, mixed_precision="bf16"))
    assert types == {torch.float32}
    AcceleratorState._reset_state(reset_partial_state=True)
    ours = zstore.accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", zstore_config={"zero_optimization": {"stage": stage}}
    )
    losses, types = _images(ours)
    ours.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert types == {torch.float32}
    assert losses == pytest.approx(plain, rel=0.05)


class _Exchanging(torch.optim.SGD):
    """Evaluates with other weights than it trains, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self._averages: list[torch.Tensor] | None = None

    @torch.no_grad()
    def eval(self) -> None:
        parameters = self.param_groups[0]["params"]
        self._averages = [p.clone() for p in parameters]
        for p in parameters:
            p.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for p, value in zip(self.param_groups[0]["params"], self._averages or [], strict=False):
            p.copy_(value)


def _schedule_free(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 3)
    model, optimizer = accelerator.prepare(net, _Exchanging(net.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        optimizer.train()
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        optimizer.eval()
        with torch.no_grad():
            found.append(model(x).square().mean().item())
    return found


def test_an_optimizer_that_exchanges_weights_is_told_of_training_and_evaluation() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = _schedule_free(accelerate.Accelerator(cpu=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    ours = zstore.accelerate.Accelerator(cpu=True, zstore_config={})
    assert _schedule_free(ours) == plain
    ours.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
