"""Gradients and weights that loops and callbacks of others change in place, beside the same runs without zstore."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as torch_dist
import transformers
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

import zstore.accelerate
import zstore.hf
from tests.integrations.lightning_runs import Net, fit, make_net, make_trainer
from tests.integrations.trainers import Texts, arguments, history, llama
from zstore.errors import UsageError
from zstore.lightning import ZstoreStrategy

PLACES = ["whole", "disk"]
APART = ["whole", "masters on disk"]


def _config(where: str, folder: Path) -> dict[str, Any]:
    if where == "whole":
        return {"zero_optimization": {"stage": 0}}
    offload = {"device": "nvme", "nvme_path": str(folder)}
    if where == "masters on disk":
        return {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    shards = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {**shards, "offload_optimizer": offload, "offload_param": offload}}


class _Watches(transformers.TrainerCallback):  # type: ignore[misc]
    """Logs the norm of the gradients, and halves those of one layer."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        found = [p.grad.detach().data.norm(2) for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(found).norm(2)))
        for name, parameter in model.named_parameters():
            if "layers.0" in name and parameter.grad is not None:
                parameter.grad.data.mul_(0.5)


class _Clamps(transformers.TrainerCallback):  # type: ignore[misc]
    """Clamps weights after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.02, 0.02)


def _trained(kind: Any, callback: Any, folder: Path, **more: Any) -> Any:
    made = arguments(
        folder, max_steps=4, gradient_accumulation_steps=2, max_grad_norm=0.2, lr_scheduler_type="constant"
    )
    trainer = kind(model=llama(), args=made, train_dataset=Texts(16), callbacks=[callback], **more)
    trainer.train()
    return trainer


@pytest.mark.parametrize("where", PLACES)
def test_a_callback_of_trainer_reads_and_scales_gradients(where: str, tmp_path: Path) -> None:
    wanted, found = _Watches(), _Watches()
    plain = _trained(transformers.Trainer, wanted, tmp_path / "plain")
    ours = _trained(zstore.hf.Trainer, found, tmp_path / "ours", zstore_config=_config(where, tmp_path))
    assert all(norm == pytest.approx(0.2, rel=1e-4) for norm in wanted.norms)  # after clipping
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), rel=1e-5)
    ours.close()


@pytest.mark.parametrize("where", APART)
def test_a_callback_of_trainer_clamps_weights(where: str, tmp_path: Path) -> None:
    plain = _trained(transformers.Trainer, _Clamps(), tmp_path / "plain")
    ours = _trained(zstore.hf.Trainer, _Clamps(), tmp_path / "ours", zstore_config=_config(where, tmp_path))
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), rel=1e-5)
    for name, value in plain.model.named_parameters():
        torch.testing.assert_close(ours.engine.get_full_parameter(name), value.detach())
        assert value.abs().max() <= 0.02
    ours.close()


@pytest.mark.parametrize("where", [*PLACES, "masters on disk"])
def test_the_optimizer_of_a_trainer_has_state_and_its_model_is_copied(where: str, tmp_path: Path) -> None:
    plain = _trained(transformers.Trainer, _Watches(), tmp_path / "plain")
    ours = _trained(zstore.hf.Trainer, _Watches(), tmp_path / "ours", zstore_config=_config(where, tmp_path))
    wanted, found = plain.optimizer.state_dict(), ours.optimizer.state_dict()
    assert found["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"] == 0.01
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in wanted["param_groups"]]
    assert found["state"].keys() == wanted["state"].keys()
    for state in (found, copy.deepcopy(found)):
        for number, slots in wanted["state"].items():
            torch.testing.assert_close(dict(state["state"][number]), slots, rtol=1e-3, atol=1e-6)
    parameter = next(ours.model.parameters())
    assert set(ours.optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    copied = copy.deepcopy(ours.model)
    ours.close()
    for (name, value), one in zip(plain.model.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(one, value, msg=name)
    batch = {name: value[None] for name, value in Texts(1)[0].items()}
    assert copied(**batch).loss.item() == pytest.approx(plain.model(**batch).loss.item())  # no hooks of the engine


def test_a_callback_that_clamps_sharded_weights_is_told(tmp_path: Path) -> None:
    class Zeroes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight)

    with pytest.raises(UsageError, match=r"up_proj.weight' outside of a forward: it is sharded"):
        _trained(zstore.hf.Trainer, Zeroes(), tmp_path / "ours", zstore_config=_config("disk", tmp_path))


@pytest.mark.parametrize("where", PLACES)
def test_a_loop_of_accelerate_clips_with_torch(where: str, tmp_path: Path) -> None:
    def run(accelerator: Any) -> list[float]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(12), batch_size=2))
        seen = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
                    if where == "whole":
                        accelerator.clip_grad_value_(model.parameters(), 1e-3)
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.grad.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        accelerator.free_memory()
        return seen

    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "cpu": True}
    wanted = run(accelerate.Accelerator(**settings))
    assert min(wanted[::3]) > 0.2
    ours = zstore.accelerate.Accelerator(zstore_config=_config(where, tmp_path), **settings)
    assert run(ours) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("where", APART)
def test_a_loop_of_accelerate_clamps_weights(where: str, tmp_path: Path) -> None:
    def run(accelerator: Any) -> list[float]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(8), batch_size=2))
        seen = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.02, 0.02)
        accelerator.free_memory()
        return seen

    wanted = run(accelerate.Accelerator(cpu=True))
    ours = zstore.accelerate.Accelerator(zstore_config=_config(where, tmp_path), cpu=True)
    assert run(ours) == pytest.approx(wanted, rel=1e-5)


@pytest.fixture
def group_of_lightning() -> Iterator[None]:
    """Destroy the process group that Lightning's strategy makes, and leaves until the process ends."""
    yield
    torch_dist.destroy_process_group()


class _ClampsItself(Net):
    """Clamps weights after each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.05, 0.05)


@pytest.mark.usefixtures("group_of_lightning")
@pytest.mark.parametrize("where", APART)
def test_a_module_of_lightning_clamps_weights(where: str, tmp_path: Path) -> None:
    def run(strategy: Any) -> list[float]:
        options = {"max_epochs": 1, "accumulate_grad_batches": 1, "plugins": []}
        trainer = make_trainer(strategy, default_root_dir=tmp_path, **options)
        return fit(trainer, make_net(_ClampsItself, dropout=0.0), 0)

    strategy = ZstoreStrategy(_config(where, tmp_path))
    found = run(strategy)
    strategy.close()
    assert found == pytest.approx(run("auto"), rel=1e-4)


class _Clips(Net):
    """Clips by itself before the step, and logs the norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.losses.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


class _ClipsItself(_Clips):
    """Takes its steps itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()
        return loss


@pytest.mark.usefixtures("group_of_lightning")
@pytest.mark.parametrize("kind", [_Clips, _ClipsItself])
@pytest.mark.parametrize("where", PLACES)
def test_a_module_of_lightning_clips_and_logs_gradients(where: str, kind: Any, tmp_path: Path) -> None:
    def run(strategy: Any) -> list[float]:
        accumulated = 1 if kind is _ClipsItself else 3
        options = {"max_epochs": 1, "gradient_clip_val": None, "accumulate_grad_batches": accumulated, "plugins": []}
        trainer = make_trainer(strategy, default_root_dir=tmp_path, **options)
        return fit(trainer, make_net(kind, dropout=0.0), 0)

    wanted = run("auto")
    strategy = ZstoreStrategy(_config(where, tmp_path))
    found = run(strategy)
    strategy.close()
    assert found == pytest.approx(wanted, rel=1e-4)
