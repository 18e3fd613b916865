"""Bad input to the engine, and bad checkpoints: a clear error, nothing lost, and the engine as usable as before."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import zstore
from tests.checkpoint.forging import Forge
from tests.engine.bits import Case, Run, digest
from tests.engine.models import Net, batch, make_net
from tests.engine.runs import make_config, start, state_of, step, unchanged, whole
from zstore.engine import Engine
from zstore.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    NonFiniteError,
    RunFolderError,
    StorageError,
    UsageError,
)
from zstore.testing.ranks import run_ranks


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


Given = Callable[[Net], dict[str, Any]]
REFUSED: dict[str, tuple[type[Exception], Given, str]] = {
    "stage 4": (
        ConfigError,
        lambda m: {"config": make_config(zero_optimization={"stage": 4})},
        r"stage: choose one of 0, 1, 2, 3; got 4",
    ),
    "no config": (ConfigError, lambda m: {"config": None}, r"initialize\(\) got no config"),
    "two configs": (ConfigError, lambda m: {"config_params": make_config(seed=2)}, "config and config_params: pass"),
    "no optimizer": (ConfigError, lambda m: {"config": make_config(optimizer=None)}, r"no optimizer"),
    "no model": (UsageError, lambda m: {"model": None}, r"expected a torch.nn.Module, got None"),
    "model parallelism": (UsageError, lambda m: {"mpu": object()}, r"omit mpu"),
    "all frozen": (UsageError, lambda m: {"model": frozen()}, r"no trainable parameter"),
    "no parameters": (UsageError, lambda m: {"model_parameters": []}, r"no trainable parameter"),
    "another model's optimizer": (
        UsageError,
        lambda m: {"optimizer": torch.optim.AdamW(make_net().parameters())},
        r"not one of the model's: create the optimizer from the parameters of the model",
    ),
    "optimizer of no kind": (UsageError, lambda m: {"optimizer": object()}, r"expected a torch optimizer, got object"),
    "optimizer that is not element-wise": (
        UsageError,
        lambda m: {"optimizer": torch.optim.LBFGS(m.norm.parameters())},
        r"LBFGS .* use one of SGD",
    ),
    "scheduler of no kind": (UsageError, lambda m: {"lr_scheduler": 3}, "a scheduler or a function of the optimizer"),
    "no samples": (UsageError, lambda m: {"training_data": TensorDataset(torch.zeros(0))}, "has 0 samples"),
    "a stream of samples": (UsageError, lambda m: {"training_data": Stream()}, "with a length and an index"),
    "no values": (UsageError, lambda m: {"model": on_meta()}, r"on the meta device"),
    "two parameters in one memory": (UsageError, lambda m: {"model": in_one_memory()}, "memory but are two objects"),
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
    kind, arguments, message = REFUSED[case]
    model = make_net()
    kwargs = {"model": model, "config": make_config(), **arguments(model)}
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
        (tmp_path / "file" / "below", RunFolderError, r"expected a folder, or one that can be created.*below"),
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


def poison(rank: int, world_size: int, stage: int, tier: str, precision: str) -> None:
    """Between steps of the plain loop's bits, take one whose loss is NaN, then infinite, on the last rank."""
    with Run(Case(stage, tier, precision, 2, 0.0), rank, world_size) as run:
        assert run.step() == []
        before = state_of(run.engine)
        for factor in (float("nan"), float("inf")):
            message = r"step 2: .* no parameter and no optimizer state was changed"
            with pytest.raises(NonFiniteError, match=message):
                step(run.engine, factor if rank == world_size - 1 else 1.0)
            assert not run.engine.was_step_applied()
            after = state_of(run.engine)
            # The calls of step() are counted, nothing else.
            assert after.pop("counters")[:2] == (1, 0)
            assert after == {key: value for key, value in before.items() if key != "counters"}
        assert run.step() + run.step() + run.differences() == []
        assert run.engine.global_steps == 3


@pytest.mark.parametrize(
    ("stage", "tier", "precision"), [(0, "none", "fp32"), (1, "cpu", "bf16"), (2, "none", "bf16"), (3, "nvme", "fp32")]
)
def test_a_loss_that_is_nan_leaves_every_bit_as_it_was(stage: int, tier: str, precision: str) -> None:
    poison(0, 1, stage, tier, precision)


@pytest.mark.parametrize(("stage", "tier"), [pytest.param(1, "none", marks=pytest.mark.soak), (3, "nvme")])
def test_a_loss_that_is_nan_on_one_rank_is_an_error_on_all(stage: int, tier: str) -> None:
    run_ranks(poison, 2, 2, stage, tier, "bf16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def engine(nvme: Path) -> Iterator[Engine]:
    with start(make_config(3, "nvme", nvme)) as engine:
        step(engine)
        yield engine


@pytest.fixture
def goes_on(engine: Engine) -> Iterator[None]:
    with unchanged(engine):
        yield


UNSTORABLE: list[tuple[Any, str]] = [
    ({"a": [1, {"b": object()}]}, r"client_state.*\['a'\]\[1\]\['b'\] is a builtins.object.* convert it"),
    ({"seen": {1, 2}}, r"\['seen'\] is a builtins.set"),
    ({"raw": b"x"}, r"\['raw'\] is a builtins.bytes"),
    ({"net": nn.Linear(1, 1)}, r"\['net'\] is a torch.nn.modules.linear.Linear"),
    ({"by_epoch": {1: 0.5}}, r"key 1 is a int.* convert it"),
    ({"z": torch.zeros(2, dtype=torch.complex128)}, r"client_state: the tensor at 'z' cannot be stored"),
    ({"s": torch.eye(2).to_sparse()}, r"client_state: the tensor at 's' cannot be stored"),
    ({"m": torch.empty(2, device="meta")}, r"client_state: the tensor at 'm' cannot be stored"),
    ({"x": {"$tensor": "y"}}, r"'\$tensor' at 'x' is a reserved key; rename it"),
    ({"n": np.array(["a"])}, r"client_state: the array at 'n' cannot be stored"),
    ({"n": np.complex128(1)}, r"\['n'\] is a builtins.complex"),
    (Namespace(func=print), r"\['func'\] is a builtins.builtin_function_or_method"),
    ([1, 2], r"client_state: expected a dict, got list"),
    ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, r"'a.b'.* rename"),
]


@pytest.mark.usefixtures("goes_on")
def test_client_state_that_cannot_be_stored_is_named_and_nothing_is_written(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "good", {"epoch": 1})
    left = sorted(folder.iterdir())
    for state, message in UNSTORABLE:
        with pytest.raises(UsageError, match=message):
            engine.save_checkpoint(str(folder), "bad", state)
    for tag in ("", "a/b", "..", "x\n", "/"):
        with pytest.raises(UsageError, match="cannot be a tag"):
            engine.save_checkpoint(str(folder), tag)
    assert sorted(folder.iterdir()) == left
    assert engine.load_checkpoint(str(folder)) == (str(folder / "good"), {"epoch": 1})


@pytest.mark.usefixtures("goes_on")
def test_a_folder_that_cannot_be_written_fails_the_save_alone(engine: Engine, folder: Path) -> None:
    for bad in ("/proc/ckpt", f"{__file__}/ckpt"):
        with pytest.raises(StorageError, match=f"cannot create the folder.*{bad}"):
            engine.save_checkpoint(bad)
    engine.save_checkpoint(str(folder))
    assert whole(folder) == ["step-00000001"]


@pytest.mark.usefixtures("goes_on")
def test_a_missing_checkpoint_is_named(engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.load_checkpoint(str(folder)) == (None, {})
    assert f"there is no checkpoint in {folder}: training starts from the beginning" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=f"{folder}"):
        engine.load_checkpoint(str(folder), "best")
    engine.save_checkpoint(str(folder), "good")
    with pytest.raises(CheckpointNotFoundError, match=r"(?s)'best'.*good"):
        engine.load_checkpoint(str(folder), "best")


@pytest.mark.usefixtures("goes_on")
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(engine: Engine, folder: Path) -> None:
    def save(name: str, model: nn.Module, **kwargs: Any) -> None:
        with start(make_config(scheduler=None), model, **kwargs) as other:
            other.save_checkpoint(str(folder), name)

    save("shallow", make_net(layers=1))
    save("wide", make_net(width=64))
    net = make_net()
    save("sgd", net, optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9))
    net = make_net()
    groups = [{"params": [p]} for p in net.parameters() if p.requires_grad]
    save("groups", net, optimizer=torch.optim.AdamW(groups))
    refused = {
        "shallow": r"(?s)from a different model or optimizer:.*missing: model/blocks\.1\.norm\.weight.*and 8 more",
        "wide": r"(?s)model/embed\.weight: shape \(1203, 64\) in the checkpoint, \(1203, 56\) in the model",
        "sgd": r"(?s)missing: optimizer/exp_avg/start.*not in the model or its optimizer: optimizer/momentum_buffer/",
        "groups": r"parameter groups, the optimizer has 1: create the same groups",
    }
    for tag, message in refused.items():
        with pytest.raises(CheckpointMismatchError, match=message) as caught:
            engine.load_checkpoint(str(folder), tag)
        assert not hasattr(caught.value, "__notes__")


def damage_cut(file: Path) -> None:
    file.chmod(0o644)
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {"missing": Path.unlink, "truncated": damage_cut}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("array", ["model/embed.weight", "optimizer/exp_avg_sq/norm.bias"])
def test_a_damaged_checkpoint_is_refused(kind: str, array: str, engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "good")
    good = state_of(engine)
    step(engine)
    engine.save_checkpoint(str(folder), "bad")
    DAMAGE[kind](next((folder / "bad" / array).glob("c.0*")))
    with pytest.raises(CorruptionError, match=f"{array}.*") as caught:
        engine.load_checkpoint(str(folder))
    assert "load another checkpoint before continuing" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="the state is inconsistent; load a checkpoint"):
        engine.save_checkpoint(str(folder), "mixed")
    with pytest.raises(UsageError, match="the state is inconsistent; load a checkpoint"):
        step(engine)
    engine.load_checkpoint(str(folder), "good")
    assert state_of(engine) == good
    step(engine)


def test_records_and_manifests_are_checked_before_anything_is_changed(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "a")
    before = state_of(engine)
    (folder / "a" / "manifest" / "rank-00000.json").unlink()
    with pytest.raises(CorruptionError, match="rank-00000"):
        engine.load_checkpoint(str(folder), "a")
    assert state_of(engine) == before


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "no engine": lambda state: state.update(engine=[]),
    "no counters": lambda state: state["engine"].pop("counters"),
    "a counter as text": lambda state: state["engine"]["counters"].update(global_steps="7"),
    "a negative counter": lambda state: state["engine"]["counters"].update(global_steps=-1),
    "a counter more": lambda state: state["engine"]["counters"].update(other=1),
    "groups of no kind": lambda state: state["engine"].update(groups=[1]),
    "a learning rate as text": lambda state: state["engine"]["groups"][0].update(lr="0.1"),
    "parameters in a group": lambda state: state["engine"]["groups"][0].update(params=[]),
    "scalars as text": lambda state: state["engine"].update(scalars="x"),
    "a scalar as a list": lambda state: next(iter(state["engine"]["scalars"].values())).update(step=[1]),
    "a schedule of no kind": lambda state: state["engine"].update(schedule=[1, 2]),
    "a position as text": lambda state: state["engine"].update(schedule={"$items": [[{}, 1]]}),
    "a tensor that is not there": lambda state: state.update(client_state={"x": {"$tensor": "client/none"}}),
    "a tensor of no name": lambda state: state.update(client_state={"x": {"$tensor": [1]}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_state_that_no_engine_saves_is_an_error_of_ours(case: str, engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "good", {"epoch": 1})
    good = state_of(engine)
    engine.save_checkpoint(str(folder), "bad")
    forge = Forge(folder / "bad")
    forge.edit("zstore.json", lambda record: HOSTILE[case](record["state"]))
    with pytest.raises((CorruptionError, CheckpointMismatchError)) as caught:
        engine.load_checkpoint(str(folder), "bad")
    assert len(str(caught.value)) < 1000
    engine.load_checkpoint(str(folder), "good")
    assert state_of(engine) == good


def test_generators_that_no_engine_saves_are_an_error_of_ours(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "bad")
    forge = Forge(folder / "bad")
    for state in ({"torch": "x"}, {"torch": "", "python": [], "numpy": []}, {"python": 1}):
        forge.edit("manifest/rank-00000.json", lambda manifest, state=state: manifest.update(rank_state=state))
        with pytest.raises(CorruptionError, match="state of the random number generators"):
            engine.load_checkpoint(str(folder), "bad")
