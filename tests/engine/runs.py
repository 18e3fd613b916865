"""Engines over the small model, their steps, and what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zstore
from tests.engine.bits import digest, engine_digests
from tests.engine.models import batch, make_net
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.report.statistics import EngineStatistics
from zstore.io import LinkStatistics

# Small tensors on a busy machine: threads would wait for each other.
torch.set_num_threads(1)

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def make_config(stage: int = 1, tier: str = "none", nvme: Any = "", own: str = "none", **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    for section, device in (("offload_optimizer", tier), ("offload_param", own)):
        if device != "none":
            zero[section] = {"device": device} | ({"nvme_path": str(nvme)} if device == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
    } | keys


def placed(zero: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """The section `zero`, each of whose drives is at `folder`."""
    return {
        key: {**value, "nvme_path": str(folder)} if isinstance(value, dict) and value["device"] == "nvme" else value
        for key, value in zero.items()
    }


def start(config: dict[str, Any] | None = None, model: nn.Module | None = None, **kwargs: Any) -> Engine:
    return zstore.initialize(model=model or make_net(), config=config or make_config(), **kwargs)[0]


def step(engine: Engine, factor: float = 1.0) -> None:
    """One step on the data of its number; `factor` times the loss of the first micro-batch."""
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(*batch(engine.global_steps, micro, engine.global_rank))
        engine.backward(loss * factor if micro == 0 else loss)
        engine.step()


def moved_since(engine: Engine, before: EngineStatistics) -> dict[str, LinkStatistics]:
    return {n: link.since(before.links.get(n, LinkStatistics())) for n, link in engine.statistics().links.items()}


def take_steps(engine: Engine, count: int) -> None:
    """Take steps; of an update behind a step, the next one tells."""
    for _ in range(count):
        step(engine)


def state_of(engine: Engine) -> dict[str, Any]:
    training = engine.training_state
    scheduler = engine.lr_scheduler
    return {
        **engine_digests(engine),
        "buffer": digest(engine.get_buffer("module.shift")),
        "scalars": {record.name: dict(scalars) for record, scalars in training.state.scalars.items()},
        "counters": (engine.global_steps, engine.skipped_steps, engine.micro_steps),
        "lr": engine.get_lr(),
        "schedule": None if scheduler is None else scheduler.state_dict(),
    }


@contextmanager
def unchanged(engine: Engine, steps: int = 1) -> Iterator[None]:
    """The block leaves every bit of `engine`, `steps` old, as it was; then it trains as one that saw no error."""
    before = state_of(engine)
    yield
    assert state_of(engine) == before
    step(engine)
    with start(make_config(3)) as other:
        for _ in range(steps + 1):
            step(other)
        assert state_of(engine) == state_of(other)


def whole(folder: Path) -> list[str]:
    """The tags of a folder, of which each is without a fault."""
    found = [info.tag for info in tags(folder)]
    for tag in found:
        with open_checkpoint(folder, tag) as opened:
            faults = verify_checkpoint(opened)
            assert not faults, faults
    return found


def constant_rate_config(**keys: Any) -> dict[str, Any]:
    return make_config(0, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, scheduler=None, **keys)


def resume_config(stage: int, tier: str, folder: str, micro_batch: int = 2) -> dict[str, Any]:
    """Of twelve samples a step."""
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": micro_batch}
    found = make_config(stage, tier, folder, gradient_clipping=1.0, **sizes)
    del found["gradient_accumulation_steps"]
    return found


def train_by_sample(engine: Engine, steps: int) -> list[float]:
    """Train from where the engine stands; return this rank's losses. Data depends on the global sample number alone."""
    losses = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            number = micro * engine.world_size + engine.global_rank
            loss = engine(*batch(engine.global_steps, 0, number))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def linear_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": 0,
    } | changes


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def start_linear(model: nn.Module | None = None, **changes: Any) -> Engine:
    engine, *_ = zstore.initialize(model=model or linear(), config=linear_config(**changes))
    return engine


def one_step(engine: Engine, x: torch.Tensor | None = None) -> float:
    x = torch.ones(2, 8, dtype=next(engine.parameters()).dtype) if x is None else x
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())
