"""The answers to "auto" that the caller of `initialize` gives: checked against the schema by their dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zstore.errors import ConfigError

from .keys import Section, known_keys, rule_of, section_of
from .parse import nearest_key
from .schema import Settings
from .values import Rule, show

_SOURCE = "initialize(auto=...)"
_SECTIONS = {key for key, field in known_keys(Settings) if section_of(field) is not None}


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
    """Yield (dotted key as written, value); objects in place of sections are entered."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not _fields(key.split(".")):
            yield from _flat(value, f"{key}.")
        elif value is not None:
            yield key, value


def _read(written: str, value: object) -> tuple[str, Any]:
    """Return (key in the schema's spelling, typed value). Raises ValueError that says what is wrong with either."""
    parts = written.split(".")
    fields = _fields(parts)
    if not fields and written in _SECTIONS:
        raise ValueError(f"expected an object with keys of that section, got {show(value)}")
    if not fields:
        raise ValueError(f"unknown key{nearest_key(_last_section(parts), parts)}")
    rules = {key: rule for key, rule in fields if rule is not None and rule.auto}
    for key, rule in rules.items():
        return key, replace(rule, auto=False)(value)
    raise ValueError('a config cannot leave this key "auto", so there is nothing to answer; write it into the config')


def _fields(parts: list[str]) -> list[tuple[str, Rule | None]]:
    """Return (key in the schema's spelling, rule) of each field at a path that is not a section; a schedule's argument
    may be one of several schedules."""
    found: list[tuple[type[Section], str]] = [(Settings, "")]
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        below: list[tuple[type[Section], str]] = []
        for section, prefix in found:
            name = section.renames.get(part, part)
            field = section.model_fields.get(name)
            inner = _sections(section, name)
            if last and field is not None and not inner:
                below.append((section, prefix + name))
            elif not last:
                below += [(one, f"{prefix}{name}.") for one in inner]
        found = below
    return [(key, rule_of(section.model_fields[key.rpartition(".")[2]])) for section, key in found]


def _sections(section: type[Section], name: str) -> list[type[Section]]:
    """Return the sections that the key `name` of `section` may hold."""
    field = section.model_fields.get(name)
    inner = None if field is None else section_of(field)
    return [*section.variants.get(name, {}).values()] or ([] if inner is None else [inner])


def _last_section(parts: list[str]) -> type[Section]:
    """Return the section that an unknown key stands in, as far as its path is known; of several, the first."""
    section: type[Section] = Settings
    for part in parts[:-1]:
        section = next(iter(_sections(section, section.renames.get(part, part))), section)
    return section
