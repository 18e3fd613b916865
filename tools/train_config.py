"""The config of `zstore train`: the file with what the command line says put in, and the answers to its "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zstore.remote.url import parse_options

if TYPE_CHECKING:
    from zstore.engine.config import Config

    from .train import TrainOptions

_BATCH = "train_micro_batch_size_per_gpu"
_WARMUP = "scheduler.params.warmup_num_steps"
_TOTAL = "scheduler.params.total_num_steps"
_WARMUP_STEPS = 1000
"""The longest warm-up that is chosen, DeepSpeed's default."""


def load_train_config(options: TrainOptions) -> Config:
    """Return the config file's content with what the command line says put in. Raises ConfigError, by the file's name."""
    from zstore.engine.config import load_config, read_config

    name = str(options.config)
    raw = read_config(options.config)
    load_config(raw, name=name)  # what follows may rely on the shape of its sections
    # The command shows its own progress; the engine's lines come where they are asked for.
    raw.setdefault("steps_per_print", 0)
    if options.micro_batch is not None:
        raw[_BATCH] = options.micro_batch
    if options.lr is not None:
        _set_lr(raw, options.lr)
    _keep(options, raw)
    if options.storage_option:
        own = _section(raw, "zstore")
        own["storage_options"] = {**(own.get("storage_options") or {}), **parse_options(options.storage_option)}
    if options.seed is not None:
        raw["seed"] = options.seed
    return load_config(raw, name=name)


def answers(options: TrainOptions, config: Config) -> tuple[dict[str, Any], str]:
    """Return what the command answers to "auto" in `config`, and a line about what it chose by itself, or nothing."""
    from zstore.engine.config.resolve import open_keys

    settings = config.settings
    open_ = set(open_keys(settings))
    given: dict[str, Any] = {_TOTAL: options.steps}
    chosen: dict[str, Any] = {}
    sizes = (settings.train_batch_size, settings.train_micro_batch_size_per_gpu)
    if all(size in (None, "auto") for size in sizes):
        chosen[_BATCH] = 1
    if _WARMUP in open_:
        chosen[_WARMUP] = max(1, min(_WARMUP_STEPS, options.steps // 10))
    hints = {_BATCH: "--micro-batch N gives another", _WARMUP: "a tenth of --steps"}
    listed = ", ".join(f"{key} = {value} ({hints[key]})" for key, value in chosen.items())
    return given | chosen, f"{config.source}: chosen, since the config leaves it open: {listed}" if chosen else ""


def offloads(config: Config) -> bool:
    """Return whether state is moved off the device."""
    return any(each.device != "none" for each in (config.offload_optimizer, config.offload_param))


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section to change, made where there is none or it is null."""
    section: dict[str, Any] = raw.get(name) or {}
    raw[name] = section
    return section


def _set_lr(raw: dict[str, Any], lr: float) -> None:
    optimizer = _section(raw, "optimizer")
    optimizer.setdefault("type", "AdamW")
    _section(optimizer, "params")["lr"] = lr
    schedule: Mapping[str, Any] = raw.get("scheduler") or {}
    params = schedule.get("params") or {}
    if "warmup_max_lr" in params:
        params["warmup_max_lr"] = lr


def _keep(options: TrainOptions, raw: dict[str, Any]) -> None:
    """Put what the command line says of checkpoints to keep in the place of what the config says."""
    asked = {"last": options.keep, "every": options.keep_every, "best": options.keep_best}
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked:
        own = _section(raw, "zstore")
        before = own.get("keep")
        own["keep"] = (before if isinstance(before, dict) else {"last": before}) | asked
