"""Estimates of `zstore plan`: activations, memory in transit, and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from zstore.engine.plan.activations import Activations
from zstore.engine.plan.plan import Plan

from .job import Choice, PlannedJob

BUCKET_NUMEL = 50_000_000
"""Elements of one collective in the configs that are proposed: 100 MB in 16 bits."""

ASSUMED: Mapping[str, float] = {"flops": 100e12, "disk_read": 3e9, "disk_write": 2e9}
"""Rates a second to assume if they are not known: of a GPU for 16-bit training, of one NVMe drive."""

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time of one step."""

    compute: float
    disk: float
    """0 if a step moves nothing."""

    @property
    def overlapped(self) -> float:
        """With computation and transfers fully overlapped."""
        return max(self.compute, self.disk)

    @property
    def in_turn(self) -> float:
        """With nothing overlapped."""
        return self.compute + self.disk


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

    Six operations per parameter and token, eight if the forward runs twice; reads and writes share the drive's time.
    Collectives, copies to and from the device and the update itself are left out.
    """
    rates, moved = known_or_assumed(job), plan.traffic_total
    operations = (8 if choice.checkpointing else 6) * job.model.num_parameters * job.micro_batch * job.seq_length
    disk = job.machine.num_ranks * (moved.read / rates["disk_read"] + moved.written / rates["disk_write"])
    return Seconds(compute=operations / rates["flops"], disk=disk)


def known_or_assumed(job: PlannedJob) -> dict[str, float]:
    """Return the machine's rates by their name in `Rates`, with those of `ASSUMED` for rates that are not known."""
    return {name: rate or ASSUMED[name] for name, rate in asdict(job.machine.rates).items()}
