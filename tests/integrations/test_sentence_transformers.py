"""The Trainer of sentence-transformers, whose files are its own, with `deepspeed=...` on zstore, beside itself alone."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers.sentence_transformer", reason="before sentence-transformers 6")
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

from tests.integrations.tokens import SENTENCES as TEXTS
from tests.integrations.tokens import sentences, write_bert
from tests.integrations.trainers import QUIET, config, open_door
from zstore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def trained(folder: Path, ds: Any = None) -> Any:
    model = SentenceTransformer(os.fspath(folder.parent / "bert"), device="cpu")
    quiet = {name: value for name, value in QUIET.items() if name != "bf16"}
    args = SentenceTransformerTrainingArguments(
        os.fspath(folder / "run"),
        **quiet,
        max_steps=4,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=4,
        seed=1,
        deepspeed=ds,
    )
    trainer = SentenceTransformerTrainer(model, args, train_dataset=sentences(), loss=CoSENTLoss(model))
    trainer.train()
    trainer.save_model(os.fspath(folder / "out"))
    trainer.accelerator.free_memory()
    trainer.accelerator.wait_for_everyone()
    return {
        place: SentenceTransformer(os.fspath(folder / place), device="cpu").encode(TEXTS)
        for place in ("out", "run/checkpoint-4")
    }


def _beside(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder) / str(rank)
    place.mkdir()
    wanted = trained(Path(folder) / "plain")
    for stage in (2, 3):
        found = trained(Path(folder) / str(stage), config(place, stage=stage))
        for name, vectors in wanted.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(vectors), rtol=1e-4, atol=1e-5)
    names = [sorted(path.name for path in (Path(folder) / name / "out").iterdir()) for name in ("plain", "2", "3")]
    assert names[0] == names[1] == names[2]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_was_trained_is_loaded_by_the_library(world_size: int, tmp_path: Path) -> None:
    write_bert(tmp_path / "bert")
    run_ranks(_beside, world_size, os.fspath(tmp_path))
