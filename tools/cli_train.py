"""The commands around training: `zstore train`, `plan`, `doctor`. Each imports its module when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from .arguments import Json, Precision, StorageOption, finish, parse_number, parse_size


def train(  # noqa: PLR0913 - one parameter per option
    *,
    config: Annotated[
        Path, typer.Option(help="Configuration, JSON in the DeepSpeed dialect.", exists=True, dir_okay=False)
    ],
    model: Annotated[
        str,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf), whose weights "
            "and tokenizer are used where it has them."
        ),
    ],
    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume included.", min=1)],
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or folder of them, read as bytes (default: Python's standard library)."),
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="Folder or URL for checkpoints; one is saved at the end.", metavar="DIR")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Save every K steps too.", min=1, metavar="K")] = None,
    keep: Annotated[int | None, typer.Option(help="Keep the newest N checkpoints.", min=1, metavar="N")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep those whose step is a multiple of K, too.", min=1, metavar="K")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="Keep the best too, by the last step's loss.", metavar="loss:min")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on from a checkpoint, DIR may be a URL; auto: from the newest in --save, if any.",
            metavar="DIR[:TAG]|auto",
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine.", min=1, metavar="N")] = 1,
    metrics: Annotated[
        Path | None, typer.Option(help="Write one JSON object a step here.", metavar="FILE.jsonl")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data order.", metavar="N")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate, in place of the configuration's.", metavar="X")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Samples of one forward on one rank, in place of the configuration's (where that leaves it open: 1).",
            min=1,
            metavar="N",
        ),
    ] = None,
    storage_option: StorageOption = None,
) -> None:
    """Train a model on text; `torchrun ... -m zstore train` works too."""
    from .train import run_train
    from .train_config import TrainOptions

    try:
        options = TrainOptions(
            config=config,
            data=data,
            model=model,
            steps=steps,
            save=save,
            save_every=save_every,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            resume=resume,
            nproc=nproc,
            metrics=metrics,
            seed=seed,
            seq_len=seq_len,
            lr=lr,
            micro_batch=micro_batch,
            storage_option=tuple(storage_option or ()),
        )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    run_train(options)


def doctor(
    path: Annotated[Path, typer.Option(help="Folder on the drive to look at.", metavar="P")] = Path(),
    json: Json = False,
) -> None:
    """Report versions, devices, memory, the file system and what the drive does."""
    from .doctor import doctor_command

    finish(doctor_command(path, json))


def plan(  # noqa: PLR0913 - one parameter per option
    *,
    model: Annotated[
        str | None,
        typer.Option(help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf)."),
    ] = None,
    params: Annotated[
        int | None, typer.Option(help="Parameters, as 7e9 or 7B.", metavar="N", parser=parse_number)
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="Width, with --params.", min=1, metavar="N")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, with --params.", min=1, metavar="N")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary, with --params (default 32000).", min=1)] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Devices; 0: train on the CPU (default: this machine's).", min=0, metavar="N")
    ] = None,
    gpu_memory: Annotated[
        int | None, typer.Option(help="Memory of one device, as 24GB.", metavar="SIZE", parser=parse_size)
    ] = None,
    memory: Annotated[
        int | None, typer.Option(help="Host memory (default: this machine's).", metavar="SIZE", parser=parse_size)
    ] = None,
    disk: Annotated[int | None, typer.Option(help="Room on the drive.", metavar="SIZE", parser=parse_size)] = None,
    micro_batch: Annotated[int, typer.Option(help="Samples of one rank and step.", min=1, metavar="N")] = 1,
    seq_length: Annotated[int, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = 1024,
    precision: Annotated[
        Precision, typer.Option(help="Type of parameters and gradients; auto: what this machine computes natively.")
    ] = Precision.AUTO,
    disk_read: Annotated[
        int | None, typer.Option(help="Bytes a second from the drive, as 3GB.", metavar="SIZE", parser=parse_size)
    ] = None,
    disk_write: Annotated[
        int | None, typer.Option(help="Bytes a second to the drive.", metavar="SIZE", parser=parse_size)
    ] = None,
    flops: Annotated[
        int | None,
        typer.Option(help="Operations a second that a device reaches, as 150T.", metavar="N", parser=parse_number),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure the rates that are not given, the drive's in this folder.", metavar="FOLDER"),
    ] = None,
    json: Json = False,
) -> None:
    """Say what of a model's training fits where, how long a step takes, and which config to use."""
    from .plan import PlanOptions, plan_command

    try:
        options = PlanOptions(
            model=model,
            params=params,
            hidden=hidden,
            layers=layers,
            vocab=vocab,
            gpus=gpus,
            gpu_memory=gpu_memory,
            memory=memory,
            disk=disk,
            micro_batch=micro_batch,
            seq_length=seq_length,
            precision=precision.value,
            disk_read=disk_read,
            disk_write=disk_write,
            flops=flops,
            measure=measure,
        )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    finish(plan_command(options, json))


COMMANDS = (train, plan, doctor)
