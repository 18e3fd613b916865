"""transformers' Trainer on zstore beside Trainer alone, and what a save and the host's memory take under it.

One Llama of random weights (25 M parameters by default) on random tokens, one process. **Step**: a pair is a short `train()`
of each, in turn in one process, so that noise meets both; who is first changes from pair to pair. The engine keeps all in
memory. A ratio is the median over pairs of the engine's median step to the other's. **Save**: state and parameters rest on
disk; the bytes of files that a `checkpoint-N` makes anew, of all that belong to it but the weights for other software.
**Save calls**: the median time for which a save holds the loop up, `--steps` saves, one each `--every` steps, the two newest
kept. A save waits for the one before it, which small steps leave no time to end.
**Memory**: the most that a process of its own has resident in training, less what it had before the model was made, under a
`host_budget_bytes` and with Trainer alone, whose own state is known.

    python -m bench.trainer [--pairs 10] [--steps 5] [--hidden 512] [--layers 8] [--path FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

import zstore.hf
from bench.machine import machine
from bench.process import forget_peak, peak_bytes, resident_bytes
from zstore.checkpoint.usage import stored_files
from zstore.testing.ranks import run_ranks

_GOALS = {"step": 1.03, "save_percent": 2.0}
_SEQUENCES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of short trainings, after one to warm up")
    parser.add_argument("--steps", type=int, default=5, help="steps of each")
    parser.add_argument("--every", type=int, default=10, help="steps from a save to the next")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=256 * 2**20, help="host_budget_bytes")
    parser.add_argument("--path", type=Path, help="folder on the drive to be measured; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = measure(options, Path(folder))
    figures["goals"] = _GOALS
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures; print each as it comes."""
    figures: dict[str, Any] = {"machine": machine(folder), "parameters": _model(options).num_parameters()}
    figures["save"] = save = _save(options, folder)
    print(
        f"save: {save['new_bytes'] / 1e6:.2f} MB anew of {save['total_bytes'] / 1e6:.1f} MB, {save['percent']:.2f} % (goal "
        f"{_GOALS['save_percent']:.0f} %); with the weights for other software {save['weights_bytes'] / 1e6:.1f} MB more"
    )
    figures["save_calls"] = calls = _save_calls(options, folder)
    print("save calls: " + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in calls.items()))
    figures["memory"] = memory = _memory(options, folder)
    print(
        f"memory: peak {memory['engine_peak_bytes'] / 2**20:.0f} MiB, Trainer alone {memory['other_peak_bytes'] / 2**20:.0f} "
        f"MiB; of it not training state {memory['beside_state_bytes'] / 2**20:.0f} MiB, so that zstore's is "
        f"{memory['engine_state_bytes'] / 2**20:.0f} MiB of a budget of {options.budget / 2**20:.0f} MiB"
    )
    figures["step"] = step = _steps(options, folder)
    print(
        f"step: zstore {step['engine_s']:.4f} s, Trainer alone {step['other_s']:.4f} s; ratio {step['ratio']:.3f} "
        f"(goal {_GOALS['step']:.2f})"
    )
    return figures


class _Tokens(Dataset[dict[str, Any]]):
    def __init__(self, samples: int, tokens: int) -> None:
        self._ids = torch.randint(0, 4096, (samples, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of the steps of the last training, the first left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.seconds, self._since = [], None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.seconds.append(now - self._since)
        self._since = now


class _Peak(TrainerCallback):  # type: ignore[misc]
    """Begins the peak of resident memory anew where training begins."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        forget_peak()


def _model(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        max_position_embeddings=options.tokens,
        vocab_size=4096,
    )
    return transformers.LlamaForCausalLM(config)


def _trainer(options: argparse.Namespace, folder: Path, config: dict[str, Any] | None, **changes: Any) -> Any:
    arguments = TrainingArguments(
        os.fspath(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_steps=options.steps + 1,
        per_device_train_batch_size=_SEQUENCES,
        logging_strategy="no",
        **{"save_strategy": "no", **changes},
    )
    data = _Tokens(_SEQUENCES * (options.steps + 1), options.tokens)
    kind, extra = (zstore.hf.Trainer, {"zstore_config": config}) if config else (transformers.Trainer, {})
    return kind(_model(options), arguments, train_dataset=data, **extra)


def _steps(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of a step of both, and their ratio."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 0}}
    pair = [_trainer(options, folder / "ours", config), _trainer(options, folder / "alone", None)]
    clocks = [_Clock(), _Clock()]
    for trainer, clock in zip(pair, clocks, strict=True):
        trainer.add_callback(clock)
    rows: list[list[float]] = []
    for number in range(options.pairs + 1):
        row = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            pair[which].train()
            row[which] = statistics.median(clocks[which].seconds)
        if number:
            rows.append(row)
    pair[0].close()
    return {
        "engine_s": statistics.median(mine for mine, _ in rows),
        "other_s": statistics.median(theirs for _, theirs in rows),
        "ratio": statistics.median(mine / theirs for mine, theirs in rows),
        "pairs_s": rows,
    }


def _config_of_disk(folder: Path, budget_bytes: int | None) -> dict[str, Any]:
    """Return a config with parameters and state on disk; with a budget as much of them in memory as it holds."""
    offload = {"device": "nvme", "nvme_path": os.fspath(folder)}
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    return config if budget_bytes is None else {**config, "zstore": {"host_budget_bytes": budget_bytes}}


def _save(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what one save takes of a run from disk."""
    config = _config_of_disk(folder, None)
    trainer = _trainer(options, folder / "disk", config, save_strategy="steps", save_steps=2)
    trainer.train()
    newest = max((folder / "disk").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    files = stored_files(newest)
    weights = sum(path.stat().st_size for path in newest.glob("model*.safetensors"))
    # A file of the state that rests on disk has a name in the run folder too, and the weights two in the checkpoint.
    new_bytes = files.freed_bytes - weights
    total_bytes = files.size_bytes - weights
    trainer.close()
    return {
        "new_bytes": new_bytes,
        "total_bytes": total_bytes,
        "percent": 100 * new_bytes / total_bytes,
        "weights_bytes": weights,
    }


def _save_calls(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds for which a save holds the loop up, by what saves."""
    configs: dict[str, dict[str, Any] | None] = {
        "Trainer alone": None,
        "in memory": {"zero_optimization": {"stage": 0}},
        "from disk": _config_of_disk(folder, None),
    }
    found: dict[str, float] = {}
    several = argparse.Namespace(**{**vars(options), "steps": options.steps * options.every})
    for name, config in configs.items():
        saves = {"save_strategy": "steps", "save_steps": options.every, "save_total_limit": 2}
        trainer = _trainer(several, folder / name, config, **saves)
        seconds: list[float] = []

        def timed(*given: Any, save: Any = trainer._save_checkpoint, seconds: list[float] = seconds) -> None:
            started = time.perf_counter()
            save(*given)
            seconds.append(time.perf_counter() - started)

        trainer._save_checkpoint = timed
        trainer.train()
        found[name] = statistics.median(seconds[len(seconds) // 4 :])  # the first find nothing that was saved before
        if config is not None:
            trainer.close()
    return found


def _memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the peaks of resident memory of both, each in a process of its own, and what is not training state in them."""
    ours, alone = (
        run_ranks(_peak, 1, options, os.fspath(folder), budget, timeout_s=600)[0] for budget in (True, False)
    )
    # Parameters, gradients and two moments in fp32: the rest is activations, and what Python and torch take.
    beside = alone - 16 * _model(options).num_parameters()
    return {
        "engine_peak_bytes": ours,
        "other_peak_bytes": alone,
        "beside_state_bytes": beside,
        "engine_state_bytes": ours - beside,
        "budget_bytes": options.budget,
    }


def _peak(rank: int, options: argparse.Namespace, folder: str, with_budget: bool) -> int:
    """Return the most bytes that a training has resident, less what the process had before the model was made."""
    warnings.simplefilter("default")
    before = resident_bytes()
    config = _config_of_disk(Path(folder), options.budget) if with_budget else None
    trainer = _trainer(options, Path(folder) / "memory", config)
    trainer.add_callback(_Peak())  # of the training alone: until then the model is whole in memory
    trainer.train()
    return peak_bytes() - before


if __name__ == "__main__":
    main()
