"""Options that commands share: how their texts are parsed, how they are passed to typer, and how they open a checkpoint.

Modules for checkpoints are imported only when one is opened, so that other commands start faster.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import typer

from zstore.errors import BudgetError, UsageError, listed, parse_bytes
from zstore.io import user_path

from .printing import ProgressBar, print_json

if TYPE_CHECKING:
    from zstore.checkpoint import ArraySource
    from zstore.weights.from_checkpoint import Companions

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
MIN_MEMORY_BYTES = 64 * MIB
RESERVED_BYTES = 32 * MIB
"""Reserved for blocks of output files, metadata and temporary Python objects."""
_MAX_POOL_BYTES = 64 * MIB
_ARRAY_BYTES, _CHUNK_BYTES = 10_000, 100
"""Bytes of memory for the metadata of an array and for the checksum of a chunk (measured and rounded up)."""
_REMOTE_THREADS = 12
_MAX_LISTED = 12

Dtype = Literal["fp16", "bf16", "fp32"]
"""Types in which weights are written."""


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "5GB" (decimal), "512MiB" (binary) or "1000000". Raises `typer.BadParameter`."""
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def size_option(text: str, **settings: Any) -> Any:
    """Return an option whose values are sizes, parsed by `parse_size`."""
    return typer.Option(help=text, metavar="SIZE", parser=parse_size, **settings)


def parse_memory(text: str | int) -> int:
    """Return the bytes of a size that suffices for a command. Raises `typer.BadParameter`, which names the minimum."""
    num_bytes = parse_size(text)
    if num_bytes < MIN_MEMORY_BYTES:
        raise typer.BadParameter(f"expected at least {MIN_MEMORY_BYTES // MIB}MiB, got {text!r}")
    return num_bytes


def parse_number(text: str | int) -> int:
    """Return the number in a text such as "7e9", "7B", "1.3 B" or "150T". Raises `typer.BadParameter`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"expected a number such as 7e9, 7B or 150T, got {text!r}")
    number, suffix = match.groups()
    power = " kmbt".index(suffix.lower().replace("g", "b")) if suffix else 0
    value = int(float(number) * float(1000**power))
    if value < 1:
        raise typer.BadParameter(f"expected a number of at least one, got {text!r}")
    return value


def parse_file(text: str | Path) -> Path:
    """Return the path of an existing file. Raises `typer.BadParameter`."""
    path = user_path(text)
    if not path.is_file():
        raise typer.BadParameter(
            f"File '{text}' does not exist." if not path.exists() else f"File '{text}' is a folder."
        )
    return path


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Return the storage options in words of the form `key=value`; a JSON value, such as `true` or `{"a": 1}`, is parsed,
    anything else is text.

    Raises UsageError for other words.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            # The text is truncated, since it may be a secret.
            raise UsageError(f"a storage option has the form key=value, got {key[:20]!r} without a value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


Location = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder of checkpoints (its newest, or --tag), the folder of one checkpoint, CKPT@TAG, or a URL. "
        "Checkpoints of DeepSpeed, torch.distributed.checkpoint and Hugging Face open directly.",
    ),
]
"""Path or URL of a checkpoint, as text, since a `Path` would alter a URL."""
FolderLocation = Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")]
Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Tag of the checkpoint, as listed by `zstore ls`; default: the newest.", metavar="TAG"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="Option for a URL's file system, as key=value (the value may be JSON); may be repeated.",
        metavar="K=V",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Options of commands that list checkpoints."""

    json: Json = False
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Reject a storage option that is not `key=value`, before anything is opened."""
        _ = self.storage_options

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options for the file system of a URL."""
        return parse_options(self.storage_option or ())


@dataclass(frozen=True, kw_only=True)
class Common(Listing):
    """Options of commands that read checkpoints."""

    memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--memory",
            help="Memory limit, in addition to what Python and its modules use.",
            metavar="SIZE",
            parser=parse_memory,
            show_default=f"{DEFAULT_MEMORY_BYTES // MIB}MiB",
        ),
    ] = None
    """Includes metadata. None: `DEFAULT_MEMORY_BYTES`, which large metadata may exceed; an explicit limit is respected, or
    an error."""
    num_pools: int = 1
    """Number of pools that share the memory."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the memory that remain for a command's data."""
        return (self.memory_bytes or DEFAULT_MEMORY_BYTES) - RESERVED_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool for transfers; read-ahead takes half as much in addition."""
        return min(_MAX_POOL_BYTES, self.free_bytes // (3 * self.num_pools))


DEFAULTS = Common()


def for_typer(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return `command` with a signature for typer: a parameter that is a dataclass of options is replaced by its fields.

    A field is an option if its type is `Annotated`. A value that such a dataclass rejects is a usage error. Paths are
    converted by `user_path`.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(kind := hints[name]) and isinstance(kind, type):
            groups[name] = kind
            parameters += _option_parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def run(**values: Any) -> int | None:
        values = {name: user_path(value) if isinstance(value, Path) else value for name, value in values.items()}
        for name, kind in groups.items():
            group_values = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
            try:
                values[name] = kind(**group_values)
            except UsageError as error:
                raise typer.BadParameter(str(error)) from error
        return command(**values)

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return run


def _option_parameters(kind: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hints[field.name]) is Annotated:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )


@contextlib.contextmanager
def open_location(
    location: str | os.PathLike[str], common: Common = DEFAULTS, tag: str | None = None
) -> Iterator[ArraySource]:
    """Open the checkpoint named by `location` and `tag` for the duration of a `with` block.

    `location` is a checkpoint's folder, a folder of checkpoints (then the newest, or `tag`), or the URL of either; `DIR@TAG`
    and `DIR/TAG` mean `DIR` with `tag`. Raises BudgetError if an explicit memory limit is too small for the metadata.
    """
    from zstore.checkpoint import NUM_THREADS
    from zstore.io import is_url, map_large_blocks, open_resources
    from zstore.open.sources import open_source

    # A network request takes tens of milliseconds, so more of them run concurrently.
    num_threads = _REMOTE_THREADS if is_url(location) else NUM_THREADS
    if is_url(location):
        map_large_blocks()  # for the bytes of responses, which each thread would retain
    with (
        open_resources(pool_bytes=common.pool_bytes, num_threads=num_threads) as resources,
        open_source(location, tag, resources=resources, storage_options=common.storage_options) as source,
    ):
        num_chunks = sum(array.grid.num_shards * array.grid.chunks_per_shard for array in source.arrays.values())
        metadata_bytes = len(source.arrays) * _ARRAY_BYTES + (num_chunks if source.record.id else 0) * _CHUNK_BYTES
        min_bytes = MIN_MEMORY_BYTES + common.num_pools * max(0, metadata_bytes - RESERVED_BYTES // 4)
        if common.memory_bytes is not None and common.memory_bytes < min_bytes:
            raise BudgetError(
                f"{source.location} has {len(source.arrays)} arrays, whose metadata takes about {metadata_bytes} bytes: use "
                f"`--memory {-(-min_bytes // MIB)}MiB` or more"
            )
        yield source


@contextlib.contextmanager
def reporting(
    title: str, common: Listing, *sources: ArraySource, total_bytes: int | None = None
) -> Iterator[ProgressBar]:
    """Show the progress of a block; then report the bytes read from zstore's `sources`, and with `json` print
    `ProgressBar.document`, including the reads of the first source, and `ProgressBar.summary`."""
    with ProgressBar(title, total_bytes) as progress:
        yield progress
        for reading in [reading for source in reversed(sources) if (reading := source.reading()) is not None]:
            if reading.asked_bytes or reading.requests:
                progress.print_line(reading.text())
            progress.document |= asdict(reading)
    if common.json:
        print_json(progress.document | progress.summary())


def array_bytes(source: ArraySource) -> int:
    """Return the bytes of all values of a checkpoint, uncompressed."""
    return sum(array.spec.nbytes for array in source.arrays.values())


def report_skipped(progress: ProgressBar, companions: Companions) -> None:
    """Report which files of a model were not copied with its weights, and record for `--json` which were."""
    progress.document |= {"companions": companions.copied, "left_behind": companions.skipped}
    if companions.skipped:
        progress.print_line(f"files of the model that were not copied: {listed(companions.skipped, _MAX_LISTED)}")
