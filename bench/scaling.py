"""How cost grows: processor time, time and memory against model size, number of arrays, ranks, checkpoints and steps of a
journal, with the exponent of each: 1 is a straight line, 0 no growth at all.

    python -m bench.scaling [--axes parameters,arrays,ranks,checkpoints,plan,planned] [--path FOLDER] [--json FILE]
                            [--md FILE] [--svg FILE] [--show FILE]

Each point is a process of its own. `planned` are the parts of a save and a load of single ranks of a world of up to 512
(`bench.scale`). An exponent is the slope of a line through the logarithms of all points, by least squares, and
beside it that between the last two, where fixed costs weigh least.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import scale
from bench.chart import Panel, draw
from bench.children import run_child
from bench.machine import machine
from bench.offload import MODELS

Row = dict[str, Any]

MILLION = 10**6
AXES: dict[str, str] = {
    "parameters": "parameters, in 24 arrays",
    "arrays": "arrays, of ten million elements in all",
    "ranks": "ranks, of ten million parameters in 24 arrays; processor time and memory of all together",
    "checkpoints": "checkpoints in the folder",
    "plan": "million parameters of a GPT, planned with all on disk",
    "planned": "ranks that save, of 110 million parameters; what a single one does",
}
POINTS: dict[str, list[int]] = {
    "parameters": [10 * MILLION, 30 * MILLION, 110 * MILLION],
    "arrays": [10, 100, 1000, 10_000],
    "ranks": [1, 2, 3, 4],
    "checkpoints": [1, 10, 100, 1000],
    "plan": [2, 110, 1200, 2700],
    "planned": [8, 64, 512],
}
GPTS = {2: "tiny", 110: "110m", 1200: "1.2b", 2700: "2.7b"}
"""Millions of parameters -> name in `bench.offload`."""
_LIMIT_S = 600.0
_LEAST_SHOWN_BYTES = 8 * 2**20


def main() -> None:
    options = _options()
    if options.show:
        figures = json.loads(options.show.read_text(encoding="utf-8"))
    else:
        figures = {"machine": machine(options.path), "rows": []}
        for row in measure(options):
            figures["rows"].append(row)
            print(
                f"{row['axis']} {row['x']:,}: {row['path']}: {row['cpu_s']:.4f} s of processor, {row['seconds']:.4f} s"
            )
            if options.json:  # after each, for a run of all takes a while
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    lines = table(figures["rows"])
    print("\n".join(lines))
    if options.md:
        options.md.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.svg:
        options.svg.write_text(draw(panels(figures["rows"])), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES), help="which of them, by commas")
    parser.add_argument("--points", help="values of the axis, by commas, where one axis is named")
    parser.add_argument(
        "--numel", type=int, default=10 * MILLION, help="elements of a model, where they are not the axis"
    )
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder of state and checkpoints, for a while")
    parser.add_argument("--steps-only", action="store_true", help="no saves: state on disk is all that is written")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--md", type=Path, help="write the table to this file")
    parser.add_argument("--svg", type=Path, help="draw them into this file")
    parser.add_argument("--show", type=Path, help="measure nothing, and show the figures of this file")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each path at each point of each axis."""
    for axis in options.axes.split(","):
        points = [int(x) for x in options.points.split(",")] if options.points else POINTS[axis]
        for x in points:
            found = planned(x, options.path) if axis == "planned" else measured_at(axis, x, options)
            for row in found:
                yield {"axis": axis, "x": x, **row}


def measured_at(axis: str, x: int, options: argparse.Namespace) -> list[Row]:
    """Return what a process measured at one point."""
    spec: Row = {"arrays": 24, "numel": options.numel, "tiers": ["none", "nvme"], "saves": not options.steps_only}
    spec["limit_s"] = _LIMIT_S
    if axis == "parameters":
        spec |= {"contender": "model", "numel": x}
        spec |= {"tiers": ["nvme"], "steps": 1} if options.steps_only else {}
    elif axis == "arrays":
        # A row of 64 elements each, at least.
        spec |= {"contender": "model", "arrays": x}
    elif axis == "plan":
        spec |= {"contender": "plan", "shape": asdict(MODELS[GPTS[x]])}
    elif axis == "ranks":
        spec |= {"contender": "ranks", "ranks": x}
    else:
        spec |= {"contender": axis, axis: x, "arrays": 2, "numel": 1000}
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
        told = run_child("bench.scaling_paths", spec | {"folder": folder})
    if told.error is not None:
        raise RuntimeError(f"{axis} {x}: {told.error}")
    return [{key: value for key, value in each.items() if key != "event"} for each in told.events]


def planned(ranks: int, path: Path) -> list[Row]:
    """Return what single ranks of a world of so many do to save a checkpoint, and to load it on three quarters of them."""
    options = argparse.Namespace(
        save_ranks=ranks, load_ranks=ranks * 3 // 4, layers=12, hidden=768, manifests=32, path=path, out=None
    )
    rows = []
    for row in scale.measure(options)["rows"]:
        what = "the look at all manifests" if row["event"].startswith("look") else row["event"]
        if not (row["who"] == "load" and row["rank"]):
            rows.append(
                {"path": f"{row['who']}: {what}", **{key: row[key] for key in ("seconds", "cpu_s", "growth_bytes")}}
            )
    return rows


# -- what they come to ------------------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope, by least squares, of a line through the logarithms of at least two points, which are positive."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((x - x_mean) * (y - y_mean) for x, y in logs) / sum((x - x_mean) ** 2 for x, _ in logs)
    return slope


def lines_of(rows: Sequence[Row], axis: str, what: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each path of an axis."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["axis"] == axis and row[what]:
            lines.setdefault(row["path"], []).append((row["x"], row[what]))
    return {path: sorted(points) for path, points in lines.items()}


def table(rows: Sequence[Row]) -> list[str]:
    """Return a table for each axis, in Markdown."""
    lines: list[str] = []
    for axis in [axis for axis in AXES if any(row["axis"] == axis for row in rows)]:
        xs = sorted({row["x"] for row in rows if row["axis"] == axis})
        lines += [
            f"### {_heading(axis)}",
            "",
            f"Against {AXES[axis]}: processor seconds, and below them MiB.",
            "",
        ]
        lines += ["| path |" + "".join(f" {x:,} |" for x in xs) + " exponent | of the last two |"]
        lines += ["|---|" + "--:|" * (len(xs) + 2)]
        for what, scaled, unit in (("cpu_s", 1.0, ""), ("growth_bytes", 2.0**-20, ", MiB")):
            for path, points in lines_of(rows, axis, what).items():
                if what == "growth_bytes" and max(y for _, y in points) < _LEAST_SHOWN_BYTES:
                    continue
                by_x = dict(points)
                cells = "".join(f" {by_x[x] * scaled:.3g} |" if x in by_x else " |" for x in xs)
                fits = f" {exponent(points):.2f} | {exponent(points[-2:]):.2f} |" if len(points) > 1 else " | |"
                lines.append(f"| {path}{unit} |{cells}{fits}")
        lines.append("")
    return lines


def _heading(axis: str) -> str:
    text = AXES[axis].split(",")[0]
    return text[0].upper() + text[1:]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return a chart of processor time for each axis."""
    return [
        Panel(title=axis, x_title=AXES[axis].split(";")[0], y_title="processor seconds", lines=lines)
        for axis in AXES
        if (lines := lines_of(rows, axis, "cpu_s"))
    ]


if __name__ == "__main__":
    main()
