"""What `bench.checkpoint` found, as medians, beside the goals, and in words."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

MIB = 2**20


def medians(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each thing that was measured: the median of each figure over its rounds."""
    kinds: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["model"], row["who"], row["what"]), []).append(row)
    found: list[Row] = []
    for (model, who, what), several in kinds.items():
        merged: Row = {"model": model, "who": who, "what": what, "rounds": len(several)}
        for name in several[0]:
            values = [row.get(name) for row in several]
            numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
            merged.setdefault(name, statistics.median(numbers) if numbers and None not in values else values[-1])
        merged["error"] = next((row["error"] for row in several if row.get("error")), None)
        found.append(merged)
    return found


def goals(rows: Sequence[Row]) -> list[Row]:
    """Return what was to be reached, and whether it was, for each row that is judged by it."""
    found: list[Row] = []

    def judge(row: Row, goal: str, reached: bool, text: str) -> None:
        found.append({"what": f"{row['model']}, {row['who']}: {goal}", "reached": reached, "text": text})

    def of_limit(row: Row, least: float) -> None:
        percent = row["percent_of_limit"]
        judge(row, f"{row['what']} at {least:.0f} % of the limit", percent >= least, f"{percent:.0f} %")

    peer = next((r for r in rows if r["who"] == "DCP 4 threads" and r["what"] == "save" and "seconds" in r), None)
    for row in rows:
        if not row["who"].startswith("zstore") or "seconds" not in row:
            continue
        if row["who"] == "zstore, from memory":
            of_limit(row, 90)
            if (percent := row.get("percent_of_bare")) is not None:
                judge(row, f"{row['what']} at 95 % of the plain program", percent >= 95, f"{percent:.0f} %")
            if row["what"] == "save" and peer is not None:
                times = peer["seconds"] / row["seconds"]
                judge(row, "save twice as fast as DCP with 4 threads", times >= 2, f"{times:.2f} times")
        elif row["who"] == "zstore, from disk" and row["what"] == "save":
            judge(row, "stall under 100 ms", row["stall_s"] < 0.1, f"{1000 * row['stall_s']:.1f} ms")
            percent = row["new_blocks_percent"]
            judge(row, "under 1 % of the checkpoint written", percent < 1, f"{percent:.2f} %")
        elif row["what"] == "load" and "from disk" not in row["who"]:
            of_limit(row, 90)
            if "over_read" in row:
                over = row["over_read"]
                judge(row, "reads under 1.06 of what is needed", over < 1.06, f"{over:.3f}")
        elif row["what"] == "consolidate to fp16":
            if "limited_peak_bytes" in row:
                peak = row["limited_peak_bytes"]
                text = f"{row['memory_limit']}, {'?' if peak is None else peak // MIB} MiB charged"
                judge(row, "completes in that limit of memory", not row.get("error"), text)
            else:
                of_limit(row, 85)
                growth = row["growth_bytes"] or 0
                judge(row, "under 512 MiB beside the interpreter", growth < 512 * MIB, f"{growth // MIB} MiB")
    return found


def describe(row: Row) -> str:
    """Return a row for a person to read."""
    name = f"{row['model']} {row['who']}: {row['what']}"
    if "seconds" not in row:
        return f"{name} FAILED: {row.get('error')}"
    parts = [
        f"{row['seconds']:.3f} s",
        f"{row['gb_per_s']:.2f} GB/s",
        f"{row['percent_of_limit']:.0f} % of {row['limit_gb_per_s']:.2f}",
    ]
    if row.get("percent_of_many_files") is not None:
        parts.append(f"{row['percent_of_many_files']:.0f} % of as many files")
    if row.get("percent_of_bare") is not None:
        parts.append(f"{row['percent_of_bare']:.0f} % of the plain program beside it")
    if row.get("stall_s") is not None:
        parts.insert(0, f"stall {1000 * row['stall_s']:.1f} ms")
    if row.get("growth_bytes") is not None:
        parts.append(f"{row['growth_bytes'] / MIB:.0f} MiB more at its peak")
    parts.append(f"processor {row['cpu_s']:.2f} s")
    for key, text in (("new_blocks_percent", "{:.2f} % new blocks"), ("over_read", "read {:.3f} of what is needed")):
        if row.get(key) is not None:
            parts.append(text.format(row[key]))
    if row.get("limited_peak_bytes") is not None:
        parts.append(f"{row['limited_peak_bytes'] / MIB:.0f} MiB charged to the {row['memory_limit']}")
    if row.get("error"):
        parts.append(f"then FAILED: {row['error']}")
    return f"{name}: {', '.join(parts)}"
