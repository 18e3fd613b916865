"""transformers' Trainer on zstore, through its DeepSpeed integration, beside Trainer alone.

One Llama of random weights (25 M parameters by default) on random tokens, one process. **Step**: a pair is a short `train()`
of each, in turn, so that noise meets both; who is first changes from pair to pair. The engine keeps all in memory. The ratio is
the median over pairs of the engine's median step to the other's. **Save calls**: the median time for which a save holds the
loop up, `--steps` saves, one each `--every` steps, the two newest kept, with `checkpoint.writer.decoupled`. A save waits
for the one before it, which small steps leave no time to end.

    python -m bench.trainer [--pairs 10] [--steps 5] [--hidden 512] [--layers 8] [--path FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine

_GOAL = 1.03
_SEQUENCES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of short trainings, after one to warm up")
    parser.add_argument("--steps", type=int, default=5, help="steps of each")
    parser.add_argument("--every", type=int, default=10, help="steps from a save to the next")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--path", type=Path, help="folder on the drive to be measured; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    importlib.import_module("zstore.as_deepspeed")  # before transformers
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = {"machine": machine(Path(folder)), "goal": _GOAL, **measure(options, Path(folder))}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures; print each as it comes."""
    calls = _save_calls(options, folder)
    print("save calls: " + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in calls.items()))
    step = _steps(options, folder)
    print(
        f"step: zstore {step['engine_s']:.4f} s, Trainer alone {step['other_s']:.4f} s; ratio {step['ratio']:.3f} "
        f"(goal {_GOAL:.2f})"
    )
    return {"save_calls": calls, "step": step}


def _trainer(options: argparse.Namespace, folder: Path, ds: dict[str, Any] | None, **changes: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        max_position_embeddings=options.tokens,
        vocab_size=4096,
    )
    if ds is None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of a Trainer before
    arguments = transformers.TrainingArguments(
        os.fspath(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_steps=options.steps + 1,
        per_device_train_batch_size=_SEQUENCES,
        logging_strategy="no",
        deepspeed=ds,
        **{"save_strategy": "no", **changes},
    )
    samples = _SEQUENCES * (options.steps + 1)
    ids = torch.randint(0, 4096, (samples, options.tokens), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data)


def _config(folder: Path | None) -> dict[str, Any]:
    """Return a config with everything in memory, or parameters and state in a folder."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 0},
        "checkpoint": {"writer": {"decoupled": True}},
    }
    if folder is not None:
        offload = {"device": "nvme", "nvme_path": os.fspath(folder)}
        config["zero_optimization"] = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    return config


def _steps(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of a step of both, and their ratio."""
    rows: list[list[float]] = []
    for number in range(options.pairs + 1):
        row = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            trainer = _trainer(options, folder / "steps", None if which else _config(None))
            row[which] = statistics.median(_timed(trainer, "training_step")[1:])
        if number:
            rows.append(row)
    return {
        "engine_s": statistics.median(mine for mine, _ in rows),
        "other_s": statistics.median(theirs for _, theirs in rows),
        "ratio": statistics.median(mine / theirs for mine, theirs in rows),
        "pairs_s": rows,
    }


def _timed(trainer: Any, call: str) -> list[float]:
    """Train, and return the seconds of each call of a method; of `training_step` from one to the next."""
    method, seconds, last = getattr(trainer, call), [], time.perf_counter()

    def timed(*given: Any) -> Any:
        nonlocal last
        started = last if call == "training_step" else time.perf_counter()
        result = method(*given)
        last = time.perf_counter()
        seconds.append(last - started)
        return result

    setattr(trainer, call, timed)
    trainer.train()
    trainer.accelerator.free_memory()
    return seconds


def _save_calls(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds for which a save holds the loop up, by what saves."""
    configs = {"Trainer alone": None, "in memory": _config(None), "from disk": _config(folder)}
    several = argparse.Namespace(**{**vars(options), "steps": options.steps * options.every})
    saves = {"save_strategy": "steps", "save_steps": options.every, "save_total_limit": 2}
    found: dict[str, float] = {}
    for name, config in configs.items():
        seconds = _timed(_trainer(several, folder / name, config, **saves), "_save_checkpoint")
        found[name] = statistics.median(seconds[len(seconds) // 4 :])  # the first find nothing that was saved before
    return found


if __name__ == "__main__":
    main()
