"""Checkpoints that cannot be saved or loaded: a clear error, nothing lost, and the engine as usable as before."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.forging import Forge
from tests.engine.models import make_net
from tests.engine.runs import make_config, start, state_of, step, unchanged, whole
from zstore.engine import Engine
from zstore.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    StorageError,
    UsageError,
)


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
    """The test changes nothing."""
    with unchanged(engine):
        yield


# -- saving ---------------------------------------------------------------------------------------------------------

UNSTORABLE: list[tuple[Any, str]] = [
    ({"a": [1, {"b": object()}]}, r"client_state.*\['a'\]\[1\]\['b'\] is a builtins.object.* convert it"),
    ({"seen": {1, 2}}, r"\['seen'\] is a builtins.set"),
    ({"raw": b"x"}, r"\['raw'\] is a builtins.bytes"),
    ({"net": nn.Linear(1, 1)}, r"\['net'\] is a torch.nn.modules.linear.Linear"),
    ({"by_epoch": {1: 0.5}}, r"key 1 is a int.* convert it"),
    (
        {"z": torch.zeros(2, dtype=torch.complex128)},
        r"client_state: the tensor at 'z' cannot be stored",
    ),
    ({"s": torch.eye(2).to_sparse()}, r"client_state: the tensor at 's' cannot be stored"),
    (
        {"m": torch.empty(2, device="meta")},
        r"client_state: the tensor at 'm' cannot be stored",
    ),
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


# -- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("goes_on")
def test_a_checkpoint_that_is_not_there_is_named(
    engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.load_checkpoint(str(folder)) == (None, {})
    assert f"there is no checkpoint in {folder}: training starts from the beginning" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=f"{folder}"):
        engine.load_checkpoint(str(folder), "best")
    engine.save_checkpoint(str(folder), "good")
    with pytest.raises(CheckpointNotFoundError, match=r"(?s)'best'.*good"):
        engine.load_checkpoint(str(folder), "best")


@pytest.mark.usefixtures("goes_on")
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_differences(
    engine: Engine, folder: Path
) -> None:
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
        "shallow": r"(?s)of another model or optimizer:.*missing: model/blocks\.1\.norm\.weight.*and 8 more",
        "wide": r"(?s)model/embed\.weight: shape \(1203, 64\) in the checkpoint, \(1203, 56\) here",
        "sgd": r"(?s)missing: optimizer/exp_avg/start.*not in the model or its optimizer: optimizer/momentum_buffer/",
        "groups": r"parameter groups, the optimizer has 1: make the same groups",
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
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_loads(
    kind: str, array: str, engine: Engine, folder: Path
) -> None:
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
