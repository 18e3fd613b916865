"""Configs in the forms that scripts and libraries give DeepSpeed, converted for zstore; DeepSpeed's config classes; and, by
their sections, monitors and the sizes of an elastic run."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from functools import reduce
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

from zstore.engine.config.config import load_config, read_config
from zstore.engine.config.keys import Section
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.config.schema import ConfigSections
from zstore.engine.config.sections import Bf16Section, CsvMonitorSection, Fp16Section, TensorboardSection, WandbSection
from zstore.engine.config.zero import Device, OffloadOptimizerSection, OffloadParamSection, ZeroSection
from zstore.engine.extras.elasticity import ElasticitySection
from zstore.engine.report.monitors import monitors_of
from zstore.errors import ConfigError, ZstoreError
from zstore.ranks.world import World

_log = logging.getLogger("zstore")

GRADIENT_CLIPPING_DEFAULT: float = ConfigSections.model_fields["gradient_clipping"].default


def cleaned(source: Any) -> Any:
    """Return a config without the keys that DeepSpeed ignores: a copy, if it is a dict.

    Those are `steps_per_print` of infinity and `zero_allow_untested_optimizer`, which accelerate writes by itself, keys with
    a dot at the top, which trl writes, and `managed_gradient_accumulation`, which `initialize` reads. A path, or a dict
    as base64-encoded JSON, is read first; anything else is returned as it is.
    """
    raw = raw_config(source)
    if not isinstance(raw, Mapping):
        return raw
    config = {key: value for key, value in raw.items() if "." not in key}
    for key in ("zero_allow_untested_optimizer", "managed_gradient_accumulation"):
        config.pop(key, None)
    steps = config.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        config["steps_per_print"] = 0
    return config


def raw_config(source: Any) -> Any:
    """Return the dict in `source`, a copy: of a dict, of a file, or of base64-encoded JSON; anything else as it is."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if isinstance(source, str) and not os.path.exists(source):
        decoded = _decoded(source)
        if decoded is not None:
            return decoded
    if isinstance(source, str | os.PathLike):
        return read_config(source)
    return source


class GivenTwiceError(ConfigError, AssertionError):
    """A key under its old name and its new one, for which DeepSpeed has an assertion."""


class DeepSpeedConfigModel(BaseModel):
    """The base of a script's own config classes. "auto" leaves a key at its default unless `strict` is true.

    A field with `json_schema_extra={"deprecated": True, "new_param": "NAME"}` is taken with a warning, and its value, which
    `new_param_fn` may change, goes to the field NAME, which may be a dotted one, unless `set_new_param` is false.
    """

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True, extra="forbid",
        arbitrary_types_allowed=True, protected_namespaces=(),
    )  # fmt: skip

    def __init__(self, strict: bool = False, **data: Any) -> None:
        kept = {key: value for key, value in data.items() if strict or value != "auto" or key == "replace_method"}
        super().__init__(**kept)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if name in self.model_fields_set and isinstance(extra, dict) and extra.get("deprecated"):
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        new = str(extra.get("new_param", ""))
        instead = f"; use {new}" if new else ""
        _log.warning("the config's key %s is deprecated%s. %s", name, instead, extra.get("deprecated_msg", ""))
        if not new or not extra.get("set_new_param", True):
            return
        *path, last = new.split(".")
        holder = reduce(getattr, path, self)
        if last in holder.model_fields_set:
            raise GivenTwiceError(f"{name} is the old name of {new}: expected one of them, got both; remove {name}")
        value = getattr(self, name)
        delattr(self, name)
        setattr(holder, last, extra.get("new_param_fn", lambda old: old)(value))


class DeepSpeedBF16Config(Bf16Section):
    """The section `bf16`."""


class DeepSpeedFP16Config(Fp16Section):
    """The section `fp16`."""

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _as_number(cls, value: Any) -> float:
        """Take the text of a number too, as DeepSpeed does."""
        try:
            if not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ValueError(f"fp16.loss_scale must be a number of at least 0 (0: dynamic), got {value!r}")


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizerSection):
    """The section `offload_optimizer`."""

    device: Device = "none"

    @property
    def pipeline(self) -> bool:
        """Whether the update reads or writes ahead."""
        return any(self.model_dump(include={"pipeline_read", "pipeline_write"}).values())


class DeepSpeedZeroOffloadParamConfig(OffloadParamSection):
    """The section `offload_param`."""

    device: Device = "none"


class DeepSpeedZeroConfig(ZeroSection):
    """The section `zero_optimization`, with every key as an attribute, `stage3_...` also without that."""

    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None  # type: ignore[assignment]
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        key = self.renames.get(name)
        if key is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        return getattr(self, key)


class DeepSpeedMonitorConfig(BaseModel):
    """The sections of the destinations of metrics."""

    tensorboard: TensorboardSection = TensorboardSection()
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    wandb: WandbSection = WandbSection()

    @property
    def enabled(self) -> bool:
        """Whether metrics go anywhere."""
        return self.tensorboard.enabled or self.csv_monitor.enabled or self.wandb.enabled


class DeepSpeedConfig:
    """A config that was read: its top-level keys, resolved for this world size, as attributes."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: dict[str, Any] = raw_config(config)
        loaded = load_config(cleaned(self._param_dict))
        self.world_size = World.current().world_size
        self._settings: ConfigSections = loaded.resolve(ResolveContext(world_size=self.world_size)).settings
        self.zero_config = DeepSpeedZeroConfig(**self._param_dict.get("zero_optimization") or {})
        self.zero_optimization_stage = self.zero_config.stage
        sections = {key: self._param_dict.get(key) or {} for key in DeepSpeedMonitorConfig.model_fields}
        self.monitor_config = DeepSpeedMonitorConfig(**sections)

    def __getattr__(self, name: str) -> Any:
        if name == "_settings":
            raise AttributeError(name)
        return getattr(self._settings, name)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16` of a config."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """Return a config's `gradient_clipping`."""
    return param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        return None
    return found if isinstance(found, dict) else None


class ZeroParamStatus(Enum):
    """Whether a parameter has its values now."""

    AVAILABLE = 1
    """It has all of them."""
    NOT_AVAILABLE = 2
    """They are sharded; GatheredParameters gives them."""
    INFLIGHT = 3
    """They are on their way; no parameter is ever reported in this state."""


def _words(name: str, words: str) -> Any:
    """Return an enumeration of texts that are their names."""
    return Enum(name, {word: word for word in words.split()}, type=str, module=__name__)


ZeroStageEnum = IntEnum(
    "ZeroStageEnum",
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    module=__name__,
)
OffloadDeviceEnum = _words("OffloadDeviceEnum", "none cpu nvme")
OffloadStateTypeEnum = _words(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
)


class MonitorMaster:
    """All monitors that the sections switch on. Rank 0 writes; other ranks' values are dropped."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        sections = monitor_config.csv_monitor, monitor_config.tensorboard, monitor_config.wandb
        self._monitors = monitors_of(*sections, config={}, opens=World.current().rank == 0)
        self.enabled = self._monitors.enabled

    def write_events(self, event_list: Sequence[tuple[Any, ...]]) -> None:
        """Write (name, value, sample) triples. Raises UsageError for anything else."""
        self._monitors.write_events(event_list)


class _OfOne(MonitorMaster):
    """The monitor of one section, whose keys are its attributes."""

    key: ClassVar[str]

    def __init__(self, section: Section) -> None:
        super().__init__(DeepSpeedMonitorConfig().model_copy(update={self.key: section}))

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.monitor_config, self.key), name)


csvMonitor = type("csvMonitor", (_OfOne,), {"key": "csv_monitor", "__doc__": "CSV files."})  # noqa: N816 - DeepSpeed's name
TensorBoardMonitor = type("TensorBoardMonitor", (_OfOne,), {"key": "tensorboard", "__doc__": "TensorBoard."})
WandbMonitor = type("WandbMonitor", (_OfOne,), {"key": "wandb", "__doc__": "Weights & Biases."})


class ElasticityError(ZstoreError):
    """Base of the errors of elasticity."""


class ElasticityConfigError(ElasticityError, ConfigError):
    """The section is missing, not enabled, or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError, ConfigError):  # noqa: N818 - DeepSpeed's name
    """The world size cannot train with the batch."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether a config has the section, enabled."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Do nothing: there is one config, which nobody changes between scheduler and run."""


def compute_elastic_config(
    ds_config: Any, target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Return (train batch, valid world sizes), with a world size or `return_microbatch` followed by the micro-batch (None
    without a world size), by DeepSpeed's formula: see [Note: the elastic batch] in `zstore.engine.extras.elasticity`.

    Only the section of `ds_config`, a dict or the path of a JSON file, counts. A world size that is not valid is an error
    with version 0.1, and with 0.2 the only one that is valid for the batch returned. Raises ElasticityConfigError if the
    section is wrong or not enabled, ElasticityIncompatibleWorldSize if the world size cannot train.
    """
    try:
        settings = load_config({"elasticity": raw_config(ds_config).get("elasticity")}).settings
        section: ElasticitySection = vars(settings)["elasticity"]
        if not section.enabled:
            raise ConfigError('expected "elasticity": {"enabled": true, ...}, got none that is enabled')
        batch, valid = section.batch()
    except ValueError as error:
        raise ElasticityConfigError(str(error)) from None
    if world_size <= 0:
        return (batch, list(valid), None) if return_microbatch else (batch, list(valid))
    try:
        batch, valid = section.batch(world_size)
        return batch, list(valid), section.sizes_at(world_size)[1]
    except ValueError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from None
