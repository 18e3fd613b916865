"""What `bench.gpu` runs, in order of worth: the parts, the processes of each, and what of their figures is a fault."""

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from zstore.errors import format_bytes
from zstore.io.machine import read_host_memory

Figures = Any
"""JSON data."""

ORDER = ("ceilings", "waits", "speed", "fits", "checkpoint", "deepspeed")
_LIMIT_S = 300.0
_BYTES_PER_PARAMETER = 16
"""What an offloaded bf16 parameter takes: itself, its gradient, an fp32 master and two moments."""
_DISK_SHARE, _MEMORY_SHARE = 0.9, 0.7
"""Of what is free, how much a run may take."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: `python -m module arguments`, which leaves its figures in `out`."""

    label: str
    module: str
    arguments: tuple[str, ...]
    out: str
    """Name of the file of its figures."""
    environment: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    """Names of other files that it leaves beside its figures."""
    is_peer: bool = False
    """It runs a peer alone: where that fails the part passes all the same."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs that belong together, and the seconds that they may take."""

    name: str
    title: str
    limit_s: float
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    """What is left out, and why."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the parts depend on."""

    path: Path
    """Folder on the drive to use."""
    tiny: bool = False
    """Each part small, on the CPU."""
    has_deepspeed: bool = False
    num_devices: int = 1

    @property
    def device(self) -> str:
        """What computes."""
        return "cpu" if self.tiny else "cuda"


def make_parts(setting: Setting) -> list[Part]:
    """Return all parts, in order of worth: five of at most five minutes, each of use alone, and DeepSpeed's where it is."""
    parts = [_ceilings(setting), _waits(setting), _speed(setting), _fits(setting), _checkpoint(setting)]
    return [*parts, *([_deepspeed(setting)] if setting.has_deepspeed else [])]


def _run(label: str, module: str, setting: Setting, *arguments: str, out: str = "--json", is_peer: bool = False) -> Run:
    """Return a benchmark of ours, which takes the device and the folder on the drive."""
    name = f"{module.removeprefix('bench.')}-{label.replace(' ', '-')}.json"
    common = [] if module == "bench.links" else ["--device", setting.device]
    common += [] if module == "bench.overhead" else ["--path", str(setting.path)]
    return Run(label=label, module=module, arguments=(*common, *arguments, out, name), out=name, is_peer=is_peer)


def _tests(label: str, file: str, setting: Setting, chosen: str, **environment: str) -> Run:
    without = [word for plugin in ("cacheprovider", "xdist", "benchmark") for word in ("-p", f"no:{plugin}")]
    arguments = [file, "-q", *without, "-m", "not soak", f"--junitxml={label}.xml"]
    if setting.tiny:
        arguments += ["-k", chosen]
    return Run(
        label=label,
        module="pytest",
        arguments=tuple(arguments),
        out=f"{label}.xml",
        environment={"ZSTORE_TEST_DEVICE": setting.device, **environment},
    )


def _ceilings(setting: Setting) -> Part:
    """What the machine allows, and whether the engine is right on it."""
    notes = []
    if not setting.tiny and setting.num_devices < 2:
        notes.append("one device: a group of one rank; NCCL refuses two ranks on one device, so several were not run")
    links = _run("links", "bench.links", setting, "--gib", "0.06" if setting.tiny else "1")
    runs = (
        links,
        _tests("cuda", "tests/engine/test_cuda.py", setting, "moments_in_bf16"),
        _tests("nccl", "tests/engine/test_nccl.py", setting, "one_rank_trains and gloo"),
        _tests(
            "late copies",
            "tests/engine/test_cuda.py",
            setting,
            "moments_in_bf16",
            ZSTORE_TEST_LATE_COPIES="1",
        ),
    )
    title = "What the machine allows, and tests on the device, over NCCL, and with late copies"
    return Part(name="ceilings", title=title, limit_s=_LIMIT_S, runs=runs, notes=tuple(notes))


def _waits(setting: Setting) -> Part:
    """How often the host waits for the device, and a trace of each mode."""
    sizes = ("--model", "gpt-tiny", "--tokens", "8") if setting.tiny else ("--model", "gpt-base", "--tokens", "512")
    run = _run("waits", "bench.waits", setting, *sizes, "--trace", "traces.zip")
    title = "Waits of the host for the device, by mode"
    return Part(name="waits", title=title, limit_s=_LIMIT_S, runs=(replace(run, kept=("traces.zip",)),))


def _speed(setting: Setting) -> Part:
    """The optimizer step, whole steps, and training with all state offloaded, each beside torch alone."""
    small = ["--model", "gpt-tiny", "--steps", "1", "--tokens", "8", "--gib", "0.03"]
    runs = [
        _run(tier, "bench.step", setting, "--tier", tier, *(small if setting.tiny else ["--gib", "1"]))
        for tier in ("none", "cpu", "nvme")
    ]
    runs.append(_overhead(setting, ["plain", "FSDP2"]))
    found, notes = _offload(setting, "1.2b", 1_229_000_000, "cpu", 1024, ["--fsdp2", "--steps", "3"])
    title = "Steps beside a plain loop and FSDP2, and 1.2 B parameters with all state in host memory beside FSDP2's"
    return Part(name="speed", title=title, limit_s=_LIMIT_S, runs=(*runs, *found), notes=notes)


def _overhead(setting: Setting, others: Sequence[str]) -> Run:
    sizes = ["--hidden", "1536", "--layers", "12", "--vocab", "32768", "--tokens", "1024", "--pairs", "6"]
    sizes += ["--stages", "0", "3", "--precisions", "bf16"]
    if setting.tiny:
        sizes = ["--hidden", "64", "--layers", "1", "--vocab", "64", "--batch", "1", "--tokens", "8", "--pairs", "1"]
        sizes += ["--stages", "3", "--precisions", "bf16"]
    arguments = ["--processes", "1", "--others", *others, *sizes]
    is_peer = "DeepSpeed" in others
    return _run(" and ".join(others), "bench.overhead", setting, *arguments, is_peer=is_peer)


def _offload(
    setting: Setting, model: str, parameters: int, tier: str, tokens: int, more: Sequence[str]
) -> tuple[list[Run], tuple[str, ...]]:
    """Return the training of a model with all state offloaded, and what is left out for lack of room."""
    room = Room(tiers={tier: None})
    if not setting.tiny:
        disk_bytes = shutil.disk_usage(setting.path).free
        memory_bytes = read_host_memory().available_bytes or 0
        room = room_for(parameters, disk_bytes=disk_bytes, memory_bytes=memory_bytes)
    if tier not in room.tiers:
        return [], tuple(note for note in room.notes if note.startswith(tier))
    budget = room.tiers[tier]
    arguments = ["--models", "tiny" if setting.tiny else model, "--tiers", tier, "--clip", "off", "--limit-s", "150"]
    arguments += ["--no-peer", "--overlap", "backward", *more]
    arguments += ["--steps", "1", "--gib", "0.03"] if setting.tiny else ["--gib", "1", "--tokens", str(tokens)]
    arguments += ["--budget", "none" if budget is None else str(budget)]
    label = f"{model}, {tier}, {tokens} tokens"
    return [_run(label, "bench.offload", setting, *arguments, out="--out")], ()


def _fits(setting: Setting) -> Part:
    """A model whose state is five times the device memory that it may take, long sequences, and state on disk."""
    runs: list[Run] = []
    notes: list[str] = []
    for model, parameters, tier, tokens, more in (
        ("2.7b", 2_651_000_000, "cpu", 1024, ["--steps", "2", "--device-memory", "8GiB", "--no-compute"]),
        ("1.2b", 1_229_000_000, "cpu", 16384, ["--steps", "3", "--fsdp2"]),
        ("1.2b", 1_229_000_000, "nvme", 1024, ["--steps", "3", "--no-compute"]),
    ):
        found, left_out = _offload(setting, model, parameters, tier, tokens, more)
        runs += found
        notes += left_out
    title = "2.7 B parameters in 8 GiB of device memory; 1.2 B with 16,384 tokens beside FSDP2, and on disk"
    return Part(name="fits", title=title, limit_s=_LIMIT_S, runs=tuple(runs), notes=tuple(notes))


def _checkpoint(setting: Setting) -> Part:
    arguments = ["--from-device", "--rounds", "1"]
    if setting.tiny:
        arguments += ["--models", "tiny", "--peers", "DCP 4 threads", "--gib", "0.03"]
    else:
        arguments += ["--models", "110m", "--peers", "torch.save,DCP 1 thread,DCP 4 threads,DCP async", "--gib", "0.5"]
    title = "Saving, loading and consolidating beside torch.distributed.checkpoint"
    run = _run("checkpoint", "bench.checkpoint", setting, *arguments, out="--out")
    return Part(name="checkpoint", title=title, limit_s=_LIMIT_S, runs=(run,))


def _deepspeed(setting: Setting) -> Part:
    """DeepSpeed compiles its operators for minutes at its first run."""
    arguments = ["--models", "1.2b", "--tiers", "cpu", "--clip", "off", "--peer", "--overlap", "backward"]
    arguments += ["--steps", "3", "--tokens", "1024"]
    offload = _run("1.2b", "bench.offload", setting, *arguments, out="--out", is_peer=True)
    runs = (_overhead(setting, ["DeepSpeed"]), offload)
    return Part(name="deepspeed", title="Training beside DeepSpeed", limit_s=2 * _LIMIT_S, runs=runs)


@dataclass(frozen=True, kw_only=True)
class Room:
    """The tiers that a model's state fits on, each with the host budget that this takes, and why others are left out."""

    tiers: Mapping[str, int | None]
    notes: tuple[str, ...] = ()


def room_for(parameters: int, *, disk_bytes: int, memory_bytes: int) -> Room:
    """Return where the state of an offloaded model fits, with so much of disk and memory free.

    On disk it may lie in part: what the disk has no room for becomes the host budget.
    """
    needed = parameters * _BYTES_PER_PARAMETER
    on_disk, in_memory = int(disk_bytes * _DISK_SHARE), int(memory_bytes * _MEMORY_SHARE)
    tiers: dict[str, int | None] = {}
    notes: list[str] = []
    if needed <= in_memory:
        tiers["cpu"] = None
    else:
        notes.append(
            f"cpu was left out: it takes {format_bytes(needed)} of memory, {format_bytes(in_memory)} may be used"
        )
    if needed <= on_disk:
        tiers["nvme"] = None
    elif needed <= on_disk + in_memory:
        tiers["nvme"] = needed - on_disk
        held = format_bytes(needed - on_disk)
        notes.append(f"nvme has room for a part of the state: {held} of it rest in host memory")
    else:
        notes.append(
            f"nvme was left out: it takes {format_bytes(needed)}, of which {format_bytes(on_disk)} may be on disk and "
            f"{format_bytes(in_memory)} in memory; give another drive with --path"
        )
    return Room(tiers=tiers, notes=tuple(notes))


def read_tests(path: Path) -> Figures:
    """Return what pytest's report says: how many tests passed, what failed, and why what was skipped was."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures: dict[str, str] = {}
    skipped: dict[str, int] = {}
    for case in cases:
        for child in case:
            text = child.get("message") or ""
            if child.tag in ("failure", "error"):
                failures[f"{case.get('classname')}.{case.get('name')}"] = text[:2000]
            elif child.tag == "skipped":
                skipped[text] = skipped.get(text, 0) + 1
    return {
        "tests": len(cases),
        "passed": len(cases) - len(failures) - sum(skipped.values()),
        "failures": failures,
        "skipped": skipped,
    }


def _test_faults(figures: Figures) -> list[str]:
    if not figures["passed"] and not figures["failures"]:
        return ["no test was run"]
    return [f"{name}: {text}" for name, text in figures["failures"].items()]


def _offload_rows(figures: Figures) -> list[dict[str, Any]]:
    return [row for model in figures["models"] for row in model["rows"]]


def _offload_faults(figures: Figures) -> list[str]:
    rows = _offload_rows(figures)
    faults = [f"{row['contender']}: {row['error']}" for row in rows if row["error"] and row["contender"] != "deepspeed"]
    return faults or ([] if any(row["contender"] == "zstore" for row in rows) else ["zstore was not reached"])


def _checkpoint_faults(figures: Figures) -> list[str]:
    ours = [row for row in figures["rows"] if row["who"].startswith("zstore")]
    return [f"{row['who']}, {row['what']}: {row['error']}" for row in ours if row.get("error")]


FAULTS: dict[str, Callable[[Figures], list[str]]] = {
    "pytest": _test_faults,
    "bench.offload": _offload_faults,
    "bench.checkpoint": _checkpoint_faults,
}
"""By module: what of its figures is a fault; others end with an error. One of a peer is none of ours."""


def lines_of(module: str, figures: Figures) -> Sequence[str]:
    """Return a run's figures for a person to read, a line each."""
    if module == "pytest":
        skipped = [f"{count} skipped: {why}" for why, count in figures["skipped"].items()]
        return [f"{figures['passed']} of {figures['tests']} tests passed", *skipped]
    bench = importlib.import_module("bench.checkpoint_figures" if module == "bench.checkpoint" else module)
    if module == "bench.links":
        return list(bench.describe(figures))
    if module == "bench.step":
        return list(bench.describe(figures).splitlines())
    rows = _offload_rows(figures) if module == "bench.offload" else figures["rows"]
    return [bench.describe(row) for row in rows]
