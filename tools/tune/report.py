"""What `zstore tune` leaves: the best config, and the table of trials beside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..printing import cell, make_console, make_table
from .search import START, Search, Trial
from .trial import write_json

BEST = "ds_config_optimal.json"
"""File of the best config, by DeepSpeed's name."""
TABLE, DATA, COMMAND = "trials.md", "trials.json", "cmd_optimal.txt"
_COLUMNS = ("trial", "status", "samples/s", "s a step", "beside the start", "s a step of each run")


def write_results(search: Search, best: Trial | None, folder: Path) -> None:
    """Write the table of trials, its data, and, where a trial was ok, the best config and for a script the command with it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(search, one) for one in ranked(search)]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"| {one.name} | does not fit by the plan: {'; '.join(one.lacking)} | | | | |" for one in search.left_out]
    (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(folder / DATA, document(search, best))
    if best is not None:
        config = best.candidate.config
        write_json(folder / BEST, config)
        if search.task.options.script:
            command = _script_command(search, search.task.job(folder / BEST, config).command)
            (folder / COMMAND).write_text(shlex.join(command) + "\n", encoding="utf-8")


def _script_command(search: Search, command: tuple[str, ...]) -> list[str]:
    """Return the command that runs the script as a trial did, with the best config and its mapped options."""
    options = search.task.options
    flags = [*(["--as-deepspeed"] * options.as_deepspeed), *(["--module"] * options.module)]
    script = command.index((options.script or [""])[0])
    return ["zstore", "run", "--nproc", str(search.task.num_ranks), *flags, *command[script:]]


def ranked(search: Search) -> list[Trial]:
    """Return the trials, the best first and those that are not ok last."""
    return sorted(search.trials, key=lambda one: (not one.is_ok, -(one.metric or 0.0)))


def print_table(search: Search) -> None:
    """Print the table of trials."""
    table: Table = make_table(_COLUMNS[:2], _COLUMNS[2:], f"trials by {search.task.section.metric}, the best first")
    for one in ranked(search):
        table.add_row(*map(cell, _row(search, one)))
    for left in search.left_out:
        table.add_row(cell(left.name), cell(f"does not fit by the plan: {'; '.join(left.lacking)}"))
    make_console().print(table)


def print_best(search: Search, best: Trial, folder: Path) -> None:
    """Print which config is the best, and where it is."""
    start = next((one for one in search.trials if one.candidate.name == START), None)
    beside = ratio(search, best, start)
    told = "" if beside is None else f", {beside:.2f} times the start's {search.task.section.metric}"
    if best.candidate.name == START:
        told = ": the config as it is"
    make_console().print(f"the best is {best.candidate.name}{told}\n{folder / BEST}", soft_wrap=True)
    if best.candidate.name == START:
        print("zstore: nothing that was tried is faster than the config as it is", file=sys.stderr)


def ratio(search: Search, one: Trial, start: Trial | None) -> float | None:
    """Return how many times better than the start a trial is; None where either is not ok."""
    if start is None or one.metric is None or start.metric is None:
        return None
    return start.metric / one.metric if search.task.section.metric == "latency" else one.metric / start.metric


def _row(search: Search, one: Trial) -> list[str]:
    if not one.is_ok:
        last = one.runs[0].problem.splitlines()[-1:]
        status = ": ".join([one.runs[0].status, *last]).replace("|", "/")
        return [one.candidate.name, status, "", "", "", ""]
    best = one.fastest
    start = next((each for each in search.trials if each.candidate.name == START), None)
    beside = ratio(search, one, start)
    return [
        one.candidate.name,
        "ok",
        f"{best.samples / best.median_s:,.2f}",
        f"{best.median_s:.4g}",
        "" if beside is None else f"{beside:.2f}",
        ", ".join(f"{run.median_s:.4g}" for run in one.runs),
    ]


def document(search: Search, best: Trial | None) -> dict[str, Any]:
    """Return everything as JSON data."""
    rows: list[Mapping[str, Any]] = [
        {
            "name": one.candidate.name,
            "config": one.candidate.config,
            "metric": one.metric,
            "runs": [run.to_json() for run in one.runs],
        }
        for one in ranked(search)
    ]
    return {
        "metric": search.task.section.metric,
        "ranks": search.task.num_ranks,
        "best": None if best is None else best.candidate.name,
        "trials": rows,
        "does_not_fit": [{"name": one.name, "lacking": list(one.lacking)} for one in search.left_out],
    }
