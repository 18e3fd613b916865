"""Types of arguments that commands share, and how their texts are read."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import typer

from zstore.errors import UsageError

from .opening import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES, Common


class Dtype(StrEnum):
    """Types that weights are written in."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Precision(StrEnum):
    """Types that a model is trained in."""

    AUTO = "auto"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Overflow(StrEnum):
    """What becomes of values that fp16 cannot hold."""

    ERROR = "error"
    INF = "inf"
    CLAMP = "clamp"


class Target(StrEnum):
    """What `convert` writes."""

    ZSTORE = "zstore"
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


class CodecName(StrEnum):
    """What an archive's chunks are compressed with."""

    NONE = "none"
    ZSTD = "zstd"
    BLOSC = "blosc"


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


def parse_memory(text: str | int) -> int:
    """Bytes in a size that a command can work in; `typer.BadParameter` that says the least for a smaller one."""
    num_bytes = parse_size(text)
    if num_bytes < LEAST_MEMORY_BYTES:
        raise typer.BadParameter(f"expected at least {LEAST_MEMORY_BYTES // 2**20}MiB, got {text!r}")
    return num_bytes


Location = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder of checkpoints (the newest is meant, or --tag), one checkpoint's own folder, or CKPT:TAG; a URL works "
        "too. Checkpoints of DeepSpeed, torch.distributed.checkpoint and Hugging Face open as they are.",
    ),
]
"""Path or URL of a checkpoint, as text: a `Path` would spoil a URL."""
Tag = Annotated[
    str | None,
    typer.Option(
        "--tag", help="Which checkpoint of the folder, as `zstore ls` lists them; default: the newest.", metavar="TAG"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        help="Limit of the memory used, on top of what Python and its modules take.",
        metavar="SIZE",
        parser=parse_memory,
        show_default=f"{DEFAULT_MEMORY_BYTES // 2**20}MiB",
    ),
]
"""None where it is not given; see `Common`."""
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="Option for the file system of a URL, as key=value (the value may be JSON); may be repeated.",
        metavar="K=V",
    ),
]


def common(json: bool, memory: int | None, storage_option: list[str] | None) -> Common:
    """Return the options that every command on checkpoints has; `typer.BadParameter` for what is not `key=value`."""
    return Common(json=json, memory_bytes=memory, storage_options=storage_options(storage_option))


def storage_options(words: list[str] | None) -> dict[str, Any]:
    """Return what `--storage-option` says; `typer.BadParameter` for what is not `key=value`."""
    from zstore.remote.url import parse_options

    try:
        return parse_options(words or ())
    except UsageError as error:
        raise typer.BadParameter(f"--storage-option: {error}") from error


def finish(code: int | None) -> None:
    """End the command with `code`, where that is no success."""
    if code:
        raise typer.Exit(code)
