"""A config as the engine reads it: loaded, then resolved for a run.

[Note: from a key to its effect]
A key `a.b` is field `b` of a section of `sections.py` (optimizers and schedules: `optimizers.py`; extras:
`engine/extras/sections.py`), with its description. The engine reads it as `config.settings.a.b`, in short `config.zero.b` and
`config.zstore.b`, or by a property of `Config` if it also depends on other keys, the optimizer or the run. So a search for the
key's last name finds its field, the property if there is one, and the code that uses it. Contradictions with other keys are
in `parse.rules`, values of "auto" in `resolve.py`.
"""

import argparse
import copy
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zstore.errors import ConfigError, UsageError
from zstore.io import user_path

from .keys import Notice, Status, problem_text
from .optimizers import OPTIMIZERS, Moments, OptimizerParams
from .parse import load_jsonc, parse
from .resolve import BatchSizes, ResolveContext, resolve_settings, with_auto_values
from .sections import ConfigSections, Fp16Section, OffloadSection, ZeroSection, ZstoreSection
from .values import show


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config without errors, created by `load_config`; its properties require the config that `resolve` returns. See
    [Note: from a key to its effect]."""

    settings: ConfigSections
    """Every key, typed."""
    source: str
    """Path of the file, or a name for messages."""
    notices: tuple[Notice, ...] = ()
    """One notice per set key that has no effect, or an effect other than the config says, with the reason."""
    resolved: bool = False
    world_size: int = 1
    """Ranks of the run, once resolved."""
    frozen: bool = False
    """For an engine without an optimizer, which has no state to offload and takes no steps."""
    whole_tensors: bool = False
    """The optimizer's step needs whole tensors, which are exchanged between ranks."""
    replicates_state: bool = False
    """Every rank has a full copy of the optimizer state, and its own gradients."""

    def report(self) -> list[str]:
        """Return the notices as lines to print, one per reason."""
        keys: dict[str, list[str]] = {}
        for notice in self.notices:
            keys.setdefault(notice.message, []).append(notice.key)
        return [f"{', '.join(names)}: {message}" for message, names in keys.items()]

    def with_auto_values(self, auto_values: Mapping[str, Any]) -> "Config":
        """Return this config with "auto" replaced by `auto_values`, by dotted key; `resolve` fills in batch sizes."""
        return replace(self, settings=with_auto_values(self.settings, auto_values))

    def resolve(self, context: ResolveContext) -> "Config":
        """Return this config with every "auto" and the batch sizes filled in from `context`.

        Raises ConfigError naming all keys that are impossible, or conflict at this world size.
        """
        settings, problems, defaults = resolve_settings(self.settings, context)
        if problems:
            raise ConfigError(problem_text(self.source, problems))
        resolved = replace(self, settings=settings, resolved=True, world_size=context.world_size, frozen=context.frozen)
        notices = list(self.notices)
        if context.frozen:
            notices = [notice for notice in notices if not notice.key.startswith(_TRAINING_KEY_PREFIXES)]
            defaults = {key: value for key, value in defaults.items() if not key.startswith(_TRAINING_KEY_PREFIXES)}
            notices += _default_notices(defaults)
            return replace(resolved, notices=tuple(notices))
        for key, passed in (("optimizer", context.client_optimizer), ("scheduler", context.client_scheduler)):
            if passed and getattr(self.settings, key) is not None:
                notices = [notice for notice in notices if not notice.key.startswith(f"{key}.")]
                notices.append(Notice(Status.NO_EFFECT, f"the {key} passed to initialize() is used", (key,)))
        optimizer_name = context.optimizer_name if settings.optimizer is None else settings.optimizer.type
        params_type = OPTIMIZERS.get(optimizer_name, OptimizerParams)
        clips = "gradient_clipping" in self.settings.model_fields_set and "gradient_clipping" not in defaults
        if params_type.replicates_state and not clips:  # the default is for optimizers that can be clipped
            settings = settings.model_copy(update={"gradient_clipping": 0.0})
            defaults |= {"gradient_clipping": 0.0} if "gradient_clipping" in defaults else {}
        notices += _default_notices(defaults)
        if context.world_size == 1:
            notices += _single_rank_notices(settings.zero_optimization, {notice.key for notice in notices})
        if conflicts := list(params_type.conflicts(settings, optimizer_name)):
            raise ConfigError(problem_text(self.source, list(map(str, conflicts))))
        resolved = replace(resolved, settings=settings, replicates_state=params_type.replicates_state)
        resolved = replace(resolved, whole_tensors=params_type.whole_tensors or bool(context.optimizer_name))
        return replace(resolved, notices=(*notices, *resolved._substitution_notices()))

    def _substitution_notices(self) -> Iterator[Notice]:
        """Yield a notice if the effective step mode, or policy for non-finite gradients, differs from the config's."""
        _, text = self._effective_step_mode()
        if text and self.zstore.step_overlap != "auto":
            yield Notice(Status.ACTIVE, text, ("zstore.step_overlap",))
        policy = self.non_finite_gradients
        if self.zstore.non_finite_gradients != policy and "non_finite_gradients" in self.zstore.model_fields_set:
            key = "fp16.enabled" if self.precision == "fp16" else "bf16.check_grad_overflow"
            yield Notice(Status.ACTIVE, f'is treated as "{policy}" because of {key}', ("zstore.non_finite_gradients",))

    def _resolved_settings(self) -> Any:
        if not self.resolved:
            raise UsageError('this config may still contain "auto": call resolve() and use the config that it returns')
        return self.settings

    @property
    def zero(self) -> ZeroSection:
        """The section `zero_optimization`."""
        return self.settings.zero_optimization

    @property
    def zstore(self) -> ZstoreSection:
        """The section `zstore`."""
        return self.settings.zstore

    @property
    def batch(self) -> BatchSizes:
        """Samples per step, per forward, and forwards per step."""
        s = self._resolved_settings()
        return BatchSizes(
            train_batch_size=s.train_batch_size,
            micro_batch_size=s.train_micro_batch_size_per_gpu,
            accumulation_steps=s.gradient_accumulation_steps,
        )

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Precision of parameters and gradients; masters are always in fp32."""
        if self._resolved_settings().bf16.enabled:
            return "bf16"
        return "fp16" if self.settings.fp16.enabled else "fp32"

    @property
    def loss_scaling(self) -> Fp16Section | None:
        """The loss scaling of fp16; None for other precisions, and for a frozen engine."""
        return self.settings.fp16 if self.precision == "fp16" and not self.frozen else None

    @property
    def non_finite_gradients(self) -> Literal["error", "skip", "apply"]:
        """The policy for a step whose gradients are not finite."""
        checked = self.precision == "bf16" and self.settings.bf16.check_grad_overflow
        return "skip" if self.precision == "fp16" or checked else self.zstore.non_finite_gradients

    @property
    def moment_type(self) -> Moments:
        """Dtype of the optimizer's moments; a frozen engine has none."""
        section = self.settings.optimizer
        requests_bf16 = self.settings.bf16.bf16_optimizer_states
        requests_bf16 = requests_bf16 or (section is not None and not section.params.fp32_optimizer_states)
        return "fp32" if self.frozen else self.zstore.moments or ("bf16" if requests_bf16 else "fp32")

    @property
    def gradient_clipping(self) -> float:
        """Maximum global norm of the gradients; 0: no clipping."""
        return float(self._resolved_settings().gradient_clipping)

    @property
    def stage(self) -> int:
        """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Stage 1 becomes 0 with an
        optimizer whose state is replicated on every rank."""
        return 0 if self.replicates_state and self.zero.stage == 1 else self.zero.stage

    @property
    def offload_optimizer(self) -> OffloadSection:
        """Where the optimizer state is stored."""
        return _ON_DEVICE if self.frozen else self.zero.offload_optimizer

    @property
    def fills_device_memory(self) -> bool:
        """Whether as much optimizer state is updated on the device as fits in its memory."""
        return self.offload_optimizer.device != "none" and self.zero.offload_optimizer.ratio == "auto"

    @property
    def offload_param(self) -> OffloadSection:
        """Where parameters are stored between uses; below stage 3, on the device."""
        return _ON_DEVICE if self.stage < 3 else self.zero.offload_param

    @property
    def activations(self) -> Literal["device", "host", "disk"]:
        """Where the tensors that a forward saves for its backward pass are stored."""
        if self.frozen:
            return "device"
        on_host = self.settings.activation_checkpointing.cpu_checkpointing
        return self.zstore.activations or ("host" if on_host else "device")

    @property
    def activations_paths(self) -> tuple[Path, ...]:
        """Folders of the drives for activations; empty if they stay in memory."""
        if self.activations != "disk":
            return ()
        return self.zstore.activations_path or self.offload_optimizer.nvme_paths or self.offload_param.nvme_paths

    @property
    def step_overlap(self) -> Literal["none", "backward", "forward"]:
        """When updates run. "auto" runs them in the backward or in the background if state or parameters are offloaded, so
        that transfers overlap with computation."""
        return self._effective_step_mode()[0]

    def _effective_step_mode(self) -> tuple[Literal["none", "backward", "forward"], str]:
        """Return when updates run, and, if that differs from the config's mode, a notice with the reason."""
        mode, offload_sections = self.zstore.step_overlap, (self.offload_optimizer, self.offload_param)
        if mode == "auto":
            mode = "backward" if any(section.device != "none" for section in offload_sections) else "none"
        if self.frozen or mode == "none":
            return "none", ""
        if self.whole_tensors:
            return "none", (
                'is treated as "none": this optimizer needs whole tensors, which are exchanged between ranks, and only one '
                "thread of a rank may use collectives at a time"
            )
        if mode == "backward" and self.stage < 2 and self.world_size > 1:
            return (
                "none",
                'is treated as "none": at stages 0 and 1 gradients are reduced once per step, after the backward',
            )
        notice = ""
        if mode == "backward" and (self.gradient_clipping > 0 or self.non_finite_gradients != "error"):
            mode = "forward"
            notice = (
                'is treated as "forward": clipping and the check for finite values need all gradients before any update'
            )
        if mode == "forward" and not (self.stage == 3 and (self.world_size > 1 or self.offload_param.device != "none")):
            return "none", (
                'is treated as "none": only what is gathered before its use (stage 3, with several ranks or offload_param) '
                "can be updated in the background after step()"
            )
        return mode, notice

    @property
    def pin_memory(self) -> bool:
        """Whether parameters in host memory are registered with the device's driver."""
        return any(s.device != "none" and s.pin_memory for s in (self.offload_optimizer, self.offload_param))

    @property
    def secondary_size(self) -> int | None:
        """Ranks that share a second copy of the parameters; None: no second copy."""
        return self.zero.zero_hpz_partition_size if self.zero.zero_hpz_partition_size > 1 else None


_ON_DEVICE = OffloadSection.model_construct(device="none")
_TRAINING_KEY_PREFIXES = (
    "optimizer", "scheduler", "gradient_", "prescale_gradients", "fp16.", "steps_per_print", "wall_clock_breakdown",
    "memory_breakdown", "zero_optimization.offload_optimizer", "zero_optimization.reduce_",
    "zstore.step_overlap", "zstore.moments", "bf16.bf16_optimizer_states",
)  # fmt: skip
"""Prefixes of the keys that have no effect on an engine without an optimizer."""


def _single_rank_notices(zero: ZeroSection, reported_keys: Container[str]) -> Iterator[Notice]:
    """Yield the keys that have no effect on a single rank, except for those in `reported_keys`."""
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(zero, name) and f"zero_optimization.{name}" not in reported_keys:
            yield Notice(Status.NO_EFFECT, "a single rank sends nothing", (f"zero_optimization.{name}",))


def _default_notices(defaults: Mapping[str, Any]) -> Iterator[Notice]:
    """Yield a notice with the defaults of the "auto" keys that got no value."""
    if defaults:
        listed = ", ".join(f"{key} = {show(value)}" for key, value in defaults.items())
        message = (
            f"no value was given, so these defaults are used: {listed}. For other values, set them in the config or "
            f'pass initialize(..., auto={{"{next(iter(defaults))}": ...}})'
        )
        yield Notice(Status.ACTIVE, message, ('"auto"',))


def load_config(source: Mapping[str, Any] | str | os.PathLike[str] | Config, *, name: str = "config") -> Config:
    """Return the config in `source`, a dict (copied, never changed) or the path of a JSON file with comments.

    Messages name a file by its path, and a dict by `name`. A `Config` is returned unchanged. Raises ConfigError with every
    problem found.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        raw = read_config(source)
    else:
        raise ConfigError(f"expected a config as a dict or the path of a JSON file, got {type(source).__name__}")
    settings, notices, _ = parse(raw)
    if errors := [str(notice) for notice in notices if notice.is_error]:
        raise ConfigError(problem_text(name, errors))
    return Config(settings=settings, source=name, notices=tuple(notices))


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a JSON file with comments. Raises ConfigError if it cannot be read."""
    name = os.fspath(path)
    if name.lstrip().startswith("{"):
        raise ConfigError(
            "expected the path of a config file, got JSON text; pass json.loads(text), or write it to a file"
        )
    try:
        text = user_path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {name} does not exist (working directory: {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {name} cannot be read: {error}") from error
    return load_jsonc(text, name)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` (a flag for the script's own use) and `--deepspeed_config PATH`, and return `parser`.

    The older `--deepscale` and `--deepscale_config` are also accepted, but not listed in the help.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration in the DeepSpeed dialect")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing else")
    group.add_argument("--deepspeed_config", metavar="PATH", help="JSON file with the configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", metavar="PATH", help=argparse.SUPPRESS)
    return parser
