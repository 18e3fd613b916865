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
    """Annotation with the description of a type's values, where the type's limits do not imply it."""

    text: str


@dataclass(frozen=True)
class OneOf:
    """Annotation of a `Literal`, or of a string that must be in `names`: case is ignored, and an error lists the choices."""

    advice: Callable[[object], str] = lambda _: ""
    """Returns the end of the message about an invalid value."""
    names: Collection[str] = ()
    """Read at each use, since extras add names."""

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


def expected(kind: Any, annotations: Iterable[Any] = ()) -> str:
    """Return the description of the values of type `kind` with these annotations."""
    if get_origin(kind) is Annotated:
        return expected(kind.__origin__, kind.__metadata__)
    if (text := next((each.text for each in annotations if isinstance(each, Expects)), None)) is not None:
        return text
    options = next((each.names for each in annotations if isinstance(each, OneOf)), ()) or get_args(kind)
    if get_origin(kind) is Literal or (kind is str and options):
        return ("one of " if len(options) > 1 else "") + ", ".join(map(show, options))
    if kind in _SIMPLE_TYPES:
        return _SIMPLE_TYPES[kind]
    if kind in (int, float):
        return _number("a whole number" if kind is int else "a number", annotations)
    return " or ".join(expected(each) for each in get_args(kind) if each is not NoneType)


_SIMPLE_TYPES = {bool: "true or false", str: "a string", Path: "an absolute path"}


def _number(noun: str, annotations: Iterable[Any]) -> str:
    limits: dict[str, Any] = {}
    for annotation in annotations:
        for limit in annotation.metadata if isinstance(annotation, FieldInfo) else [annotation]:
            limits |= {name: getattr(limit, name) for name in ("ge", "le", "lt", "multiple_of") if hasattr(limit, name)}
    if "multiple_of" in limits:
        return f"a positive multiple of {limits['multiple_of']}"
    if "le" not in limits and "lt" not in limits:
        return f"{noun} of at least {limits['ge']:g}"
    end = f"below {limits['lt']:g}" if "lt" in limits else f"{limits['le']:g}"
    return f"{noun} from {limits['ge']:g} to {end}"


def check(kind: Any, value: object, reader: TypeAdapter[Any] | None = None) -> Any:
    """Return `value` converted to `kind`, by `reader` if given. Raises ValueError with the expected values."""
    try:
        return (reader or TypeAdapter(kind)).validate_python(value)
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
        if error["type"] == "value_error":
            raise ValueError(str(error["ctx"]["error"])) from None
        raise ValueError(f"expected {expected(kind)}, got {show(value)}") from None


def _parse_int(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"expected a path, got {show(value)}")
    try:
        return user_path(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _parse_folders(value: object) -> object:
    if not isinstance(value, list | tuple):
        value = [value]
    if not value or len({str(path) for path in value}) < len(value):
        raise ValueError(f"expected different paths, one for each drive, got {show(value)}")
    return value


def _parse_options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        # The value is not shown, since it may be a secret.
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return dict(value)


_KEEP_FORMAT = "a whole number of at least 1, or an object with any of last, every, best, tags"


def _parse_keep(value: object) -> Keep:
    """Return the rules in an object with fields of `Keep`, or the rule for a number of newest checkpoints."""
    fields = dict(value) if isinstance(value, Mapping) else {"last": value}
    rules: dict[str, Any] = {name: _parse_int(item) for name, item in fields.items() if item is not None}
    if isinstance(rules.get("tags"), list):
        rules["tags"] = tuple(rules["tags"])
    try:
        return Keep(**rules)
    except (TypeError, UsageError) as error:
        raise ValueError(f"expected {_KEEP_FORMAT}, got {show(value)}: {error}") from error


def _parse_names(value: object) -> object:
    """Read a single name as a list."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _is_off(value: object) -> bool:
    if isinstance(value, Mapping):
        return not value["enabled"] if "enabled" in value else all(map(_is_off, value.values()))
    return value is None or value == "none" or not value


def _none_if_off(value: object) -> object:
    return None if _is_off(value) else value


Auto = Literal["auto"]
"""Placeholder until `resolve` fills in the value."""
Bool = StrictBool
Name = StrictStr
Int = Annotated[int, Strict(), BeforeValidator(_parse_int)]
"""A whole number, `1e9` included."""
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
Position = Annotated[Int, Field(ge=-1)]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Real = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Real, Field(le=1)]
BelowOne = Annotated[Real, Field(lt=1)]
Folder = Annotated[Path, BeforeValidator(_parse_path)]
Drives = Annotated[tuple[Folder, ...], BeforeValidator(_parse_folders), Expects("a path, or a list of them")]
"""Folders, created if missing; paths are relative to the working directory at startup."""
Names = Annotated[tuple[StrictStr, ...], BeforeValidator(_parse_names), Expects("a name, or a list of names")]
Options = Annotated[
    dict[str, Any],
    BeforeValidator(_parse_options),
    PlainSerializer(lambda options: f"{len(options)} keys, hidden since they may be secret"),
    Expects("an object"),
]
Rules = Annotated[
    Keep,
    BeforeValidator(_parse_keep),
    PlainSerializer(lambda keep: {name: value for name, value in asdict(keep).items() if value not in (None, ())}),
    Expects(_KEEP_FORMAT),
]
Anything = Annotated[Any, Expects("anything")]
Ignored = Annotated[Anything, AfterValidator(_none_if_off)]
"""An ignored value; "none", false, 0, and an empty or disabled object count as unset."""
DataType = Annotated[Literal["fp32", "fp16", "bf16", "none"], OneOf(), AfterValidator(_none_if_off)]
"""A type; "none" is None."""
