"""From what was written to `Settings`: every problem is found and named by its key, and every key that does not act."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .keys import Section, Status, about, known_keys, rule_of
from .schema import Settings
from .values import Anything, is_off, show

_EVERY_KEY = tuple(path for path, _ in known_keys(Settings))

_CLOSE = 0.72
"""How close a key of the same section must be to be guessed, as difflib counts."""
_CLOSE_ELSEWHERE = 0.85
"""How close a key of another section must be."""
_MOST_HOMES = 2
"""Sections that are named as the home of a key: one like "enabled" has too many to mean any."""
_MOST_KEYS = 8
"""Keys of a section that are listed."""
_TELLING = 5
"""Letters without which a part of a name says little."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A key that was set and does not act, or not as it could be read."""

    key: str
    """Dotted path, as written."""
    message: str
    """What happens instead, or why nothing is left to do."""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong, and the keys that it is about."""

    keys: tuple[str, ...]
    message: str


def parse(raw: Mapping[str, Any]) -> tuple[Settings, list[Problem], list[Notice]]:
    """Return settings, problems and notices of `raw`, all of them; with problems, the settings mean nothing."""
    problems: list[Problem] = []
    sound = dict(raw)
    while True:
        try:
            settings = Settings.model_validate(sound)
            break
        except ValidationError as failure:
            # What is wrong is taken out and the rest is read again, so that checks across keys are made too.
            seen = sound
            for error in failure.errors(include_url=False):
                path = tuple(map(str, error["loc"]))
                problems.append(_problem(seen, path, error))
                sound = _without(sound, path)
    broken = {key for problem in problems for key in problem.keys}
    for section in ("optimizer", "scheduler"):
        if f"{section}.type" in broken:  # Its params belong to a type that is not offered.
            problems = [problem for problem in problems if not problem.keys[0].startswith(f"{section}.params")]
    found, notices = _review(settings, sound)
    problems += [problem for problem in [*found, *_contradictions(settings)] if not broken & set(problem.keys)]
    return settings, problems, notices


def _problem(raw: Any, path: tuple[str, ...], error: ErrorDetails) -> Problem:
    """Return what pydantic's `error` at `path` means, with the key as it was written."""
    section: type[Section] = Settings
    variants: Mapping[str, type[Section]] = {}
    written: list[str] = []
    for name in path:
        spelled = _spelled(raw, section, name)
        written.append(spelled)
        inner = section.section_at(name, raw)
        if inner is not None:
            variants, section = section.variants.get(name, {}), inner
        raw = raw.get(spelled) if isinstance(raw, Mapping) else None
    key = ".".join(written)
    if error["type"] == "extra_forbidden":
        others = [kind for kind, other in variants.items() if path[-1] in other.model_fields]
        here = f" here ({' and '.join(others)} {'have' if others[1:] else 'has'} it)" if others else ""
        return Problem(keys=(key,), message=f"{key}: unknown key{here}{nearest_key(section, path)}")
    if error["type"] == "missing":
        rule = rule_of(section.model_fields[path[-1]])
        return Problem(keys=(key,), message=f"{key}: the key is missing; expected {rule}")
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return Problem(keys=(key,), message=f"{key}: {message}" if key else message)


def nearest_key(section: type[Section], path: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown key of `section`, the last part of `path`: the known key that is
    meant, where one is really close, else the keys of the section that act, where they are few."""
    prefix = "".join(f"{part}." for part in path[:-1])
    name = path[-1]
    homes = list(dict.fromkeys(key for key in _EVERY_KEY if key.rpartition(".")[2] == name and key != prefix + name))
    if 0 < len(homes) <= _MOST_HOMES:
        return f"; it belongs {' or '.join(_home(key) for key in homes)}"
    here = [*section.model_fields, *section.renames]
    close = _with_words_of(name, section) or difflib.get_close_matches(name, here, n=1, cutoff=_CLOSE)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    names = {key.rpartition(".")[2]: key for key in reversed(_EVERY_KEY)}
    far = difflib.get_close_matches(name, names.keys() - {name}, n=1, cutoff=_CLOSE_ELSEWHERE)
    if far:
        return f"; did you mean {names[far[0]]}?"
    keys = [key for key, field in section.model_fields.items() if about(field)[0] is Status.BUILT]
    return f"; the keys there are {', '.join(keys)}" if len(keys) <= _MOST_KEYS else ""


def _with_words_of(name: str, section: type[Section]) -> list[str]:
    """Return the one key of `section` that has all words of `name`; nothing where several do, or where that says
    little."""
    words = set(name.lower().split("_"))
    spellings = {
        spelled: section.renames.get(spelled, spelled) for spelled in (*section.model_fields, *section.renames)
    }
    found = {key for spelled, key in spellings.items() if words <= set(spelled.split("_"))}
    return list(found) if len(found) == 1 and len(name) >= _TELLING else []


def _home(key: str) -> str:
    """Return where a key stands, for a sentence."""
    section = key.rpartition(".")[0]
    return f"in {section}" if section else "at the top of the config"


def _spelled(raw: Any, section: type[Section], name: str) -> str:
    """Return how `raw` spells the key `name` of `section`."""
    if not isinstance(raw, Mapping) or raw.get(name) is not None:
        return name
    return next((other for other, target in section.renames.items() if target == name and other in raw), name)


def _without(raw: Any, path: tuple[str, ...], section: type[Section] = Settings) -> Any:
    """Return a copy of `raw` without the key at `path`, however spelled; without its section if that needs the key."""
    if not path or not isinstance(raw, Mapping):
        return {}
    names = {path[0], *(other for other, target in section.renames.items() if target == path[0])}
    copy = {name: value for name, value in raw.items() if str(name) not in names}
    inner = section.section_at(path[0], raw)
    if inner is not None and len(path) > 1:
        spelled = _spelled(raw, section, path[0])
        if spelled in raw and not _needs(inner, path[1:], raw[spelled]):
            copy[spelled] = _without(raw[spelled], path[1:], inner)
    return copy


def _needs(section: type[Section], path: tuple[str, ...], raw: Any) -> bool:
    """Return whether `section`, written as `raw`, cannot be without the key at `path`."""
    field = section.model_fields.get(path[0])
    if field is None or not field.is_required():
        return False
    inner = section.section_at(path[0], raw)
    if inner is None or len(path) == 1:
        return True
    return _needs(inner, path[1:], raw.get(_spelled(raw, section, path[0])) if isinstance(raw, Mapping) else None)


def _review(section: Section, raw: Any, prefix: str = "") -> tuple[list[Problem], list[Notice]]:
    """Return the refused keys and the ones that do not act, among those set in `section` and what lies in it."""
    problems: list[Problem] = []
    notices: list[Notice] = []
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set or (section.is_off and name != section.switch):
            continue
        value = getattr(section, name)
        spelled = _spelled(raw, type(section), name)
        key = prefix + spelled
        if isinstance(value, Section):
            inner = _review(value, raw.get(spelled) if isinstance(raw, Mapping) else None, f"{key}.")
            problems += inner[0]
            notices += inner[1]
            continue
        status, why, quiet = about(field)
        asks = value != field.default and value not in quiet and not _can_be_off(field, value)
        off_switch = name == section.switch and section.is_off
        if status is Status.REFUSED and asks:
            problems.append(Problem(keys=(key,), message=f"{key}: {show(value)} is not supported: {why}"))
        elif status in (Status.NOT_BUILT, Status.NO_EFFECT) and asks and not off_switch:
            notices.append(Notice(key=key, message=f"{status.value}: {why}"))
    return problems, notices + ([] if prefix else list(_idle(section)))


def _can_be_off(field: FieldInfo, value: object) -> bool:
    """Whether a value whose content is not read asks for nothing."""
    rule = rule_of(field)
    return isinstance(rule, Anything) and rule.can_be_off and is_off(value)


def _idle(settings: Section) -> Iterator[Notice]:
    """Yield the keys that act in general, but not with the other keys of this config."""
    if not isinstance(settings, Settings):
        return
    zero = settings.zero_optimization
    if zero.stage != 3 and "stage3_param_persistence_threshold" in zero.model_fields_set:
        key = "zero_optimization.stage3_param_persistence_threshold"
        yield Notice(
            key=key, message=f"no effect: parameters are sharded at stage 3 only, and the stage is {zero.stage}"
        )
    if zero.stage != 3 and zero.offload_param.device != "none":
        yield Notice(
            key="zero_optimization.offload_param",
            message="not built: parameters are offloaded at stage 3 only. At stage "
            f'{zero.stage} they stay whole on the device; write "stage": 3 to offload them',
        )
    if zero.offload_optimizer.device == "cpu" and zero.offload_optimizer.nvme_path is not None:
        yield Notice(key="zero_optimization.offload_optimizer.nvme_path", message='no effect: the device is "cpu"')
    if settings.zstore.durability != "step" and settings.zstore.durability_path is not None:
        yield Notice(key="zstore.durability_path", message='no effect: zstore.durability is not "step"')
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if getattr(settings, key) and settings.steps_per_print == 0:
            yield Notice(key=key, message="no effect: its line comes with those of progress, and steps_per_print is 0")
    optimizer = settings.optimizer
    if optimizer is not None and optimizer.type == "AdamW" and not optimizer.params.adam_w_mode:
        message = 'no effect: AdamW always decouples weight decay, as in DeepSpeed; write type "Adam" for the other'
        yield Notice(key="optimizer.params.adam_w_mode", message=message)


def _contradictions(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong between keys that are each right by themselves."""
    zero = settings.zero_optimization
    if settings.fp16.enabled is True and settings.bf16.enabled is True:
        yield _clash(("fp16.enabled", "bf16.enabled"), "both are true; set one of them to false")
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        key = f"zero_optimization.{name}"
        ignored = offload is zero.offload_param and zero.stage != 3
        if offload.device == "nvme" and offload.nvme_path is None and not ignored:
            message = 'the device is "nvme"; give the absolute path of a folder on the drive'
            yield _clash((f"{key}.nvme_path", f"{key}.device"), message)
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        message = f'"{zero.offload_optimizer.device}" needs stage 1, 2 or 3; got stage 0'
        yield _clash(("zero_optimization.offload_optimizer.device", "zero_optimization.stage"), message)
    own = settings.zstore
    nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none")
    if own.durability == "step" and own.durability_path is None and not nvme:
        message = '"step" needs a folder for its snapshots, and nothing is on a drive: give the absolute path of one'
        yield _clash(("zstore.durability", "zstore.durability_path"), message)
    if own.durability_path is not None and len(own.durability_path) > 1:
        message = f"expected one folder, got {len(own.durability_path)}: a snapshot is in one place"
        yield Problem(keys=("zstore.durability_path",), message=f"zstore.durability_path: {message}")
    threads = settings.zstore.io_threads
    if threads is not None and "thread_count" in settings.aio.model_fields_set and threads != settings.aio.thread_count:
        message = f"these are the same setting, but one is {threads} and one {settings.aio.thread_count}; keep one"
        yield _clash(("zstore.io_threads", "aio.thread_count"), message)


def _clash(keys: tuple[str, ...], message: str) -> Problem:
    return Problem(keys=keys, message=f"{' and '.join(keys)}: {message}")
