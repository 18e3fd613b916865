"""The effect of each key that a config sets, sound or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .keys import ConfigProblem, Notice, Section, Status, about, description, stages_of
from .parse import parse
from .schema import ConfigSections
from .values import show

ERROR = "error"
"""Status of a key with a problem."""
_ANYWAY = "it asks for what happens anyway"
_SECRET = "zstore.storage_options"
_LISTED = {status.value for status in Status}


@dataclass(frozen=True, kw_only=True)
class KeyFact:
    """A key that is set, or a section that is off."""

    key: str
    """Dotted path, as written."""
    value: str
    """As JSON, shortened."""
    status: str
    """"acts", "no effect", "not built", "refused", or `ERROR`."""
    text: str
    """The key's effect; for one that does not act, or is wrong, the reason."""


def explain(raw: Mapping[str, Any]) -> tuple[list[KeyFact], list[ConfigProblem]]:
    """Return a fact about each key of `raw`, in its order, and every problem."""
    settings, problems, notices = parse(raw)
    facts = list(_Explained(problems, notices, None if problems else settings).facts(ConfigSections, raw))
    return facts, problems


class _Explained:
    def __init__(self, problems: list[ConfigProblem], notices: list[Notice], settings: ConfigSections | None) -> None:
        self._problems = {key: problem.what for problem in problems for key in problem.keys}
        self._notices = {notice.key: notice.message for notice in notices}
        self._settings = settings

    def facts(
        self, section: type[Section], raw: Mapping[str, Any], prefix: str = "", idle: str | None = None
    ) -> Iterator[KeyFact]:
        """Yield a fact for each key of `raw`; `idle` says why the section as a whole does not act."""
        off = self._switch_that_is_off(section, raw, prefix)
        for written, value in raw.items():
            name = section.renames.get(str(written), str(written))
            key = f"{prefix}{written}"
            inner = section.section_at(name, raw)
            if inner is not None and isinstance(value, Mapping) and key not in self._problems:
                told = self._notices.get(key)
                if told is not None:
                    yield KeyFact(key=key, value="an object", status=_status(told), text=_reason(told))
                acts = told is None or _status(told) == Status.BUILT.value
                yield from self.facts(inner, value, f"{key}.", None if acts or told is None else _reason(told))
            elif idle is not None and key not in self._problems:
                yield KeyFact(key=key, value=show(value), status=Status.NO_EFFECT.value, text=idle)
            else:
                yield self._fact(section, name, key, value, off)

    def _fact(self, section: type[Section], name: str, key: str, value: Any, off: str | None) -> KeyFact:
        status, text = self._become(section, name, key, value, off)
        shown = "an object, not shown" if key == _SECRET else show(value)
        return KeyFact(key=key, value=shown, status=status, text=" ".join(text.split()))

    def _become(self, section: type[Section], name: str, key: str, value: Any, off: str | None) -> tuple[str, str]:
        if key in self._problems:
            refused = "is not supported: " in self._problems[key]
            return (Status.REFUSED.value if refused else ERROR), self._problems[key]
        told = self._notices.get(key) or self._notices.get(key.removesuffix(key.rpartition(".")[2]) + name)
        if told is not None:
            return _status(told), _reason(told)
        field = section.model_fields.get(name)
        if value is None:
            return Status.NO_EFFECT.value, "null is the same as leaving the key out"
        if field is None or section.section_at(name) is not None:
            return Status.BUILT.value, "an older form, read as today's"
        if off is not None and name != section.switch:
            return Status.NO_EFFECT.value, f"{off} turns the section off"
        stage = None if self._settings is None else self._settings.zero_optimization.stage
        if about(field)[0] is not Status.BUILT or (
            stage is not None and stages_of(field) and stage not in stages_of(field)
        ):
            return Status.NO_EFFECT.value, _ANYWAY
        return Status.BUILT.value, description(section, name)

    def _switch_that_is_off(self, section: type[Section], raw: Mapping[str, Any], prefix: str) -> str | None:
        """Return `KEY: VALUE` of the switch if it is off, None if the section is on or has no switch."""
        if section.switch is None:
            return None
        value = raw.get(section.switch, section.model_fields[section.switch].default)
        return f"{prefix}{section.switch}: {show(value)}" if value in (False, "none", None) else None


def _status(message: str) -> str:
    """Return the status that a notice begins with; of one that begins otherwise the key acts."""
    status = message.partition(":")[0]
    return status if status in _LISTED else Status.BUILT.value


def _reason(message: str) -> str:
    status, _, reason = message.partition(": ")
    return reason if status in _LISTED else message
