"""The source of a loop's config, and the requests in the launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from zstore.engine.config.config import CONFIG_VARIABLE, read_given
from zstore.errors import ConfigError, UsageError

_LAUNCHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""Variables that `accelerate launch` sets, and the request of each."""


def read_source(given: Any, argument: str, *, default: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Return the config as a dict of its own, and its source, for messages.

    `given` is a dict, a path or JSON text; None: the variable ZSTORE_CONFIG, and without it the `default`. Raises ConfigError
    if there is none.
    """
    source = os.environ.get(CONFIG_VARIABLE) if given is None else given
    name = argument if given is not None else f"the variable {CONFIG_VARIABLE}"
    if source is None or source == "":
        if default is not None:
            return dict(default), "the default config"
        raise ConfigError(
            f"there is no config: pass {argument}=dict or path of a DeepSpeed JSON, or set {CONFIG_VARIABLE}"
        )
    found = read_given(source, name)
    if found is None:
        raise ConfigError(f"{name}: expected a dict, a path or JSON text, got {type(source).__name__}")
    return found


def written(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a config as it was read; None if there is none."""
    value: Any = raw
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a config as it was read, made if there is none; a dict of no config if the section is not a
    dict, which the config's own check reports."""
    found = raw.setdefault(name, {})
    return found if isinstance(found, dict) else {}


def ask_for_precision(raw: dict[str, Any]) -> None:
    """Leave the precision to the loop if the config names none."""
    if not {"fp16", "bf16", "bfloat16"} & raw.keys():
        raw["bf16"], raw["fp16"] = {"enabled": "auto"}, {"enabled": "auto"}


def refuse_launchers(source: str) -> None:
    """Raise UsageError if `accelerate launch` was told to shard in another way."""
    for variable, what in _LAUNCHERS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UsageError(
                f"{source}: accelerate was started for {what} ({variable}=true), and zstore shards the model itself: run "
                "`accelerate config` anew without it, or start with torchrun"
            )


def mismatch_text(source: str, differing: Iterable[str]) -> str:
    """Return the message about values of a config that contradict the loop's."""
    lines = "".join(f"\n  - {line}" for line in differing)
    return f'{source} contradicts the arguments; write "auto" into the config, or make both equal:{lines}'
