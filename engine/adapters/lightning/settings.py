"""The config of a strategy, and the Trainer's values for it. Nothing here imports Lightning."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zstore.engine.config.config import load_config, read_given
from zstore.engine.config.optimizers import AdamParams
from zstore.engine.config.schema import ConfigSections
from zstore.errors import ConfigError

DEFAULT_STAGE = 2
PRECISIONS: Mapping[str, str | None] = {
    "32-true": None,
    "16-mixed": "fp16",
    "16-true": "fp16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
}
"""Lightning's names -> the config's section."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """A config as it was given."""

    raw: Mapping[str, Any]
    name: str
    """For messages."""

    @property
    def settings(self) -> ConfigSections:
        """Every key, typed."""
        return load_config(self.raw, name=self.name).settings


def read_source(config: Mapping[str, Any] | str | os.PathLike[str] | None, stage: int | None) -> GivenConfig:
    """Return the config of a strategy: the given one, the one that `ZSTORE_CONFIG` names, or one of `stage`. Text is a path,
    or the JSON itself.

    Raises ConfigError that names every problem in it.
    """
    if config is not None and stage is not None:
        raise ConfigError(f"ZstoreStrategy got a config and stage={stage}: write the stage into the config")
    found = read_given(config, "ZstoreStrategy(config)") if stage is None else None
    raw, name = found or ({"zero_optimization": {"stage": DEFAULT_STAGE if stage is None else stage}}, "ZstoreStrategy")
    source = GivenConfig(raw=raw, name=name)
    own = source.settings.zstore
    if own.keep is not None:
        raise ConfigError(
            f"{source.name}: zstore.keep would remove checkpoints that Lightning's ModelCheckpoint keeps: leave it out, and "
            "set ModelCheckpoint(save_top_k=...)"
        )
    return source


def for_trainer(
    source: GivenConfig, *, precision: str, accumulation_steps: int, clip_norm: float | None
) -> dict[str, Any]:
    """Return the config with the Trainer's values for missing keys and "auto"; `precision` is Lightning's name.

    Raises ConfigError if both name different values.
    """
    settings = source.settings
    raw = copy.deepcopy(dict(source.raw))
    raw.setdefault("steps_per_print", 0)
    raw |= _precision(source, settings, PRECISIONS[precision], precision)
    _agree(source, "gradient_accumulation_steps", settings, accumulation_steps, "accumulate_grad_batches")
    raw["gradient_accumulation_steps"] = accumulation_steps
    if clip_norm is not None:
        _agree(source, "gradient_clipping", settings, clip_norm, "gradient_clip_val")
        raw["gradient_clipping"] = clip_norm
    elif settings.gradient_clipping == "auto" or "gradient_clipping" not in settings.model_fields_set:
        raw["gradient_clipping"] = 0.0
    return raw


def _agree(source: GivenConfig, key: str, settings: ConfigSections, theirs: float, argument: str) -> None:
    """Raise ConfigError if the config says another number than the Trainer."""
    own = getattr(settings, key)
    if key in settings.model_fields_set and own not in (None, "auto", theirs):
        raise ConfigError(
            f'{source.name}: {key} is {own}, and Trainer({argument}={theirs}): set both alike, or {key} to "auto"'
        )


def _precision(source: GivenConfig, settings: ConfigSections, wanted: str | None, given: str) -> dict[str, Any]:
    """Return the sections of precision; the Trainer's default, 32 bits, leaves the config its choice."""
    sections: Mapping[str, Any] = {"bf16": settings.bf16, "fp16": settings.fp16}
    stated = [name for name, section in sections.items() if section.enabled is True]
    if wanted is not None and stated and stated != [wanted]:
        raise ConfigError(
            f'{source.name}: {stated[0]}.enabled is true, and Trainer(precision="{given}"): set both alike, or leave one out'
        )
    changed: dict[str, Any] = {}
    for name, section in sections.items():
        present = (
            dict(section.model_dump(exclude_unset=True, by_alias=False)) if name in settings.model_fields_set else {}
        )
        if section.enabled == "auto":
            changed[name] = present | {"enabled": name == wanted or name in stated}
        elif name == wanted and section.enabled is not True:
            if "enabled" in section.model_fields_set:
                raise ConfigError(
                    f'{source.name}: {name}.enabled is false, and Trainer(precision="{given}"): set both alike, or '
                    f'{name}.enabled to "auto"'
                )
            changed[name] = present | {"enabled": True}
    return changed


def check_batch_size(source: GivenConfig, micro: int, accumulation: int, world_size: int) -> None:
    """Raise ConfigError if the config says another batch size than follows from the loader's, `micro`."""
    settings = source.settings
    whole = f"{micro * accumulation * world_size}, that x accumulate_grad_batches {accumulation} x {world_size} ranks"
    for key, wanted, told in (
        ("train_micro_batch_size_per_gpu", micro, str(micro)),
        ("train_batch_size", micro * accumulation * world_size, whole),
    ):
        if getattr(settings, key) not in (None, "auto", wanted):
            raise ConfigError(
                f"{source.name}: {key} is {getattr(settings, key)}, and with the loader's batch size of {micro} it is {told}: "
                f'change one of them, or set {key} to "auto"'
            )


def compute_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """Return the type of parameters and inputs of a config that `for_trainer` returned."""
    settings = load_config(raw).settings
    on = [name for name in _DTYPES if getattr(settings, name).enabled is True]
    return _DTYPES[on[0]] if on else torch.float32


def check_optimizer(source: GivenConfig, client: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the config's optimizer is not the one of `configure_optimizers`.

    Keys that the section leaves "auto", or out, are that optimizer's.
    """
    section = source.settings.optimizer
    if section is None:
        return
    params = section.params
    kind: str = "AdamW" if isinstance(params, AdamParams) and params.adam_w_mode else section.type
    stated = {} if kind == "Muon" else params.arguments()  # its groups differ
    kind = {"Muon": "MuonWithAdam"}.get(kind, kind)
    differing = [
        f"params.{name} is {value}, there it is {client.defaults.get(name)}"
        for name, value in stated.items()
        if name in section.params.model_fields_set and value != "auto" and value != client.defaults.get(name)
    ]
    if type(client).__name__ != kind:
        differing.insert(0, f"{section.type} means {kind}, there it is {type(client).__name__}")
    if differing:
        raise ConfigError(
            f"{source.name}: optimizer: configure_optimizers() returns another one: {'; '.join(differing)}. Leave the section "
            'out, say "auto" there, or let configure_optimizers() return None'
        )
