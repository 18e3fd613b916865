"""Blocks whose activations are computed again in the backward: torch's checkpointing, with DeepSpeed's additions.

[Note: a block]
`checkpoint(function, *args)` keeps the tensors in `args`, and not those that `function` computes from them. It is torch's
non-reentrant checkpointing: random numbers and autocast are as they were, so the bits are those without it. The tensors
are saved through autograd, so that the engine's saved-tensor hooks take them off the device (see `offload`).

The choices of `configure` hold for the whole process; before it is called, those of the engine that was made last.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from ..config.config import Config, load_config, read_config
from ..config.inactive import NOT_PARTITIONED
from ..config.sections import ActivationCheckpointingSection
from .offload import ActivationOffload, active_offload
from .statistics import ActivationStatistics

_log = logging.getLogger("zstore")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How blocks are checkpointed."""

    in_cpu: bool = False
    """Inputs go to host memory if no engine takes them off the device."""
    synchronize: bool = False
    profile: bool = False


@dataclass
class BlockTimes:
    """Blocks that ran while `profile` was on, and their time with the device waited for."""

    blocks: int = 0
    forward_s: float = 0.0
    recomputed: int = 0
    recompute_s: float = 0.0


@dataclass
class _Process:
    """The choices and counters of this process."""

    configured: Choices | None = None
    section: Choices = field(default_factory=Choices)
    """Those of the engine that was made last."""
    times: BlockTimes = field(default_factory=BlockTimes)

    @property
    def choices(self) -> Choices:
        return self.configured or self.section


_process = _Process()


def configure(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` keeps the inputs of blocks in this process, until the next call.

    `deepspeed_config`, a dict or a path, has defaults for the others in its section `activation_checkpointing`, which
    describes them, and those that do not act; neither does `mpu_`, since there is no model parallelism. Raises ConfigError
    for a config that is wrong.
    """
    section = ActivationCheckpointingSection()
    if deepspeed_config is not None:
        section = _section_in(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = section.model_copy(update={name: value for name, value in given.items() if value is not None})
    if partition_activations or contiguous_checkpointing:
        _log.warning("zstore.checkpointing.configure: partition_activations does not act: %s", NOT_PARTITIONED)
    _process.configured = _choices(section)
    _process.times = BlockTimes()


def _section_in(source: Any) -> ActivationCheckpointingSection:
    """Return the section of a config; other sections are not read."""
    raw = read_config(source) if isinstance(source, str | os.PathLike) else source
    if isinstance(raw, Mapping):
        raw = {"activation_checkpointing": raw.get("activation_checkpointing") or {}}
    return load_config(raw).settings.activation_checkpointing


def _choices(section: ActivationCheckpointingSection) -> Choices:
    return Choices(
        in_cpu=section.cpu_checkpointing,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )


def use_section(section: ActivationCheckpointingSection) -> None:
    """Let blocks be checkpointed as an engine's config says, if `configure` was not called."""
    # The engine carries out its `cpu_checkpointing`, for the forward's other saved tensors too.
    _process.section = replace(_choices(section), in_cpu=False)
    _process.times = BlockTimes()


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _process.configured is not None


def reset() -> None:
    """Do nothing: there are no buffers to let go of. DeepSpeed's scripts call it."""


def block_times() -> BlockTimes:
    """Return a copy of the times of blocks so far."""
    return replace(_process.times)


def activation_statistics(offload: ActivationOffload | None, config: Config) -> ActivationStatistics | None:
    """Return the counters of an engine's activations, and of the process's blocks; None if there are neither."""
    timed = asdict(_process.times) if _process.choices.profile else {}
    if offload is not None:
        return replace(offload.statistics(), **timed)
    return ActivationStatistics(tier="device", **timed) if config.settings.activation_checkpointing.profile else None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, of which the backward computes the activations again. See [Note: a block].

    Tensors anywhere else than directly in `args` are kept as they are.
    """
    choices = _process.choices
    run = function
    if choices.synchronize or choices.profile:
        run = _Recomputed(function, choices)
    with _keeping(choices):
        return torch_checkpoint.checkpoint(run, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do as `checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args)


def checkpoint_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` as `checkpoint` does; without gradients nothing is kept anyway."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if not kwargs:
        return checkpoint(function, *args)
    return checkpoint(partial(_with_names, function, tuple(kwargs), len(args)), *args, *kwargs.values())


def _with_names(function: Callable[..., Any], names: tuple[str, ...], num_plain: int, *values: Any) -> Any:
    return function(*values[:num_plain], **dict(zip(names, values[num_plain:], strict=True)))


def _keeping(choices: Choices) -> AbstractContextManager[object]:
    """Return a context that keeps the inputs of a block as chosen."""
    if not torch.is_grad_enabled():
        return nullcontext()
    if not choices.in_cpu or active_offload() is not None:
        return nullcontext()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autograd.graph.save_on_cpu(pin_memory=device_type == "cuda", device_type=device_type)


class _Recomputed:
    """A function that is called once forward, and again in the backward, and timed."""

    def __init__(self, function: Callable[..., Any], choices: Choices) -> None:
        self._function = function
        self._choices = choices
        self._again = False

    def __call__(self, *args: Any) -> Any:
        again, self._again = self._again, True
        self._wait()
        started = time.perf_counter()
        try:
            return self._function(*args)
        finally:  # torch ends a recomputation by an exception, once it has the tensors it needs
            self._wait()
            if self._choices.profile:
                _count(again, time.perf_counter() - started)

    def _wait(self) -> None:
        if (self._choices.synchronize or self._choices.profile) and torch.cuda.is_available():
            torch.cuda.synchronize()


def _count(again: bool, seconds: float) -> None:
    times = _process.times
    if again:
        times.recomputed += 1
        times.recompute_s += seconds
    else:
        times.blocks += 1
        times.forward_s += seconds
