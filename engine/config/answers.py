"""The answers to "auto" that the caller of `initialize` gives: checked against the schema by their dotted keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from zstore.errors import ConfigError

from .keys import Section, answer_type, section_of
from .schema import ConfigSections
from .values import refusal, show

_SOURCE = "initialize(auto=...)"


@cache
def _fields() -> Mapping[str, tuple[str, list[FieldInfo]]]:
    """Return, by each spelling of a dotted key, the schema's and the fields: several if its section is one of several."""
    found: dict[str, tuple[str, list[FieldInfo]]] = {}
    for written, key, field in _spelled(ConfigSections):
        found.setdefault(written, (key, []))[1].append(field)
    return found


def _spelled(section: type[Section], outer: str = "", place: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    for written, name in ({name: name for name in section.model_fields} | dict(section.renames)).items():
        field = section.model_fields[name]
        yield outer + written, place + name, field
        for inner in section.variants.get(name, {"": section_of(field)}).values():
            if inner is not None:
                yield from _spelled(inner, f"{outer}{written}.", f"{place}{name}.")


def read_answers(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the answers in `given` as {dotted key: typed value}.

    Keys are dotted paths as in a config, other spellings included, or nested as a config is, or both; None is no answer.
    Raises ConfigError that names every key that is unknown or cannot be "auto", and every value that its key refuses.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_SOURCE}: expected a dict of config keys and values, got {type(given).__name__}")
    answers: dict[str, Any] = {}
    problems: list[str] = []
    for written, value in _flat(given):
        try:
            key, answer = _read(written, value)
            if answers.setdefault(key, answer) != answer:
                raise ValueError(f"it is given twice, as {show(answers[key])} and as {show(answer)}; keep one")
        except ValueError as error:
            problems.append(f"{written}: {error}")
    if problems:
        raise ConfigError(problem_text(_SOURCE, problems))
    return answers


def problem_text(source: str, problems: Sequence[str]) -> str:
    """Return the message of an error about `problems` in `source`."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return f"{source}: {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key as written, value), also for the keys in nested sections."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and all(map(section_of, _fields().get(key, ("", []))[1])):
            yield from _flat(value, f"{key}.")
        elif value is not None:
            yield key, value


def _read(written: str, value: object) -> tuple[str, Any]:
    """Return (key in the schema's spelling, typed value). Raises ValueError if either is wrong."""
    key, fields = _fields().get(written, ("", []))
    if not fields:
        close = difflib.get_close_matches(written, _fields(), n=1, cutoff=0.85)
        raise ValueError(f"unknown key{f'; did you mean {close[0]}?' if close else ''}")
    if any(map(section_of, fields)):
        raise ValueError(f"expected an object with keys of that section, got {show(value)}")
    kind = next((kind for field in reversed(fields) if (kind := answer_type(field)) is not None), None)
    if kind is None:
        raise ValueError(
            'a config cannot leave this key "auto", so there is nothing to answer; write it into the config'
        )
    try:
        return key, TypeAdapter(kind).validate_python(value)
    except ValidationError as failure:
        raise ValueError(refusal(kind, value, failure.errors()[0])) from None
