"""What `bench.cycles` found, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.cycle_causes import CAUSES

Row = dict[str, Any]
_Cell = Callable[[Row], float | None]


def describe(figures: Row) -> str:
    """Return the tables, in Markdown: what each path costs, by what causes, and its largest places."""
    parts = [_costs(figures)]
    if figures["sampler"]["perf"]:
        parts += [_causes(figures), _places(figures)]
    if figures["sampler"]["why"]:
        parts.append(f"Columns are missing here: {figures['sampler']['why']}.")
    return "\n\n".join(parts)


def _costs(figures: Row) -> str:
    """Return a row for each path, and for each checkout of it."""
    parameters = figures["parameters"] / 1e6
    columns: dict[str, Callable[[Row], str]] = {
        "core-s / GB": lambda row: f"{row['core_s'] / gigabytes(row):.3f}",
        "core-ms / M parameters": lambda row: f"{1000 * row['core_s'] / row['times'] / parameters:.2f}",
        "of it system": lambda row: f"{100 * row['system_s'] / row['core_s']:.0f} %",
        "GB": lambda row: f"{gigabytes(row) / row['times']:.2f}",
        "s": lambda row: f"{row['seconds'] / row['times']:.3f}",
        "cores busy": lambda row: f"{row['core_s'] / row['seconds']:.2f}",
        "no core": lambda row: f"{row['runnable_s'] / row['seconds']:.2f}",
        "in wait for the GIL": lambda row: _optional(row.get("lock_wait_s"), row["seconds"], ".2f"),
        "waits / GB": lambda row: f"{row['voluntary_switches'] / gigabytes(row):.0f}",
        "waits for the GIL / GB": lambda row: _optional(row.get("lock_waits"), gigabytes(row), ".0f"),
        "faults / GB": lambda row: f"{row['page_faults'] / gigabytes(row):.0f}",
    }
    lines = [["path", *(["checkout"] if len(figures["names"]) > 1 else []), *columns]]
    for path, rows in figures["paths"].items():
        for name in figures["names"]:
            if name in rows:
                lines.append([path, *([name] if len(figures["names"]) > 1 else [])])
                lines[-1] += [cell(rows[name]) for cell in columns.values()]
    return _table(lines)


def gigabytes(row: Row) -> float:
    """Return what a path moved, in 10^9 bytes; what moved nothing is taken as one byte."""
    return float(max(1, row["read_bytes"] + row["written_bytes"]) / 1e9)


def _optional(value: float | None, by: float, how: str) -> str:
    return "" if value is None else f"{value / by:{how}}"


def _causes(figures: Row) -> str:
    """Return core-milliseconds a GB by cause, a column for each path; before and now in one cell."""
    paths, names = figures["paths"], figures["names"]

    def cells(of: _Cell) -> list[str]:
        return [" > ".join(_number(of(rows[name])) for name in names if name in rows) for rows in paths.values()]

    lines = [["core-ms / GB", *paths], ["all", *cells(lambda row: 1000 * row["core_s"] / gigabytes(row))]]
    if len(names) > 1:
        lines.append(["core-s now / before", *(_ratio(rows) for rows in paths.values())])
    for cause in CAUSES:
        found = cells(lambda row, cause=cause: 1000 * row["causes"].get(cause, 0) / gigabytes(row))  # type: ignore[misc]
        if any(cell.strip("0 >") for cell in found):
            lines.append([cause, *found])
    return _table(lines)


def _ratio(rows: dict[str, Row]) -> str:
    """Return the core-seconds of one time now over those before: the same work, whatever bytes it moves."""
    if len(rows) < 2:
        return ""
    now, before = (rows[name]["core_s"] / rows[name]["times"] for name in ("now", "before"))
    return f"{now / before:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


_SHOWN = 6
"""Places that are shown for each path."""


def _places(figures: Row) -> str:
    """Return the largest places of each path."""
    lines = [["path", "cause", "place", "% of core-s"]]
    for path, rows in figures["paths"].items():
        row = rows.get("now", {})
        found = [(part, cause, place) for cause, each in row.get("places", {}).items() for place, part in each.items()]
        for part, cause, place in sorted(found, reverse=True)[:_SHOWN]:
            lines.append([path, cause, f"`{place[:60]}`", f"{100 * part / row['core_s']:.0f}"])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, the first the head, as a table in Markdown with its columns aligned."""
    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(rows)
