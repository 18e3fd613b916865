"""Everything that needs a CUDA device, in order of worth, in five parts of at most five minutes: `make gpu`.

    python -m bench.gpu [--only cuda,step] [--redo] [--path FOLDER] [--out FOLDER]
    python -m bench.gpu --merge FOLDER

Each part runs in processes of its own, under a limit of its own, and its result goes to `gpu.json` and `gpu.md` in `--out` at
once: a run that is cut off keeps what it has, and the next one goes on with what is missing. A part that passed on this device
with these versions is not run again but with `--redo`. A part that fails is recorded with its last lines, and the run goes on.
`--merge` runs nothing: it takes the results of a folder that came back from another machine into those of `--out`.

Ends with 0 where all chosen parts passed, 1 where one failed, and 2 where torch sees no CUDA device. `--tiny` runs every part
small on the CPU.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu_parts import FAULTS, ORDER, Part, Run, Setting, lines_of, make_parts, read_tests
from bench.machine import machine

_ROOT = Path(__file__).resolve().parent.parent
_NO_DEVICE = """\
make gpu: torch {version} in {python} sees no CUDA device.
It needs an NVIDIA GPU with its driver, and a build of torch with CUDA. Name one with TORCH, which makes the environment anew:
    make gpu TORCH="torch=={base} --index-url URL"
with the index of torch's builds for your CUDA version as URL (torch's own page on installing has a list), or name another
environment, which has one, with VENV=FOLDER."""

Entry = dict[str, Any]
"""What is recorded of one part."""


def main() -> None:
    options = _options()
    if options.merge is not None:
        print("\n".join(Record(options.out).merge(Record(options.merge))))
        return
    if not options.tiny:
        require_device()
    if options.check:
        return
    # Ends what runs, and records that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = make_parts(_setting(options))
    names = [part.name for part in parts]
    if unknown := set(options.only or ()) - set(names):
        print(f"--only: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        sys.exit(2)
    record = Record(options.out)
    facts: Entry = {**machine(options.path)}
    chosen = [part for part in parts if not options.only or part.name in options.only]
    for part in chosen:
        if not options.redo and record.has_passed(part.name, facts):
            print(f"{part.name}: passed before, kept; --redo runs it again", flush=True)
            continue
        print(f"{part.name}: at most {part.limit_s / 60:.0f} minutes", flush=True)
        run_part(part, record, facts)
        print(_text(record.parts[part.name]), flush=True)
    failed = [part.name for part in chosen if record.parts[part.name]["status"] not in ("passed", "left out")]
    print(f"results: {record.folder / 'gpu.md'}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="comma-separated names of parts")
    parser.add_argument("--redo", action="store_true", help="run parts again that passed before")
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to use")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and gpu.md (default: bench/results)")
    parser.add_argument(
        "--tiny", action="store_true", help="run each part small on the CPU, to try this out; needs --out"
    )
    parser.add_argument("--merge", type=Path, help="folder of results to take into those of --out; nothing is run")
    parser.add_argument("--check", action="store_true", help="only check for a device")
    options = parser.parse_args()
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out FOLDER: figures of the CPU do not belong beside those of a device")
    options.out = options.out or _ROOT / "bench" / "results"
    options.path = options.path.resolve()
    return options


def require_device() -> None:
    """End with status 2, and what to do, where torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        version = str(torch.__version__)
        print(
            _NO_DEVICE.format(version=version, base=version.partition("+")[0], python=sys.executable), file=sys.stderr
        )
        sys.exit(2)


def _setting(options: argparse.Namespace) -> Setting:
    import torch

    return Setting(
        path=options.path,
        tiny=options.tiny,
        has_deepspeed=not options.tiny and importlib.util.find_spec("deepspeed") is not None,
        num_devices=torch.cuda.device_count(),
    )


class Record:
    """What is known of each part, in `gpu.json` and `gpu.md` of a folder; each change is on disk at once, or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "gpu.json"
        found = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else []
        self.parts: dict[str, Entry] = {entry["name"]: entry for entry in found}

    def has_passed(self, name: str, facts: Entry) -> bool:
        """Return whether the part passed, on this device with these versions."""
        entry = self.parts.get(name, {})
        same = [entry.get("machine", {}).get(key) == facts.get(key) for key in ("device", "driver", "torch", "zstore")]
        return entry.get("status") == "passed" and all(same)

    def put(self, entry: Entry) -> None:
        """Replace what is recorded of a part."""
        self.parts[entry["name"]] = entry
        ordered = sorted(self.parts.values(), key=lambda part: [part["name"] != name for name in ORDER])
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / "gpu.json", json.dumps({"parts": ordered}, indent=2) + "\n")
        _replace(self.folder / "gpu.md", report(ordered))

    def merge(self, other: "Record") -> list[str]:
        """Take the parts of `other`, but none that did not pass for one that did; return a line for each."""
        lines = []
        for name, entry in other.parts.items():
            keeps = entry["status"] != "passed" and self.parts.get(name, {}).get("status") == "passed"
            lines.append(f"{name}: {entry['status']}" + ("; the one that passed before is kept" if keeps else ""))
            if not keeps:
                self.put(entry)
        return lines


def _replace(path: Path, text: str) -> None:
    """Write a file anew so that it has the old or the new text, whenever this is cut off."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def report(entries: Sequence[Entry]) -> str:
    """Return what was recorded, for a person to read, as Markdown."""
    lines = [
        "# On a GPU",
        "",
        "`make gpu` wrote this; `gpu.json` beside it has all figures. A failing part has its last lines.",
    ]
    facts: Entry = {}
    for entry in entries:
        lines += ["", f"## {entry['title']}", ""]
        if entry["machine"] != facts:
            facts = entry["machine"]
            lines += [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
        lines += [*_text(entry).splitlines(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _text(entry: Entry) -> str:
    lines = [
        f"`{entry['name']}` {entry['status']} after {entry['seconds']:.0f} s of {entry['limit_s']:.0f}, {entry['ended']}."
    ]
    lines += ["", *(f"- {note}" for note in entry["notes"])] if entry["notes"] else []
    for run in entry["runs"]:
        described = [] if run["figures"] is None else lines_of(run["module"], run["figures"])
        lines += ["", f"{run['label']}, {run['seconds']:.0f} s:", "", *(f"- {line}" for line in described)]
        if run["error"]:
            lines += ["", "```", *run["error"].splitlines(), "```"]
    return "\n".join(lines)


def run_part(part: Part, record: Record, facts: Entry) -> None:
    """Run a part's processes within its limit; what each gave is recorded at once."""
    started = time.monotonic()
    entry: Entry = {"name": part.name, "title": part.title, "status": "cut off", "limit_s": part.limit_s}
    entry |= {"machine": facts, "notes": list(part.notes), "runs": []}

    def note() -> None:
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        record.put(entry | {"seconds": time.monotonic() - started, "ended": ended})

    with tempfile.TemporaryDirectory(prefix="zstore-gpu-") as name:
        for run in part.runs:
            entry["runs"].append(_result(run, Path(name), None, 0.0))
            note()
            began = time.monotonic()
            error: str | None = "cut off"
            try:
                error = launch(run, Path(name), max(1.0, round(part.limit_s - (began - started), 1)))
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            finally:
                entry["runs"][-1] = _result(run, Path(name), error, time.monotonic() - began)
                for kept in filter(Path.exists, (Path(name) / each for each in run.kept)):
                    shutil.copy(kept, record.folder)
                note()
    failed = any(each["error"] and not run.is_peer for run, each in zip(part.runs, entry["runs"], strict=True))
    entry["status"] = "failed" if failed else "passed" if part.runs else "left out"
    note()


def arguments_of(run: Run, folder: Path) -> list[str]:
    """Return the arguments of a process that leaves its files in `folder`."""
    files = (run.out, *run.kept)
    return [
        next((each.replace(name, str(folder / name)) for name in files if name in each), each) for each in run.arguments
    ]


def launch(run: Run, folder: Path, limit_s: float) -> str | None:
    """Run a process in `_ROOT` that leaves its figures in `folder`; return how it failed, None where it did not."""
    from bench.children import run_group

    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **run.environment}
    return run_group([sys.executable, "-m", run.module, *arguments_of(run, folder)], limit_s, environment, folder=_ROOT)


def _result(run: Run, folder: Path, error: str | None, seconds: float) -> Entry:
    figures = _figures(run, folder / run.out)
    faults = [] if figures is None else FAULTS.get(run.module, lambda _: [])(figures)
    if figures is None and error is None and seconds:
        faults = ["it left no figures"]
    return {
        "label": run.label,
        "module": run.module,
        "arguments": list(run.arguments),
        "seconds": seconds,
        "error": "\n".join(filter(None, [error, *(faults if seconds else [])])) or None,
        "figures": figures,
    }


def _figures(run: Run, path: Path) -> Any:
    """Return what a run left so far; None where it left nothing, or was cut off while it wrote."""
    try:
        return read_tests(path) if run.module == "pytest" else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # SyntaxError: that of XML
        return None


if __name__ == "__main__":
    main()
