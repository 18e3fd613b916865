"""The `zstore` command: arguments, exit codes and errors. What a command does stands in a module of its own.

Exit codes: 0 done, 1 failed or found a fault, 2 wrong usage. Data goes to stdout, everything else to stderr. Each
command imports its module when it is run, so that `zstore inspect` starts without torch.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zstore._version import __version__
from zstore.errors import UsageError, ZstoreError

app = typer.Typer(
    name="zstore",
    help="Train models larger than memory, and look after their checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A checkpoint's folder, or the folder above it (then the newest one).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Dtype(StrEnum):
    """Types that weights are written in."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Overflow(StrEnum):
    """What becomes of values that fp16 cannot hold."""

    ERROR = "error"
    INF = "inf"
    CLAMP = "clamp"


def main() -> None:
    """Run the command with the process's arguments and end the process."""
    try:
        app()
    except (ZstoreError, OSError) as error:
        if os.environ.get("ZSTORE_TRACEBACK") == "1":
            traceback.print_exc()
        else:
            print(f"zstore: {error}", file=sys.stderr)
        sys.exit(1)


def parse_size(text: str | int) -> int:
    """Bytes in a size like "5GB" (decimal), "512MiB" (binary) or "1000000"; `typer.BadParameter` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"expected a size like 5GB, 512MiB or a number of bytes, got {text!r}")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    num_bytes = int(float(number) * (1024 if binary else 1000) ** power)
    if num_bytes < 1:
        raise typer.BadParameter(f"expected a size of at least one byte, got {text!r}")
    return num_bytes


def parse_number(text: str | int) -> int:
    """Whole number in a text like "7e9", "7B", "1.3 B" or "150T"; `typer.BadParameter` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"expected a number like 7e9, 7B or 150T, got {text!r}")
    number, suffix = match.groups()
    power = " kmbt".index(suffix.lower().replace("g", "b")) if suffix else 0
    value = int(float(number) * float(1000**power))
    if value < 1:
        raise typer.BadParameter(f"expected a number of at least one, got {text!r}")
    return value


def _finish(code: int | None) -> None:
    if code:
        raise typer.Exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models larger than memory, and look after their checkpoints."""


@app.command()
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
    save: Annotated[Path | None, typer.Option(help="Folder for checkpoints; one is saved at the end.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Save every K steps too.", min=1, metavar="K")] = None,
    keep: Annotated[int | None, typer.Option(help="Keep the newest N checkpoints.", min=1, metavar="N")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on from a checkpoint; auto: from the newest in --save, if any.", metavar="DIR[:TAG]|auto"
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
) -> None:
    """Train a model on text; `torchrun ... -m zstore train` works too."""
    from .train import TrainOptions, run_train

    try:
        options = TrainOptions(
            config=config,
            data=data,
            model=model,
            steps=steps,
            save=save,
            save_every=save_every,
            keep=keep,
            resume=resume,
            nproc=nproc,
            metrics=metrics,
            seed=seed,
            seq_len=seq_len,
            lr=lr,
        )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    run_train(options)


@app.command()
def consolidate(
    ckpt: Checkpoint,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder to write (default: CKPT-<type> beside CKPT).")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.FP16,
    max_shard_size: Annotated[
        int,
        typer.Option(
            help="Largest file, in bytes or as 5GB, 512MiB.", metavar="SIZE", parser=parse_size, show_default="5GB"
        ),
    ] = 5 * 10**9,
    overflow: Annotated[
        Overflow, typer.Option(help="For values that the type cannot hold: stop, write infinity, or the largest value.")
    ] = Overflow.ERROR,
) -> None:
    """Write a checkpoint's weights as safetensors in the Hugging Face layout."""
    from .consolidate import consolidate_command

    _finish(consolidate_command(ckpt, out, dtype, max_shard_size, overflow))


@app.command()
def reshard(
    ckpt: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    world_size: Annotated[int, typer.Option(help="Ranks to lay the state out for.", min=1, metavar="N")],
) -> None:
    """Write the same state laid out for another number of ranks."""
    from .reshard import reshard_command

    _finish(reshard_command(ckpt, out, world_size))


@app.command()
def inspect(ckpt: Checkpoint, json: Json = False) -> None:
    """Show tags, step, world size and arrays with shapes, types and bytes."""
    from .inspect import inspect_command

    _finish(inspect_command(ckpt, json))


@app.command()
def verify(ckpt: Checkpoint) -> None:
    """Check the checksum of every chunk; exit code 1 when one is wrong."""
    from .verify import verify_command

    _finish(verify_command(ckpt))


@app.command()
def doctor(
    path: Annotated[Path, typer.Option(help="Folder on the drive to look at.", metavar="P")] = Path(),
    json: Json = False,
) -> None:
    """Report versions, devices, memory, the file system and what the drive does."""
    from .doctor import doctor_command

    _finish(doctor_command(path, json))


@app.command()
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
    precision: Annotated[Dtype, typer.Option(help="Type of parameters and gradients.")] = Dtype.BF16,
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
    _finish(plan_command(options, json))
