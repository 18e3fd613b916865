"""`deepspeed.elasticity`: the batch and the world sizes of an elastic run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zstore.elasticity import compute_elastic_config as _computed
from zstore.errors import ConfigError, ZstoreError


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
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return (train batch, valid world sizes), with a world size or `return_microbatch` followed by the micro-batch (None
    without a world size). Of `ds_config` only the section counts.
    """
    section = {key: value for key, value in ds_config.items() if key == "elasticity"}
    try:
        found = _computed(section)
        sizes = found.train_batch_size, list(found.valid_world_sizes)
        if world_size <= 0:
            return (*sizes, None) if return_microbatch else sizes
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    try:
        found = _computed(section, world_size)
    except ConfigError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from None
    return found.train_batch_size, list(found.valid_world_sizes), found.micro_batch_size
