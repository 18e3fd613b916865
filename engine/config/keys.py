"""The status of a config key, messages about keys, and the base of all sections of the schema."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from .inactive import INACTIVE
from .values import Auto


class Status(Enum):
    """The effect of a key that is set."""

    BUILT = "acts"
    """It does what it says."""
    NOT_BUILT = "not built"
    """Not done, and the result of training does not depend on it; a notice names the drawback and the substitute."""
    NO_EFFECT = "no effect"
    """Nothing is lost without it: it happens anyway, or there is nothing to do it to; it is reported."""
    REFUSED = "refused"
    """Training without it would not be what the config asks for: an error."""
    WRONG = "error"
    """Unknown, of a wrong value, or in contradiction to another key."""


@dataclass(frozen=True)
class Notice:
    """Keys that were set and do not act, or not as they could be read, or are errors."""

    status: Status
    text: str
    """The substitute, or the reason why nothing is left to do; of an error all that is wrong."""
    keys: tuple[str, ...]
    """Dotted paths."""

    @property
    def is_error(self) -> bool:
        """Whether no run takes the config."""
        return self.status in (Status.REFUSED, Status.WRONG)

    @property
    def key(self) -> str:
        """The names of the keys; empty for the config as a whole."""
        return " and ".join(filter(None, self.keys))

    @property
    def message(self) -> str:
        """The text, after the status of keys that do not act."""
        is_idle = self.status in (Status.NOT_BUILT, Status.NO_EFFECT)
        return f"{self.status.value}: {self.text}" if is_idle else self.text

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


def problem_text(source: str, problems: Sequence[str]) -> str:
    """Return the message of an error about `problems` in `source`."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return f"{source}: {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def built(default: Any, *, stages: tuple[int, ...] = (), text: str | None = None) -> Any:
    """A key that acts, at these ZeRO stages alone if any are named; without a docstring it is described by `text`."""
    return _key(default, Status.BUILT, stages=stages, text=text)


def _key(default: Any, status: Status, why: str = "", stages: tuple[int, ...] = (), text: str | None = None) -> Any:
    extra: Any = {"status": status, "why": why, "stages": stages}
    return Field(default=default, description=text, json_schema_extra=extra)


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def about(field: FieldInfo) -> tuple[Status, str]:
    """Return status and reason of a field made by the functions above."""
    extra = _extra(field)
    return extra.get("status", Status.BUILT), extra.get("why", "")


def stages_of(field: FieldInfo) -> tuple[int, ...]:
    """Return the ZeRO stages at which a key acts; none: at every one."""
    stages: tuple[int, ...] = _extra(field).get("stages", ())
    return stages


def type_of(field: FieldInfo) -> Any:
    """Return the type of a field, with its annotations."""
    kind: Any = field.annotation
    for one in field.metadata:
        kind = Annotated[kind, one]
    return kind


def answer_type(field: FieldInfo) -> Any:
    """Return the type of the values that "auto" can be in a field; None if the field has no "auto"."""
    kinds = get_args(field.annotation)
    return Union[tuple(one for one in kinds if one not in (Auto, NoneType))] if Auto in kinds else None  # noqa: UP007


class Section(BaseModel):
    """An object of the config, which `parse` reads. Frozen; unknown keys are errors; null is the same as leaving the key
    out."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    renames: ClassVar[Mapping[str, str]] = {}
    """Other spellings of keys."""
    variants: ClassVar[Mapping[str, Mapping[str, "type[Section]"]]] = {}
    """Keys that hold one of several sections, by the value of the key `type` before them; missing ones are empty."""
    switch: ClassVar[str | None] = None
    """The key that turns the section on; if it is off, the other keys have no effect."""
    gives_batch: ClassVar[bool] = False
    """Whether the section, if it is on, gives the batch sizes in place of their keys, by `sizes_at`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        rows = [(Status(status), *row) for status, rows in INACTIVE.items() for row in rows]
        for status, section, keys, kind, default, why in rows:
            if section == cls.__name__ and cls.__module__.startswith("zstore."):
                for key in keys.split():
                    cls.__annotations__[key] = kind
                    setattr(cls, key, _key(default, status, why))

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Return `data` in the present form."""
        return data

    def notices(self, settings: Any) -> Iterator[Notice]:
        """Yield the errors of the section, which is on, by itself and beside other keys of the config, and the keys that do
        not act because of it."""
        return iter(())

    def prepare(self, model: Any) -> None:
        """Change a model as the section, which is on, says, before an engine takes it."""

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return (train batch, micro-batch, accumulation steps) at a world size. Raises ValueError, with advice, if there are
        none."""
        raise NotImplementedError

    @property
    def is_off(self) -> bool:
        """Whether the section's switch is off."""
        return self.switch is not None and getattr(self, self.switch) in (None, False, "none")


class Setting(NamedTuple):
    """A key that a config sets."""

    key: str
    """Dotted path, in the schema's spelling."""
    section: Section
    name: str
    value: Any
    field: FieldInfo


def settings_in(section: Section, prefix: str = "") -> Iterator[Setting]:
    """Yield the keys that are set in `section` and in the sections in it, in the order of the schema."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set:
            one = Setting(f"{prefix}{name}", section, name, getattr(section, name), field)
            if isinstance(one.value, Section):
                yield from settings_in(one.value, f"{one.key}.")
            else:
                yield one


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds, None if it holds a value."""
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def description(section: type[Section], name: str) -> str:
    """Return the docstring of a key, read from the source when it is asked for: pydantic would read it at each start."""
    if (text := section.model_fields[name].description) is not None:
        return text
    return next((found[name] for kind in section.__mro__ if name in (found := _docstrings(kind))), "")


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields that a section has beside those of its base."""
    if not issubclass(kind, Section):
        return {}
    try:
        source = inspect.getsource(kind)
    except OSError:  # it was made of a table, which has the texts of its fields
        return {}
    found = {}
    for pair in pairwise(ast.parse(source).body[0].body):  # type: ignore[attr-defined]
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                found[name] = inspect.cleandoc(text)
    return found


def known_keys(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted path, field) of each key of `section` and of the sections in it, in the order of the schema."""
    for written, key, field in spelled_keys(section):
        if written == key:
            yield key, field


def spelled_keys(section: type[Section], outer: str = "", place: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (dotted path as written, dotted path, field) of each spelling of the keys of `section` and of the sections in
    it."""
    for written, name in ({name: name for name in section.model_fields} | dict(section.renames)).items():
        field = section.model_fields[name]
        yield outer + written, place + name, field
        for inner in section.variants.get(name, {"": section_of(field)}).values():
            if inner is not None:
                yield from spelled_keys(inner, f"{outer}{written}.", f"{place}{name}.")


def acting(section: Section) -> dict[str, Any]:
    """Return the keys of `section` that act, with their values as JSON data, and the sections in it that hold any."""
    fields = type(section).model_fields.items()
    values = {name for name, field in fields if section_of(field) is None and about(field)[0] is Status.BUILT}
    found = section.model_dump(mode="json", include=values)
    inner = {
        name: acting(value)
        for name in type(section).model_fields
        if isinstance(value := getattr(section, name), Section)
    }
    found |= {name: keys for name, keys in inner.items() if keys}
    return {name: found[name] for name in type(section).model_fields if name in found}
