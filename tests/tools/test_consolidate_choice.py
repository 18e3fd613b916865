"""`zstore consolidate --include --exclude --exclude-frozen`: which weights are written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.checkpoint.checkpoints import save_arrays
from tests.engine.models import make_net
from tests.engine.runs import make_config, start
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import CheckpointMismatchError
from zstore.sizes import format_count
from zstore.tools.consolidate import Which, consolidate_command
from zstore.tools.opening import Common
from zstore.weights.choose import choose, frozen_weights

ONE = np.ones((4, 3), np.float32)
WEIGHTS = {f"model/{name}": ONE * i for i, name in enumerate(("h.0.w", "h.1.w", "h.10.w", "norm.bias", "odd[0].w"), 1)}
ADAM = {f"optimizer/exp_avg/{name}": ONE for name in ("h.1.w", "norm.bias")}


def written(folder: Path, out: Path, which: Which) -> set[str]:
    assert consolidate_command(folder, out, "fp32", 10**9, "error", which=which) == 0
    found = load_file(out / "model.safetensors")
    assert all(np.array_equal(found[name], WEIGHTS[f"model/{name}"]) for name in found)
    return set(found)


@pytest.mark.parametrize(
    ("which", "names"),
    [
        (Which(include=("h.*",)), {"h.0.w", "h.1.w", "h.10.w"}),
        (Which(include=("h.*", "odd[0].w"), exclude=("h.1.*",)), {"h.0.w", "h.10.w", "odd[0].w"}),
        (Which(exclude=("*.w",)), {"norm.bias"}),
        (Which(include=("h.?.w",)), {"h.0.w", "h.1.w"}),
        (Which(exclude_frozen=True), {"h.1.w", "norm.bias"}),
        (Which(include=("h.*",), exclude_frozen=True), {"h.1.w"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the order of a set differs by process
)
def test_what_is_chosen_is_written(
    which: Which, names: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_arrays(tmp_path / "ckpt", WEIGHTS | ADAM)
    assert written(tmp_path / "ckpt", tmp_path / "out", which) == names
    plan, *_ = capsys.readouterr().err.splitlines()
    assert plan.startswith(f"plan: {format_count(len(names), 'tensor')} as fp32")
    assert f"leaving out {len(WEIGHTS) - len(names)}: " in plan


def test_a_pattern_without_a_match_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    save_arrays(tmp_path / "ckpt", WEIGHTS)
    for which in (Which(include=("h.0.weight",)), Which(exclude=("norm.weight",))):
        with pytest.raises(CheckpointMismatchError, match="matches none of the 5 names; close matches: "):
            consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", 10**9, "error", which=which)
    with pytest.raises(CheckpointMismatchError, match="has 5 weights, and the options leave out all of them"):
        consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", 10**9, "error", which=Which(exclude=("*",)))
    assert not (tmp_path / "out").exists()


def test_frozen_parameters_are_known_by_the_record_too(tmp_path: Path) -> None:
    record = {"engine": {"scalars": {"h.0.w": {"step": 3.0}}}}
    save_arrays(tmp_path / "sgd", WEIGHTS, record=record)
    with open_checkpoint(tmp_path / "sgd") as source:
        assert frozen_weights(source) == {name.partition("/")[2] for name in WEIGHTS} - {"h.0.w"}


def test_without_any_state_it_cannot_be_known_which_are_frozen(tmp_path: Path) -> None:
    save_arrays(tmp_path, WEIGHTS, record={"engine": {"scalars": "odd"}})
    with open_checkpoint(tmp_path) as source, pytest.raises(CheckpointMismatchError, match="does not say which"):
        frozen_weights(source)


def test_json_says_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_arrays(tmp_path / "ckpt", WEIGHTS)
    which = Which(include=("h.*",))
    consolidate_command(
        tmp_path / "ckpt", tmp_path / "out", "fp16", 10**9, "error", which=which, common=Common(json=True)
    )
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(tmp_path / "out")
    assert told["files"] == ["model.safetensors"]
    assert told["left_out"] == ["norm.bias", "odd[0].w"]
    assert (told["values_lost"], told["bytes"]) == (0, 3 * ONE.nbytes)


def test_order_is_that_of_the_names() -> None:
    assert choose(["b", "a", "c"], ["c", "b"]) == ["b", "c"]
    assert choose(["b", "a"]) == ["b", "a"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_engines_frozen_parameters_are_left_out(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    net, config = make_net(), make_config()
    del config["optimizer"]
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    names = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    with start(config, net, optimizer=kind(trained, lr=1e-2)) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    which = Which(exclude_frozen=True)
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", 10**9, "error", which=which) == 0
    assert set(load_file(tmp_path / "out/model.safetensors")) == names | {"shift"}
