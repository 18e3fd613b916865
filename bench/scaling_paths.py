"""What `bench.scaling` measures at one point of an axis, each point in a process of its own."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zstore
from bench.contenders import build_model
from bench.process import Spec, Tell, measured, serve
from zstore.checkpoint.catalog import list_tags, resolve
from zstore.checkpoint.format import Record
from zstore.checkpoint.names import RECORD_FILE, new_save_id
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.retention import Keep, weigh
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.config.config import OptimizerConfig, load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.optim.optimizer import optimizer_from_config
from zstore.engine.optim.rules import TILES, kernels_for
from zstore.engine.params.record import named_parameters
from zstore.engine.plan.needs import find_needs, placement_settings
from zstore.engine.plan.placement import make_plan
from zstore.engine.plan.plan import Plan
from zstore.engine.plan.run import shapes_of_model, units_of_model
from zstore.testing.ranks import run_ranks
from zstore.tools.inspect import inspect_command
from zstore.tools.ls import ls_command
from zstore.tools.prune import prune_folder

STEPS = 3
"""That are measured, after one that is not; their median counts."""
_ROW = 64


def run() -> None:
    """Do what the first argument says."""
    serve(CONTENDERS)


class Many(nn.Module):
    """`arrays` parameters of equal size, `numel` elements in all; its loss is their sum."""

    def __init__(self, arrays: int, numel: int) -> None:
        super().__init__()
        rows = max(1, round(numel / arrays / _ROW))
        self.values = nn.ParameterList(torch.zeros(rows, _ROW, dtype=torch.bfloat16) for _ in range(arrays))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all elements, times `x`."""
        return torch.stack([value.sum() for value in self.values]).sum() * x


def start_engine(spec: Spec, tier: str, folder: str) -> Engine:
    """Return an engine for such a model, with optimizer state in memory ("none") or on disk ("nvme")."""
    offload = {"offload_optimizer": {"device": tier, "nvme_path": folder}} if tier != "none" else {}
    config = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, **offload},
        "steps_per_print": 0,
    }
    engine: Engine = zstore.initialize(model=Many(spec["arrays"], spec["numel"]), config=config)[0]
    return engine


def step(engine: Engine) -> None:
    """Take one step, to its end on disk."""
    engine.backward(engine(torch.ones(())))
    engine.step()
    engine.training_state.pending.complete()


def _repeated(work: Callable[[], Any], times: int = STEPS) -> dict[str, Any]:
    """Return the medians of what `measured` gives for `work`, each on its own."""
    rows = [measured(work)[1] for _ in range(times)]
    return {key: statistics.median(row[key] for row in rows) for key in ("seconds", "cpu_s")} | {
        "growth_bytes": max(row["growth_bytes"] or 0 for row in rows)
    }


def _run_paths(spec: Spec, found: Callable[..., None], folder: str) -> None:
    """Measure an engine from its start to what a checkpoint of it takes."""
    with start_engine(spec | {"arrays": 2, "numel": 1000}, "none", folder) as engine:
        step(engine)  # all modules are there from now on
    for tier in spec["tiers"]:
        engine, figures = measured(partial(start_engine, spec, tier, folder))
        with engine:
            where = "in memory" if tier == "none" else "from disk"
            found(path=f"start, {where}", **figures)
            step(engine)
            found(path=f"step {where}", **_repeated(partial(step, engine), spec.get("steps", STEPS)))
            if tier == spec["tiers"][0] and spec["saves"]:
                _checkpoint_paths(engine, found, folder)


def _checkpoint_paths(engine: Engine, found: Callable[..., None], folder: str) -> None:
    place = Path(folder) / "checkpoints"
    _, figures = measured(lambda: engine.save_checkpoint(str(place), tag="t"))
    found(path="save", **figures)
    _, figures = measured(lambda: engine.load_checkpoint(str(place), tag="t"))
    found(path="load", **figures)
    if engine.global_rank == 0:
        with open_checkpoint(place, "t") as reader:
            problems, figures = measured(lambda: verify_checkpoint(reader))
        if problems:
            raise RuntimeError(f"a checkpoint that was just saved is damaged: {problems[:3]}")
        found(path="verify", **figures)
        _, figures = measured(lambda: inspect_command(str(place / "t")))
        found(path="inspect", **figures)


def _model(spec: Spec, tell: Tell) -> None:
    """Measure a model of `arrays` arrays with `numel` elements in all."""
    with open(os.devnull, "w", encoding="utf-8") as silent, redirect_stdout(silent):
        _run_paths(spec, lambda **row: tell("path", **row), spec["folder"])


def _rank(rank: int, spec: Spec) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open(os.devnull, "w", encoding="utf-8") as silent, redirect_stdout(silent):
        _run_paths(spec, lambda **row: rows.append(row), spec["folder"])
    return rows


def _ranks(spec: Spec, tell: Tell) -> None:
    """Measure a model on `ranks` ranks: processor time and memory are the sums over all."""
    by_rank = run_ranks(_rank, spec["ranks"], spec, timeout_s=spec["limit_s"])
    for row in by_rank[0]:
        all_of = [one for rows in by_rank for one in rows if one["path"] == row["path"]]
        sums = {key: sum(one[key] or 0 for one in all_of) for key in ("cpu_s", "growth_bytes")}
        tell("path", **row | sums)


def _checkpoints(spec: Spec, tell: Tell) -> None:
    """Measure a folder that has `checkpoints` checkpoints of a tiny model."""
    place = Path(spec["folder"]) / "checkpoints"
    with (
        open(os.devnull, "w", encoding="utf-8") as silent,
        redirect_stdout(silent),
        start_engine(spec, "none", spec["folder"]) as engine,
    ):
        step(engine)
        engine.save_checkpoint(str(place), tag="t0")
        _copy(place / "t0", spec["checkpoints"] - 1)
        # The first save looks at all that is there, those after it at what came since.
        _, figures = measured(lambda: engine.save_checkpoint(str(place), tag="first"))
        tell("path", path="first save of a process", **figures)
        tags = iter(f"more-{number}" for number in range(STEPS))
        tell("path", path="save", **_repeated(lambda: engine.save_checkpoint(str(place), tag=next(tags))))
        tell("path", path="list_tags", **_repeated(lambda: list_tags(place)))
        tell("path", path="latest", **_repeated(lambda: resolve(place)))
        tell("path", path="ls", **_repeated(lambda: ls_command(str(place))))
        tell("path", path="retention", **_repeated(lambda: weigh(place, Keep(last=1))))
        _, figures = measured(lambda: engine.load_checkpoint(str(place)))
        tell("path", path="load of the latest", **figures)
        _, figures = measured(lambda: prune_folder(str(place), Keep(last=1)))
        tell("path", path="prune all but one", **figures)


def _copy(source: Path, count: int) -> None:
    path = source / RECORD_FILE
    record = Record.decode(path.read_bytes(), str(path))
    for number in range(1, count + 1):
        target = source.with_name(f"t{number}")
        shutil.copytree(source, target, copy_function=os.link)
        (target / RECORD_FILE).unlink()
        own = replace(record, tag=target.name, id=new_save_id(), committed_ns=record.committed_ns + number)
        (target / RECORD_FILE).write_bytes(own.encode())


def _plan(spec: Spec, tell: Tell) -> None:
    """Plan a GPT of the shape `spec["shape"]`, without memory, at stage 3 with everything on disk."""
    with torch.device("meta"):
        module = build_model(spec["shape"])
    offload = {"device": "nvme", "nvme_path": spec["folder"]}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    written = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    config = load_config({**written, "optimizer": {"type": "AdamW"}}).resolve(ResolveContext(world_size=1))
    optimizer = optimizer_from_config(OptimizerConfig(kind="AdamW", arguments={}), None, module)
    (kernel,) = kernels_for(TILES, type(optimizer), optimizer.param_groups)
    slots = {name: kernel.slots for name, _, parameter in named_parameters(module)}

    def plan() -> Plan:
        shapes, units = shapes_of_model(module, "bf16"), units_of_model(module)
        needs = find_needs(shapes, slots, config, world_size=1, rank=0)
        return make_plan(needs, placement_settings(config, budget_bytes=None, device_is_host=True), units)

    made = plan()
    tell("path", path="plan", **_repeated(plan))
    nothing = {"seconds": 0.0, "cpu_s": 0.0}
    tell("path", path="state on disk, planned", growth_bytes=made.held_total.disk, **nothing)
    tell("path", path="traffic of a step, planned", growth_bytes=made.traffic_total.total, **nothing)


CONTENDERS = {"plan": _plan, "model": _model, "ranks": _ranks, "checkpoints": _checkpoints}
"""What a process may be asked for."""
