"""Draws the charts of README and of `docs/figures.md`, `docs/pictures/figures.svg`, from `bench/results/*.json`.

    python -m bench.plots

A test says that the file is the one that the results give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PICTURE = ROOT / "docs/pictures/figures.svg"
_GIB = 2**30
_BARS_WIDTH, _BAR, _NAMES, _TEXTS = 560, 22, 200, 120


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A horizontal bar: its name, its length, the text at its end, and whether it is one of ours."""

    name: str
    value: float
    text: str
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A chart of horizontal bars from zero."""

    title: str
    subtitle: str
    bars: Sequence[Bar]


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


def draw_bars(charts: Sequence[Bars], columns: int = 2) -> str:
    """Return an SVG of charts of bars side by side; the charts of a row are as high as the highest of them."""
    parts, top = [], 0
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        for number, chart in enumerate(row):
            parts += [f'<g transform="translate({number * _BARS_WIDTH},{top})">', *_bars(chart), "</g>"]
        top += 60 + _BAR * max(len(chart.bars) for chart in row)
    return _svg(min(columns, len(charts)) * _BARS_WIDTH, top, parts)


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _bars(chart: Bars) -> Iterable[str]:
    longest = max(bar.value for bar in chart.bars)
    yield f'<text x="16" y="24" font-size="14" font-weight="bold">{escape(chart.title)}</text>'
    yield f'<text x="16" y="41" fill="#555">{escape(chart.subtitle)}</text>'
    for number, bar in enumerate(chart.bars):
        y = 52 + _BAR * number
        length = (_BARS_WIDTH - _NAMES - _TEXTS) * bar.value / longest
        colour, weight = ("#3366cc", "bold") if bar.ours else ("#a0a8b4", "normal")
        yield f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end" font-weight="{weight}">{escape(bar.name)}</text>'
        yield f'<rect x="{_NAMES}" y="{y}" width="{length:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
        yield f'<text x="{_NAMES + length + 6:.1f}" y="{y + 12}" font-weight="{weight}">{escape(bar.text)}</text>'


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
