"""The code of `docs/trainer.md` and the examples run as they are printed."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

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


def _example(rank: int, script: str, words: list[str]) -> None:
    open_door()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as `accelerate launch --mixed_precision bf16` does
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize(
    ("name", "world_size", "words", "left"),
    [
        ("trainer", 2, ["--steps", "10"], "model.safetensors"),
        ("sft_lora", 1, ["--steps", "1"], "adapter_model.safetensors"),
        ("accelerate_loop", 1, ["--epochs", "1"], "weights/model.safetensors"),
    ],
)
def test_an_example_runs(tmp_path: Path, name: str, world_size: int, words: list[str], left: str) -> None:
    for killed in ("checkpoint-1", "state"):  # in its first save
        (tmp_path / "out" / killed).mkdir(parents=True)
    run_ranks(_example, world_size, str(ROOT / "examples" / f"{name}.py"), ["--out", str(tmp_path / "out"), *words])
    assert (tmp_path / "out" / left).exists()
