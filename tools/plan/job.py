"""What is planned: a model, a machine and a precision, from what the command line says and what this machine has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from zstore.checkpoint.moments import Moments
from zstore.engine.params.tensors import PRECISIONS
from zstore.engine.plan.plan import OffloadTier
from zstore.errors import UsageError

from .machine import (
    Machine,
    Rates,
    device_flops,
    find_precision,
    host_memory_bytes,
    measured_rates,
    own_gpus,
    own_rates,
)
from .model import DEFAULT_VOCAB, ModelShape, shape_of_model, shape_of_numbers
from .options import PlanOptions

_DEFAULT_NVME = PurePosixPath("/local_nvme")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what."""

    model: ModelShape
    machine: Machine
    micro_batch: int
    """Samples per rank and step; a choice may take fewer in one forward, and more forwards."""
    seq_length: int
    """Tokens in a sample."""
    precision: str
    nvme_path: PurePosixPath
    precision_is_auto: bool = False
    """Whether the configs say "auto", which is `precision` on this machine."""
    precision_note: str | None = None
    """What there is to say about it."""
    moments: Moments = "fp32"
    """What the optimizer's moments are kept in."""

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return PRECISIONS[self.precision].itemsize


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a job's config can be chosen."""

    stage: int
    optimizer: OffloadTier = "none"
    parameters: OffloadTier = "none"
    micro_batch: int
    checkpointing: bool = False


def make_job(options: PlanOptions) -> Job:
    """Return what is to be planned. Raises ConfigError for a model that cannot be, UsageError for a device of unknown
    size."""
    found, found_bytes = own_gpus()
    gpus = found if options.gpus is None else options.gpus
    own = own_rates(gpus, is_this_machine=options.gpu_memory is None or options.measure is not None)
    precision = find_precision(str(options.precision), own)
    model = _model(options, precision.name)
    gpu_bytes = options.gpu_memory or found_bytes
    memory = options.memory or host_memory_bytes()
    if gpus and gpu_bytes is None:
        raise UsageError(
            "--gpus: this machine has no GPU to read the memory size from; give --gpu-memory too, like 24GB"
        )
    rates = Rates(disk_read=options.disk_read, disk_write=options.disk_write, flops=options.flops)
    disk = options.disk
    if options.measure is not None:
        rates, free_bytes = measured_rates(options.measure, rates)
        disk = disk or free_bytes
    if rates.flops is None and own is not None:
        rates = replace(rates, flops=device_flops(own, precision.name))
    machine = Machine(
        gpus=gpus,
        gpu_bytes=gpu_bytes if gpus and gpu_bytes else memory,
        memory_bytes=memory,
        disk_bytes=disk,
        rates=rates,
    )
    nvme = _DEFAULT_NVME if options.measure is None else PurePosixPath(options.measure.resolve())
    return Job(
        model=model,
        machine=machine,
        micro_batch=options.micro_batch,
        seq_length=options.seq_length,
        precision=precision.name,
        nvme_path=nvme,
        precision_is_auto=precision.is_auto,
        precision_note=precision.note,
        moments=options.moments.value,
    )


def _model(options: PlanOptions, precision: str) -> ModelShape:
    if options.model is not None:
        return shape_of_model(options.model, precision, options.seq_length)
    numbers = (options.params or 0, options.hidden or 0, options.layers or 0)  # given, where no model is
    return shape_of_numbers(*numbers, options.vocab or DEFAULT_VOCAB, precision)
