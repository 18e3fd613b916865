"""Reads a config into `ConfigSections`, and says of every key whether it acts, does not, or is wrong."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .keys import ConfigProblem, Notice, Section, Status, about, description, known_keys, type_of
from .rules import contradictions, idle_keys
from .schema import ConfigSections
from .values import expected, refusal, show

_SECRET = "zstore.storage_options"
_REFUSED = "is not supported: "
_CLOSE = 0.72
"""How close a key of the same section must be to be guessed, as difflib counts."""
_MOST_HOMES = 2
"""Most sections that are named as the home of a key: one like "enabled" has too many."""
_MOST_KEYS = 8
"""Keys of a section that are listed."""
_TELLING = 5
"""Letters below which a part of a name is ambiguous."""


def parse(raw: Mapping[str, Any]) -> tuple[ConfigSections, list[ConfigProblem], list[Notice]]:
    """Return settings, problems and notices of `raw`, all of them; with problems, the settings mean nothing."""
    problems: list[ConfigProblem] = []
    sound, removed = dict(raw), set[tuple[str, ...]]()
    while True:
        try:
            settings = ConfigSections.model_validate(sound)
            break
        except ValidationError as failure:
            # Wrong keys are taken out and the others are read again, so that checks across keys are made too.
            seen, before = sound, frozenset(removed)
            for error in failure.errors(include_url=False):
                path, problem = _problem(seen, error)
                wrong = path
                if _is_missing(error, path):  # then its section goes, or the one around it
                    wrong = path[:-1]
                    while wrong in before:
                        wrong = wrong[:-1]
                # Else it was taken out, alone or with its section, or is refused by the other members of a union too.
                if path not in removed and not any(path[:depth] in before for depth in range(1, len(path))):
                    problems.append(problem)
                removed |= {path, wrong}
                sound = _without(sound, wrong)
            if sound == seen:  # the wrong key was written as another one, in an older form
                sound = _without(sound, path[:1])
    broken = {key for problem in problems for key in problem.keys}
    for section in ("optimizer", "scheduler"):
        if f"{section}.type" in broken:  # Its params belong to a type that is not offered.
            problems = [problem for problem in problems if not problem.keys[0].startswith(f"{section}.params")]
    notices: list[Notice] = []
    for one in _written(settings, sound):
        status, why = about(one.field)
        if status is Status.BUILT or one.is_off or one.value == one.field.default:
            continue
        if status is Status.REFUSED:
            problems.append(ConfigProblem((one.key,), f"{show(one.value)} {_REFUSED}{why}"))
        else:
            notices.append(Notice(one.key, f"{status.value}: {why}"))
    problems += [problem for problem in contradictions(settings) if not broken & set(problem.keys)]
    return settings, problems, [*notices, *idle_keys(settings)]


@dataclass(frozen=True, kw_only=True)
class KeyFact:
    """A key that a config sets."""

    key: str
    """Dotted path, as written."""
    value: str
    """As JSON, shortened."""
    status: str
    """"acts", "no effect", "not built", "refused", or "error"."""
    text: str
    """The key's effect; for one that does not act, or is wrong, the reason."""


def explain(raw: Mapping[str, Any]) -> tuple[list[KeyFact], list[ConfigProblem]]:
    """Return a fact about each key that `raw` sets, those with a problem first, and every problem."""
    settings, problems, notices = parse(raw)
    wrong = {key: problem.what for problem in problems for key in problem.keys}
    said = {notice.key: notice.message for notice in notices}
    facts: dict[str, tuple[object, str, str]] = {}
    for key, what in wrong.items():
        facts[key] = (_value_at(raw, key), "refused" if _REFUSED in what else "error", what)
    for one in _written(settings, raw):
        outer = one.key.rpartition(".")[0]
        notice = next((said[key] for key in (f"{outer}.{one.name}", *_with_outer(one.key)) if key in said), None)
        status, text = Status.BUILT.value, ""
        if one.key in wrong:
            continue
        if notice is not None:
            first, _, reason = notice.partition(": ")
            is_status = first in {one.value for one in Status}
            status, text = (first, reason) if is_status else (status, notice)
        elif one.is_off and one.name != one.section.switch:
            status, text = Status.NO_EFFECT.value, f"{one.section.switch} turns the section off"
        elif about(one.field)[0] is not Status.BUILT:
            status, text = Status.NO_EFFECT.value, "it asks for what happens anyway"
        else:
            text = description(one.section, one.name)
        facts[one.key] = (one.value, status, text)
    shown = {key: "an object, not shown" if key == _SECRET else show(value) for key, (value, _, _) in facts.items()}
    found = [
        KeyFact(key=key, value=shown[key], status=status, text=" ".join(text.split()))
        for key, (_, status, text) in facts.items()
    ]
    return found, problems


def _with_outer(key: str) -> Iterator[str]:
    """Yield a dotted key and those of the sections around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _value_at(raw: Any, key: str) -> object:
    """Return the value at a dotted key, as written; None if there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def _problem(raw: Any, error: ErrorDetails) -> tuple[tuple[str, ...], ConfigProblem]:
    """Return the path of the key that pydantic's `error` is about, as the schema spells it, and the message, with the key
    as it was written."""
    section: type[Section] | None = ConfigSections
    field: FieldInfo | None = None
    variants: Mapping[str, type[Section]] = {}
    path: list[str] = []
    written: list[str] = []
    for name in map(str, error["loc"]):
        if section is None:  # inside a value
            break
        holder = section
        path.append(name)
        written.append(_spelled(raw, section, name))
        field = section.model_fields.get(name)
        section = section.section_at(name, raw)
        raw = raw.get(written[-1]) if isinstance(raw, Mapping) else None
        if section is not None:
            variants = holder.variants.get(name, {})
    key = ".".join(written)
    if error["type"] == "extra_forbidden":
        others = [kind for kind, other in variants.items() if path[-1] in other.model_fields]
        here = f" here ({' and '.join(others)} {'have' if others[1:] else 'has'} it)" if others else ""
        message = f"unknown key{here}{_nearest(holder, path)}"
    elif field is None or section is not None:
        message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    elif _is_missing(error, path):
        message = f"the key is missing; expected {expected(type_of(field))}"
    else:
        message = refusal(type_of(field), error["input"] if raw is None else raw, error)
    return tuple(path), ConfigProblem((key,), message)


def _is_missing(error: ErrorDetails, path: Sequence[str]) -> bool:
    """Return whether `error` is about a key that is not there, and not about an item of a value."""
    return error["type"] == "missing" and len(error["loc"]) == len(path)


def _nearest(section: type[Section], path: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown key of `section`, the last part of `path`: its sections if it is known
    elsewhere, else the key that is meant if one is really close, else the keys of the section that act, if they are few."""
    *outer, name = path
    homes = {key.rpartition(".")[0] for key, _ in known_keys(ConfigSections) if key.rpartition(".")[2] == name}
    homes -= {".".join(outer)}
    if 0 < len(homes) <= _MOST_HOMES:
        return (
            f"; it belongs {' or '.join(f'in {one}' if one else 'at the top of the config' for one in sorted(homes))}"
        )
    here = [*section.model_fields, *section.renames]
    longer = {section.renames.get(key, key) for key in here if name in key and len(name) >= _TELLING}
    close = list(longer) if len(longer) == 1 else difflib.get_close_matches(name, here, n=1, cutoff=_CLOSE)
    if close:
        return f"; did you mean {'.'.join([*outer, close[0]])}?"
    keys = [key for key, field in section.model_fields.items() if about(field)[0] is Status.BUILT]
    return f"; the keys there are {', '.join(keys)}" if len(keys) <= _MOST_KEYS else ""


def _spelled(raw: Any, section: type[Section], name: str) -> str:
    """Return how `raw` spells the key `name` of `section`."""
    if not isinstance(raw, Mapping) or raw.get(name) is not None:
        return name
    return next((other for other, target in section.renames.items() if target == name and other in raw), name)


def _without(raw: Any, path: Sequence[str], section: type[Section] | None = ConfigSections) -> Any:
    """Return a copy of `raw` without the key at `path`, however spelled."""
    if not path or section is None or not isinstance(raw, Mapping):
        return {}
    name, *rest = path
    names = {name, *(other for other, target in section.renames.items() if target == name)}
    copy = {other: value for other, value in raw.items() if str(other) not in names}
    spelled = _spelled(raw, section, name)
    if rest and spelled in raw:
        copy[spelled] = _without(raw[spelled], rest, section.section_at(name, raw))
    return copy


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A key that is set in a section."""

    key: str
    """Dotted path, as written."""
    value: Any
    section: type[Section]
    name: str
    is_off: bool
    """Whether the section is off."""

    @property
    def field(self) -> FieldInfo:
        return self.section.model_fields[self.name]


def _written(section: Section, raw: Any, prefix: str = "") -> Iterator[_Written]:
    """Yield the keys that are set in `section`, which was `raw`, and in its sections."""
    kind, off = type(section), section.is_off
    for name in (name for name in kind.model_fields if name in section.model_fields_set):
        value, spelled = getattr(section, name), _spelled(raw, kind, name)
        if isinstance(value, Section):
            inner = raw.get(spelled) if isinstance(raw, Mapping) else None
            yield from _written(value, inner, f"{prefix}{spelled}.")
        else:
            yield _Written(key=f"{prefix}{spelled}", value=value, section=kind, name=name, is_off=off)
