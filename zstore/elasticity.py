"""The batch and the world sizes of an elastic run, for whoever starts one: `compute_elastic_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zstore.engine.config.config import Config, load_config
from zstore.errors import ConfigError

__all__ = ["ElasticConfig", "compute_elastic_config"]


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Batch and world sizes that the section `elasticity` of a config gives."""

    train_batch_size: int
    """Samples of a step, at every world size."""
    valid_world_sizes: tuple[int, ...]
    """Numbers of ranks that can train with it, ascending."""
    micro_batch_size: int | None = None
    """Samples of one forward on one rank at the world size that was given; None: none was."""
    accumulation_steps: int | None = None
    """Micro-batches of a step on one rank at that world size."""


def compute_elastic_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config, world_size: int | None = None
) -> ElasticConfig:
    """Return the batch and the world sizes of `config`, a dict or the path of a JSON file, by DeepSpeed's formula (see
    [Note: the elastic batch] in `zstore.engine.config.elastic_batch`), and with `world_size` what a rank takes: a world
    size that is not valid is an error with version 0.1, and with 0.2 the only one that is valid for the batch returned.

    Raises ConfigError if the config is wrong, `elasticity` is not enabled in it, or the world size cannot train.
    """
    loaded = load_config(config)
    section = loaded.settings.elasticity
    if not section.enabled:
        raise ConfigError(f'{loaded.source}: expected "elasticity": {{"enabled": true, ...}}, got none that is enabled')
    micro = accumulation = None
    try:
        found = section.batch(world_size)
        if world_size is not None:
            _, micro, accumulation = section.sizes_at(world_size)
    except ValueError as error:
        raise ConfigError(f"{loaded.source}: {error}") from None
    return ElasticConfig(
        train_batch_size=found.train_batch_size,
        valid_world_sizes=found.valid_world_sizes,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
    )
