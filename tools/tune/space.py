"""What `zstore tune` may try: configs made from the one that it starts from. Pure."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zstore.engine.config.autotuning import AutotuningSection
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.config.schema import BATCH_KEYS
from zstore.engine.plan.plan import OffloadTier

from ..plan.choices import Outcome, changed_config, weigh
from ..plan.job import Choice, Job

BUCKET_SIZES = (5_000_000, 50_000_000, 500_000_000)
"""Elements of one collective that are tried."""
_STEP_MODES = ("none", "forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many samples a step has, and in which parts they may be taken."""

    samples_per_rank: int | None
    """Of a step, where the config fixes them; None: they may be chosen."""
    micro_batch: int
    """As the config has it."""
    accumulation: int
    is_elastic: bool = False
    """Whether the section elasticity gives all batch sizes."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config to try."""

    name: str
    config: dict[str, Any]
    space: tuple[int, str, str]
    """Stage, and tiers of optimizer state and parameters."""
    micro_batch: int
    estimate: tuple[float, ...] = ()
    """What the plan expects, the better the smaller."""
    lacking: tuple[str, ...] = ()
    """What does not fit by the plan."""


def micro_batches(batch: Batch, section: AutotuningSection, num_ranks: int) -> list[int]:
    """Return the micro-batches that may be tried, ascending: doublings within the section's limits, of samples that are
    fixed those that divide them; and the config's own."""
    if batch.is_elastic:
        return [batch.micro_batch]
    low, high = section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu
    found, size = {batch.micro_batch}, low
    while size <= high:
        if batch.samples_per_rank is None:
            samples = size * batch.accumulation * num_ranks
            if section.max_train_batch_size is not None and samples > section.max_train_batch_size:
                break
            found.add(size)
        elif size > batch.samples_per_rank:
            break
        elif batch.samples_per_rank % size == 0:
            found.add(size)
        size *= 2
    return sorted(found)


def samples_of(batch: Batch, micro_batch: int, section: AutotuningSection, num_ranks: int) -> int:
    """Return the samples of a step on one rank with a micro-batch."""
    if batch.samples_per_rank is not None:
        return batch.samples_per_rank
    least = -(-section.min_train_batch_size // (micro_batch * num_ranks))
    return micro_batch * max(batch.accumulation, least)


def spaces(num_ranks: int, *, on_gpu: bool, has_drive: bool) -> list[tuple[int, OffloadTier, OffloadTier]]:
    """Return (stage, tier of optimizer state, tier of parameters), from the least offload on; those that are the same on
    one rank once."""
    stages = (0, 1, 2, 3) if num_ranks > 1 else (0, 3)
    offloading = (1, 2, 3) if num_ranks > 1 else (2, 3)
    tiers: list[OffloadTier] = []
    if on_gpu:
        tiers.append("cpu")
    if has_drive:
        tiers.append("nvme")
    found: list[tuple[int, OffloadTier, OffloadTier]] = [(stage, "none", "none") for stage in stages]
    for tier in tiers:
        found += [(stage, tier, "none") for stage in offloading]
        found.append((3, tier, tier))
    return found


def first_candidates(
    base: Mapping[str, Any], batch: Batch, section: AutotuningSection, found: Sequence[tuple[int, OffloadTier, OffloadTier]],
    *, num_ranks: int, job: Job | None, nvme_path: str,
) -> list[Candidate]:  # fmt: skip
    """Return a candidate for each space and micro-batch in the order of the section's `tuner_type`, those that do not fit by
    the plan at the end; without a `job` all count as fitting."""
    sizes = micro_batches(batch, section, num_ranks)
    candidates: list[Candidate] = []
    for stage, optimizer, parameters in found:
        here: list[Candidate] = []
        for size in sizes:
            samples = samples_of(batch, size, section, num_ranks)
            choice = Choice(stage=stage, optimizer=optimizer, parameters=parameters, micro_batch=size)
            outcome = None if job is None else weigh(replace(job, micro_batch=samples), choice)
            if job is not None and outcome is not None and not outcome.fits:
                choice = replace(choice, checkpointing=True)
                outcome = weigh(replace(job, micro_batch=samples), choice)
            config = changed_config(base, choice, samples, nvme_path) if outcome is None else outcome.config
            here.append(
                Candidate(
                    name=name_of(choice),
                    config=with_batch(base, config, batch, num_ranks),
                    space=(stage, optimizer, parameters),
                    micro_batch=size,
                    estimate=_estimate(choice, samples, outcome),
                    lacking=() if outcome is None else outcome.lacking,
                )
            )
        fitting = [one for one in here if not one.lacking]
        number = section.num_tuning_micro_batch_sizes
        chosen = fitting[-number:] if job is not None else fitting[:number]
        candidates += chosen + [one for one in here if one.lacking][:1]
    return _ordered(candidates, section, base)


def _ordered(candidates: list[Candidate], section: AutotuningSection, base: Mapping[str, Any]) -> list[Candidate]:
    fitting = [one for one in candidates if not one.lacking]
    if section.tuner_type == "random":
        random.Random(int(base.get("seed") or 0)).shuffle(fitting)
    elif section.tuner_type == "model_based":
        fitting.sort(key=lambda one: one.estimate)
    return fitting + [one for one in candidates if one.lacking]


def _estimate(choice: Choice, samples: int, outcome: Outcome | None) -> tuple[float, ...]:
    """Return seconds a sample where rates are known, bytes to and from the drive a sample, tiers below the device, and what
    else makes one of two slower: more sharding than is needed, and smaller micro-batches."""
    depth = {"none": 0, "cpu": 1, "nvme": 2}
    moved = 0 if outcome is None else outcome.plan.traffic_total.total
    seconds = None if outcome is None else outcome.seconds.in_turn
    offload = depth[choice.optimizer] + depth[choice.parameters]
    return (round((seconds or 0.0) / samples, 9), moved / samples, offload, choice.stage, -choice.micro_batch)


def with_batch(base: Mapping[str, Any], config: Mapping[str, Any], batch: Batch, num_ranks: int) -> dict[str, Any]:
    """Return `config` with its batch sizes said as `base` says them, without the section autotuning."""
    found = copy.deepcopy({key: value for key, value in config.items() if key != "autotuning"})
    if batch.is_elastic:
        for key in BATCH_KEYS:
            found.pop(key, None)
        found |= {key: base[key] for key in (*BATCH_KEYS, "elasticity") if key in base}
    elif isinstance(base.get("train_batch_size"), int | float):
        found["train_batch_size"] = base["train_batch_size"]
        found.pop("gradient_accumulation_steps", None)  # follows, at any world size
    return found


def name_of(choice: Choice) -> str:
    """Return a short name of a choice, as `z3-cpu-none-mbs4`."""
    tiers = "" if choice.optimizer == choice.parameters == "none" else f"-{choice.optimizer}-{choice.parameters}"
    return f"z{choice.stage}{tiers}-mbs{choice.micro_batch}{'-checkpointing' if choice.checkpointing else ''}"


def refinements(best: Candidate, context: ResolveContext) -> Iterator[Candidate]:
    """Yield variants of the best: other step modes that act with it, and with several ranks other sizes of buckets."""
    config = load_config(best.config).resolve(context)
    for mode in _STEP_MODES:
        if mode != config.step_overlap:
            changed = _with(best.config, "zstore", step_overlap=mode)
            notices = load_config(changed).resolve(context).notices()
            if all(notice.key != "zstore.step_overlap" for notice in notices):
                yield replace(best, name=f"{best.name}-{mode}", config=changed)
    for size in BUCKET_SIZES if context.world_size > 1 else ():
        if size not in (config.reduce_bucket_numel, config.allgather_bucket_numel):
            changed = _with(best.config, "zero_optimization", reduce_bucket_size=size, allgather_bucket_size=size)
            yield replace(best, name=f"{best.name}-bucket{size // 1_000_000}M", config=changed)


def _with(config: Mapping[str, Any], section: str, **keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(dict(config)), section: {**(config.get(section) or {}), **keys}}
