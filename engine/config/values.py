"""Types of config values for pydantic, each with a description for messages and for `docs/config.md`."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    Strict,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from zstore.checkpoint import Keep
from zstore.errors import UsageError
from zstore.io import user_path


def show(value: object) -> str:
    """Return `value` as JSON would write it, shortened."""
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):  # keys that are not strings, numbers with too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Expects:
    """Annotates a type with the description of its values, if it does not follow from the type's limits."""

    text: str


@dataclass(frozen=True)
class OneOf:
    """Annotates a `Literal`, or a string out of `names`: case is ignored, and an error lists the choices."""

    advice: Callable[[object], str] = lambda _: ""
    """Returns the end of the message about another value."""
    names: Collection[str] = ()
    """Read at each use, since extras add theirs."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with which pydantic reads the value."""
        options = self.names or get_args(source)

        def choose(value: object) -> object:
            key = value.lower() if isinstance(value, str) else value
            for option in options:
                same_kind = isinstance(value, bool) == isinstance(option, bool)
                if same_kind and key == (option.lower() if isinstance(option, str) else option):
                    return option
            raise ValueError(f"choose one of {', '.join(map(show, options))}; got {show(value)}{self.advice(value)}")

        return core_schema.no_info_plain_validator_function(choose)


def expected(kind: Any, about: Iterable[Any] = ()) -> str:
    """Return the description of the values of a type with these annotations."""
    if get_origin(kind) is Annotated:
        return expected(kind.__origin__, kind.__metadata__)
    if (text := next((one.text for one in about if isinstance(one, Expects)), None)) is not None:
        return text
    options = next((one.names for one in about if isinstance(one, OneOf)), ()) or get_args(kind)
    if get_origin(kind) is Literal or (kind is str and options):
        return ("one of " if len(options) > 1 else "") + ", ".join(map(show, options))
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind in (int, float):
        return _number("a whole number" if kind is int else "a number", about)
    return " or ".join(expected(one) for one in get_args(kind) if one is not NoneType)


_SIMPLE = {bool: "true or false", str: "a string", Path: "an absolute path"}


def _number(noun: str, about: Iterable[Any]) -> str:
    limits: dict[str, Any] = {}
    for one in about:
        for limit in one.metadata if isinstance(one, FieldInfo) else [one]:
            limits |= {name: getattr(limit, name) for name in ("ge", "le", "lt", "multiple_of") if hasattr(limit, name)}
    if "multiple_of" in limits:
        return f"a positive multiple of {limits['multiple_of']}"
    if "le" not in limits and "lt" not in limits:
        return f"{noun} of at least {limits['ge']:g}"
    end = f"below {limits['lt']:g}" if "lt" in limits else f"{limits['le']:g}"
    return f"{noun} from {limits['ge']:g} to {end}"


def check(kind: Any, value: object, reader: TypeAdapter[Any] | None = None) -> Any:
    """Return `value` as a `kind`, by `reader` if given. Raises ValueError with the expected values."""
    try:
        return (reader or TypeAdapter(kind)).validate_python(value)
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
        if error["type"] == "value_error":
            raise ValueError(str(error["ctx"]["error"])) from None
        raise ValueError(f"expected {expected(kind)}, got {show(value)}") from None


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"expected a path, got {show(value)}")
    try:
        return user_path(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _folders(value: object) -> object:
    if not isinstance(value, list | tuple):
        value = [value]
    if not value or len({str(one) for one in value}) < len(value):
        raise ValueError(f"expected different paths, one for each drive, got {show(value)}")
    return value


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        # Not shown: it may be a secret.
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return dict(value)


_KEEP = "a whole number of at least 1, or an object with any of last, every, best, tags"


def _keep(value: object) -> Keep:
    """Return the rules in an object with fields of `Keep`, or for a number of newest checkpoints."""
    found = dict(value) if isinstance(value, Mapping) else {"last": value}
    rules: dict[str, Any] = {name: _whole(item) for name, item in found.items() if item is not None}
    if isinstance(rules.get("tags"), list):
        rules["tags"] = tuple(rules["tags"])
    try:
        return Keep(**rules)
    except (TypeError, UsageError) as error:
        raise ValueError(f"expected {_KEEP}, got {show(value)}: {error}") from error


def _names(value: object) -> object:
    """Read a single name as a list."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _is_off(value: object) -> bool:
    if isinstance(value, Mapping):
        return not value["enabled"] if "enabled" in value else all(map(_is_off, value.values()))
    return value is None or value == "none" or not value


def _none_if_off(value: object) -> object:
    return None if _is_off(value) else value


Auto = Literal["auto"]
"""Stands for a value until `resolve` fills it in."""
Bool = StrictBool
Name = StrictStr
Whole = Annotated[int, Strict(), BeforeValidator(_whole)]
"""A whole number, `1e9` included."""
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Position = Annotated[Whole, Field(ge=-1)]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Real = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Real, Field(le=1)]
BelowOne = Annotated[Real, Field(lt=1)]
Folder = Annotated[Path, BeforeValidator(_path)]
Drives = Annotated[tuple[Folder, ...], BeforeValidator(_folders), Expects("a path, or a list of them")]
"""Folders, created if missing; relative paths start at the working folder of the start."""
Names = Annotated[tuple[StrictStr, ...], BeforeValidator(_names), Expects("a name, or a list of names")]
Options = Annotated[
    dict[str, Any],
    BeforeValidator(_options),
    PlainSerializer(lambda options: f"{len(options)} keys, not shown: they may be secret"),
    Expects("an object"),
]
Rules = Annotated[
    Keep,
    BeforeValidator(_keep),
    PlainSerializer(lambda keep: {name: value for name, value in asdict(keep).items() if value not in (None, ())}),
    Expects(_KEEP),
]
Anything = Annotated[Any, Expects("anything")]
Unread = Annotated[Anything, AfterValidator(_none_if_off)]
"""A value that is ignored; "none", false, 0, an empty and a disabled object count as unset."""
DataType = Annotated[Literal["fp32", "fp16", "bf16", "none"], OneOf(), AfterValidator(_none_if_off)]
"""A type; "none" is None."""
