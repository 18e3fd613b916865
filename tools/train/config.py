"""The settings of `zstore train`: the config file, overridden by the command line, with the values for its "auto"; and for
`--resume` the checkpoint and the position in the data that it was saved at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.checkpoint import tags
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointNotFoundError, UsageError
from zstore.io import is_url, user_location
from zstore.open.sources import folder_of, open_source, split_location

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
    load_config(raw, name=name)  # checks the shape of the sections that are changed below
    # The command shows its own progress; the engine's lines are printed only on request.
    raw.setdefault("steps_per_print", 0)
    if options.micro_batch is not None:
        raw[_BATCH] = options.micro_batch
    if options.seed is not None:
        raw["seed"] = options.seed
    if options.storage_option:
        section = raw["zstore"] = raw.get("zstore") or {}
        former = section.get("storage_options") or {}
        section["storage_options"] = {**former, **parse_options(options.storage_option)}
    return load_config(raw, name=name)


def auto_values(options: TrainOptions, config: Config) -> dict[str, Any]:
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


# -- resuming -----------------------------------------------------------------------------------------------------------

STATE_KEY = "zstore_train"
"""Key of a run's position in the client state."""

Source = tuple[str, str | None]
"""A folder or URL of checkpoints, and a tag; None: the newest."""


@dataclass(frozen=True)
class Position:
    """Position of a run in its data: the settings that determine the samples, and how many were used."""

    seed: int
    seq_len: int
    samples: int = 0


def resume_source(
    resume: str | None, save: str | None, *, storage_options: Mapping[str, Any] | None = None
) -> Source | None:
    """Return the source that `DIR`, `DIR@TAG` or `auto` names; None to start fresh. Raises CheckpointNotFoundError for a DIR
    that does not exist."""
    if resume is None:
        return None
    if resume == "auto":
        try:
            open_source(save or "", storage_options=storage_options).close()
        except CheckpointNotFoundError:
            return None
        return save or "", None
    folder, tag = split_location(resume)
    if tag is not None or is_url(folder) or Path(folder).is_dir():
        return folder, tag
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR@TAG of a saved checkpoint, but there is no such folder"
    )


def start_position(
    seed: int | None, seq_len: int | None, source: Source | None, *, storage_options: Mapping[str, Any] | None = None
) -> Position:
    """Return the position to start from; a resumed run keeps its seed and sample length, which determine its order of data."""
    if source is None:
        return Position(seed or 0, seq_len or 128)
    with open_source(*source, storage_options=storage_options) as checkpoint:
        state = checkpoint.record.state.get("client_state", {}).get(STATE_KEY)
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{source[0]}: the checkpoint was not saved by `zstore train`, so its position in the data is unknown; load it "
            "with `engine.load_checkpoint` in the script that made it"
        )
    saved = Position(int(state["seed"]), int(state["seq_len"]), int(state["samples"]))
    for option, given, kept in (("--seed", seed, saved.seed), ("--seq-len", seq_len, saved.seq_len)):
        if given is not None and given != kept:
            raise CheckpointMismatchError(
                f"{option} {given}: the checkpoint was trained with {kept}, and the order of its data depends on it; omit "
                "the option to resume, or start a new run"
            )
    return saved


def require_own_folder(save: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise CheckpointExistsError if `save` has checkpoints: a new run would save under the same names."""
    try:
        found = tags(folder_of(save, storage_options))
    except CheckpointNotFoundError:
        return
    if found:
        raise CheckpointExistsError(
            f"--save {save} holds {found[-1].tag} of another run, and this one would save under the same names: pass --resume "
            f"auto to continue it, name another folder, or remove them (`zstore prune {save}`)"
        )
