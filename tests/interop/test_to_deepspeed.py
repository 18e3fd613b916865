"""`zstore convert --to deepspeed`: the folder is as DeepSpeed's own tool writes it, loses nothing, and DeepSpeed goes on.

The last is tried where there is DeepSpeed: `PYTHON_WITH_DEEPSPEED=PYTHON make soak`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zstore
from tests.interop.deepspeed_data import DATA, root_of, write
from tests.interop.deepspeed_model import ADAM, SCHEDULER, TRAIN_BATCH_SIZE, groups_of, make_tiny, micro_batches
from zstore.checkpoint.reader import open_checkpoint
from zstore.engine import Engine
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CorruptionError
from zstore.interop.deepspeed.universal import UniversalFolder
from zstore.interop.deepspeed.values import CLASSES
from zstore.interop.pickles import PickledObject
from zstore.interop.torchfile import load_torch_file
from zstore.open.sources import open_source
from zstore.tools.convert import ConvertOptions, convert_command
from zstore.weights.from_checkpoint import whole_values

torch.set_num_threads(1)

STEPS = 3
TAG = "a tag"
SCALE = {"initial_scale_power": 8, "loss_scale_window": 2}


def convert(src: Path, out: Path, to: str = "deepspeed") -> Path:
    assert convert_command(str(src), out, ConvertOptions(to=to)) == 0
    return out


def config_for(precision: str, own: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": TRAIN_BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": dict(ADAM)},
        "scheduler": SCHEDULER,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zstore": own or {},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True} | (SCALE if precision == "fp16" else {})
    return config


def steps(engine: Engine, first: int, count: int) -> list[float]:
    losses = []
    for number in range(first, first + count):
        (ids,) = micro_batches(number, 0, 1)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach().float()))
    return losses


def train(root: Path, precision: str, groups: str = "one", own: dict[str, Any] | None = None, after: int = 0) -> Any:
    """Save a run of zstore's in `root` after `STEPS` steps; return the losses of `after` more."""
    model = make_tiny()
    parameters = groups_of(model, groups)
    with zstore.initialize(model=model, config=config_for(precision, own), model_parameters=parameters)[0] as engine:
        steps(engine, 0, STEPS)
        engine.save_checkpoint(str(root), tag=TAG, client_state={"a": 1, "t": torch.ones(2), "module": "mine"})
        return steps(engine, STEPS, after)


# -- what is written --------------------------------------------------------------------------------------------------


def entries(path: Path) -> Any:
    """What a file of torch.save holds, tensors with their values."""
    try:
        return torch.load(path, weights_only=True)
    except Exception:  # classes of DeepSpeed's
        return load_torch_file(path, CLASSES)


def check_alike(ours: Any, theirs: Any, where: str) -> None:
    """Ours has the type and value of theirs."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        for key in set(ours) & set(theirs):
            check_alike(ours[key], theirs[key], f"{where}: {key}")
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.reshape(theirs.shape).tolist()) == (theirs.dtype, theirs.tolist()), where
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs), where
        if len(ours) == len(theirs):
            for number, pair in enumerate(zip(ours, theirs, strict=True)):
                check_alike(*pair, f"{where}: {number}")
    elif not isinstance(theirs, PickledObject):
        assert type(ours) is type(theirs) or theirs is None, where


@pytest.mark.parametrize("case", ["universal-stage1-2", "universal-stage3-2"])
def test_the_folder_is_as_deepspeeds_own_tool_writes_it(case: str, tmp_path: Path) -> None:
    convert(root_of(case), tmp_path / "ours", "zstore")
    out = convert(tmp_path / "ours", tmp_path / "out")
    theirs = root_of(case)
    tag = (theirs / "latest_universal").read_text()
    assert (out / "latest_universal").read_text() == tag
    stage3 = case == "universal-stage3-2"
    trained = {
        path.parent.name
        for path in (theirs / tag / "zero").glob("*/exp_avg.pt")
        if path.parent.name not in ("frozen.weight", "frozen.bias", "head.weight", "numbers", "shift")
    }
    assert {path.name for path in (out / tag / "zero").iterdir()} == {*trained, "optimizer_state.pt"}
    for name in trained:
        files = {path.name for path in (theirs / tag / "zero" / name).iterdir()} | {"step.pt"}
        assert {path.name for path in (out / tag / "zero" / name).iterdir()} == files
        for file in files:
            ours = torch.load(out / tag / "zero" / name / file, weights_only=True)
            if file == "step.pt":
                assert (ours.dtype, ours.shape, float(ours)) == (torch.float32, (), 3.0)
                continue
            own = torch.load(theirs / tag / "zero" / name / file, weights_only=True)
            own = {"cat_dim": 0, "param": own} if stage3 else own  # bare and flat there, and read in both forms
            assert ours.keys() == own.keys()
            check_alike(ours, own, f"{name}/{file}")
    # Stage 3 reads one file, the others the other; each has all keys of DeepSpeed's, of the same types.
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage3 else "mp_rank_00_model_states.pt"
    ours, own = torch.load(out / tag / name, weights_only=True), torch.load(theirs / tag / name, weights_only=True)
    assert ours.keys() == own.keys()
    for key in ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "ds_config"):
        ours.pop(key), own.pop(key)
    assert sorted(ours["buffer_names"]) == sorted(own["buffer_names"])
    assert ours["module"].keys() == own["module"].keys()
    ours.pop("buffer_names"), own.pop("buffer_names")
    check_alike(ours, own, name)
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "lr_scheduler"):
        assert ours[key] == own[key], key
    assert ours["shared_params"] == {"head.weight": "embed.weight"}
    head, read = (entries(each / tag / "zero/optimizer_state.pt") for each in (out, theirs))
    assert set(head) <= set(read) | {"ds_version", "optimizer_state_dict", "overflow"}
    assert len(head["param_groups"]) == len(read["param_groups"])
    for mine, group in zip(head["param_groups"], read["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "params"):
            assert (type(mine[key]), mine[key]) == (type(group[key]), group[key])
    inner = head["optimizer_state_dict"]
    assert float(inner["state"][0]["step"]) == 3.0
    assert ("weight_decay" in inner["param_groups"][0]) is not stage3  # the groups of that case differ in it


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_there_and_back_is_the_same(precision: str, tmp_path: Path) -> None:
    train(tmp_path / "ckpt", precision, "two")
    out = convert(tmp_path / "ckpt", tmp_path / "out")
    convert(out, tmp_path / "back", "zstore")
    with open_checkpoint(tmp_path / "ckpt") as ours, open_checkpoint(tmp_path / "back") as back:
        assert back.tag == ours.tag == TAG
        assert back.arrays.keys() == ours.arrays.keys()
        for name, array in ours.arrays.items():
            assert back.arrays[name].spec == array.spec
            assert back.read_array(name).tobytes() == ours.read_array(name).tobytes(), name
        one, other = ours.record.state["engine"], back.record.state["engine"]
        assert {k: other[k] for k in ("counters", "batch", "precision", "schedule")} == {
            k: one[k] for k in ("counters", "batch", "precision", "schedule")
        }
        assert other["data_position"] == STEPS * TRAIN_BATCH_SIZE
        assert [group["weight_decay"] for group in other["groups"]] == [0.2, 0.0]
        assert back.record.state["client_state"] == {"a": 1, "t": {"$tensor": "client/t"}}
    head = entries(out / TAG / "zero/optimizer_state.pt")
    if precision == "fp16":
        # What DeepSpeed's own run pickles after as many steps with this config.
        (file,) = (DATA / "stage2-fp16-1").glob("*/*optim_states.pt")
        theirs = load_torch_file(file, CLASSES)["optimizer_state_dict"]
        scaler, own = head["loss_scaler"], theirs["loss_scaler"]
        assert scaler.name == own.name == "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
        names = {key: value.name if key == "dtype" else value for key, value in scaler.state.items()}
        wanted = {
            key: value.name.replace("half", "float16") if key == "dtype" else value for key, value in own.state.items()
        }
        assert names == wanted
        assert head["dynamic_loss_scale"] is theirs["dynamic_loss_scale"] is True
        assert one["loss_scale"] == other["loss_scale"]
    else:
        assert "loss_scaler" not in head


def test_moments_in_8_bits_and_split_masters_become_fp32(tmp_path: Path) -> None:
    train(tmp_path / "ckpt", "bf16", own={"moments": "int8", "split_master": True})
    out = convert(tmp_path / "ckpt", tmp_path / "out")
    with open_checkpoint(tmp_path / "ckpt") as source:
        assert source.arrays["model/mix"].spec.dtype == "bfloat16"
        assert source.arrays["optimizer/exp_avg/mix"].spec.dtype == "int8"
        for file, array in (("fp32", "model/mix"), ("exp_avg", "optimizer/exp_avg/mix")):
            found = torch.load(out / TAG / "zero/mix" / f"{file}.pt", weights_only=True)["param"]
            stored = source.read_array(array).reshape(-1)
            whole = np.concatenate([values for _, values in whole_values(source, array, 0, stored)])
            assert found.dtype == torch.float32
            assert found.numpy().tobytes() == whole.tobytes()


def test_a_scalar_parameter_has_a_dimension_there(tmp_path: Path) -> None:
    write(tmp_path / "run")
    with open_source(tmp_path / "run") as source:
        assert UniversalFolder(source).parameter_files("b")["zero/b/fp32.pt"].value["param"].shape == (3,)
        spec = source.arrays["model/b"].spec
        object.__setattr__(spec, "shape", ())
        assert UniversalFolder(source).parameter_files("b")["zero/b/fp32.pt"].value["param"].shape == (1,)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_deepspeed_could_not_go_on_from_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run")

    def refused(change: Callable[[Any], None], what: str, error: type[Exception] = CheckpointMismatchError) -> None:
        with open_source(tmp_path / "run") as source:
            change(source)
            with pytest.raises(error, match=what):
                UniversalFolder(source)

    def renamed(source: Any, one: str, other: str) -> None:
        source.arrays = {name.replace(one, other): array for name, array in source.arrays.items()}

    refused(lambda s: s.record.state.pop("engine"), "no state of an engine.*--to safetensors")
    refused(lambda s: renamed(s, "exp_avg_sq", "momentum"), "kept exp_avg, momentum .*of Adam, alone")
    refused(lambda s: s.arrays.pop("optimizer/exp_avg/b"), "of Adam, alone")
    refused(lambda s: [s.arrays.pop(name) for name in list(s.arrays) if "optimizer" in name], "kept nothing")
    engine = "engine"
    refused(lambda s: s.record.state[engine]["scalars"]["b"].update(step=5.0), "1 at step 5, 1 at step 7")
    refused(lambda s: s.record.state[engine]["scalars"]["b"].update(mu_product=5.0), r"\['mu_product'\]")
    refused(lambda s: s.record.state[engine]["scalars"].pop("b"), "lacks the step counts", CorruptionError)
    refused(lambda s: s.record.state[engine].update(groups=[]), "is damaged", CorruptionError)
    refused(lambda s: s.record.state[engine].pop("batch"), "is damaged", CorruptionError)
    with open_source(tmp_path / "run") as source:
        source.record.state[engine]["scalars"]["b"]["step"] = 0.0
        universal = UniversalFolder(source)  # its moments are zeros
        assert "1 parameters were never updated" in universal.notes[1]


def test_nothing_half_written_and_nothing_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointExistsError, match="remove it"):
        convert(tmp_path / "run", out)
    out.rmdir()
    file = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CorruptionError):
        convert(tmp_path / "run", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# -- DeepSpeed itself -------------------------------------------------------------------------------------------------

PYTHON = os.environ.get("PYTHON_WITH_DEEPSPEED", sys.executable if importlib.util.find_spec("deepspeed") else "")
CLOSE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 1e-3}
"""How far losses may be apart: rounding of the precision, in other orders of sums and other kernels."""


def by_deepspeed(cases: list[dict[str, Any]], world_size: int, out: Path) -> list[dict[str, Any]]:
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [(out / f"{rank}.log").open("w") for rank in range(world_size)]
    script = Path(__file__).with_name("deepspeed_goes_on.py")
    ranks = [
        subprocess.Popen(
            [PYTHON, script, json.dumps(cases), out],
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(world_size)
    ]
    for log in logs:
        log.close()
    codes = [rank.wait(600) for rank in ranks]
    assert not any(codes), (out / "0.log").read_text()[-3000:]
    found: list[dict[str, Any]] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="needs DeepSpeed, or PYTHON_WITH_DEEPSPEED")
@pytest.mark.parametrize("world_size", [1, 2])
def test_deepspeed_loads_it_and_goes_on_with_the_same_losses(
    world_size: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cases, wanted = [], []
    for precision, groups, stages in (
        ("fp32", "one", (1, 2, 3)),
        ("bf16", "one", (1, 2, 3)),
        ("fp16", "one", (1, 2, 3)),
        ("bf16", "two", (1, 2)),
    ):
        name = f"{precision}-{groups}"
        losses = train(tmp_path / name, precision, groups, after=5)
        root = convert(tmp_path / name, tmp_path / f"{name}-out")
        for stage in stages:
            # The scale is to come from the folder: another one to begin with.
            scale = {**SCALE, "initial_scale_power": 4}
            case = {"root": str(root), "tag": None, "stage": stage, "precision": precision, "groups": groups}
            cases.append({**case, "fp16": scale, "steps": 5})
            wanted.append((tmp_path / name, losses))
    found = by_deepspeed(cases, world_size, tmp_path / "out")
    for number, (case, (root, losses), result) in enumerate(zip(cases, wanted, found, strict=True)):
        where = f"{case['precision']}, stage {case['stage']}, {case['groups']}"
        state = torch.load(tmp_path / "out" / f"{number}.pt", weights_only=True)
        with open_checkpoint(root) as source:
            for name in source.arrays:
                if name.startswith("optimizer/") or f"optimizer/exp_avg/{name.partition('/')[2]}" in source.arrays:
                    assert state[name].numpy().tobytes() == source.read_array(name).tobytes(), f"{where}: {name}"
            groups = source.record.state["engine"]["groups"]
        assert result["lr"] == [group["lr"] for group in groups], where
        assert result["counters"] == [STEPS, STEPS * TRAIN_BATCH_SIZE, 0], where
        assert result["client"] == {"a": 1, "t": [1.0, 1.0]}, where
        assert result["losses"] == pytest.approx(losses, rel=CLOSE[case["precision"]]), where
        far = max(abs(a / b - 1) for a, b in zip(result["losses"], losses, strict=True))
        record_property(f"{where}, {world_size} ranks", f"{far:.1e}")
        if case["precision"] == "fp16":
            assert result["scales"] == [512.0, 512.0, 1024.0, 1024.0, 2048.0], where
    shutil.rmtree(tmp_path / "out")
