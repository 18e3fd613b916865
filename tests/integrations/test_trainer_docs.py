"""The code of `docs/trainer.md` and the examples run as they are printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.integrations.trainers import VOCAB, Texts

ROOT = Path(__file__).parents[2]
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
}


@pytest.mark.filterwarnings("default")
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {"SHAPE": SHAPE, "DATA": Texts(8), "SWAP_FOLDER": str(tmp_path / "swap")}
    names |= {name: str(tmp_path / name) for name in ("OUT", "STATE", "WEIGHTS")}
    (tmp_path / "swap").mkdir()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
        if "trainer" in names:
            names.pop("trainer").close()
    names["accelerator"].free_memory()
    assert {path.name for path in Path(names["OUT"]).glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert (Path(names["WEIGHTS"]) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("launcher", "name", "words", "left"),
    [
        (["torch.distributed.run", "--nproc-per-node", "2"], "trainer", ["--steps", "10"], "model.safetensors"),
        ([], "sft_lora", ["--steps", "1"], "adapter_model.safetensors"),
        (
            ["accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "bf16"],
            "accelerate_loop",
            ["--epochs", "1"],
            "weights/model.safetensors",
        ),
    ],
)
def test_an_example_runs(tmp_path: Path, launcher: list[str], name: str, words: list[str], left: str) -> None:
    for killed in ("checkpoint-1", "state"):  # in its first save
        (tmp_path / "out" / killed).mkdir(parents=True)
    script = [str(ROOT / "examples" / f"{name}.py"), "--out", str(tmp_path / "out"), *words]
    command = [sys.executable, *(["-m", *launcher] if launcher else []), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = warm.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / left).exists()
