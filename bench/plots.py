"""Draws the charts of README and of `docs/figures.md`, `docs/pictures/figures.svg`, from `bench/results/*.json`.

    python -m bench.plots

A test says that the file is the one that the results give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.chart import Bar, Bars, draw_bars

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PICTURE = ROOT / "docs/pictures/figures.svg"
_GIB = 2**30


def results(name: str) -> Any:
    """Return the figures of a benchmark as it wrote them."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def training(found: Any) -> Bars:
    """Iterations of a model whose state is on disk, beside the peer, each with the peak memory of its process."""
    (model,) = (model for model in found["models"] if model["model"] == "1.2b")
    names = {"compute": "computation alone, in memory", "deepspeed": "DeepSpeed, NVMe"}
    bars = [
        Bar(
            name=f"zstore, {_budget(row['host_budget_bytes'])}" if ours else names[row["contender"]],
            value=row["iteration_s"],
            text=f"{row['iteration_s']:.1f} s, {row['peak_bytes'] / _GIB:.1f} GiB",
            ours=ours,
        )
        for row in _distinct(model["rows"])
        for ours in [row["contender"] == "zstore"]
    ]
    return Bars(
        title="Training 1.2 B parameters from disk",
        subtitle=f"seconds of an iteration, peak memory ({_machine(found['machine'])})",
        bars=sorted(bars, key=lambda bar: -bar.value),
    )


def checkpoints(found: Any, what: str) -> Bars:
    """How long a save or a load of a model's state takes with each library."""
    rows = [
        row
        for row in found["medians"]
        if row["model"] == "110m" and row["what"] == what and row["who"] in _LIBRARIES and row["error"] is None
    ]
    bars = [
        Bar(
            name=_LIBRARIES[row["who"]],
            value=row["seconds"],
            text=f"{row['seconds']:.2f} s",
            ours="zstore" in row["who"],
        )
        for row in rows
    ]
    size = rows[0]["bytes"] / 1e9
    titles = {"save": f"Saving {size:.1f} GB from memory", "load": f"Loading {size:.1f} GB"}
    ends = {"save": "it is durable", "load": "every value is there"}
    return Bars(
        title=titles[what],
        subtitle=f"seconds until {ends[what]} ({_machine(found['machine'])})",
        bars=sorted(bars, key=lambda bar: -bar.value),
    )


def steps(found: Any) -> Bars:
    """Whole steps of two processes without offload, beside DDP and FSDP2."""
    bars: list[Bar] = []
    for row in found["rows"]:
        bars += [
            Bar(name=f"{row['other']}, {row['precision']}", value=row["other_s"], text=f"{row['other_s']:.2f} s"),
            Bar(
                name=f"zstore, {row['precision']}, stage {row['stage']}",
                value=row["engine_s"],
                text=f"{row['engine_s']:.2f} s",
                ours=True,
            ),
        ]
    return Bars(
        title="Whole steps of two processes, all in memory",
        subtitle=f"seconds, medians of pairs ({_machine(found['machine'])})",
        bars=bars,
    )


def figures() -> str:
    """Return the SVG of all charts."""
    saves = results("checkpoint")
    charts = [
        training(results("offload")),
        steps(results("overhead")),
        checkpoints(saves, "save"),
        checkpoints(saves, "load"),
    ]
    return draw_bars(charts)


_LIBRARIES = {
    "zstore, from memory": "zstore",
    "torch.save": "torch.save",
    "safetensors": "safetensors",
    "DCP 4 threads": "torch DCP, 4 threads",
    "tensorstore": "tensorstore",
    "DeepSpeed, from memory": "DeepSpeed",
}
"""Who saves and loads in `checkpoint.json` -> its name in the chart."""


def _distinct(rows: Sequence[Any]) -> list[Any]:
    """Return a row for each contender and budget, the last that was taken, of those without clipping."""
    found = {(row["contender"], row.get("host_budget_bytes")): row for row in rows if not row.get("clip")}
    return list(found.values())


def _budget(budget_bytes: int | None) -> str:
    return "buffers alone" if budget_bytes is None else f"budget {budget_bytes / 1e9:.1f} GB"


def _machine(machine: Any) -> str:
    return f"{machine['cores']} cores, {machine['cpu'].replace('(R)', '').replace(' Processor', '')}"


if __name__ == "__main__":
    PICTURE.write_text(figures(), encoding="utf-8")
