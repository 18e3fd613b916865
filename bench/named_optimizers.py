"""Optimizers that a config names, beside their own class in a plain loop: losses over the same text, state and seconds.

Each trains a GPT in fp32 for as many steps, with the state on the drive at stage 3, by `zstore.initialize` with a config that
names it, and in a loop of forward, backward and `step()`; one process, one thread. Printed are the mean loss of the last
tenth of the steps, the most that two losses of a step are apart, the bytes that the optimizer keeps of a parameter beside
its fp32 master, and the seconds of a step over those of the loop.

    python -m bench.named_optimizers [--names Lion Lamb Adafactor Muon] [--steps 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zstore
from bench.machine import machine
from zstore.optim import Lamb, Lion, MuonWithAdam, split_for_muon
from zstore.tools.sample.corpus import open_corpus
from zstore.tools.sample.models import build_model

_SEED = 0

Figures = dict[str, Any]
Step = Callable[[torch.Tensor, torch.Tensor], float]
"""Trains on ids and labels; returns the loss."""


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    hidden, others = split_for_muon(model)
    return MuonWithAdam(
        [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False, "lr": 1e-3, "fused": True}]
    )


CASES: dict[str, tuple[dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "AdamW": ({"lr": 1e-3}, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.0, fused=True)),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "Lion": ({"lr": 2e-4}, lambda m: Lion(m.parameters(), lr=2e-4)),
    "Lamb": ({"lr": 1e-2}, lambda m: Lamb(m.parameters(), lr=1e-2)),
    "Adafactor": ({"lr": 1e-2}, lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2)),
    "Muon": ({"adam_lr": 1e-3}, _muon),
}
"""Arguments in the config, and the class in a plain loop."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--path", type=Path, help="folder on the drive")
    parser.add_argument("--json", type=Path, help="write all figures, with every step's loss, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(name, options) for name in options.names]
    print(describe(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(Path.cwd()), "rows": rows}, indent=2) + "\n")


def compare(name: str, options: argparse.Namespace) -> Figures:
    """Return the figures of one optimizer."""
    params, make = CASES[name]
    plain = _model(options)
    optimizer = make(plain)

    def own(ids: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = plain(ids, labels=labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    theirs, plain_s = _run(own, options)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
        disk = {"device": "nvme", "nvme_path": folder}
        config = {
            "gradient_clipping": 0.0,
            "train_micro_batch_size_per_gpu": options.batch,
            "optimizer": {"type": name, "params": params},
            "zero_optimization": {"stage": 3, "offload_optimizer": disk, "offload_param": disk},
            "steps_per_print": 0,
        }
        with zstore.initialize(model=_model(options), config=config)[0] as engine:

            def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
                loss = engine(ids, labels=labels)
                engine.backward(loss)
                engine.step()
                return float(loss.detach())

            losses, seconds = _run(step, options)
            state = engine.training_state.state
            slots = [(record, slot.name) for record in state.scalars for slot in state.slots_of(record)]
            held = sum(state.store.local(f"optimizer/{slot}/{record.name}").nbytes for record, slot in slots)
            numel = sum(record.numel for record in state.scalars)
    last = max(len(losses) // 10, 1)
    return {
        "name": name,
        "losses": losses,
        "last_loss": statistics.fmean(losses[-last:]),
        "plain_last_loss": statistics.fmean(theirs[-last:]),
        "most_apart": max(abs(mine - other) for mine, other in zip(losses, theirs, strict=True)),
        "slot_bytes_per_parameter": held / numel,
        "seconds_ratio": seconds / plain_s,
    }


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(_SEED)
    return build_model(options.model, options.tokens)


def _run(step: Step, options: argparse.Namespace) -> tuple[list[float], float]:
    corpus, batch = open_corpus(None), options.batch
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(options.steps):
        ids = corpus.batch(range(number * batch, (number + 1) * batch), options.tokens, _SEED)
        started = time.perf_counter()
        losses.append(step(ids, ids))
        seconds.append(time.perf_counter() - started)
    return losses, statistics.median(seconds)


def describe(rows: list[Figures]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        f"{len(rows[0]['losses'])} steps, stage 3 with state and parameters on the drive, beside the class in a plain loop",
        "",
        "| optimizer | loss, last tenth | plain loop's | most apart | bytes kept a parameter | seconds, to the loop's |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['last_loss']:.4f} | {row['plain_last_loss']:.4f} | {row['most_apart']:.1e} | "
        f"{row['slot_bytes_per_parameter']:.2f} | {row['seconds_ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
