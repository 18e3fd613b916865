"""Checkpoints of a Lightning run that a bucket keeps as versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.s3_server import s3_server
from tests.integrations.lightning_runs import fit, make_net, make_trainer
from zstore.checkpoint.reader import tags
from zstore.lightning import ZstoreStrategy
from zstore.remote.folder import open_folder
from zstore.testing.ranks import run_ranks

pytest.importorskip("icechunk", reason="extra versions")
pytest.importorskip("moto", reason="extra test")
pytest.importorskip("s3fs", reason="extra s3")


class _RemovesTheNewest(ModelCheckpoint):
    """Removes a checkpoint as soon as it has saved it, as Lightning's tuner does, at the first save."""

    removed = ""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if not self.removed:
            self.removed = filepath
            self._remove_checkpoint(trainer, filepath)


def _train(rank: int, base: Path, options: dict[str, Any], url: str) -> list[list[str]]:
    # Lightning looks into the bucket itself.
    os.environ |= {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    os.environ["AWS_ENDPOINT_URL"] = options["client_kwargs"]["endpoint_url"]
    config = {"zstore": {"storage_options": options, "upload_folder": str(base), "versions": True}}
    saves = _RemovesTheNewest(url, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", filename="{step}")
    seen: list[list[str]] = []

    class Sees(ModelCheckpoint):
        """Comes after the one that saves."""

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > len(seen):
                seen.append(sorted(info.tag for info in tags(open_folder(url, options))))

    callbacks = [saves, Sees(base / "unused", save_top_k=0)]
    trainer = make_trainer(ZstoreStrategy(config), callbacks=callbacks, enable_checkpointing=True, max_epochs=1)
    fit(trainer, make_net(), rank)
    trainer.strategy.close()
    return seen


def test_lightning_goes_on_when_it_removes_the_newest_version(tmp_path: Path) -> None:
    with s3_server() as options:
        bucket = f"bucket-{os.urandom(4).hex()}"
        open_folder("s3://none", options).fs.mkdir(bucket)  # type: ignore[attr-defined]
        (found,) = run_ranks(_train, 1, tmp_path, options, f"s3://{bucket}/run")
    assert found[:2] == [["step=1.ckpt"], ["step=2.ckpt"]], "the first one was removed once there was a second"
