"""zstore.torchtitan.CheckpointManager beside torchtitan's own, by their Configs, in the same loop: equal bits."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file

from tests import warm
from tests.integrations.titan_loop import STEPS, Names, Run
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.testing.ranks import run_ranks
from zstore.torchtitan import CheckpointManager


def theirs() -> Any:
    from torchtitan.components.checkpointer import CheckpointManager as Own

    return Own


def names(folder: str) -> list[str]:
    return sorted(entry for entry in os.listdir(folder) if entry != "latest")


def resume(manager: Any, folder: str, mode: str) -> list[str]:
    """Train, train again from step 2 on with other weights to begin with, and return what both came to."""
    whole = Run(manager, folder, async_mode=mode).train().close()
    resumed = Run(manager, folder, seed=2, load_step=2, async_mode=mode)
    assert resumed.load()
    middle = resumed.digest()
    return [whole, middle, resumed.train().close()]


def keep_two(folder: str) -> list[str]:
    """Save at the first step and every second; keep two, beside a folder of another name."""
    os.makedirs(f"{folder}/checkpoint/step-1-mine", exist_ok=True)
    options = {"keep_latest_k": 2, "enable_first_step_checkpoint": True, "async_mode": "async"}
    Run(CheckpointManager, folder, **options).train(5).close()
    return names(f"{folder}/checkpoint")


def move_over(folder: str) -> list[str]:
    """A run that torchtitan's manager began goes on with zstore's, from the newest of both."""
    Run(theirs(), folder).train(2).close()
    run = Run(CheckpointManager, folder, seed=3)
    assert run.load()
    run.train(4).close()
    again = Run(CheckpointManager, folder, seed=4)
    assert again.load()
    assert again.step == 4
    return [again.digest(), again.train().close()]


def hugging_face(folder: str) -> dict[str, Any]:
    """The last save is Hugging Face's, as bf16; another run begins with it, and one with weights that zstore saved."""
    adapter = Names()
    last = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "bfloat16"}
    run = Run(CheckpointManager, folder, sd_adapter=adapter, **last).train()
    weights = run.weights()
    run.close()
    # Nothing resumes from exported weights: the newest whole checkpoint counts.
    again = Run(CheckpointManager, folder, sd_adapter=adapter, seed=2)
    assert again.load()
    assert again.step == STEPS - 2
    again.close()
    started = {}
    for name, path, options in (
        ("hf", f"{folder}/checkpoint/step-{STEPS}", {"initial_load_in_hf": True}),
        ("zstore", f"{folder}/checkpoint/step-{STEPS - 2}", {}),
    ):
        begun = Run(
            CheckpointManager, f"{folder}/{name}", sd_adapter=adapter, seed=2, initial_load_path=path, **options
        )
        assert begun.load()
        assert begun.step == 0
        started[name] = begun.weights()
        begun.close()
    return {"weights": weights, **started}


def loops(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "theirs": resume(theirs(), f"{folder}/theirs", "disabled"),
        "sync": resume(CheckpointManager, f"{folder}/sync", "disabled"),
        "async": resume(CheckpointManager, f"{folder}/async", "async"),
        "kept": keep_two(f"{folder}/kept"),
        "moved": move_over(f"{folder}/moved"),
        "hf": hugging_face(f"{folder}/hf"),
    }
    return found


def resume_alone(rank: int, folder: str) -> list[str]:
    """What two ranks saved, on one: by zstore's manager and by torchtitan's."""
    found = []
    for name, manager in (("theirs", theirs()), ("sync", CheckpointManager)):
        run = Run(manager, f"{folder}/{name}", seed=5, load_step=4)
        assert run.load()
        found += [run.digest(), run.train().close()]
    last = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    Run(CheckpointManager, f"{folder}/last", **last).train().close()
    # Behind a URL, where old ones are removed as well.
    Run(CheckpointManager, "memory://titan", keep_latest_k=2, enable_first_step_checkpoint=True).train(5).close()
    run = Run(CheckpointManager, "memory://titan", seed=6)
    assert run.load()
    assert run.step == 4
    files = fsspec.filesystem("memory")
    found.append(run.train().close())
    found += sorted(entry["name"] for entry in files.ls("/titan/checkpoint") if entry["type"] == "directory")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("titan")
    results = run_ranks(loops, 2, str(folder))
    assert results == [results[0]] * 2
    return folder, results[0]


def test_a_resumed_run_has_the_bits_of_torchtitans_own(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    assert found["theirs"] == found["sync"] == found["async"]
    assert found["theirs"][0] == found["theirs"][2]
    assert found["moved"][1] == found["theirs"][0]
    with open_checkpoint(folder / "async/checkpoint") as reader:
        assert verify_checkpoint(reader) == []
        assert (reader.record.tag, reader.record.world_size) == (f"step-{STEPS}", 2)
        assert {"model/layers.0.weight", "optimizer/exp_avg/layers.0.weight"} <= reader.arrays.keys()


def test_what_two_ranks_saved_resumes_on_one(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for name in ("theirs", "sync"):
        shutil.copytree(runs[0] / name, tmp_path / name)
    (found,) = run_ranks(resume_alone, 1, str(tmp_path))
    assert found[:2] == found[2:4]
    assert found[5:] == [f"/titan/checkpoint/step-{step}" for step in (2, 4, 6)]
    # The last save of the weights alone, cast.
    with open_checkpoint(tmp_path / "last/checkpoint") as reader:
        dtypes = {name: array.spec.dtype for name, array in reader.arrays.items()}
    weights = {f"model/{name}" for name in ("layers.0.weight", "layers.1.bias", "head.weight", "seen")}
    assert weights <= dtypes.keys()
    assert set(dtypes.values()) == {"bfloat16"}
    assert len(tags(tmp_path / "last/checkpoint")) == 3


def test_the_newest_are_kept_and_what_is_not_ours_stays(runs: tuple[Path, dict[str, Any]]) -> None:
    assert runs[1]["kept"] == ["step-1-mine", "step-2", "step-4"]


def test_weights_go_to_hugging_face_and_come_from_there(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs[0] / "hf/checkpoint", runs[1]["hf"]
    exported = load_file(next((folder / f"step-{STEPS}").glob("*.safetensors")))
    import torch

    expected = {f"model.{n}": torch.tensor(v).bfloat16() for n, v in found["weights"].items() if n != "seen"}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    assert all(torch.equal(torch.tensor(found["hf"][n.removeprefix("model.")]), v.float()) for n, v in expected.items())
    with open_checkpoint(folder) as reader:
        assert found["zstore"]["head.weight"] == reader.read_array("model/head.weight").tolist()


PROGRAM = """
import json, sys, torch.distributed as dist
from tests.integrations.titan_loop import Run
from zstore.torchtitan import CheckpointManager

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    options = {"async_mode": "async_with_pinned_mem"}
    ran = Run(CheckpointManager, sys.argv[1], **options).train().close()
    resumed = Run(CheckpointManager, sys.argv[1], seed=2, load_step=4, **options)
    assert resumed.load()
    print(json.dumps([ran, resumed.train().close()]))
    dist.destroy_process_group()
"""


def test_saves_by_a_process_beside_training(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "MASTER_ADDR": "localhost", "PYTHONWARNINGS": "ignore"}
    done = warm.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    ran, resumed = json.loads(done.stdout.splitlines()[-1])
    assert ran == resumed
    with open_checkpoint(tmp_path / "checkpoint", "step-2") as reader:
        assert verify_checkpoint(reader) == []


@pytest.mark.parametrize(("option", "words"), [({"num_threads": 0}, "num_threads: expected at least 1")])
def test_options_that_cannot_be_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CheckpointManager.Config(**option)


def test_the_example_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/torchtitan_checkpoint.py"
    done = warm.run([sys.executable, str(script), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1", "2", "3", "4", "5", "6"]
    with open_checkpoint(tmp_path / "checkpoint") as reader:
        assert verify_checkpoint(reader) == []
        assert reader.record.step == STEPS


def test_the_config_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/torchtitan.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["checkpoint"].keep_latest_k == 3
