"""The config of `zstore train`: the file, overridden by the command line, and the values for its "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zstore.errors import UsageError
from zstore.io import user_location
from zstore.remote.url import parse_options

from ..options import StorageOption, parse_file

if TYPE_CHECKING:
    from zstore.engine.config.config import Config


_BATCH = "train_micro_batch_size_per_gpu"
_WARMUP = "scheduler.params.warmup_num_steps"
_TOTAL = "scheduler.params.total_num_steps"
_WARMUP_STEPS = 1000
"""The longest warm-up that is chosen, DeepSpeed's default."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options on the command line. None: not given."""

    config: Annotated[
        Path, typer.Option(help="Configuration, JSON in the DeepSpeed dialect.", parser=parse_file, metavar="FILE")
    ]
    model: Annotated[
        str,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf), whose weights "
            "and tokenizer are used where it has them."
        ),
    ]
    steps: Annotated[int, typer.Option(help="Total number of steps, including those before a resume.", min=1)]
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text file or folder of them; bytes, if the model has no tokenizer (default: Python's standard library)."
        ),
    ] = None
    validation: Annotated[
        Path | None, typer.Option(help="Text to evaluate on, of any kind that --data takes.", metavar="PATH")
    ] = None
    validation_split: Annotated[
        float | None,
        typer.Option(help="Part of --data held out to evaluate on, as 0.05 (default: the resumed run's).", metavar="X"),
    ] = None
    eval_every: Annotated[
        int | None,
        typer.Option(help="Evaluate every K steps, and after the last (default: after the last).", min=1, metavar="K"),
    ] = None
    eval_samples: Annotated[
        int, typer.Option(help="Samples to evaluate on, the same ones each time.", min=1, metavar="N")
    ] = 256
    save: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL for checkpoints; one is saved at the end.", metavar="DIR", parser=user_location
        ),
    ] = None
    save_every: Annotated[int | None, typer.Option(help="Also save every K steps.", min=1, metavar="K")] = None
    keep: Annotated[
        int | None, typer.Option(help="Keep the newest N checkpoints (default: by the config).", min=1, metavar="N")
    ] = None
    keep_every: Annotated[
        int | None, typer.Option(help="Also keep those whose step is a multiple of K.", min=1, metavar="K")
    ] = None
    keep_best: Annotated[
        str | None,
        typer.Option(help="Also keep the best one, by loss, grad_norm, eval_loss or perplexity.", metavar="loss:min"),
    ] = None
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume from a checkpoint; DIR may be a URL. auto: from the newest in --save, if there is one.",
            metavar="DIR[:TAG]|auto",
        ),
    ] = None
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine.", min=1, metavar="N")] = 1
    """Under torchrun it is torchrun's."""
    metrics: Annotated[
        Path | None, typer.Option(help="Write one JSON object per step to this file.", metavar="FILE.jsonl")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and data order (default: the resumed run's, or 0).", metavar="N")
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sample (default: the resumed run's, or 128).", min=2, metavar="N")
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate; overrides the configuration.", metavar="X")] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Optimizer by name, as AdamW, SGD, Lion, Lamb, Adafactor or Muon; overrides the configuration, and where that "
            "names another one its arguments.",
            metavar="NAME",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Micro-batch size per rank; overrides the configuration (default: the configuration's, or 1).",
            min=1,
            metavar="N",
        ),
    ] = None
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Keep only the inputs of the model's blocks, and compute them again."
        ),
    ] = False
    activations: Annotated[
        Literal["device", "host", "disk"] | None,
        typer.Option(
            help="Where activations rest until the backward: device, host or disk; overrides the configuration."
        ),
    ] = None
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Refuse options that need others."""
        if self.save_every is not None and self.save is None:
            raise UsageError("--save-every needs --save DIR, the folder to save in")
        if self.resume == "auto" and self.save is None:
            raise UsageError("--resume auto needs --save DIR, the folder to look in")
        if self.validation_split is not None and not 0 < self.validation_split < 1:
            raise UsageError(f"--validation-split: expected a part between 0 and 1, got {self.validation_split:g}")
        if self.validation is not None and self.validation_split is not None:
            raise UsageError("--validation and --validation-split both say what to evaluate on: give one of them")

    def arguments(self) -> list[str]:
        """Return the command line that gives these options, `--nproc` left out."""
        words = [word for option in self.storage_option or () for word in ("--storage-option", option)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "gradient_checkpointing":
                words += ["--gradient-checkpointing"] * bool(value)
            elif value is not None and field.name not in ("nproc", "storage_option"):
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return words


def load_train_config(options: TrainOptions) -> Config:
    """Return the config file's content, overridden by the command line. Raises ConfigError, which names the file."""
    from zstore.engine.config.config import load_config, read_config

    name = str(options.config)
    raw = read_config(options.config)
    load_config(raw, name=name)  # the code below may rely on the shape of its sections
    # The command shows its own progress; the engine's lines are printed only on request.
    raw.setdefault("steps_per_print", 0)
    if options.micro_batch is not None:
        raw[_BATCH] = options.micro_batch
    if options.optimizer is not None:
        _set_optimizer(raw, options.optimizer)
    if options.lr is not None:
        _set_lr(raw, options.lr)
    _keep(options, raw)
    if options.gradient_checkpointing:
        _section(raw, "zstore")["gradient_checkpointing"] = True
    if options.activations is not None:
        _section(raw, "zstore")["activations"] = options.activations
    if options.storage_option:
        own = _section(raw, "zstore")
        own["storage_options"] = {**(own.get("storage_options") or {}), **parse_options(options.storage_option)}
    if options.seed is not None:
        raw["seed"] = options.seed
    return load_config(raw, name=name)


def answers(options: TrainOptions, config: Config) -> tuple[dict[str, Any], str]:
    """Return the values for "auto" in `config`, and a line about the defaults that were chosen, or an empty string."""
    from zstore.engine.config.resolve import open_keys

    settings = config.settings
    open_ = set(open_keys(settings))
    given: dict[str, Any] = {_TOTAL: options.steps}
    chosen: dict[str, Any] = {}
    sizes = (settings.train_batch_size, settings.train_micro_batch_size_per_gpu)
    if all(size in (None, "auto") for size in sizes) and settings.batch_section is None:
        chosen[_BATCH] = 1
    if _WARMUP in open_:
        chosen[_WARMUP] = max(1, min(_WARMUP_STEPS, options.steps // 10))
    hints = {_BATCH: "--micro-batch N sets another", _WARMUP: "a tenth of --steps"}
    listed = ", ".join(f"{key} = {value} ({hints[key]})" for key, value in chosen.items())
    return given | chosen, f"{config.source}: chosen, since the config leaves it open: {listed}" if chosen else ""


def offloads(config: Config) -> bool:
    """Return whether state is moved off the device."""
    return any(each.device != "none" for each in (config.offload_optimizer, config.offload_param))


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section to change; an empty one is added if it is missing or null."""
    section: dict[str, Any] = raw.get(name) or {}
    raw[name] = section
    return section


def _set_optimizer(raw: dict[str, Any], name: str) -> None:
    """Name another optimizer; its learning rate and other arguments are not the former one's."""
    section = _section(raw, "optimizer")
    if str(section.get("type")).lower() != name.lower():
        raw["optimizer"] = {"type": name}


def _set_lr(raw: dict[str, Any], lr: float) -> None:
    optimizer = _section(raw, "optimizer")
    optimizer.setdefault("type", "AdamW")
    params = _section(optimizer, "params")
    params["lr"] = lr
    for name in ("muon_lr", "adam_lr"):  # they would replace it
        params.pop(name, None)
    schedule: Mapping[str, Any] = raw.get("scheduler") or {}
    params = schedule.get("params") or {}
    if "warmup_max_lr" in params:
        params["warmup_max_lr"] = lr


def _keep(options: TrainOptions, raw: dict[str, Any]) -> None:
    """Override the config's retention by the command line's."""
    asked = {"last": options.keep, "every": options.keep_every, "best": options.keep_best}
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked:
        own = _section(raw, "zstore")
        before = own.get("keep")
        own["keep"] = (before if isinstance(before, dict) else {"last": before}) | asked
