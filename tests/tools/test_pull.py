"""`zstore pull` brings a folder to what a run publishes, once or as it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import warm
from tests.engine.published import in_folder, publishing, same
from tests.engine.runs import start, step
from tests.engine.transformers_models import batch_for, build
from tests.tools.commands import run
from zstore.engine import Engine
from zstore.publish import pull


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with start(publishing(tmp_path / "weights")) as made:
        yield made


def test_a_folder_is_brought_to_the_newest_version(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "weights/tokenizer.json").write_text('{"of": "the run"}')
    missing = run("pull", str(tmp_path / "weights"), "--into", str(tmp_path / "hf"))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "has no version of weights: expected folders like weight_v000001" in missing.stderr
    step(engine)
    step(engine)
    done = run("pull", str(tmp_path / "weights"), "--into", str(tmp_path / "hf"), "--json")
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("version", "step", "is_new")} == {"version": 2, "step": 2, "is_new": True}
    engine.save_16bit_model(tmp_path / "whole", dtype="bf16")
    assert same(in_folder(tmp_path / "hf"), load_file(tmp_path / "whole/model.safetensors"))
    assert (tmp_path / "hf/tokenizer.json").read_text() == '{"of": "the run"}'
    again = run("pull", str(tmp_path / "weights"), "--into", str(tmp_path / "hf"))
    assert again.stderr == f"{tmp_path / 'hf'} has version 2, of step 2 already\n"


def test_a_folder_follows(engine: Engine, tmp_path: Path) -> None:
    words = ["-m", "zstore", "pull", str(tmp_path / "weights"), "--into", str(tmp_path / "hf"), "--follow", "--json"]
    with warm.Popen(
        [sys.executable, *words, "--every", "0.01"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "no version of weights" in process.stderr.readline()
        for number in range(1, 4):
            step(engine)
            assert json.loads(process.stdout.readline())["version"] == number
        process.kill()


def test_a_model_in_several_files_keeps_those_that_did_not_change(engine: Engine, tmp_path: Path) -> None:
    to, into = tmp_path / "weights", tmp_path / "hf"
    step(engine)
    first = to / "weight_v000001"
    whole, index = (
        load_file(first / "model.safetensors"),
        json.loads((first / "model.safetensors.index.json").read_text()),
    )
    apart = {name: f"model-0000{1 + name.startswith('frozen')}-of-00002.safetensors" for name in whole}
    for file in set(apart.values()):
        save_file({name: value for name, value in whole.items() if apart[name] == file}, first / file)
    (first / "model.safetensors").unlink()
    (first / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": apart}))
    for number in range(2, 5):
        assert pull(to, into).version == number - 1
        step(engine)
    assert pull(to, into).version == 4
    names = sorted(path.name for path in into.glob("*.safetensors"))
    assert names == [f"model-v00000{at}-0000{1 + (at < 3)}-of-00002.safetensors" for at in (1, 3, 4)]
    engine.save_16bit_model(tmp_path / "whole", dtype="bf16")
    assert same(in_folder(into), load_file(tmp_path / "whole/model.safetensors"))


def test_from_pretrained_opens_the_folder(tmp_path: Path) -> None:
    with start(publishing(tmp_path / "weights"), build("Llama")) as engine:
        for number in range(2):
            engine.backward(engine(**batch_for("Llama", number, 0, torch.bfloat16)).loss)
            engine.step()
            pull(tmp_path / "weights", tmp_path / "hf")
        engine.save_16bit_model(tmp_path / "whole", dtype="bf16")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    assert same(dict(opened.state_dict()), load_file(tmp_path / "whole/model.safetensors"))
