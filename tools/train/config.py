"""The config of `zstore train`: the file, overridden by the command line, and the values for its "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.errors import UsageError
from zstore.io import user_location

from ..options import StorageOption, parse_file, parse_options

if TYPE_CHECKING:
    from zstore.engine.config.config import Config

_BATCH = "train_micro_batch_size_per_gpu"
_WARMUP = "scheduler.params.warmup_num_steps"
_TOTAL = "scheduler.params.total_num_steps"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options on the command line. None: not given."""

    config: Annotated[
        Path, typer.Option(help="Configuration, JSON in the DeepSpeed dialect.", parser=parse_file, metavar="FILE")
    ]
    model: Annotated[
        str,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json (extra hf). Weights are initialized randomly."
        ),
    ]
    steps: Annotated[int, typer.Option(help="Total number of steps, including those before a resume.", min=1)]
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or folder of them, read as bytes (default: Python's standard library)."),
    ] = None
    save: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL for checkpoints; one is saved at the end.", metavar="DIR", parser=user_location
        ),
    ] = None
    save_every: Annotated[int | None, typer.Option(help="Also save every K steps.", min=1, metavar="K")] = None
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume from a checkpoint; DIR may be a URL. auto: from the newest in --save, if there is one.",
            metavar="DIR[@TAG]|auto",
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
        int | None, typer.Option(help="Bytes in a sample (default: the resumed run's, or 128).", min=2, metavar="N")
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Micro-batch size per rank; overrides the configuration (default: the configuration's, or 1).",
            min=1,
            metavar="N",
        ),
    ] = None
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Refuse options that need others."""
        if self.save_every is not None and self.save is None:
            raise UsageError("--save-every needs --save DIR, the folder to save in")
        if self.resume == "auto" and self.save is None:
            raise UsageError("--resume auto needs --save DIR, the folder to look in")


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
    if options.seed is not None:
        raw["seed"] = options.seed
    if options.storage_option:
        own = raw["zstore"] = raw.get("zstore") or {}
        own["storage_options"] = {**(own.get("storage_options") or {}), **parse_options(options.storage_option)}
    return load_config(raw, name=name)


def answers(options: TrainOptions, config: Config) -> dict[str, Any]:
    """Return the values for "auto" in `config`: the options', and a micro-batch of 1 and a warm-up of a tenth of the steps."""
    from zstore.engine.config.resolve import open_keys

    settings = config.settings
    given: dict[str, Any] = {_TOTAL: options.steps}
    if _WARMUP in open_keys(settings):
        given[_WARMUP] = max(1, min(1000, options.steps // 10))  # at most DeepSpeed's default
    sizes = (settings.train_batch_size, settings.train_micro_batch_size_per_gpu)
    if all(size in (None, "auto") for size in sizes) and settings.batch_section is None:
        given[_BATCH] = 1
    return given
