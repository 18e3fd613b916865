"""The job to plan: a model, a machine and a precision, from the command line and the hardware of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from zstore.engine.config.config import DTYPES, Config, load_config, read_config
from zstore.engine.config.optimizers import Moments
from zstore.engine.config.resolve import ResolveContext, stand_ins
from zstore.engine.plan.plan import OffloadTier
from zstore.errors import UsageError
from zstore.format import numpy_dtype

from .machine import (
    PlannedMachine,
    PrecisionChoice,
    Rates,
    find_precision,
    host_memory_bytes,
    measured_rates,
    own_gpus,
    own_rates,
    slow_note,
)
from .model import ADAM, DEFAULT_VOCAB, ModelShape, shape_of_model, shape_of_numbers
from .options import PlanOptions

if TYPE_CHECKING:
    from zstore.engine.plan.rates import MatmulRates

_MICRO_BATCH = "train_micro_batch_size_per_gpu"

_DEFAULT_NVME = PurePosixPath("/local_nvme")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedJob:
    """A model to train, and the machine to train it on."""

    model: ModelShape
    machine: PlannedMachine
    micro_batch: int
    """Samples per rank and step; a choice may take fewer in one forward, and more forwards."""
    seq_length: int
    """Tokens in a sample."""
    precision: str
    nvme_path: PurePosixPath
    precision_is_auto: bool = False
    """Whether the configs say "auto", which is `precision` on this machine."""
    precision_note: str | None = None
    """A remark about it."""
    base: Mapping[str, Any] | None = None
    """The config that is weighed, as JSON; a choice replaces its stage, offload and batch sizes. None: there is none."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """The values for its "auto"."""
    base_micro_batch: int | None = None
    """Its samples in one forward."""
    optimizer: str = ADAM.kind
    """Class of the optimizer."""
    moments: Moments = "fp32"
    """Type of the optimizer's moments."""

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return numpy_dtype(DTYPES[self.precision]).itemsize


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The part of a job's config that can be chosen."""

    stage: int
    optimizer: OffloadTier = "none"
    parameters: OffloadTier = "none"
    micro_batch: int
    checkpointing: bool = False
    second_copy: bool = False
    """Whether the ranks of a machine share a second copy of the parameters (`zero_hpz_partition_size`)."""


def make_job(options: PlanOptions) -> PlannedJob:
    """Return the job to plan. Raises ConfigError for a model that cannot be, UsageError for a device of unknown
    size."""
    here = options.gpus is None or options.gpu_memory is None
    found, found_bytes = own_gpus() if here else (0, None)
    gpus = found if options.gpus is None else options.gpus
    own = own_rates(gpus, is_this_machine=options.gpu_memory is None or options.measure is not None)
    given = (
        None
        if options.config is None
        else read_given(options.config, options, own, world_size=max(1, gpus) * options.machines)
    )
    precision = find_precision(options.precision, own) if given is None else given.precision
    model = _model(options, precision.name)
    gpu_bytes = options.gpu_memory or found_bytes
    memory = options.memory or host_memory_bytes()
    if gpus and gpu_bytes is None:
        raise UsageError(
            "--gpus: this machine has no GPU to read the memory size from; give --gpu-memory too, like 24GB"
        )
    rates = Rates(**{field.name: getattr(options, field.name) for field in fields(Rates)})
    disk = options.disk if options.disk is not None or given is None else given.free_bytes()
    if options.measure is not None:
        rates, free_bytes = measured_rates(options.measure, rates)
        disk = disk or free_bytes
    if rates.flops is None and own is not None:
        rates = replace(rates, flops=own.of_device(precision.name))
    machine = PlannedMachine(
        gpus=gpus,
        gpu_bytes=gpu_bytes if gpus and gpu_bytes else memory,
        memory_bytes=memory,
        disk_bytes=disk,
        rates=rates,
        machines=options.machines,
    )
    nvme = _DEFAULT_NVME if given is None else given.nvme_path
    if options.measure is not None:
        nvme = PurePosixPath(options.measure.resolve())
    return PlannedJob(
        model=model,
        machine=machine,
        micro_batch=options.micro_batch or 1 if given is None else given.samples_per_rank,
        seq_length=options.seq_length,
        precision=precision.name,
        nvme_path=nvme,
        precision_is_auto=precision.is_auto,
        precision_note=precision.note,
        base=None if given is None else given.raw,
        answers={} if given is None else given.answers,
        base_micro_batch=None if given is None else given.resolved.batch.micro_batch_size,
        optimizer=ADAM.kind if given is None or given.resolved.optimizer is None else given.resolved.optimizer.kind,
        moments=options.moments,
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """A config that is to be weighed."""

    raw: dict[str, Any]
    answers: dict[str, Any]
    resolved: Config
    precision: PrecisionChoice

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step on one rank."""
        return self.resolved.batch.micro_batch_size * self.resolved.batch.accumulation_steps

    @property
    def nvme_path(self) -> PurePosixPath:
        """The first drive that the config names, else the one that is proposed."""
        paths = (*self.resolved.offload_optimizer.nvme_paths, *self.resolved.offload_param.nvme_paths)
        return PurePosixPath(paths[0]) if paths else _DEFAULT_NVME

    def free_bytes(self) -> int | None:
        """Return the room on the config's drives, each counted once; None if it names none that exists."""
        paths = {*self.resolved.offload_optimizer.nvme_paths, *self.resolved.offload_param.nvme_paths}
        there = [next((one for one in (path, *path.parents) if one.is_dir()), None) for path in paths]
        drives = {one.stat().st_dev: shutil.disk_usage(one).free for one in there if one is not None}
        return sum(drives.values()) if drives else None


def read_given(path: Path, options: PlanOptions, rates: MatmulRates | None, *, world_size: int) -> Given:
    """Return the config in `path`, resolved for the planned devices. Raises ConfigError for one that is not sound, and
    UsageError if --micro-batch contradicts it."""
    raw = read_config(path)
    loaded = load_config(raw, name=str(path))
    answers = stand_ins(loaded.settings)
    if options.micro_batch is not None:
        if _MICRO_BATCH not in answers:
            raise UsageError(f"--micro-batch: {path} gives the batch size; leave the option out")
        answers[_MICRO_BATCH] = options.micro_batch
    native = ("bf16",) if rates is None else rates.native
    resolved = loaded.resolve(ResolveContext(world_size=world_size, native=native, answers=answers))
    is_auto = "auto" in (loaded.settings.bf16.enabled, loaded.settings.fp16.enabled)
    precision = PrecisionChoice(name=resolved.precision, is_auto=is_auto, note=slow_note(loaded, rates))
    return Given(raw=raw, answers=answers, resolved=resolved, precision=precision)


def _model(options: PlanOptions, precision: str) -> ModelShape:
    if options.model is not None:
        return shape_of_model(options.model, precision, options.seq_length)
    numbers = (options.params or 0, options.hidden or 0, options.layers or 0)  # given if no model is
    return shape_of_numbers(*numbers, options.vocab or DEFAULT_VOCAB, precision)
