"""Saves of a Trainer behind training: what waits for them, what is left if it is killed; the page and the examples."""

import errno
import os
import random
import runpy
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests import warm
from tests.integrations.tokens import preferences, sentences, tokenizer, write_bert
from tests.integrations.trainers import VOCAB, Texts, config, history, llama, open_door, train, weights
from tests.pages import ROOT, blocks
from zstore.engine.adapters.deepspeed.engine import DeepSpeedEngine, complete_saves
from zstore.engine.api.initialize import initialize
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import kill_ranks, run_ranks

DECOUPLED = {"checkpoint": {"writer": {"decoupled": True, "type": "FAST"}}}


def engine_of(folder: Path, files: Any) -> Any:
    disk = {"device": "nvme", "nvme_path": os.fspath(folder)}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": disk, "stage3_param_persistence_threshold": 0}
    model = torch.nn.Linear(64, 64)
    sections = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": zero}
    return initialize(model=model, config=sections | DECOUPLED, _files=files, _engine=DeepSpeedEngine)[0]


def stepped(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()


def test_a_listing_and_a_removal_wait_for_the_commit(tmp_path: Path) -> None:
    out, files = tmp_path / "out", GatedFiles("rename", pattern="*/checkpoint-2/*")
    others = tmp_path / "others"
    others.mkdir()
    with engine_of(tmp_path / "nvme", files) as engine:
        stepped(engine)
        engine.save_checkpoint(out / "checkpoint-1").wait()
        stepped(engine)
        handle = engine.save_checkpoint(out / "checkpoint-2")
        files.arrived(1)
        # The loop goes on: an older checkpoint stays until this one is committed, other folders go at once.
        assert not handle.done()
        shutil.rmtree(out / "checkpoint-1")
        shutil.rmtree(others)
        assert (out / "checkpoint-1" / "global_step1" / "zstore.json").exists()
        assert not others.exists()
        assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
        listed: list[Any] = []
        reader = threading.Thread(
            target=lambda: listed.extend(path.name for path in (out / "checkpoint-2").glob("global*"))
        )
        copier = threading.Thread(target=lambda: shutil.copytree(out / "checkpoint-2", tmp_path / "copy"))
        reader.start(), copier.start()
        reader.join(0.2)
        assert reader.is_alive()
        assert copier.is_alive()
        files.open_gate()
        reader.join(), copier.join()
        assert handle.done()
        assert listed == ["global_step2"]
        assert (tmp_path / "copy" / "global_step2" / "zstore.json").exists()
        complete_saves()
        assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2"]
        stepped(engine)
        engine.save_checkpoint(out / "checkpoint-3")
        shutil.rmtree(out)  # the one that is being saved too
        assert not out.exists()


def test_a_save_that_fails_keeps_the_older_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    files = FaultyFiles(faults=(Fault(kind="rename", pattern="*/checkpoint-2/*", times=None, error_number=errno.EIO),))
    engine = engine_of(tmp_path / "nvme", files)
    stepped(engine)
    engine.save_checkpoint(out / "checkpoint-1").wait()
    stepped(engine)
    engine.save_checkpoint(out / "checkpoint-2")
    shutil.rmtree(out / "checkpoint-1")
    complete_saves()
    assert (out / "checkpoint-1" / "global_step1" / "zstore.json").exists()
    assert "is not removed: the save of the newer checkpoint failed" in caplog.text
    with pytest.raises(OSError, match="global_step2"):
        engine.close()


SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
STEPS = SAVES | {"max_steps": 8, "lr_scheduler_type": "cosine"}


def newest(folder: Path) -> str | None:
    """The script of docs/trainer.md for a run that was killed: the newest folder that is whole."""
    whole = [path.parents[1] for path in folder.glob("checkpoint-*/global_step*/zstore.json")]
    whole = [path for path in whole if (path / "trainer_state.json").exists()]
    return os.fspath(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None


class _Dies(TrainerCallback):  # type: ignore[misc]
    """Ends the process in the step, some file operations later, or not at all."""

    def __init__(self, folder: Path, after: int) -> None:
        self.left = after
        self.folder = os.fspath(folder)
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.scandir") and self.folder in str(
            args[:2]
        ):
            self.left -= 1
            if self.left == 0:
                os._exit(9)


def _killed(rank: int, folder: str, after: list[int]) -> None:
    open_door()
    place = Path(folder)
    out = place / "run"
    dies = [_Dies(out, after[rank])] if after else []
    found = train(out, config(place / "nvme", **DECOUPLED), **STEPS, resume=newest(out), callbacks=dies)
    torch.save((history(found, "loss"), weights(found)), place / f"end-{rank}")
    found.accelerator.free_memory()


def _whole(rank: int, folder: str) -> list[float]:
    open_door()
    place = Path(folder)
    found = train(place / "whole", config(place / "nvme", **DECOUPLED), **STEPS)
    torch.save((history(found, "loss"), weights(found)), place / f"whole-{rank}")
    return history(found, "loss")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_killed_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path, world_size: int) -> None:
    run_ranks(_whole, world_size, os.fspath(tmp_path))
    chosen, reached = random.Random(world_size), 0
    for number in range(12):  # later each time, as on a busy machine the first save is behind more operations
        if number >= 3 and reached:
            break
        after = [chosen.randrange(20, 400) + 100 * number for _ in range(world_size)]
        kill_ranks(_killed, world_size, os.fspath(tmp_path), after, timeout_s=120)
        found = newest(tmp_path / "run")
        step = int(found.rpartition("-")[2]) if found else 0
        assert step >= reached  # what was committed is not lost
        reached = step
    assert reached > 0
    run_ranks(_killed, world_size, os.fspath(tmp_path), [])
    for rank in range(world_size):
        (losses, state), (wanted, expected) = (torch.load(tmp_path / f"{name}-{rank}") for name in ("end", "whole"))
        assert losses[-1:] == wanted[-1:]
        assert all(torch.equal(state[name], value) for name, value in expected.items())


ENDS = """
import zstore.as_deepspeed
import sys
from pathlib import Path
from tests.integrations.trainers import config, train, open_door
place = Path(sys.argv[1])
ds = config(place / "nvme", checkpoint={"writer": {"decoupled": True}})
train(place / "out", ds, max_steps=2, save_strategy="steps", save_steps=2)
"""


def test_a_bare_import_is_enough_and_a_program_that_ends_in_a_save_completes_it(tmp_path: Path) -> None:
    done = warm.run([sys.executable, "-c", ENDS, str(tmp_path)], anew=True, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "checkpoint-2" / "global_step2" / "zstore.json").exists()
    assert newest(tmp_path / "out") is not None


def _page(rank: int, folder: str) -> None:
    from accelerate.state import AcceleratorState
    from sentence_transformers import SentenceTransformer

    open_door()
    place = Path(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    names: dict[str, Any] = {"SHAPE": {**shape, "vocab_size": VOCAB}, "DATA": Texts(8), "CPU": True}
    names |= {"TOKENIZER": tokenizer(), "PREFERENCES": preferences(8), "SENTENCES": sentences(), "SWAP_FOLDER": folder}
    names |= {
        name: str(place / name) for name in ("OUT", "BASE", "LORA_OUT", "DPO_OUT", "SENTENCES_OUT", "STATE", "WEIGHTS")
    }
    llama().save_pretrained(names["BASE"])  # type: ignore[operator]
    write_bert(place / "bert")
    names["SENTENCE_MODEL"] = SentenceTransformer(str(place / "bert"), device="cpu")
    for block in blocks("docs/trainer.md"):
        AcceleratorState._reset_state(reset_partial_state=True)  # each is a script of its own
        exec(block, names)
    assert names["newest"] == Path(names["OUT"]) / "checkpoint-4"
    assert {path.name for path in Path(names["OUT"]).glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert all((Path(names[name]) / "model.safetensors").exists() for name in ("OUT", "SENTENCES_OUT", "WEIGHTS"))
    assert (Path(names["LORA_OUT"]) / "adapter_model.safetensors").exists()
    names["trainer"].accelerator.free_memory()


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers.sentence_transformer", reason="before sentence-transformers 6")
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
