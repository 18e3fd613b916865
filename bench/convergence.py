"""Keys that change numbers, beside the exact run: a GPT on the same text, in the same order, with the same seed.

Each case of `bench.convergence_cases` trains for as many steps as the exact run of its group, once for each seed. Printed
are the loss of the last tenth of the steps, as a ratio to that of the exact run with the same seed, one for each seed, and
so how far exact runs of two seeds are apart; the bytes that a rank sent a step, the bytes of optimizer state that it holds,
and seconds a step. Ranks are processes on gloo with one thread each, on the CPU.

    python -m bench.convergence [--groups quantized] [--cases NAME] [--seeds 0 1 2] [--steps 200] [--json FILE]

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

_TIMEOUT_S = 3600

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--cases", nargs="+", help="only these, beside the exact run")
    parser.add_argument("--ranks", type=int, nargs="+", help="processes; by default those of each group")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the weights and of the samples")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
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
    arguments = {key: getattr(options, key) for key in ("steps", "model", "batch", "tokens", "lr", "data", "precision")}
    arguments |= group.args
    exact = merged(_common(arguments), group.exact)
    chosen = {case: change for case, change in group.cases.items() if not options.cases or case in options.cases}
    rows: list[Figures] = []
    for case, config in [("exact", exact), *((case, merged(exact, change)) for case, change in chosen.items())]:
        runs = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
                found = run_ranks(train, ranks, placed(config, folder), arguments, seed, timeout_s=_TIMEOUT_S)
            runs.append(_together(found))
        about = {"group": name, "case": case, "ranks": ranks, "model": options.model, "seeds": options.seeds}
        rows.append(about | runs[0] | {"losses": [run["losses"] for run in runs]})
        rows[-1] |= _ratios(rows[-1], rows[0])
    return rows


def _common(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": arguments["batch"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments["precision"] == "bf16"},
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


def train(rank: int, config: dict[str, Any], arguments: dict[str, Any], seed: int) -> Figures:
    """Train on one rank; return its losses, what it sent and held, and its seconds."""
    torch.manual_seed(seed)
    model = build_model(arguments["model"], arguments["tokens"])
    corpus, batch = open_corpus(arguments["data"]), arguments["batch"]
    losses: list[float] = []
    seconds: list[float] = []
    with zstore.initialize(model=model, config=config)[0] as engine:
        ranks, before = engine.world_size, engine.statistics()
        for step in range(arguments["steps"]):
            first = (step * ranks + rank) * batch
            ids = corpus.batch(range(first, first + batch), arguments["tokens"], seed)
            started = time.perf_counter()
            loss = engine(ids, labels=ids)
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
    """Return the losses of the last tenth of the steps, by seed, and their ratios to the exact run's."""
    last = max(len(row["losses"][0]) // 10, 1)
    mine, theirs = ([statistics.fmean(losses[-last:]) for losses in one["losses"]] for one in (row, exact))
    return {"last_losses": mine, "last_ratios": [a / b for a, b in zip(mine, theirs, strict=True)]}


def describe(rows: Sequence[Figures]) -> str:
    """Return the figures of a group as a table in Markdown."""
    head = rows[0]
    lines = [
        f"{head['group']}: {head['model']}, {head['ranks']} ranks, {len(head['losses'][0])} steps, seeds {head['seeds']}",
        "",
        "| case | last tenth | ratios | mean ratio | sent MB a step | state MB | s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent = sum(nbytes for kind, nbytes in row["sent_bytes"].items() if kind != "control")
        lines.append(
            f"| {row['case']} | {_each(row['last_losses'])} | {_each(row['last_ratios'])} | "
            f"{statistics.fmean(row['last_ratios']):.4f} | {sent / 1e6:.2f} | {row['state_bytes'] / 1e6:.2f} | "
            f"{row['seconds']:.3f} |"
        )
    return "\n".join(lines)


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


if __name__ == "__main__":
    main()
