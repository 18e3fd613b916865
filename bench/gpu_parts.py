"""What `bench.gpu` runs, in order of worth: the parts, the processes of each, and what of their figures is a fault."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from zstore.io.hostmemory import read_host_memory
from zstore.sizes import format_bytes

Figures = Any
"""JSON data."""

_MINUTE_S = 60.0
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


# -- the parts --------------------------------------------------------------------------------------------------------


def make_parts(setting: Setting) -> list[Part]:
    """Return all parts, in order of worth; their limits add up to less than 40 minutes."""
    return [
        _cuda_tests(setting),
        _nccl_tests(setting),
        _step(setting),
        _offload(setting, "1.2b", 1_229_000_000, 9 * _MINUTE_S),
        _offload(setting, "7b", 6_850_000_000, 10 * _MINUTE_S),
        _overhead(setting),
        _checkpoint(setting),
    ]


def _tests(label: str, file: str, setting: Setting, chosen: str) -> Run:
    arguments = [file, "-q", "-p", "no:cacheprovider", "-n0", "-m", "not soak", f"--junitxml={label}.xml"]
    if setting.tiny:
        arguments += ["-k", chosen]
    return Run(
        label=label,
        module="pytest",
        arguments=tuple(arguments),
        out=f"{label}.xml",
        environment={"ZSTORE_TEST_DEVICE": setting.device},
    )


def _cuda_tests(setting: Setting) -> Part:
    run = _tests("cuda", "tests/engine/test_cuda.py", setting, "split_master_on_the_device")
    return Part(name="cuda", title="Tests on a CUDA device", limit_s=5 * _MINUTE_S, runs=(run,))


def _nccl_tests(setting: Setting) -> Part:
    notes = []
    if not setting.tiny and setting.num_devices < 2:
        notes.append("one device: a group of one rank; NCCL refuses two ranks on one device, so several were not run")
    run = _tests("nccl", "tests/engine/test_nccl.py", setting, "collectives_of_one_rank and gloo")
    return Part(name="nccl", title="Tests over NCCL", limit_s=3 * _MINUTE_S, runs=(run,), notes=tuple(notes))


def _step(setting: Setting) -> Part:
    sizes = (
        ["--model", "gpt-tiny", "--steps", "1", "--tokens", "8", "--gib", "0.03"] if setting.tiny else ["--gib", "1"]
    )
    runs = []
    for tier in ("none", "cpu", "nvme"):
        arguments = ["--tier", tier, "--device", setting.device, "--path", str(setting.path), *sizes]
        out = f"step-{tier}.json"
        runs.append(Run(label=tier, module="bench.step", arguments=(*arguments, "--json", out), out=out))
    title = "Optimizer step, by where the state rests"
    return Part(name="step", title=title, limit_s=3 * _MINUTE_S, runs=tuple(runs))


def _offload(setting: Setting, model: str, parameters: int, limit_s: float) -> Part:
    """Train with state and parameters in host memory and on disk, beside DeepSpeed where it is."""
    if setting.tiny:
        room = Room(tiers={"cpu": None, "nvme": None})
    else:
        disk_bytes = shutil.disk_usage(setting.path).free
        room = room_for(parameters, disk_bytes=disk_bytes, memory_bytes=read_host_memory().available_bytes or 0)
    notes = [*room.notes, *_without_deepspeed(setting)]
    runs = []
    for tier, budget_bytes in room.tiers.items():
        arguments = ["--models", "tiny" if setting.tiny else model, "--tiers", tier, "--device", setting.device]
        arguments += ["--path", str(setting.path), "--clip", "off", "--limit-s", str(limit_s / 2)]
        # Of the largest model each row takes minutes.
        arguments += ["--overlap", "none,backward" if model != "7b" and not setting.tiny else "backward"]
        arguments += ["--compute" if model != "7b" else "--no-compute"]
        arguments += (
            ["--steps", "1", "--gib", "0.03"] if setting.tiny else ["--steps", "3", "--gib", "1", "--tokens", "1024"]
        )
        # What it would need on disk with a budget, DeepSpeed needs without.
        arguments += ["--peer" if setting.has_deepspeed and budget_bytes is None else "--no-peer"]
        arguments += ["--budget", "none" if budget_bytes is None else str(budget_bytes)]
        out = f"offload-{model}-{tier}.json"
        runs.append(Run(label=tier, module="bench.offload", arguments=(*arguments, "--out", out), out=out))
    title = f"Training a model of {model.replace('b', ' B')} parameters with state and parameters offloaded"
    return Part(name=f"offload-{model}", title=title, limit_s=limit_s, runs=tuple(runs), notes=tuple(notes))


def _overhead(setting: Setting) -> Part:
    sizes = ["--hidden", "1536", "--layers", "12", "--vocab", "32768", "--tokens", "1024", "--pairs", "10"]
    sizes += ["--stages", "0", "3"]
    if setting.tiny:
        sizes = ["--hidden", "64", "--layers", "1", "--vocab", "64", "--batch", "1", "--tokens", "8", "--pairs", "1"]
        sizes += ["--stages", "3", "--precisions", "bf16"]
    runs = []
    for others in (["plain", "FSDP2"], ["DeepSpeed"]) if setting.has_deepspeed else (["plain", "FSDP2"],):
        label = " and ".join(others)
        out = f"overhead-{others[-1]}.json"
        arguments = ["--processes", "1", "--others", *others, "--device", setting.device, *sizes, "--json", out]
        is_peer = others == ["DeepSpeed"]
        run = Run(label=label, module="bench.overhead", arguments=tuple(arguments), out=out, is_peer=is_peer)
        runs.append(run)
    title = "Whole steps beside a plain loop, FSDP2 and DeepSpeed"
    return Part(
        name="overhead", title=title, limit_s=3 * _MINUTE_S, runs=tuple(runs), notes=_without_deepspeed(setting)
    )


def _checkpoint(setting: Setting) -> Part:
    arguments = ["--device", setting.device, "--from-device", "--path", str(setting.path), "--rounds", "1"]
    if setting.tiny:
        arguments += ["--models", "tiny", "--peers", "DCP 4 threads", "--gib", "0.03"]
    else:
        arguments += ["--models", "110m", "--peers", "torch.save,DCP 1 thread,DCP 4 threads,DCP async", "--gib", "0.5"]
    if setting.has_deepspeed:
        arguments += ["--peer-python", sys.executable]
    arguments += ["--out", "checkpoint.json"]
    run = Run(label="checkpoint", module="bench.checkpoint", arguments=tuple(arguments), out="checkpoint.json")
    title = "Saving, loading and consolidating beside torch.distributed.checkpoint and DeepSpeed"
    return Part(name="checkpoint", title=title, limit_s=5 * _MINUTE_S, runs=(run,), notes=_without_deepspeed(setting))


def _without_deepspeed(setting: Setting) -> tuple[str, ...]:
    return () if setting.has_deepspeed else ("DeepSpeed is not installed in this environment: it was not run",)


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
        notes.append(
            f"nvme has room for a part of the state: {held} of it rest in host memory, and DeepSpeed was not run"
        )
    else:
        notes.append(
            f"nvme was left out: it takes {format_bytes(needed)}, of which {format_bytes(on_disk)} may be on disk and "
            f"{format_bytes(in_memory)} in memory; give another drive with --path"
        )
    return Room(tiers=tiers, notes=tuple(notes))


# -- their figures ----------------------------------------------------------------------------------------------------


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


def _no_faults(figures: Figures) -> list[str]:
    """A benchmark of this kind ends with an error or has figures."""
    return []


FAULTS: dict[str, Callable[[Figures], list[str]]] = {
    "pytest": _test_faults,
    "bench.step": _no_faults,
    "bench.offload": _offload_faults,
    "bench.overhead": _no_faults,
    "bench.checkpoint": _checkpoint_faults,
}
"""By module: what of its figures is a fault. One of a peer is none of ours."""


def lines_of(module: str, figures: Figures) -> Sequence[str]:
    """Return a run's figures for a person to read, a line each."""
    if module == "pytest":
        skipped = [f"{count} skipped: {why}" for why, count in figures["skipped"].items()]
        return [f"{figures['passed']} of {figures['tests']} tests passed", *skipped]
    if module == "bench.step":
        from bench import step

        return step.describe(figures).splitlines()
    if module == "bench.offload":
        from bench import offload

        return [offload.describe(row) for row in _offload_rows(figures)]
    if module == "bench.overhead":
        from bench import overhead

        return [overhead.describe(row) for row in figures["rows"]]
    from bench import checkpoint_figures

    return [checkpoint_figures.describe(row) for row in figures["rows"]]
