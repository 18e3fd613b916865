"""A loop of accelerate's with its DeepSpeedPlugin on zstore, beside the same without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.integrations.trainers import Texts, config, llama, open_door, plain_again
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


def loop(out: Path, ds: Any = None, **plugin: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train an epoch, save, train another, load, and repeat it; return the losses, and the weights as they are saved."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState

    plain_again()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)  # several ranks on CPUs
    given = None if ds is None else DeepSpeedPlugin(hf_ds_config=ds, gradient_accumulation_steps=2, **plugin)
    accelerator = Accelerator(deepspeed_plugin=given, gradient_accumulation_steps=2, cpu=given is None)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Texts(16), batch_size=2), schedule
    )

    def epoch() -> list[float]:
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *schedule.get_last_lr()]

    losses = epoch()
    accelerator.save_state(os.fspath(out / "state"))
    second = epoch()
    accelerator.load_state(os.fspath(out / "state"))
    assert epoch() == second
    accelerator.save_model(model, out / "weights")
    accelerator.wait_for_everyone()
    saved = load_file(out / "weights" / "model.safetensors")
    accelerator.free_memory()
    return losses + second, saved


def _beside(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder)
    wanted, expected = loop(place / "plain")
    for stage in (2, 3):
        ds = config(place / "nvme", stage=stage, checkpoint={"writer": {"decoupled": True}}, gradient_clipping=1.0)
        del ds["optimizer"]
        found, saved = loop(place / str(stage), ds)
        assert found == pytest.approx(wanted, rel=1e-4)
        torch.testing.assert_close(saved, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_has_the_losses_and_weights_that_it_has_alone(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, world_size, os.fspath(tmp_path))


def _disagreeing(rank: int) -> None:
    open_door()
    import accelerate.state
    import deepspeed

    alone = {"num_processes": 1, "distributed_type": "DistributedType.DEEPSPEED"}
    accelerate.state.PartialState._shared_state.update(alone)
    with pytest.raises(UsageError, match=r"there are 2 ranks, and accelerate knows of 1.*use_cpu=True"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={})


def test_ranks_that_accelerate_does_not_know_of_are_refused() -> None:
    run_ranks(_disagreeing, 2)
