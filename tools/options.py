"""Options of the command line: types that commands share, how their texts are read, and how typer learns of them."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from zstore.errors import UsageError
from zstore.io import user_path
from zstore.sizes import parse_bytes

Dtype = Literal["fp16", "bf16", "fp32"]
"""Types that weights are written in."""


def parse_size(text: str | int) -> int:
    """Bytes in a size like "5GB" (decimal), "512MiB" (binary) or "1000000"; `typer.BadParameter` for anything else."""
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def size_option(text: str, **more: Any) -> Any:
    """Return an option whose values are sizes, as `parse_size` reads them."""
    return typer.Option(help=text, metavar="SIZE", parser=parse_size, **more)


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


def parse_file(text: str | Path) -> Path:
    """Path of a file that is there; `typer.BadParameter` for anything else."""
    path = user_path(text)
    if not path.is_file():
        raise typer.BadParameter(
            f"File '{text}' does not exist." if not path.exists() else f"File '{text}' is a folder."
        )
    return path


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Return the storage options in words like `key=value`; a value that is JSON, such as `true` or `{"a": 1}`, is
    parsed, anything else is text.

    Raises UsageError for other words.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            # It may hold a secret.
            raise UsageError(f"a storage option is written key=value, got one with {key[:20]!r} and no value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def require_choice(option: str, value: str, choices: Any) -> None:
    """Raise UsageError for a value that is none of a Literal's: typer looks at those of the command line alone."""
    if value not in get_args(choices):
        raise UsageError(f"{option} {value}: expected one of {', '.join(get_args(choices))}")


Location = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder of checkpoints (its newest, or --tag), one checkpoint's folder, or CKPT@TAG; a URL works "
        "too. Checkpoints of DeepSpeed, torch.distributed.checkpoint and Hugging Face open as they are.",
    ),
]
"""Path or URL of a checkpoint, as text: a `Path` would spoil a URL."""
FolderLocation = Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")]
Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Tag of the checkpoint, as `zstore ls` lists them; default: the newest.", metavar="TAG"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="Option for the file system of a URL, as key=value (the value may be JSON); may be repeated.",
        metavar="K=V",
    ),
]


def for_typer(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return `command` with a signature for typer: a parameter that is a dataclass of options is replaced by its fields.

    A field is an option if its type is `Annotated`. A value that such a dataclass refuses is wrong usage. Paths are as
    `user_path` returns them.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(kind := hints[name]) and isinstance(kind, type):
            groups[name] = kind
            parameters += _options(kind)
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def run(**given: Any) -> int | None:
        given = {name: user_path(value) if isinstance(value, Path) else value for name, value in given.items()}
        for name, kind in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
            try:
                given[name] = kind(**own)
            except UsageError as error:
                raise typer.BadParameter(str(error)) from error
        return command(**given)

    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in keyword}
    return run


def _options(kind: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hints[field.name]) is Annotated:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )
