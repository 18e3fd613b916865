"""The code of `docs/trainer.md` and the examples run as they are printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.integrations.tokens import preferences, sentences, tokenizer, write_bert
from tests.integrations.trainers import VOCAB, Texts, open_door
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _page(rank: int, folder: str) -> None:
    from accelerate.state import AcceleratorState
    from sentence_transformers import SentenceTransformer

    open_door()
    place = Path(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    names: dict[str, Any] = {"SHAPE": {**shape, "vocab_size": VOCAB}, "DATA": Texts(8), "CPU": True}
    names |= {"TOKENIZER": tokenizer(), "PREFERENCES": preferences(8), "SENTENCES": sentences(), "SWAP_FOLDER": folder}
    names |= {name: str(place / name) for name in ("OUT", "DPO_OUT", "SENTENCES_OUT", "STATE", "WEIGHTS")}
    write_bert(place / "bert")
    names["SENTENCE_MODEL"] = SentenceTransformer(str(place / "bert"), device="cpu")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        AcceleratorState._reset_state(reset_partial_state=True)  # each is a script of its own
        exec(block, names)
    assert names["newest"] == Path(names["OUT"]) / "checkpoint-4"
    assert {path.name for path in Path(names["OUT"]).glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert all((Path(names[name]) / "model.safetensors").exists() for name in ("OUT", "SENTENCES_OUT", "WEIGHTS"))
    names["trainer"].accelerator.free_memory()


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    run_ranks(_page, 1, os.fspath(tmp_path))


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
    done = warm.run(command, anew=True, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / left).exists()
