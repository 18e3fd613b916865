"""`deepspeed.elasticity`: the batch and the world sizes of an elastic run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zstore.engine.config.config import load_config
from zstore.errors import ConfigError, ZstoreError

from .config import raw_config


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
    without a world size), by DeepSpeed's formula: see [Note: the elastic batch] in `zstore.engine.config.elasticity`.

    Only the section of `ds_config`, a dict or the path of a JSON file, counts. A world size that is not valid is an error
    with version 0.1, and with 0.2 the only one that is valid for the batch returned. Raises ElasticityConfigError if the
    section is wrong or not enabled, ElasticityIncompatibleWorldSize if the world size cannot train.
    """
    try:
        section = load_config({"elasticity": raw_config(ds_config).get("elasticity")}).settings.elasticity
        if not section.enabled:
            raise ConfigError('expected "elasticity": {"enabled": true, ...}, got none that is enabled')
        found = section.batch()
    except ValueError as error:
        raise ElasticityConfigError(str(error)) from None
    if world_size <= 0:
        sizes = found.train_batch_size, list(found.valid_world_sizes)
        return (*sizes, None) if return_microbatch else sizes
    try:
        found = section.batch(world_size)
        return found.train_batch_size, list(found.valid_world_sizes), section.sizes_at(world_size)[1]
    except ValueError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from None
