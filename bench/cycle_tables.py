"""What `bench.cycles` found, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.cycle_causes import CAUSES

Row = dict[str, Any]
_Cell = Callable[[Row], float | None]


def describe(figures: Row) -> str:
    """Return the tables, in Markdown: what each path costs, by what causes, its largest places, and what the words mean."""
    perf = figures["sampler"]["perf"]
    parts = [_machine(figures), _costs(figures), *([_causes(figures), _places(figures)] if perf else [])]
    if figures["sampler"]["why"]:
        parts.append(f"Some columns are empty or missing here: {figures['sampler']['why']}.")
    words = {name: text for name, (text, _) in _columns(figures).items()} | (CAUSES if perf else {})
    return "\n\n".join([*parts, "\n".join(f"- {name}: {text}" for name, text in words.items())])


def _machine(figures: Row) -> str:
    facts = figures["machine"]
    return (
        f"{figures['model']}, {figures['parameters'] / 1e6:.1f} M parameters. {facts['cpu']}, {facts['cores']} cores, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB;\n{facts['drive']}; {facts['system']};\n"
        f"Python {facts['python']}, torch {facts.get('torch', 'none')}, numpy {facts.get('numpy', 'none')}."
    )


def _columns(figures: Row) -> dict[str, tuple[str, Callable[[Row], str]]]:
    """Return what each column says, and its cell."""
    parameters = figures["parameters"] / 1e6
    return {
        "core-s / GB": (
            "core-seconds, user and system, of all threads, for each 10^9 bytes between the process and the drive",
            lambda row: f"{row['core_s'] / gigabytes(row):.3f}",
        ),
        "core-ms / M": (
            "core-milliseconds of one time, for each million parameters of the model",
            lambda row: f"{1000 * row['core_s'] / row['times'] / parameters:.2f}",
        ),
        "system": ("part of it in the kernel", lambda row: f"{100 * row['system_s'] / row['core_s']:.0f} %"),
        "GB": ("bytes of one time, read and written", lambda row: f"{gigabytes(row) / row['times']:.2f}"),
        "s": ("seconds of one time by the clock", lambda row: f"{row['seconds'] / row['times']:.2f}"),
        "cores": ("cores that it keeps busy", lambda row: f"{row['core_s'] / row['seconds']:.2f}"),
        "no core": (
            "threads that could run and had no core, in the mean over its time; other processes take cores too",
            lambda row: f"{row['runnable_s'] / row['seconds']:.2f}",
        ),
        "GIL": (
            "threads that waited for the interpreter's lock, in the mean over its time",
            lambda row: _optional(row.get("lock_wait_s"), row["seconds"], ".2f"),
        ),
        "GIL waits": ("such waits / GB", lambda row: _optional(row.get("lock_waits"), gigabytes(row), ".0f")),
        "waits": (
            "times / GB that a thread slept: for the drive, a lock or another thread (voluntary context switches)",
            lambda row: f"{row['voluntary_switches'] / gigabytes(row):.0f}",
        ),
        "faults": ("page faults / GB", lambda row: f"{row['page_faults'] / gigabytes(row):.0f}"),
    }


def _costs(figures: Row) -> str:
    """Return a row for each path, and for each checkout of it."""
    columns, several = _columns(figures), len(figures["names"]) > 1
    lines = [["path", *(["when"] if several else []), *columns]]
    for path, rows in figures["paths"].items():
        lines += [
            [path, *([name] if several else []), *(cell(rows[name]) for _, cell in columns.values())]
            for name in figures["names"]
            if name in rows
        ]
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
    return "" if value is None else f"{max(value, 0):.0f}"


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
