"""Options of `zstore plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from zstore.engine.config.optimizers import Moments
from zstore.errors import UsageError

from ..options import parse_file, parse_number, size_option


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options on the command line; None: not given."""

    config: Annotated[
        Path | None,
        typer.Option(
            help="Say whether this configuration fits, and what to change in it where it does not.",
            parser=parse_file,
            metavar="FILE",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf)."),
    ] = None
    params: Annotated[
        int | None, typer.Option(help="Number of parameters, like 7e9 or 7B.", metavar="N", parser=parse_number)
    ] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size, with --params.", min=1, metavar="N")] = None
    layers: Annotated[int | None, typer.Option(help="Layers, with --params.", min=1, metavar="N")] = None
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size, with --params (default: 32000).", min=1)] = None
    gpus: Annotated[
        int | None, typer.Option(help="GPUs; 0: train on the CPU (default: this machine's).", min=0, metavar="N")
    ] = None
    machines: Annotated[
        int, typer.Option(help="Machines like this that train together; sizes are of one.", min=1, metavar="N")
    ] = 1
    gpu_memory: Annotated[int | None, size_option("Memory of one GPU, like 24GB.")] = None
    memory: Annotated[int | None, size_option("Host memory (default: this machine's).")] = None
    disk: Annotated[int | None, size_option("Free space on the drive.")] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Samples per rank and step (default: the configuration's, or 1).", min=1, metavar="N"),
    ] = None
    seq_length: Annotated[int, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = 1024
    precision: Annotated[
        Literal["auto", "fp16", "bf16", "fp32"],
        typer.Option(help="Type of parameters and gradients; auto: what this machine computes natively."),
    ] = "auto"
    moments: Annotated[Moments, typer.Option(help="What the optimizer's moments are kept in (`zstore.moments`).")] = (
        "fp32"
    )
    disk_read: Annotated[int | None, size_option("Bytes read from the drive per second, like 3GB.")] = None
    disk_write: Annotated[int | None, size_option("Bytes written to the drive per second.")] = None
    flops: Annotated[
        int | None,
        typer.Option(
            help="Floating-point operations per second of one device, like 150T.", metavar="N", parser=parse_number
        ),
    ] = None
    link: Annotated[int | None, size_option("Bytes per second between a GPU and host memory, each way, like 50GB.")] = (
        None
    )
    host_update: Annotated[int | None, size_option("Bytes per second that AdamW moves in host memory.")] = None
    device_update: Annotated[int | None, size_option("Bytes per second that AdamW moves in a GPU's memory.")] = None
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure the rates that are not given, the drive's in this folder.", metavar="FOLDER"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that name no model, or two."""
        numbers = (self.params, self.hidden, self.layers)
        if self.model is not None and any(value is not None for value in (*numbers, self.vocab)):
            raise UsageError("--model already gives the shape: leave out --params, --hidden, --layers and --vocab")
        if self.model is None and None in numbers:
            raise UsageError("name a model: --model M, or --params, --hidden and --layers together")
        if self.config is not None and self.precision != "auto":
            raise UsageError("--config says which type the model is trained in: leave out --precision")
        if self.config is not None and self.moments != "fp32":
            raise UsageError("--config says what moments are kept in: leave out --moments")
