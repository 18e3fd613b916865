"""Bad input to the engine: a clear error, nothing lost, and the engine as usable as before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import zstore
from tests.engine.bits import digest
from tests.engine.models import Net, batch, make_net
from tests.engine.runs import make_config, start, state_of, step, unchanged
from zstore.errors import ConfigError, NonFiniteError, RunFolderError, UsageError
from zstore.testing.ranks import run_ranks

# -- initialize -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return make_net()


def in_one_memory() -> nn.Module:
    net = make_net()
    net.unused.bias.data = net.frozen.weight.data[0, :33]
    return net


def frozen() -> nn.Module:
    return make_net().requires_grad_(False)


def zero(**keys: Any) -> dict[str, Any]:
    return make_config(zero_optimization=keys)


REFUSED: dict[str, tuple[Callable[[Net], dict[str, Any]], type[Exception], str]] = {
    "stage 4": (lambda m: {"config": zero(stage=4)}, ConfigError, r"stage: choose one of 0, 1, 2, 3; got 4"),
    "no config": (lambda m: {}, ConfigError, r"initialize\(\) got no config"),
    "two configs": (
        lambda m: {"config": make_config(), "config_params": make_config(seed=2)},
        ConfigError,
        r"config and config_params: pass one",
    ),
    "no optimizer": (lambda m: {"config": make_config(optimizer=None)}, ConfigError, r"no optimizer"),
    "no model": (
        lambda m: {"model": None, "config": make_config()},
        UsageError,
        r"expected a torch.nn.Module, got None",
    ),
    "model parallelism": (lambda m: {"mpu": object(), "config": make_config()}, UsageError, r"leave mpu out"),
    "all frozen": (lambda m: {"model": frozen(), "config": make_config()}, UsageError, r"no trainable parameter"),
    "no parameters": (
        lambda m: {"model_parameters": [], "config": make_config()},
        UsageError,
        r"no trainable parameter",
    ),
    "another model's optimizer": (
        lambda m: {"optimizer": torch.optim.AdamW(make_net().parameters()), "config": make_config()},
        UsageError,
        r"not one of the model's: make the optimizer from the parameters of the model",
    ),
    "optimizer of no kind": (
        lambda m: {"optimizer": object(), "config": make_config()},
        UsageError,
        r"expected a torch optimizer, got object",
    ),
    "optimizer that is not element-wise": (
        lambda m: {"optimizer": torch.optim.LBFGS(m.norm.parameters()), "config": make_config()},
        UsageError,
        r"LBFGS .* use one of SGD",
    ),
    "scheduler of no kind": (
        lambda m: {"lr_scheduler": 3, "config": make_config()},
        UsageError,
        r"expected a scheduler or a function of the optimizer, got int",
    ),
    "no samples": (
        lambda m: {"training_data": TensorDataset(torch.zeros(0)), "config": make_config()},
        UsageError,
        r"training_data has 0 samples",
    ),
    "a stream of samples": (
        lambda m: {"training_data": Stream(), "config": make_config()},
        UsageError,
        r"expected a data set with a length and an index, got Stream",
    ),
    "no values": (lambda m: {"model": on_meta(), "config": make_config()}, UsageError, r"on the meta device"),
    "two parameters in one memory": (
        lambda m: {"model": in_one_memory(), "config": make_config()},
        UsageError,
        r"share memory but are two objects",
    ),
}


def all_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (tensor.dtype, None if tensor.is_meta else digest(tensor.reshape(-1)))
        found[f"{name}.grad"] = None if tensor.grad is None else id(tensor.grad)
    found["hooks"] = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_initialize_refuses_before_it_changes_anything(case: str) -> None:
    arguments, kind, message = REFUSED[case]
    model = make_net()
    kwargs = {"model": model, **arguments(model)}
    given = kwargs["model"] if kwargs["model"] is not None else model
    before = all_of(given)
    with pytest.raises(kind, match=message):
        zstore.initialize(**kwargs)
    assert all_of(given) == before


def test_initialize_without_a_usable_nvme_path_leaves_the_model_as_it_is(tmp_path: Path, nvme: Path) -> None:
    model = make_net()
    model(*batch(0, 0, 0)).backward()
    before = all_of(model)
    (tmp_path / "file").touch()
    unusable: list[tuple[Path | str, type[Exception], str]] = [
        (tmp_path / "file" / "below", RunFolderError, r"expected a folder, or one that can be made.*below"),
        ("/proc", RunFolderError, r"cannot be written; give one that this user may write.*/proc"),
    ]
    with start(make_config(1, "nvme", nvme)) as first, start(make_config()) as alone:
        step(first)
        for path, kind, message in unusable:
            with pytest.raises(kind, match=message):
                start(make_config(3, "nvme", path), model)
        assert all_of(model) == before
        # Nothing of the run that holds the folder was swept.
        step(first)
        step(alone)
        step(alone)
        assert state_of(first) == state_of(alone)
    assert not (tmp_path / "missing").exists()
    with start(make_config(3, "nvme", nvme), model) as late:
        step(late)


# -- the loop -------------------------------------------------------------------------------------------------------


def test_calls_in_the_wrong_order_or_with_the_wrong_loss_are_named(nvme: Path) -> None:
    ids = batch(0, 0, 0)
    with start(make_config(3, "nvme", nvme)) as engine:
        step(engine)
        with unchanged(engine):
            with pytest.raises(UsageError, match=r"step\(\) without engine.backward\(loss\): call both"):
                engine.step()
            with pytest.raises(UsageError, match=r"a loss of one element, got shape \(3,\); take its mean"):
                engine.backward(engine(*ids) * torch.ones(3))
            with pytest.raises(UsageError, match="a loss that needs no gradient"):
                engine.backward(engine(*ids).detach())
            with torch.no_grad(), pytest.raises(UsageError, match="a loss that needs no gradient"):
                engine.backward(engine(*ids))
            with pytest.raises(IndexError):
                engine(torch.tensor([[9999, 3]]))
            with pytest.raises(AttributeError, match=r"the engine has no attribute 'fly'; of its model: 'Net' object"):
                engine.fly()


def poison(rank: int, folder: str, stage: int, tier: str, precision: str, bad_rank: int) -> None:
    """Train with a loss that is NaN, then infinite, on one rank, and without: the same bits."""
    found: dict[str, Any] = {}
    for name in ("poisoned", "clean"):
        nvme = f"{folder}/{name}"
        keys = {"bf16": {"enabled": precision == "bf16"}}
        os.makedirs(nvme, exist_ok=True)
        with start(make_config(stage, tier, nvme, **keys)) as engine:
            step(engine)
            if name == "poisoned":
                before = state_of(engine)
                for factor in (float("nan"), float("inf")):
                    message = r"step 2: .* no parameter and no optimizer state was changed"
                    with pytest.raises(NonFiniteError, match=message):
                        step(engine, factor if rank == bad_rank else 1.0)
                    assert not engine.was_step_applied()
                    after = state_of(engine)
                    # The calls of step() are counted, nothing else.
                    assert after.pop("counters")[:2] == (1, 0)
                    assert after == {key: value for key, value in before.items() if key != "counters"}
            step(engine)
            step(engine)
            found[name] = {key: value for key, value in state_of(engine).items() if key != "counters"}
            assert engine.global_steps == 3
    assert found["poisoned"] == found["clean"]


@pytest.mark.parametrize(
    ("stage", "tier", "precision"), [(0, "none", "fp32"), (1, "cpu", "bf16"), (2, "none", "bf16"), (3, "nvme", "fp32")]
)
def test_a_loss_that_is_nan_leaves_every_bit_as_it_was(tmp_path: Path, stage: int, tier: str, precision: str) -> None:
    poison(0, str(tmp_path), stage, tier, precision, 0)


@pytest.mark.parametrize(("stage", "tier"), [pytest.param(1, "none", marks=pytest.mark.soak), (3, "nvme")])
def test_a_loss_that_is_nan_on_one_rank_is_an_error_on_all(tmp_path: Path, stage: int, tier: str) -> None:
    run_ranks(poison, 2, str(tmp_path), stage, tier, "bf16", 1)
