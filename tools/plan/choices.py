"""The choices that `zstore plan` weighs: each is a config, planned by the code that the engine plans with, and estimates of
what that leaves out: activations, memory in transit, and seconds."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from zstore.engine.config.config import Config, load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.plan.activations import Activations
from zstore.engine.plan.needs import find_needs, placement_settings
from zstore.engine.plan.placement import fill_device, make_plan, without_headroom
from zstore.engine.plan.plan import Held, OffloadTier, Plan
from zstore.engine.plan.sent import with_sent
from zstore.errors import BudgetError
from zstore.sizes import format_bytes

from .job import Choice, PlannedJob
from .machine import PlannedMachine
from .model import slots_of

_BUDGET_PERCENT = 60
BUCKET_NUMEL = 50_000_000
"""Elements of one collective in the configs that are proposed: 100 MB in 16 bits."""

ASSUMED = {
    "flops": 100e12, "disk_read": 3e9, "disk_write": 2e9, "link": 25e9, "host_update": 60e9, "device_update": 1.5e12,
}  # fmt: skip
"""Rates a second to assume if not known: of a GPU in 16 bits, one NVMe drive, a link, updates in host and GPU memory."""

_NO_STATE = ("parameters", "secondary parameters", "gradients", "buffers")
_FP32_BYTES = 4
_UPDATED_BYTES = 28 / 12
"""Bytes that an update of AdamW moves in memory for each byte of its state."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time of one step."""

    compute: float
    disk: float
    """0 if a step moves nothing."""
    copies: float
    """Of parameters to the device and gradients from it, both at once; 0 if the device is the host."""
    host_update: float
    """Of the state that is not on a device, by the CPU."""
    device_update: float

    @property
    def overlapped(self) -> float:
        """With computation, transfers and the CPU's update fully overlapped."""
        return max(self.compute + self.device_update, self.disk, self.copies, self.host_update)

    @property
    def in_turn(self) -> float:
        """With nothing overlapped."""
        return self.compute + self.disk + self.copies + self.host_update + self.device_update


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The needs of a choice. Bytes of the device are one rank's, those of host and disk all ranks'."""

    title: str
    choice: Choice
    config: dict[str, Any]
    """The JSON of the config."""
    plan: Plan
    """Rank 0's."""
    activations_bytes: int
    """An estimate, as `transit_bytes` is."""
    transit_bytes: int
    device_bytes: int
    """Everything on one device; 0 if the device is the host."""
    host_bytes: int
    disk_bytes: int
    seconds: Seconds
    lacking: tuple[str, ...]
    """A text for each memory that is too small; empty if everything fits."""

    @property
    def fits(self) -> bool:
        """Whether this machine can do it."""
        return not self.lacking


def all_choices(job: PlannedJob) -> list[Costs]:
    """Return stages 0 to 3 with every tier of optimizer state and parameters that the engine offers."""
    choices = [Choice(stage=stage, micro_batch=job.micro_batch) for stage in (0, 1, 2, 3)]
    tiers: tuple[OffloadTier, ...] = ("cpu", "nvme")
    choices += [replace(choices[stage], optimizer=tier) for tier in tiers for stage in (1, 2, 3)]
    choices += [replace(choices[3], optimizer=one, parameters=other) for one in tiers for other in tiers]
    if job.machine.machines > 1 and job.machine.num_ranks > 1:
        choices.append(replace(choices[3], second_copy=True))
    return [weigh(job, choice) for choice in choices]


def ladder(job: PlannedJob) -> list[Costs]:
    """Return the choices to try when memory runs out; each rung adds to the ones before."""
    return [weigh(job, choice, title) for title, choice in _rungs(job)]


def _rungs(job: PlannedJob) -> Iterator[tuple[str, Choice]]:
    checkpointing = bool(((job.base or {}).get("zstore") or {}).get("gradient_checkpointing"))
    choice = Choice(stage=0, micro_batch=job.base_micro_batch or job.micro_batch, checkpointing=checkpointing)
    yield "as asked, stage 0", choice
    if choice.micro_batch > 1:
        choice = replace(choice, micro_batch=1)
        yield "micro-batch 1", choice
    if not checkpointing:
        choice = replace(choice, checkpointing=True)
        yield "activation checkpointing", choice
    choice = replace(choice, stage=2)
    yield "ZeRO-2", choice
    choice = replace(choice, optimizer="cpu")
    yield "optimizer to CPU", choice
    choice = replace(choice, stage=3)
    yield "ZeRO-3", choice
    choice = replace(choice, parameters="cpu")
    yield "parameters to CPU", choice
    yield "both to NVMe", replace(choice, optimizer="nvme", parameters="nvme")


def weigh(job: PlannedJob, choice: Choice, title: str = "") -> Costs:
    """Return the needs of `choice`, and which of them this machine lacks."""
    activations = activations_of(job, choice).total_bytes
    config = make_config(job, choice)
    plan, too_small = _planned(job, config)
    if too_small is not None:
        config = _without_budget(config)
    asks_budget = (config.get("zstore") or {}).get("host_budget_bytes") is not None
    if not asks_budget and "nvme" in (choice.optimizer, choice.parameters):
        # A budget keeps in memory as much as fits; if it is too small for the minimum, the sizes without one say so.
        with contextlib.suppress(BudgetError):
            budgeted = make_config(job, choice, budget_bytes=_budget_bytes(job, choice, plan, activations))
            budgeted["zstore"] = _drive_rates(job) | budgeted["zstore"]
            config, plan = budgeted, plan_of(job, budgeted)
    return _outcome(job, choice, title, config, plan)


def _drive_rates(job: PlannedJob) -> dict[str, int]:
    """Return the drive's rates as keys of a config; empty if they are not known."""
    rates = job.machine.rates
    if rates.disk_read is None or rates.disk_write is None:
        return {}
    return {"disk_read_rate": max(1, round(rates.disk_read)), "disk_write_rate": max(1, round(rates.disk_write))}


def weigh_given(job: PlannedJob) -> Costs:
    """Return the needs of the job's own config, as it is written, and which of them this machine lacks."""
    raw = dict(job.base or {})
    choice = _choice_of(_resolved(job, json.dumps(raw)))
    plan, too_small = _planned(job, raw)
    outcome = _outcome(job, choice, "as it is written", raw, plan)
    if too_small is None:
        return outcome
    return replace(outcome, lacking=(f"host budget: {too_small}", *outcome.lacking))


def _choice_of(resolved: Config) -> Choice:
    return Choice(
        stage=resolved.stage,
        optimizer=resolved.offload_optimizer.device,
        parameters=resolved.offload_param.device,
        micro_batch=resolved.batch.micro_batch_size,
        checkpointing=resolved.own.gradient_checkpointing,
    )


def _planned(job: PlannedJob, config: dict[str, Any]) -> tuple[Plan, BudgetError | None]:
    """Return the plan of a config; if its host budget is too small, of the config without one, and the error."""
    try:
        return plan_of(job, config), None
    except BudgetError as error:
        return plan_of(job, _without_budget(config)), error


def _without_budget(config: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in (config.get("zstore") or {}).items() if key != "host_budget_bytes"}
    return config | {"zstore": own}


def _outcome(job: PlannedJob, choice: Choice, title: str, config: dict[str, Any], plan: Plan) -> Costs:
    machine, held, rest = job.machine, plan.held_total, _resolved(job, _text(config)).activations
    kept, transit = activations_of(job, choice), transit_bytes(job, choice, plan)
    activations = kept.total_bytes
    moved = kept.kept_bytes if rest == "disk" or (rest == "host" and not machine.device_is_host) else 0
    # When whole tensors are updated, nothing of the backward remains.
    on_device = held.device + max(transit + activations - moved, plan.update_bytes)
    in_host = held.host + held.pinned + (moved if rest == "host" else 0)
    outcome = Costs(
        title=title,
        choice=choice,
        config=config,
        plan=plan,
        activations_bytes=activations,
        transit_bytes=transit,
        device_bytes=0 if machine.device_is_host else on_device,
        host_bytes=machine.num_ranks * (in_host + (on_device if machine.device_is_host else 0)),
        disk_bytes=machine.num_ranks * (plan.file_bytes + (moved if rest == "disk" else 0)),
        seconds=step_seconds(job, choice, plan),
        lacking=(),
    )
    return replace(outcome, lacking=tuple(_lacking(outcome, machine)))


def make_config(job: PlannedJob, choice: Choice, budget_bytes: int | None = None) -> dict[str, Any]:
    """Return the config of a choice; `budget_bytes` is the machine's host budget."""
    base = _default_config(job, choice) if job.base is None else job.base
    return changed_config(base, choice, job.micro_batch, str(job.nvme_path), budget_bytes)


def _default_config(job: PlannedJob, choice: Choice) -> dict[str, Any]:
    """Return the config to propose if none is given, before the changes of `choice`."""
    precision: dict[str, Any] = {} if job.precision == "fp32" else {job.precision: {"enabled": True}}
    if job.precision_is_auto:
        precision = {"fp16" if job.precision == "fp16" else "bf16": {"enabled": "auto"}}
    zero: dict[str, Any] = {"stage": 0} | (
        {"zero_hpz_partition_size": job.machine.num_ranks} if choice.second_copy else {}
    )
    if job.machine.world_size > 1:
        zero |= {"reduce_bucket_size": BUCKET_NUMEL, "allgather_bucket_size": BUCKET_NUMEL}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        **precision,
        "zero_optimization": zero,
        **({} if job.moments == "fp32" else {"zstore": {"moments": job.moments}}),
    }


def changed_config(
    base: Mapping[str, Any], choice: Choice, samples_per_rank: int, nvme_path: str, budget_bytes: int | None = None
) -> dict[str, Any]:
    """Return a copy of the config `base` with stage, offload and micro-batch of `choice`; a step keeps its samples.

    A section of offload that asks for the same tier is kept as it is.
    """
    config = copy.deepcopy(dict(base))
    for key in ("train_batch_size", "elasticity"):
        config.pop(key, None)
    config["train_micro_batch_size_per_gpu"] = choice.micro_batch
    config["gradient_accumulation_steps"] = max(1, samples_per_rank // choice.micro_batch)
    written = config.get("zero_optimization")
    zero: dict[str, Any] = written if isinstance(written, dict) else {}
    zero["stage"] = choice.stage
    if choice.stage < 3:
        zero.pop("zero_hpz_partition_size", None)
    for older in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
        zero.pop(older, None)
    for key, tier in (("offload_optimizer", choice.optimizer), ("offload_param", choice.parameters)):
        section = zero.get(key) or {}
        if tier == "none":
            zero.pop(key, None)
        elif section.get("device") != tier:
            kept = {name: value for name, value in section.items() if name == "pin_memory"}
            zero[key] = {"device": tier} | ({"nvme_path": nvme_path} if tier == "nvme" else {}) | kept
    config["zero_optimization"] = zero
    own: dict[str, Any] = {"gradient_checkpointing": True} if choice.checkpointing else {}
    if budget_bytes is not None:
        own["host_budget_bytes"] = budget_bytes
    return config | ({"zstore": {**(config.get("zstore") or {}), **own}} if own else {})


def plan_of(job: PlannedJob, config: dict[str, Any]) -> Plan:
    """Return rank 0's plan of a config, as the engine makes it. Raises ConfigError and BudgetError as the engine does."""
    return _plan(job, _text(config))


def _text(config: Mapping[str, Any]) -> str:
    """Return a config as text, without the key that changes nothing in a plan unless that fills the device: many choices
    differ by it alone."""
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    unread = () if offload.get("ratio") == "auto" else ("gradient_checkpointing",)
    own = {key: value for key, value in (config.get("zstore") or {}).items() if key not in unread}
    return json.dumps({**config, "zstore": own})


@lru_cache
def _plan(job: PlannedJob, text: str) -> Plan:
    machine, resolved = job.machine, _resolved(job, text)
    budget = resolved.own.host_budget_bytes
    if budget == "auto":
        budget = machine.memory_bytes * _BUDGET_PERCENT // 100
    share = budget // machine.num_ranks if isinstance(budget, int) else None
    settings = placement_settings(resolved, budget_bytes=share, device_is_host=machine.device_is_host)
    slots, units = slots_of(job.model, resolved.optimizer), job.model.units
    ranks, native = machine.world_size, not machine.device_is_host
    needs = find_needs(
        job.model.shapes, slots, resolved, world_size=ranks, rank=0, units=units, local_world_size=machine.num_ranks
    )
    plan = make_plan(needs, settings, units)
    if resolved.fills_device and not machine.device_is_host:
        usable_bytes = without_headroom(machine.gpu_bytes)
        usable_bytes -= activations_of(job, _choice_of(resolved)).bytes_on_device(resolved.activations)
        plan = make_plan(needs, fill_device(plan, needs, units, usable_bytes), units)
    return with_sent(plan, needs, resolved, ranks, native=native, local_world_size=machine.num_ranks)


@lru_cache
def _resolved(job: PlannedJob, text: str) -> Config:
    return load_config(json.loads(text)).resolve(
        ResolveContext(
            world_size=job.machine.world_size,
            hidden_size=job.model.width.hidden,
            native=(job.precision,),
            answers=job.answers,
        )
    )


def _budget_bytes(job: PlannedJob, choice: Choice, plan: Plan, activations: int) -> int:
    """Return a host budget for the machine: as much as "auto" takes, but on a CPU no more than the model leaves."""
    memory = job.machine.memory_bytes
    budget = memory * _BUDGET_PERCENT // 100
    if job.machine.device_is_host:
        budget = min(
            budget, without_headroom(memory) - plan.held_total.device - transit_bytes(job, choice, plan) - activations
        )
    return max(1, budget)


def memories(outcome: Costs, machine: PlannedMachine) -> list[tuple[str, int, int | None]]:
    """Return (name, bytes needed, bytes that may be used or None if that is not known) of each memory."""
    return [
        ("device", outcome.device_bytes, without_headroom(machine.gpu_bytes)),
        ("host", outcome.host_bytes, without_headroom(machine.memory_bytes)),
        ("disk", outcome.disk_bytes, machine.disk_bytes),
    ]


def _lacking(outcome: Costs, machine: PlannedMachine) -> Iterator[str]:
    for name, needed, usable in memories(outcome, machine):
        if usable is not None and needed > usable:
            yield f"{name}: {format_bytes(needed)} needed, {format_bytes(usable)} usable"


def activations_of(job: PlannedJob, choice: Choice) -> Activations:
    """Return the estimated activations that a forward keeps for its backward on one rank."""
    tokens = choice.micro_batch * job.seq_length
    return Activations(width=job.model.width, tokens=tokens, itemsize=job.itemsize, checkpointing=choice.checkpointing)


def transit_bytes(job: PlannedJob, choice: Choice, plan: Plan) -> int:
    """Return the estimated bytes that pass through a device's memory beside the state that it holds: gathered parameters of a
    unit and the next, gradients of a unit if they do not stay as autograd made them, and the buckets of collectives."""
    model, num_ranks = job.model, job.machine.world_size
    unit = model.largest_unit_numel * job.itemsize
    whole = choice.stage < 2 or num_ranks == 1
    cast = plan.settings.accumulation_steps > 1 and job.itemsize < _FP32_BYTES
    in_backward = 0 if whole and plan.held["gradients"].device and not cast else unit
    bucket = min(BUCKET_NUMEL, model.num_parameters if choice.stage < 2 else model.largest_unit_numel) * job.itemsize
    return plan.gathered_bytes + in_backward + (2 * bucket if num_ranks > 1 else 0)


def step_seconds(job: PlannedJob, choice: Choice, plan: Plan) -> Seconds:
    """Return the time of a step from the machine's rates, or those assumed.

    Six operations per parameter and token, eight if the forward runs twice; reads and writes share the drive's time, and ranks
    that of the machine's drive and memory. Collectives are left out.
    """
    rates, moved, parameters = known_or_assumed(job), plan.traffic_total, plan.held["parameters"]
    operations = (8 if choice.checkpointing else 6) * job.model.num_parameters * job.micro_batch * job.seq_length
    disk = job.machine.num_ranks * (moved.read / rates["disk_read"] + moved.written / rates["disk_write"])
    state = sum((held for kind, held in plan.held.items() if kind not in _NO_STATE), Held())
    away = state.total if job.machine.device_is_host else state.total - state.device
    share = away / max(1, state.total)
    # Parameters that are not on the device come twice in each micro-batch, others after their update on the CPU.
    up = 2 * plan.settings.accumulation_steps * (parameters.total - parameters.device) + share * parameters.device
    down = share * plan.settings.accumulation_steps * parameters.total
    return Seconds(
        compute=operations / rates["flops"],
        disk=disk,
        copies=0.0 if job.machine.device_is_host else max(up, down) / rates["link"],
        host_update=job.machine.num_ranks * _UPDATED_BYTES * away / rates["host_update"],
        device_update=_UPDATED_BYTES * (state.total - away) / rates["device_update"],
    )


def known_or_assumed(job: PlannedJob) -> dict[str, float]:
    """Return the machine's rates by their name in `Rates`, with those of `ASSUMED` for rates that are not known."""
    return {name: rate or ASSUMED[name] for name, rate in asdict(job.machine.rates).items()}
