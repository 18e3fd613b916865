"""The config of `zstore train`: the file with what the command line says put in, and the answers to its "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.errors import ConfigError, UsageError
from zstore.remote.url import parse_options

if TYPE_CHECKING:
    from zstore.engine.config import Config


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


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the command line says."""

    config: Path
    """JSON file in the DeepSpeed dialect."""
    model: str
    """A shipped model's name, or a transformers `config.json` or model folder: its weights and its tokenizer are used, where
    it has them."""
    steps: int
    """Optimizer steps in total, those before a resume included."""
    data: Path | None = None
    """Text file or folder of text files; None: the sources of Python's standard library."""
    save: str | None = None
    """Folder or URL for checkpoints; None: none is saved."""
    save_every: int | None = None
    """Steps from one save to the next; None: only at the end."""
    keep: int | None = None
    """Newest checkpoints to keep; None: what the config says."""
    keep_every: int | None = None
    """Keep those whose step is a multiple of it, too."""
    keep_best: str | None = None
    """Keep the one with the best metric, as `loss:min`, too; `loss` and `grad_norm` are the last step's."""
    resume: str | None = None
    """`DIR`, `DIR:TAG` (DIR may be a URL), or `auto` for the newest checkpoint in `save`, or a newer snapshot of a step, if
    any."""
    nproc: int = 1
    """Processes to start on this machine; under torchrun it is torchrun's."""
    metrics: Path | None = None
    """JSONL file that gets one object a step."""
    seed: int | None = None
    """Seed of initial weights and data order; None: the resumed run's, else 0."""
    seq_len: int | None = None
    """Tokens in a sample; None: the resumed run's, else 128."""
    lr: float | None = None
    """Learning rate in place of the config's."""
    micro_batch: int | None = None
    """Samples of one forward on one rank, in place of the config's; None: the config's, or 1 where that leaves it open."""
    storage_option: tuple[str, ...] = ()
    """`key=value` for the file system of URLs, beside what the config has."""

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "keep", "keep_every", "nproc", "seq_len", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        if self.save_every is not None and self.save is None:
            raise UsageError("--save-every needs --save DIR, the folder to save in")
        if self.resume == "auto" and self.save is None:
            raise UsageError("--resume auto looks in the folder of --save DIR: name it")
        if not self.config.is_file():
            raise ConfigError(f"--config: expected a JSON file, found none at {self.config}")

    def arguments(self) -> list[str]:
        """Return the command line that gives these options, `--nproc` left out."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "storage_option":
                words += [word for option in value for word in ("--storage-option", option)]
            elif value is not None and field.name != "nproc":
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return words
