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
    description,
    known_keys,
    section_of,
    settings_in,
    stages_of,
    status_of,
    type_of,
)
from .sections import ConfigSections, ZeroSection
from .values import check, expected, show

Variants = Mapping[str, type[Section]]
_SECRET_KEY = "zstore.storage_options"
_MIN_SIMILARITY = 0.72
"""Minimum difflib similarity of a key for it to be suggested in a message."""
_MAX_SECTIONS = 2
"""Maximum number of sections that a message names for a key; a key such as "enabled" is in more."""
_MAX_LISTED_KEYS = 8
"""Maximum number of keys of a section that a message lists."""
_MIN_PART_LENGTH = 5
"""Minimum length of a part of a name that identifies a key."""

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=[ \t\r\n]*[\]}}])")


def load_jsonc(text: str, source: str) -> dict[str, Any]:
    """Return the object in `text`; `source` names it in errors.

    Raises ConfigError, with source, line and column, for text that is not JSON, a duplicate key, a number that is too
    large, and a value that is not an object.
    """
    plain = _COMMENT.sub(_without_comment, text.removeprefix("\ufeff"))
    plain = _TRAILING_COMMA.sub(lambda match: " " if match.group() == "," else match.group(), plain)
    try:
        value = json.loads(plain, object_pairs_hook=_object, parse_float=_finite_number, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        if plain.lstrip()[:1] == "{" and (value := _hjson(plain)) is not None:
            return value
        following = plain[error.pos :].split(maxsplit=1)
        match = f"got {following[0][:20]!r}" if following else "got the end of the text"
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: {error.msg}, {match}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply for a config") from None
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


def _without_comment(match: re.Match[str]) -> str:
    """Return a string unchanged, and a comment as white space of the same length."""
    text = match.group()
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{duplicate}" is given twice in one object; keep one')
    return parsed


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
        """The path as written of each key that is set, by its dotted path in the schema's spelling."""

    def section(
        self, kind: type[Section], raw: object, path: str = "", written: str = "", siblings: Variants | None = None
    ) -> Section | None:
        """Return the section in `raw`, at `path`; None if it is not an object or lacks a required key. `siblings` are the
        variants from which it was selected."""
        try:
            raw_values = self._values_by_name(kind, raw)
        except ValueError as error:
            self.errors.append(Notice(Status.INVALID, str(error), (written,)))
            return None
        values: dict[str, Any] = {}
        for name, field in kind.model_fields.items():
            spelling, value = raw_values.pop(name, (name, None))
            inner, variants = section_of(field), kind.variants.get(name, {})
            if variants:
                inner, value = variants.get(values.get("type", "")), {} if value is None else value
                if inner is None:  # the type is wrong
                    continue
            key, written_key = _dotted(path, name), _dotted(written, spelling)
            self.written[key] = written_key
            try:
                if inner is not None and value is not None:
                    if (section := self.section(inner, value, key, written_key, variants)) is not None:
                        values[name] = section
                elif value is not None:
                    values[name] = check(type_of(field), value, _reader(kind, name))
                elif field.is_required():
                    raise ValueError(f"the key is missing; expected {expected(type_of(field))}")
            except ValueError as error:
                self.errors.append(Notice(Status.INVALID, str(error), (written_key,)))
        for name in raw_values:
            text = _unknown_key(kind, path, name, siblings or {}) if isinstance(name, str) else "keys must be strings"
            self.errors.append(Notice(Status.INVALID, text, (_dotted(written, str(name)),)))
        if any(field.is_required() and name not in values for name, field in kind.model_fields.items()):
            return None
        return kind.model_construct(set(values), **values)

    def _values_by_name(self, kind: type[Section], raw: object) -> dict[Any, tuple[str, object]]:
        """Return (name as written, value) of each key, by name. Raises ValueError if `raw` is not an object, or gives a key
        two values."""
        raw = kind.rewrite(raw)
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"expected an object with keys such as {', '.join(list(kind.model_fields)[:3])}; got {show(raw)}"
            )
        known = kind.model_fields
        raw_values = {name: (name, value) for name, value in raw.items() if value is not None or name not in known}
        for spelling, name in kind.renames.items():
            _, value = raw_values.pop(spelling, (spelling, None))
            if value is not None and (other := raw_values.setdefault(name, (spelling, value))[1]) != value:
                values = f"one is {show(value)} and one {show(other)}"
                raise ValueError(f'"{spelling}" and "{name}" are the same setting, but {values}; keep one')
        return raw_values


@cache
def _reader(kind: type[Section], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(type_of(kind.model_fields[name]))


def _dotted(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name


def parse(raw: Mapping[str, Any]) -> tuple[ConfigSections, list[Notice], Mapping[str, str]]:
    """Return the settings in `raw` (invalid if there are errors), all notices, and the path as written of each key that
    is set, by its dotted path."""
    reader = _Reader()
    read = reader.section(ConfigSections, raw)
    settings = read if isinstance(read, ConfigSections) else ConfigSections()
    notices, written = reader.errors, reader.written
    invalid_keys = {key for error in notices for key in error.keys}
    for setting in settings_in(settings):
        if not setting.section.is_off and setting.value != setting.field.default:
            effect = _effect(setting, settings, written[setting.key])
            notices += [effect] if effect.status is not Status.ACTIVE else []
    notices += [notice for notice in rules(settings) if not _is_consequence(notice, invalid_keys)]
    return settings, notices, written


def _effect(setting: Setting, settings: ConfigSections, written: str) -> Notice:
    """Return the effect of a key considering only the stage and its section's switch; the text is empty if the key is
    active."""
    (status, why), stages, stage = status_of(setting.field), stages_of(setting.field), settings.zero_optimization.stage
    if setting.section.is_off and setting.name != setting.section.switch:
        return Notice(Status.NO_EFFECT, f"{setting.section.switch} turns the section off", (written,))
    if status is Status.REFUSED and setting.value != setting.field.default:
        return Notice(status, f"{show(setting.value)} is not supported: {why}", (written,))
    if status is not Status.ACTIVE and setting.value == setting.field.default:
        return Notice(Status.NO_EFFECT, "this is what the engine does anyway", (written,))
    if stages and stage not in stages and setting.value != setting.field.default:
        listed = " and ".join(", ".join(map(str, stages)).rsplit(", ", 1))
        reason = "parameters are sharded at stage 3 only" if stages == [3] else f"it applies to stages {listed}"
        return Notice(Status.NO_EFFECT, f"{reason}, and the stage is {stage}", (written,))
    return Notice(status, why, (written,))


def _is_consequence(notice: Notice, invalid_keys: set[str]) -> bool:
    """Return whether an error may result from a previous one: one of its keys, or a key in its section, is invalid."""
    contains_invalid = len(notice.keys) == 1 and any(key.startswith(f"{notice.keys[0]}.") for key in invalid_keys)
    return notice.is_error and (contains_invalid or not invalid_keys.isdisjoint(notice.keys))


@dataclass(frozen=True, kw_only=True)
class KeyFact:
    """A key that a config sets."""

    key: str
    """Dotted path, as written."""
    value: str
    """As JSON, shortened."""
    status: str
    """"active", "no effect", "not implemented", "refused", or "error"."""
    text: str
    """The key's effect; for an inactive or invalid key, the reason."""


def explain(raw: Mapping[str, Any]) -> tuple[list[KeyFact], list[Notice]]:
    """Return a fact about each key that `raw` sets, keys with an error first, and every error."""
    settings, notices, written = parse(raw)
    errors = [notice for notice in notices if notice.is_error]
    facts_by_key = {key: (_value_at(raw, key), error) for error in errors for key in error.keys}
    notice_by_key = {notice.key: notice for notice in notices if not notice.is_error}
    for setting in settings_in(settings):
        key = written[setting.key]
        notice = next((notice_by_key[name] for name in (key, *_with_outer(setting.key)) if name in notice_by_key), None)
        value = setting.section.model_dump(mode="json", include={setting.name})[setting.name]
        notice = notice or _effect(setting, settings, key)
        text = notice.text or description(type(setting.section), setting.name)
        facts_by_key.setdefault(key, (value, replace(notice, text=text)))
    facts = [
        KeyFact(
            key=key,
            value="an object, hidden" if key == _SECRET_KEY else show(value),
            status=notice.status.value,
            text=" ".join(notice.text.split()),
        )
        for key, (value, notice) in facts_by_key.items()
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


def _unknown_key(section: type[Section], path: str, name: str, siblings: Variants) -> str:
    """Return the message about an unknown key of `section`, at `path`. It names the sections that have the key, else a key
    with a similar name, else the active keys of the section if they are few."""
    variants = [kind for kind, other in siblings.items() if name in other.model_fields]
    elsewhere = f" here ({' and '.join(variants)} {'have' if variants[1:] else 'has'} it)" if variants else ""
    unknown = f"unknown key{elsewhere}"
    sections = {key.rpartition(".")[0] for key, _ in known_keys(ConfigSections) if key.rpartition(".")[2] == name}
    sections -= {path}
    if 0 < len(sections) <= _MAX_SECTIONS:
        places = " or ".join(f"in {outer}" if outer else "at the top of the config" for outer in sorted(sections))
        return f"{unknown}; it belongs {places}"
    spellings = [*section.model_fields, *section.renames]
    containing = {section.renames.get(key, key) for key in spellings if name in key and len(name) >= _MIN_PART_LENGTH}
    close = difflib.get_close_matches(name, spellings, n=1, cutoff=_MIN_SIMILARITY)
    close = list(containing) if len(containing) == 1 else close
    if close:
        return f"{unknown}; did you mean {_dotted(path, close[0])}?"
    keys = [key for key, field in section.model_fields.items() if status_of(field)[0] is Status.ACTIVE]
    return f"{unknown}; the keys there are {', '.join(keys)}" if len(keys) <= _MAX_LISTED_KEYS else unknown


def rules(settings: ConfigSections) -> Iterator[Notice]:
    """Yield the keys that have no effect because of other keys of this config, and the conflicts between keys."""
    if settings.fp16.enabled is True and settings.bf16.enabled is True:
        yield Notice(Status.INVALID, "both are true; set one of them to false", ("fp16.enabled", "bf16.enabled"))
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if getattr(settings, key) and settings.steps_per_print == 0:
            yield Notice(Status.NO_EFFECT, "it adds to the progress lines, which steps_per_print: 0 disables", (key,))
    yield from _zero_rules(settings.zero_optimization)
    yield from _zstore_rules(settings)
    for _, section in settings.enabled_sections():
        yield from section.notices(settings)


def _zero_rules(zero: ZeroSection) -> Iterator[Notice]:
    optimizer, param, prefix = zero.offload_optimizer, zero.offload_param, "zero_optimization."
    if zero.stage != 3 and not param.is_off:
        text = (
            f"parameters are offloaded at stage 3 only. At stage {zero.stage} they stay unsharded on the device; set "
            '"stage": 3 to offload them'
        )
        yield Notice(Status.NOT_IMPLEMENTED, text, (f"{prefix}offload_param",))
    if optimizer.device == "cpu" and optimizer.nvme_path is not None:
        yield Notice(Status.NO_EFFECT, 'the device is "cpu"', (f"{prefix}offload_optimizer.nvme_path",))
    for name, section in (("offload_optimizer", optimizer), *((("offload_param", param),) if zero.stage == 3 else ())):
        if section.device == "nvme" and section.nvme_path is None:
            text = 'the device is "nvme"; give the path of a folder on the drive'
            yield Notice(Status.INVALID, text, (f"{prefix}{name}.nvme_path", f"{prefix}{name}.device"))
    if zero.stage == 0 and not optimizer.is_off:
        text = f'"{optimizer.device}" needs stage 1, 2 or 3; got stage 0'
        yield Notice(Status.INVALID, text, (f"{prefix}offload_optimizer.device", f"{prefix}stage"))
    if zero.stage < 3 and zero.zero_hpz_partition_size > 1:
        text = f"it needs stage 3, got stage {zero.stage}, where every rank has all parameters; set stage 3, or leave it out"
        yield Notice(Status.INVALID, text, (f"{prefix}zero_hpz_partition_size", f"{prefix}stage"))


def _zstore_rules(settings: ConfigSections) -> Iterator[Notice]:
    zero, zstore, optimizer = settings.zero_optimization, settings.zstore, settings.optimizer
    if zstore.quantized_gradient_bits != 4 and not zero.zero_quantized_gradients:
        text = "zero_optimization.zero_quantized_gradients is not set"
        yield Notice(Status.NO_EFFECT, text, ("zstore.quantized_gradient_bits",))
    on_drive = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none")
    if zstore.activations != "disk" and zstore.activations_path is not None:
        yield Notice(Status.NO_EFFECT, 'zstore.activations is not "disk"', ("zstore.activations_path",))
    if zstore.activations == "disk" and zstore.activations_path is None and not on_drive:
        text = '"disk" needs a folder, and no other section names one: give its absolute path'
        yield Notice(Status.INVALID, text, ("zstore.activations", "zstore.activations_path"))
    bf16_requests = {
        "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
        "optimizer.params.fp32_optimizer_states": optimizer is not None and not optimizer.params.fp32_optimizer_states,
    }
    for key in (key for key, value in bf16_requests.items() if value and zstore.moments not in (None, "bf16")):
        text = f'one requests moments in bf16, the other in "{zstore.moments}"; keep one'
        yield Notice(Status.INVALID, text, (key, "zstore.moments"))
