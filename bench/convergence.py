"""Keys that change numbers, beside the exact run: a GPT on the same text, in the same order, with the same seed.

Each case of `bench.convergence_cases` trains for as many steps as the exact run of its group. Printed are the mean loss
of all steps and of the last tenth, both as ratios to the exact run's, the bytes that a rank sent a step, the bytes of
optimizer state that it holds, and seconds a step. Ranks are processes on gloo with one thread each, on the CPU.

    python -m bench.convergence [--groups quantized] [--cases NAME] [--ranks 2] [--steps 200] [--json FILE]

The text is the standard library's sources, or `--data`. Losses repeat to the last bit on one machine; seconds do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import zstore
from bench.convergence_cases import GROUPS
from bench.machine import machine
from zstore.testing.ranks import run_ranks
from zstore.tools.sample.corpus import open_corpus
from zstore.tools.sample.models import build_model

_SEED = 0
_TIMEOUT_S = 3600

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--cases", nargs="+", help="only these, beside the exact run")
    parser.add_argument("--ranks", type=int, nargs="+", help="processes; by default those of each group")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank and step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", help="file or folder of text")
    parser.add_argument("--path", type=Path, help="folder for what runs keep on the drive")
    parser.add_argument("--json", type=Path, help="write all figures, with every step's loss, to this file")
    options = parser.parse_args()
    rows: list[Figures] = []
    for name in options.groups:
        for ranks in options.ranks or GROUPS[name].ranks:
            found = compare(name, ranks, options)
            print(describe(found), end="\n\n", flush=True)
            rows += found
    if options.json:
        figures = {"machine": machine(Path.cwd()), "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def compare(name: str, ranks: int, options: argparse.Namespace) -> list[Figures]:
    """Return the figures of the group's exact run and of its cases on so many ranks."""
    group = GROUPS[name]
    arguments = {key: getattr(options, key) for key in ("steps", "model", "batch", "tokens", "lr", "data")}
    arguments |= group.args
    exact = merged(_common(arguments), group.exact)
    chosen = {case: change for case, change in group.cases.items() if not options.cases or case in options.cases}
    rows: list[Figures] = []
    for case, config in [("exact", exact), *((case, merged(exact, change)) for case, change in chosen.items())]:
        with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
            found = run_ranks(train, ranks, placed(config, folder), arguments, timeout_s=_TIMEOUT_S)
        rows.append({"group": name, "case": case, "ranks": ranks, "model": options.model} | _together(found))
        rows[-1] |= _ratios(rows[-1], rows[0])
    return rows


def _common(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": arguments["batch"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": arguments["lr"]}},
        "steps_per_print": 0,
    }


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the changes; sections are merged, and what is changed to None is left out."""
    found = dict(config)
    for key, value in changes.items():
        former = found.get(key)
        found[key] = (
            merged(former if isinstance(former, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return {key: value for key, value in found.items() if value is not None}


def placed(config: Any, folder: str) -> Any:
    """Return `config` with `folder` for every value that says "FOLDER"."""
    if isinstance(config, Mapping):
        return {key: placed(value, folder) for key, value in config.items()}
    return folder if config == "FOLDER" else config


def train(rank: int, config: dict[str, Any], arguments: dict[str, Any]) -> Figures:
    """Train on one rank; return its losses, what it sent and held, and its seconds."""
    torch.manual_seed(_SEED)
    model = build_model(arguments["model"], arguments["tokens"])
    corpus, batch = open_corpus(arguments["data"]), arguments["batch"]
    losses: list[float] = []
    seconds: list[float] = []
    with zstore.initialize(model=model, config=config)[0] as engine:
        ranks, before = engine.world_size, engine.statistics()
        for step in range(arguments["steps"]):
            first = (step * ranks + rank) * batch
            ids, labels = corpus.batch(range(first, first + batch), arguments["tokens"], _SEED)
            started = time.perf_counter()
            loss = engine(ids, labels=labels)
            engine.backward(loss)
            engine.step()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
        after = engine.statistics()
    sent = {kind: nbytes - before.sent_bytes.get(kind, 0) for kind, nbytes in after.sent_bytes.items()}
    return {
        "losses": losses,
        "sent_bytes": {kind: nbytes / len(losses) for kind, nbytes in sorted(sent.items()) if nbytes},
        "state_bytes": after.held.optimizer_state,
        "seconds": statistics.median(seconds),
    }


def _together(found: Sequence[Figures]) -> Figures:
    losses = [statistics.fmean(values) for values in zip(*(one["losses"] for one in found), strict=True)]
    return {**found[0], "losses": losses}


def _ratios(row: Figures, exact: Figures) -> Figures:
    losses, others = row["losses"], exact["losses"]
    last = max(len(losses) // 10, 1)
    pairs = {"mean": (losses, others), "last": (losses[-last:], others[-last:])}
    found = {f"{name}_loss": statistics.fmean(mine) for name, (mine, _) in pairs.items()}
    found |= {
        f"{name}_ratio": statistics.fmean(mine) / statistics.fmean(theirs) for name, (mine, theirs) in pairs.items()
    }
    found["most_apart"] = max(abs(mine - theirs) for mine, theirs in zip(losses, others, strict=True))
    return found


def describe(rows: Sequence[Figures]) -> str:
    """Return the figures of a group as a table in Markdown."""
    head = rows[0]
    lines = [
        f"{head['group']}: {head['model']}, {head['ranks']} ranks, {len(head['losses'])} steps",
        "",
        "| case | mean loss | ratio | last tenth | ratio | sent MB a step | state MB | s a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent = sum(nbytes for kind, nbytes in row["sent_bytes"].items() if kind != "control")
        lines.append(
            f"| {row['case']} | {row['mean_loss']:.4f} | {row['mean_ratio']:.4f} | {row['last_loss']:.4f} | "
            f"{row['last_ratio']:.4f} | {sent / 1e6:.2f} | {row['state_bytes'] / 1e6:.2f} | {row['seconds']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
