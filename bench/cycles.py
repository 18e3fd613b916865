"""A budget of cycles: core-seconds a GB and a million parameters for each path over training state, by cause.

    python -m bench.cycles [--paths step,save] [--against FOLDER] [--compare before.json] [--json FILE]

Paths are an optimizer step with its state on disk, forward and backward with the parameters on disk, a save from memory,
a load, and the commands verify, consolidate and reshard on what was saved. Each runs in a process of its own, which marks
when it is in the path; what it does before and after does not count. Core-seconds are those that the kernel counted, user
and system, of all its threads; a GB is 10^9 bytes that the kernel moved between it and the drive. Where there is Linux's
`perf`, samples of all threads tell by what causes (`bench.cycle_causes`); elsewhere there are counters alone.

With `--against` each path runs on another checkout of this project too, in turn with this one, and both stand side by side;
with `--compare` the other figures come from the JSON of an earlier run: its "before" where it has two. Compare runs of one
machine in one state alone: with two cores to itself a process has more threads that ask for the interpreter's lock at once
than beside other work, and its core-seconds rise by up to a half. `--show` makes the tables of a JSON anew, and `--md` puts
them into a page. To bring `bench/results/cycles.md` up to date, BEFORE being a checkout of the commit before:

    python -m bench.cycles --against BEFORE --json bench/results/cycles.json --md bench/results/cycles.md
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.children import run_group
from bench.cycle_causes import Found, Sampler, find_sampler, read_samples
from bench.cycle_tables import describe
from bench.machine import machine
from zstore.tools.train.command import OFFLOAD_ENVIRONMENT

Row = dict[str, Any]

_HERE = Path(__file__).resolve().parent.parent
_BEGIN, _END = "<!-- tables -->", "<!-- end of tables -->"
_LIMIT_S = 3600.0
_TOP = 12
"""Places that are kept for each cause."""

PATHS: dict[str, Row] = {
    "step": {"contender": "step", "times": 6},
    "forward": {"contender": "forward", "times": 6},
    "save": {"contender": "save", "times": 2},
    "load": {"contender": "load", "times": 3},
    "verify": {"contender": "command", "times": 3, "arguments": ["verify"]},
    "consolidate": {"contender": "command", "times": 3, "arguments": ["consolidate", "--dtype", "fp16"]},
    "reshard": {"contender": "command", "times": 2, "arguments": ["reshard", "--world-size", "2"]},
}
"""Paths, in the order in which they run: those after `save` use what it left."""


def main() -> None:
    options = _options()
    if options.show:
        _report(json.loads(options.show.read_text(encoding="utf-8")), options.md)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the path and removes its files
    sampler = find_sampler(perf=options.perf)
    names = ["before", "now"] if options.against or options.compare else ["now"]
    figures: Row = {
        "machine": machine(options.path),
        "model": options.model,
        "parameters": _num_parameters(options),
        "sampler": {"kernel": sampler.kernel, "locks": sampler.locks, "perf": bool(sampler.words), "why": sampler.why},
        "names": names,
        "paths": {},
    }
    if options.compare:
        earlier = json.loads(options.compare.read_text(encoding="utf-8"))
        first = earlier["names"][0]
        figures["machine_before"] = earlier["machine"]
        figures["paths"] = {
            path: {"before": earlier["paths"][path][first]} for path in options.paths if path in earlier["paths"]
        }
    for path, name, row in measure(options, sampler):
        figures["paths"].setdefault(path, {})[name] = row
        if options.json:  # after each, for a run of all takes a while
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    _report(figures, options.md)


def _report(figures: Row, page: Path | None) -> None:
    """Print the tables, and put them into `page` where the last ones were: between its two comments of tables."""
    text = describe(figures)
    print(text)
    if page is not None:
        begin, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
        page.write_text(f"{begin}{_BEGIN}\n\n{text}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", type=_paths, default=[*PATHS], help=f"some of {','.join(PATHS)}")
    parser.add_argument("--model", default="gpt-base")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--times", type=int, help="times that a process takes its path (default: 2 to 6)")
    parser.add_argument("--rounds", type=int, default=1, help="processes for each path; figures are their medians")
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to use, for about 3 GB")
    parser.add_argument("--checkout", type=Path, default=_HERE, help="checkout of this project (default: this one)")
    parser.add_argument("--against", type=Path, help="another checkout of this project, to set beside it")
    parser.add_argument("--compare", type=Path, help="JSON of an earlier run, whose first figures to set beside these")
    parser.add_argument("--prefix", type=shlex.split, default=[], help='before each process, as "taskset -c 0,1"')
    parser.add_argument("--perf", action=argparse.BooleanOptionalAction, default=True, help="sample, where perf can")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--md", type=Path, help="put the tables into this page, between its two comments of tables")
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and measure nothing")
    return parser.parse_args()


def _paths(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PATHS]:
        raise argparse.ArgumentTypeError(f"unknown path {unknown[0]!r}; there are {', '.join(PATHS)}")
    return [name for name in PATHS if name in names]


def _num_parameters(options: argparse.Namespace) -> int:
    import torch

    from zstore.tools.sample.models import build_model

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(options.model, options.tokens).parameters())


def measure(options: argparse.Namespace, sampler: Sampler) -> Iterator[tuple[str, str, Row]]:
    """Yield path, checkout ("before" or "now") and figures, as each is taken."""
    checkouts = ({"before": options.against.resolve()} if options.against else {}) | {"now": options.checkout.resolve()}
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as temporary:
        folder, saved = Path(temporary), {}
        needed = [path for path in PATHS if path in options.paths or (path == "save" and _uses_saved(options.paths))]
        for path in needed:
            rows: dict[str, list[Row]] = {name: [] for name in checkouts}
            for number in range(options.rounds if path in options.paths else 1):
                for name, checkout in checkouts.items():
                    place = folder / f"{path}-{name}-{number}"
                    place.mkdir()
                    if path == "save":
                        saved[name] = str(place / "saved")
                    spec = PATHS[path] | {"folder": str(place), "model": options.model, "tokens": options.tokens}
                    spec |= {"warm_up": 2, "saved": saved.get(name), "prefix": options.prefix}
                    spec["times"] = options.times or spec["times"]
                    rows[name].append(run_path(spec, checkout, sampler))
            if path in options.paths:
                for name, found in rows.items():
                    yield path, name, _median(found)


def _uses_saved(paths: list[str]) -> bool:
    return any(path in ("load", "verify", "consolidate", "reshard") for path in paths)


def run_path(spec: Row, checkout: Path, sampler: Sampler) -> Row:
    """Run one path on a checkout of this project, in a process of its own; return its figures."""
    place = Path(spec["folder"])
    out, data = place / "events", place / "samples"
    # The checkout's zstore, and this one's benchmark.
    program = "import sys; sys.path.insert(0, sys.argv[2]); import zstore; sys.path[0] = sys.argv[3]\n"
    program += "from bench.cycle_paths import run; run()"
    command = [sys.executable, "-c", program, json.dumps({**spec, "out": str(out)}), str(checkout), str(_HERE)]
    if sampler.words:
        command = [*sampler.words, str(data), "--", *command]
    command = [*spec["prefix"], *command]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", **OFFLOAD_ENVIRONMENT}
    error = run_group(command, _LIMIT_S, environment, folder=place)
    if error is not None:
        raise SystemExit(f"{spec['contender']} on {checkout}: {error}")
    events = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    told = next(event for event in events if event["event"] == "path")
    found = read_samples(data, told["windows"], told["interpreter_at"]) if sampler.words else None
    return _figures(told, found, sampler)


def _figures(told: Row, found: Found | None, sampler: Sampler) -> Row:
    counted = told["counted"]
    core_s = counted["user_s"] + counted["system_s"]
    row = {**counted, "core_s": core_s, "versions": told["versions"]}
    if found is None:
        return row
    # A sample stands for its part of what was counted: of all, or of the time outside of the kernel.
    each = (core_s if sampler.kernel else counted["user_s"]) / max(1, found.samples)
    row["samples"] = found.samples
    row["causes"] = {cause: round(each * number, 6) for cause, number in found.causes.items()}
    if not sampler.kernel:
        row["causes"]["kernel"] = counted["system_s"]
    if sampler.locks:
        row |= {"lock_wait_s": found.lock_wait_s, "lock_waits": found.lock_waits}
    row["places"] = {
        cause: {place: round(each * number, 6) for place, number in places.most_common(_TOP)}
        for cause, places in found.places.items()
    }
    return row


def _median(rows: list[Row]) -> Row:
    """Return the row whose core-seconds are the median, with the least and the most of them."""
    ordered = sorted(rows, key=lambda row: float(row["core_s"]))
    return ordered[(len(rows) - 1) // 2] | {"core_s_of": [row["core_s"] for row in rows]}


if __name__ == "__main__":
    main()
