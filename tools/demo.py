"""The main job, end to end: train on disk with 2 processes, resume on 1 in memory, reshard, verify, consolidate.

`make demo` runs it. Every step is a `zstore` command as a user would type it; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAVE_EVERY = 20
LEARNING_RATE = 4e-3
MAX_DIFFERENCE = 0.02
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""A model as small as this gains little from torch's threads, which mostly wait for each other."""


def main() -> None:
    """Run the demo; exits with 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="demo-run", help="folder to work in; an existing one is replaced")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; a multiple of 20, at least 40")
    parser.add_argument("--model", default="gpt-tiny")
    options = parser.parse_args()
    from zstore.io import user_path  # numpy with it, which takes a while

    started = time.perf_counter()
    demo = Demo(user_path(options.folder), options.model, options.steps)
    demo.run()
    demo.close_with_table(time.perf_counter() - started)


class Demo:
    """The demo's folder and the results of its steps."""

    def __init__(self, folder: Path, model: str, steps: int) -> None:
        if steps < 2 * SAVE_EVERY or steps % SAVE_EVERY:
            raise SystemExit(f"--steps: expected a multiple of {SAVE_EVERY} from {2 * SAVE_EVERY} on, got {steps}")
        self.folder = folder
        self.model = model
        self.steps = steps
        self.stalls_ms: list[float] = []
        self.facts: list[tuple[str, str]] = []

    def run(self) -> None:
        """Carry out every step."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "nvme").mkdir(parents=True)
        first = self._train_on_disk()
        second = self._resume_in_memory()
        self._compare(first, second)
        _say("Reshard the newest checkpoint for 4 ranks, and verify every chunk")
        self._zstore("reshard", self.folder / "run", self.folder / "run-4", "--world-size", 4)
        self._zstore("verify", self.folder / "run-4")
        _say("Consolidate to fp16 weights that other software loads")
        self._zstore("consolidate", self.folder / "run", self.folder / "weights", "--dtype", "fp16")
        self._write_sample()

    def _config(self, name: str, zero: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.json"
        config = {
            "train_batch_size": 16,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LEARNING_RATE, "warmup_num_steps": 10}},
            "zero_optimization": zero,
        }
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return path

    def _train_on_disk(self) -> list[dict[str, Any]]:
        _say(f"Train {self.model} for {self.steps} steps on 2 processes: ZeRO-3, optimizer state on disk")
        offload = {"device": "nvme", "nvme_path": str(self.folder / "nvme")}
        config = self._config("zero3-disk", {"stage": 3, "offload_optimizer": offload})
        return self._train(config, "run", "--save-every", SAVE_EVERY, "--nproc", 2, "--seed", 7)

    def _resume_in_memory(self) -> list[dict[str, Any]]:
        middle = (self.steps // SAVE_EVERY + 1) // 2 * SAVE_EVERY
        _say(f"Resume step {middle} on 1 process: ZeRO-1, optimizer state in memory")
        config = self._config("zero1-memory", {"stage": 1})
        return self._train(config, "run-1", "--resume", f"{self.folder / 'run'}@step-{middle:08d}")

    def _train(self, config: Path, save: str, *words: object) -> list[dict[str, Any]]:
        """Run `zstore train`; return its metrics, a row a step."""
        metrics, saved = config.with_suffix(".jsonl"), self.folder / save
        model = ("--model", self.model, "--steps", self.steps)
        self._zstore("train", "--config", config, *model, "--save", saved, *words, "--metrics", metrics)
        return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]

    def _compare(self, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
        losses = {row["step"]: row["loss"] for row in first}
        apart = max(abs(losses[row["step"]] - row["loss"]) for row in second)
        self.facts += [
            ("loss, first step and last", f"{first[0]['loss']:.3f} -> {first[-1]['loss']:.3f}"),
            ("largest difference of the resumed run's loss", f"{apart:.5f} (at most {MAX_DIFFERENCE})"),
        ]
        if not apart <= MAX_DIFFERENCE:
            raise SystemExit(
                f"the resumed run's loss is {apart:.5f} from the first run's; at most {MAX_DIFFERENCE} is allowed"
            )

    def _write_sample(self) -> None:
        import torch
        from safetensors.torch import load_file

        from .sample import build_model

        _say("Load the weights into a plain torch model and generate text")
        torch.set_num_threads(1)  # see ONE_THREAD
        model = build_model(self.model, 128)
        weights = load_file(self.folder / "weights" / "model.safetensors")
        missing, unexpected = model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
        if unexpected or any("lm_head" not in name for name in missing):
            raise SystemExit(
                f"the consolidated weights do not fit the model: missing {missing}, unexpected {unexpected}"
            )
        prompt = b"def "
        generator = torch.Generator().manual_seed(1)
        ids = torch.tensor([list(prompt)])
        out = model.eval().generate(ids, max_new_tokens=200, temperature=0.8, generator=generator)  # type: ignore[operator]
        print(bytes(out[0].tolist()).decode("utf-8", errors="replace"))

    def _zstore(self, *words: object) -> None:
        """Run a `zstore` command, show its output, and note the save stalls."""
        command = [sys.executable, "-m", "zstore", *map(str, words)]
        print("$ zstore " + " ".join(command[3:]), flush=True)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ONE_THREAD | os.environ) as process:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                if "save stall" in line:
                    self.stalls_ms.append(float(line.split("save stall")[1].split()[0]))
        if process.returncode:
            raise SystemExit(f"the command failed with exit code {process.returncode}")

    def close_with_table(self, elapsed_s: float) -> None:
        """Print the results, and what to type next."""
        rows = [
            *self.facts,
            ("save stall, longest", f"{max(self.stalls_ms):.1f} ms"),
            ("time", f"{elapsed_s:.0f} s"),
        ]
        _say("Results")
        for name, value in rows:
            print(f"{name:<58} {value}")
        print("\nWhat to type next:")
        for command, what in next_commands(_shown(self.folder), self.model, self.steps):
            print(f"  {command}  # {what}")


def next_commands(folder: str, model: str, steps: int) -> list[tuple[str, str]]:
    """Return commands on the demo's own folder, each with a description."""
    script = Path(sys.executable).with_name("zstore")
    zstore = _shown(script) if script.exists() else f"{sys.executable} -m zstore"
    run, config = f"{folder}/run", f"{folder}/zero1-memory.json"
    before, last = f"{run}/step-{steps - SAVE_EVERY:08d}", f"{run}/step-{steps:08d}"
    on = f"--steps {steps + SAVE_EVERY} --save {run}-1 --resume auto"
    return [
        (f"{zstore} serve {folder}", "a page that shows the runs, their checkpoints and arrays (extra `serve`)"),
        (f"{zstore} ls {run}", "the checkpoints, and what they share"),
        (f"{zstore} inspect {run}", "the arrays: shape, bytes, shards"),
        (f"{zstore} diff {before} {last}", f"what the last {SAVE_EVERY} steps changed"),
        (f"{zstore} train --config {config} --model {model} {on}", "continue training"),
        (f"{zstore} doctor --path {folder}", "what this machine and its drive can do"),
        (f"{zstore} plan --model gpt-base", "how a larger model's training fits on this machine"),
    ]


def _shown(path: Path) -> str:
    """Return `path` as a user would type it in this folder."""
    folder = Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
