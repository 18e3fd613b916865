"""Rules for one value of a config: each turns what was written into typed data, or says what it expected."""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

_PLACEHOLDER = re.compile(r"\s*\[([^\[\]]*\|[^\[\]]*)\]\s*")


def show(value: object) -> str:
    """Return `value` as JSON would write it, shortened."""
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):  # keys that are no strings, numbers with too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must be. Called with the value as written; raises ValueError with what was expected and got."""

    auto: bool = False
    """Whether "auto" may stand here until `resolve` replaces it."""

    def __call__(self, value: object) -> object:
        """Return the typed value; pydantic calls this."""
        if self.auto and value == "auto":
            return value
        placeholder = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
        if placeholder:
            choices = ", ".join(choice.strip() for choice in placeholder.group(1).split("|"))
            raise ValueError(f"[{placeholder.group(1)}] is left in from documentation; choose one of {choices}")
        return self._convert(value)

    def _convert(self, value: object) -> object:
        """Return the typed value of anything but "auto" and placeholders."""
        raise NotImplementedError

    def _expected(self) -> str:
        """Return what the rule takes, for messages and for the document."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self._expected() + (' or "auto"' if self.auto else "")

    def _refuse(self, value: object) -> ValueError:
        return ValueError(f"expected {self}, got {show(value)}")


@dataclass(frozen=True, kw_only=True)
class Flag(Rule):
    """true or false."""

    def _convert(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise self._refuse(value)
        return value

    def _expected(self) -> str:
        return "true or false"


@dataclass(frozen=True, kw_only=True)
class Whole(Rule):
    """A whole number, `1e9` included; `words` are strings that are taken as they are."""

    minimum: int = 0
    maximum: int | None = None
    multiple: int = 1
    words: tuple[str, ...] = ()

    def _convert(self, value: object) -> int | str:
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise self._refuse(value)
        if value < self.minimum or (self.maximum is not None and value > self.maximum) or value % self.multiple:
            raise self._refuse(value)
        return int(value)

    def _expected(self) -> str:
        if self.multiple > 1:
            text = f"a positive multiple of {self.multiple}"
        elif self.maximum is not None:
            text = f"a whole number from {self.minimum} to {self.maximum}"
        else:
            text = f"a whole number of at least {self.minimum}"
        return " or ".join([text, *map(show, self.words)])


@dataclass(frozen=True, kw_only=True)
class Number(Rule):
    """A finite number from `minimum` to `maximum`, or below it where `open_end`."""

    minimum: float = 0.0
    maximum: float = math.inf
    open_end: bool = False

    def _convert(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._refuse(value)
        if not self.minimum <= value <= self.maximum or (self.open_end and value == self.maximum):
            raise self._refuse(value)
        return float(value)

    def _expected(self) -> str:
        if self.maximum == math.inf:
            return f"a number of at least {self.minimum:g}"
        return f"a number from {self.minimum:g} to {'below ' if self.open_end else ''}{self.maximum:g}"


@dataclass(frozen=True, kw_only=True)
class OneOf(Rule):
    """One of a few words or numbers; words in any case."""

    options: tuple[str | int | bool, ...]
    hint: str = ""
    """What to do where the value wanted is not among them."""

    def _convert(self, value: object) -> str | int | bool:
        key = value.lower() if isinstance(value, str) else value
        for option in self.options:
            same_kind = isinstance(value, bool) == isinstance(option, bool)
            if same_kind and key == (option.lower() if isinstance(option, str) else option):
                return option
        raise ValueError(f"choose one of {', '.join(map(show, self.options))}; got {show(value)}{self._advice(value)}")

    def _advice(self, value: object) -> str:
        """Return the end of the message about `value`, which is not among the options."""
        return self.hint

    def _expected(self) -> str:
        return "one of " + ", ".join(map(show, self.options))


@dataclass(frozen=True, kw_only=True)
class Text(Rule):
    """A string."""

    def _convert(self, value: object) -> str:
        if not isinstance(value, str):
            raise self._refuse(value)
        return value

    def _expected(self) -> str:
        return "a string"


@dataclass(frozen=True, kw_only=True)
class Folder(Rule):
    """An absolute path of a folder, which need not exist yet, or a list of such paths, on several drives."""

    def _convert(self, value: object) -> tuple[Path, ...]:
        if not isinstance(value, list | tuple):
            return (self._path(value),)
        paths = tuple(self._path(one) for one in value)
        if not paths or len(set(paths)) < len(paths):
            raise ValueError(f"expected different paths, one for each drive, got {show(value)}")
        return paths

    def _path(self, value: object) -> Path:
        if not isinstance(value, str | Path) or not str(value):
            raise self._refuse(value)
        path = Path(value)
        if not path.is_absolute():
            meant = Path.home() / path.relative_to("~") if path.parts[0] == "~" else path.absolute()
            raise ValueError(f'expected an absolute path, got {show(str(value))}; write "{meant}"')
        return path

    def _expected(self) -> str:
        return "an absolute path, or a list of them"


@dataclass(frozen=True, kw_only=True)
class OneFolder(Folder):
    """An absolute path of a folder, which need not exist yet."""

    def _convert(self, value: object) -> Any:
        return self._path(value)

    def _expected(self) -> str:
        return "an absolute path"


@dataclass(frozen=True, kw_only=True)
class Options(Rule):
    """An object whose keys go to other software as they are."""

    def _convert(self, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            # Not shown: it may be a secret.
            raise ValueError(f"expected {self}, got a {type(value).__name__}")
        return dict(value)

    def _expected(self) -> str:
        return "an object"


@dataclass(frozen=True, kw_only=True)
class Pair(Rule):
    """Two numbers, each by `item`."""

    item: Number = field(default_factory=Number)

    def _convert(self, value: object) -> tuple[float, float]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self._refuse(value)
        try:
            return self.item._convert(value[0]), self.item._convert(value[1])
        except ValueError:
            raise self._refuse(value) from None

    def _expected(self) -> str:
        return f"two numbers, each {self.item._expected().removeprefix('a number ')}"


@dataclass(frozen=True, kw_only=True)
class PerGroup(Rule):
    """A number by `item`, or a list of them, one for each parameter group of the optimizer."""

    item: Number = field(default_factory=Number)

    def _convert(self, value: object) -> float | tuple[float, ...]:
        try:
            if isinstance(value, list | tuple) and value:
                return tuple(map(self.item._convert, value))
            return self.item._convert(value)
        except ValueError:
            raise self._refuse(value) from None

    def _expected(self) -> str:
        return f"{self.item._expected()}, or a list with one for each parameter group"


@dataclass(frozen=True, kw_only=True)
class Anything(Rule):
    """Any JSON value; for keys whose content is not read."""

    can_be_off: bool = True
    """Whether false, 0, an empty or a disabled object asks for nothing."""

    def _convert(self, value: object) -> object:
        return value

    def _expected(self) -> str:
        return "anything"


def is_off(value: object) -> bool:
    """Whether a value whose content is not read asks for nothing: false, 0, null, empty, or a disabled object."""
    if isinstance(value, Mapping):
        return not value["enabled"] if "enabled" in value else all(map(is_off, value.values()))
    return value is None or value == "none" or not value


Auto = Literal["auto"]
Bool = Annotated[bool, PlainValidator(Flag())]
AutoBool = Annotated[bool | Auto, PlainValidator(Flag(auto=True))]
Count = Annotated[int, PlainValidator(Whole())]
Positive = Annotated[int, PlainValidator(Whole(minimum=1))]
AutoCount = Annotated[int | Auto, PlainValidator(Whole(auto=True))]
AutoPositive = Annotated[int | Auto, PlainValidator(Whole(minimum=1, auto=True))]
Real = Annotated[float, PlainValidator(Number())]
AutoReal = Annotated[float | Auto, PlainValidator(Number(auto=True))]
MaybeCount = Annotated[int | None, PlainValidator(Whole())]
MaybePositive = Annotated[int | None, PlainValidator(Whole(minimum=1))]
MaybeAutoCount = Annotated[int | Auto | None, PlainValidator(Whole(auto=True))]
MaybeAutoPositive = Annotated[int | Auto | None, PlainValidator(Whole(minimum=1, auto=True))]
MaybeAutoReal = Annotated[float | Auto | None, PlainValidator(Number(auto=True))]
MaybeName = Annotated[str | None, PlainValidator(Text())]
Fraction = Annotated[float, PlainValidator(Number(maximum=1.0))]
Name = Annotated[str, PlainValidator(Text())]
Unread = Annotated[Any, PlainValidator(Anything())]
Leftover = Annotated[Any, PlainValidator(Anything(can_be_off=False))]
MaybeOptions = Annotated[dict[str, Any] | None, PlainValidator(Options())]
MaybePath = Annotated[Path | None, PlainValidator(OneFolder())]
AbsolutePaths = Annotated[tuple[Path, ...] | None, PlainValidator(Folder())]
