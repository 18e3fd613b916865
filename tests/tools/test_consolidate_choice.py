"""`zstore consolidate --exclude-frozen`: which weights are written."""

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
from zstore.tools.consolidate import consolidate_command
from zstore.tools.opening import Common
from zstore.weights.choose import frozen_weights

ONE = np.ones((4, 3), np.float32)
WEIGHTS = {f"model/{name}": ONE * i for i, name in enumerate(("h.0.w", "h.1.w", "h.10.w", "norm.bias", "odd[0].w"), 1)}
ADAM = {f"optimizer/exp_avg/{name}": ONE for name in ("h.1.w", "norm.bias")}


def test_frozen_parameters_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_arrays(tmp_path / "ckpt", WEIGHTS | ADAM)
    common = Common(json=True)
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", exclude_frozen=True, common=common) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert set(found) == {"h.1.w", "norm.bias"}
    assert all(np.array_equal(found[name], WEIGHTS[f"model/{name}"]) for name in found)
    printed = capsys.readouterr()
    assert printed.err.startswith("plan: 2 tensors as fp32")
    assert "leaving out 3: " in printed.err.splitlines()[0]
    told = json.loads(printed.out)
    assert (told["path"], told["files"]) == (str(tmp_path / "out"), ["model.safetensors"])
    assert (told["left_out"], told["bytes"]) == (["h.0.w", "h.10.w", "odd[0].w"], 2 * ONE.nbytes)
    save_arrays(tmp_path / "none", WEIGHTS | {"optimizer/exp_avg/other": ONE})
    with pytest.raises(CheckpointMismatchError, match="no weights but frozen ones"):
        consolidate_command(tmp_path / "none", tmp_path / "empty", exclude_frozen=True)


def test_without_any_state_it_cannot_be_known_which_are_frozen(tmp_path: Path) -> None:
    save_arrays(tmp_path, WEIGHTS, record={"engine": {"scalars": "odd"}})
    with open_checkpoint(tmp_path) as source, pytest.raises(CheckpointMismatchError, match="does not say which"):
        frozen_weights(source)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_engines_frozen_parameters_are_left_out(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    net, config = make_net(), make_config()
    del config["optimizer"]
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    names = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    with start(config, net, optimizer=kind(trained, lr=1e-2)) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", exclude_frozen=True) == 0
    assert set(load_file(tmp_path / "out/model.safetensors")) == names | {"shift"}
