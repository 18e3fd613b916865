"""Reads a config into `ConfigSections`, with a notice for every inactive or wrong key.

A file is JSON with comments (`//`, `#`, `/* */`), trailing commas and a byte order mark, or Hjson, as in DeepSpeed, if the
package `hjson` is installed.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from pydantic import TypeAdapter

from zstore.errors import ConfigError

from .keys import (
    Notice,
    Section,
    Setting,
    Status,
    about,
    description,
    known_keys,
    section_of,
    settings_in,
    stages_of,
    type_of,
)
from .sections import ConfigSections, ZeroSection
from .values import check, expected, show

Variants = Mapping[str, type[Section]]
_SECRET = "zstore.storage_options"
_CUTOFF = 0.72
"""Least similarity, as difflib counts, of a key of the section that a message suggests."""
_MAX_HOMES = 2
"""Sections of a key that a message names: a key like "enabled" is in too many."""
_MAX_KEYS = 8
"""Keys of a section that a message lists."""
_MIN_PART = 5
"""Letters below which a part of a name is ambiguous."""

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=[ \t\r\n]*[\]}}])")


def load_jsonc(text: str, source: str) -> dict[str, Any]:
    """Return the object in `text`; `source` names it in errors.

    Raises ConfigError with source, line and column for text that is not JSON, for a key given twice, a number that is too
    large, and a value that is not an object.
    """
    plain = _COMMENT.sub(_without_comment, text.removeprefix("\ufeff"))
    plain = _TRAILING_COMMA.sub(lambda found: " " if found.group() == "," else found.group(), plain)
    try:
        value = json.loads(plain, object_pairs_hook=_object, parse_float=_finite_number, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        if plain.lstrip()[:1] == "{" and (value := _hjson(plain)) is not None:
            return value
        following = plain[error.pos :].split(maxsplit=1)
        found = f"got {following[0][:20]!r}" if following else "got the end of the text"
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: {error.msg}, {found}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep for a config") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{source}: expected an object, starting with "{{", got {type(value).__name__}')
    return value


def _hjson(text: str) -> dict[str, Any] | None:
    """Return the object in `text` as Hjson; None if it is not one, or the package is not installed."""
    if find_spec("hjson") is None:
        return None
    try:
        value = import_module("hjson").loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _without_comment(found: re.Match[str]) -> str:
    """Return a string unchanged, and a comment as white space of the same length."""
    text = found.group()
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{twice}" is given twice in one object; keep one')
    return members


def _finite_number(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {literal} is too large")
    return value


def _not_finite(literal: str) -> NoReturn:
    raise ValueError(f"expected a number, got {literal}")


class _Reader:
    """Reads objects into sections, and collects every error."""

    def __init__(self) -> None:
        self.errors: list[Notice] = []
        self.written: dict[str, str] = {}
        """The path as written, by the dotted path (in the schema's spelling) of each key that is set."""

    def section(
        self, kind: type[Section], raw: object, path: str = "", written: str = "", others: Variants | None = None
    ) -> Section | None:
        """Return the section in `raw`, at `path`, one of the variants `others`; None if it is no object or lacks a required
        key."""
        try:
            given = self._by_name(kind, raw)
        except ValueError as error:
            self.errors.append(Notice(Status.WRONG, str(error), (written,)))
            return None
        values: dict[str, Any] = {}
        for name, field in kind.model_fields.items():
            spelling, value = given.pop(name, (name, None))
            inner, variants = section_of(field), kind.variants.get(name, {})
            if variants:
                inner, value = variants.get(values.get("type", "")), {} if value is None else value
                if inner is None:  # the type is wrong
                    continue
            key, place = _dotted(path, name), _dotted(written, spelling)
            self.written[key] = place
            try:
                if inner is not None and value is not None:
                    if (section := self.section(inner, value, key, place, variants)) is not None:
                        values[name] = section
                elif value is not None:
                    values[name] = check(type_of(field), value, _reader(kind, name))
                elif field.is_required():
                    raise ValueError(f"the key is missing; expected {expected(type_of(field))}")
            except ValueError as error:
                self.errors.append(Notice(Status.WRONG, str(error), (place,)))
        for name in given:
            message = _unknown(kind, path, name, others or {}) if isinstance(name, str) else "Keys should be strings"
            self.errors.append(Notice(Status.WRONG, message, (_dotted(written, str(name)),)))
        if any(field.is_required() and name not in values for name, field in kind.model_fields.items()):
            return None
        return kind.model_construct(set(values), **values)

    def _by_name(self, kind: type[Section], raw: object) -> dict[Any, tuple[str, object]]:
        """Return (name as written, value) of each key, by name. Raises ValueError if `raw` is no object, or has two values
        for a key."""
        raw = kind.rewrite(raw)
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"expected an object with keys as {', '.join(list(kind.model_fields)[:3])}; got {show(raw)}"
            )
        known = kind.model_fields
        given = {name: (name, value) for name, value in raw.items() if value is not None or name not in known}
        for spelling, name in kind.renames.items():
            _, value = given.pop(spelling, (spelling, None))
            if value is not None and (other := given.setdefault(name, (spelling, value))[1]) != value:
                values = f"one is {show(value)} and one {show(other)}"
                raise ValueError(f'"{spelling}" and "{name}" are the same setting, but {values}; keep one')
        return given


@cache
def _reader(kind: type[Section], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(type_of(kind.model_fields[name]))


def _dotted(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name


def parse(raw: Mapping[str, Any]) -> tuple[ConfigSections, list[Notice], Mapping[str, str]]:
    """Return the settings in `raw`, which are meaningless with an error, all notices, and, by the dotted path of each key that
    is set, the path as written."""
    reader = _Reader()
    read = reader.section(ConfigSections, raw)
    settings = read if isinstance(read, ConfigSections) else ConfigSections()
    notices, written = reader.errors, reader.written
    broken = {key for error in notices for key in error.keys}
    for one in settings_in(settings):
        if not one.section.is_off and one.value != one.field.default:
            effect = _effect(one, settings, written[one.key])
            notices += [effect] if effect.status is not Status.BUILT else []
    notices += [notice for notice in rules(settings) if not _follows(notice, broken)]
    return settings, notices, written


def _effect(one: Setting, settings: ConfigSections, written: str) -> Notice:
    """Return the effect of a key regardless of others, except for the stage and its section's switch; the text is empty if
    the key acts."""
    (status, why), stages, stage = about(one.field), stages_of(one.field), settings.zero_optimization.stage
    if one.section.is_off and one.name != one.section.switch:
        return Notice(Status.NO_EFFECT, f"{one.section.switch} turns the section off", (written,))
    if status is Status.REFUSED and one.value != one.field.default:
        return Notice(status, f"{show(one.value)} is not supported: {why}", (written,))
    if status is not Status.BUILT and one.value == one.field.default:
        return Notice(Status.NO_EFFECT, "this is the case anyway", (written,))
    if stages and stage not in stages and one.value != one.field.default:
        listed = " and ".join(", ".join(map(str, stages)).rsplit(", ", 1))
        acts = "parameters are sharded at stage 3 only" if stages == [3] else f"it acts at stages {listed}"
        return Notice(Status.NO_EFFECT, f"{acts}, and the stage is {stage}", (written,))
    return Notice(status, why, (written,))


def _follows(notice: Notice, broken: set[str]) -> bool:
    """Return whether an error may be a consequence of another one: one of its keys, or a key of its section, is wrong."""
    inside = len(notice.keys) == 1 and any(key.startswith(f"{notice.keys[0]}.") for key in broken)
    return notice.is_error and (inside or not broken.isdisjoint(notice.keys))


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
    """The key's effect; for an inactive or wrong key, the reason."""


def explain(raw: Mapping[str, Any]) -> tuple[list[KeyFact], list[Notice]]:
    """Return a fact about each key that `raw` sets, keys with an error first, and every error."""
    settings, notices, written = parse(raw)
    errors = [notice for notice in notices if notice.is_error]
    found = {key: (_value_at(raw, key), error) for error in errors for key in error.keys}
    reported = {notice.key: notice for notice in notices if not notice.is_error}
    for one in settings_in(settings):
        key = written[one.key]
        notice = next((reported[name] for name in (key, *_with_outer(one.key)) if name in reported), None)
        value = one.section.model_dump(mode="json", include={one.name})[one.name]
        notice = notice or _effect(one, settings, key)
        text = notice.text or description(type(one.section), one.name)
        found.setdefault(key, (value, replace(notice, text=text)))
    facts = [
        KeyFact(
            key=key,
            value="an object, not shown" if key == _SECRET else show(value),
            status=notice.status.value,
            text=" ".join(notice.text.split()),
        )
        for key, (value, notice) in found.items()
    ]
    return facts, errors


def _with_outer(key: str) -> Iterator[str]:
    """Yield a dotted key and the keys of its outer sections."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _value_at(raw: Any, key: str) -> object:
    """Return the value at a dotted key, as written; None if there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def _unknown(section: type[Section], path: str, name: str, others: Variants) -> str:
    """Return the message about an unknown key of `section`, at `path`, one of the variants `others`: the sections that have
    such a key, else a key with a similar name, else the keys of the section that act, if they are few."""
    having = [kind for kind, other in others.items() if name in other.model_fields]
    here = f" here ({' and '.join(having)} {'have' if having[1:] else 'has'} it)" if having else ""
    unknown = f"unknown key{here}"
    homes = {key.rpartition(".")[0] for key, _ in known_keys(ConfigSections) if key.rpartition(".")[2] == name}
    homes -= {path}
    if 0 < len(homes) <= _MAX_HOMES:
        places = " or ".join(f"in {one}" if one else "at the top of the config" for one in sorted(homes))
        return f"{unknown}; it belongs {places}"
    spellings = [*section.model_fields, *section.renames]
    longer = {section.renames.get(key, key) for key in spellings if name in key and len(name) >= _MIN_PART}
    close = list(longer) if len(longer) == 1 else difflib.get_close_matches(name, spellings, n=1, cutoff=_CUTOFF)
    if close:
        return f"{unknown}; did you mean {_dotted(path, close[0])}?"
    keys = [key for key, field in section.model_fields.items() if about(field)[0] is Status.BUILT]
    return f"{unknown}; the keys there are {', '.join(keys)}" if len(keys) <= _MAX_KEYS else unknown


def rules(settings: ConfigSections) -> Iterator[Notice]:
    """Yield the keys that have no effect with the other keys of this config, and the conflicts between keys."""
    if settings.fp16.enabled is True and settings.bf16.enabled is True:
        yield Notice(Status.WRONG, "both are true; set one of them to false", ("fp16.enabled", "bf16.enabled"))
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if getattr(settings, key) and settings.steps_per_print == 0:
            yield Notice(Status.NO_EFFECT, "its line is part of the progress, and steps_per_print is 0", (key,))
    yield from _rules_of_zero(settings.zero_optimization)
    yield from _rules_of_zstore(settings)
    for _, section in settings.sections_on():
        yield from section.notices(settings)


def _rules_of_zero(zero: ZeroSection) -> Iterator[Notice]:
    state, parameters, prefix = zero.offload_optimizer, zero.offload_param, "zero_optimization."
    if zero.stage != 3 and not parameters.is_off:
        text = (
            f"parameters are offloaded at stage 3 only. At stage {zero.stage} they stay whole on the device; write "
            '"stage": 3 to offload them'
        )
        yield Notice(Status.NOT_BUILT, text, (f"{prefix}offload_param",))
    if state.device == "cpu" and state.nvme_path is not None:
        yield Notice(Status.NO_EFFECT, 'the device is "cpu"', (f"{prefix}offload_optimizer.nvme_path",))
    for name, section in (("offload_optimizer", state), *((("offload_param", parameters),) if zero.stage == 3 else ())):
        if section.device == "nvme" and section.nvme_path is None:
            text = 'the device is "nvme"; give the path of a folder on the drive'
            yield Notice(Status.WRONG, text, (f"{prefix}{name}.nvme_path", f"{prefix}{name}.device"))
    if zero.stage == 0 and not state.is_off:
        text = f'"{state.device}" needs stage 1, 2 or 3; got stage 0'
        yield Notice(Status.WRONG, text, (f"{prefix}offload_optimizer.device", f"{prefix}stage"))
    if zero.stage < 3 and zero.zero_hpz_partition_size > 1:
        text = f"it needs stage 3, got stage {zero.stage}, where every rank has all parameters; set stage 3, or leave it out"
        yield Notice(Status.WRONG, text, (f"{prefix}zero_hpz_partition_size", f"{prefix}stage"))


def _rules_of_zstore(settings: ConfigSections) -> Iterator[Notice]:
    zero, own, optimizer = settings.zero_optimization, settings.zstore, settings.optimizer
    if own.quantized_gradient_bits != 4 and not zero.zero_quantized_gradients:
        text = "zero_optimization.zero_quantized_gradients is not set"
        yield Notice(Status.NO_EFFECT, text, ("zstore.quantized_gradient_bits",))
    on_drive = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none")
    if own.activations != "disk" and own.activations_path is not None:
        yield Notice(Status.NO_EFFECT, 'zstore.activations is not "disk"', ("zstore.activations_path",))
    if own.activations == "disk" and own.activations_path is None and not on_drive:
        text = '"disk" needs a folder, and nothing else is on a drive: give the absolute path of one'
        yield Notice(Status.WRONG, text, ("zstore.activations", "zstore.activations_path"))
    asked = {
        "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
        "optimizer.params.fp32_optimizer_states": optimizer is not None and not optimizer.params.fp32_optimizer_states,
    }
    for key in (key for key, value in asked.items() if value and own.moments not in (None, "bf16")):
        text = f'one asks for moments in bf16, one for "{own.moments}"; keep one'
        yield Notice(Status.WRONG, text, (key, "zstore.moments"))
