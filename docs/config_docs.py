"""Generates the reference of config keys in the docs from the schema: `python docs/config_docs.py`.

In `docs/config.md` it writes the tables of the keys that take effect, in `docs/deepspeed.md` the table of the others: the
parts between two marks. Everything else is written by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from zstore.engine.config.keys import Section, Status, description, known_keys, section_of, status_of, type_of
from zstore.engine.config.sections import ConfigSections
from zstore.engine.config.values import expected, show


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "unset" if field.default is None else f"`{show(field.default)}`"


def _row(name: str, field: FieldInfo, section: type[Section]) -> str:
    """Return the row of a key, by its name within the table's section."""
    inner, key = section_of(field), name.rpartition(".")[2]
    if inner is not None:
        kind = "an object, by `type`" if key in section.variants else "an object"
        return f"| `{name}` | {kind} | | {_cell(inner.__doc__ or '')} |"
    also = [f"`{spelling}`" for spelling, target in section.renames.items() if target == key]
    text = description(section, key) + (f" Also accepted as {', '.join(also)}." if also else "")
    return f"| `{name}` | {_cell(expected(type_of(field)))} | {_cell(_default(field))} | {_cell(text)} |"


def _rows(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the rows of a section's keys and of the sections in it; keys that several types share are one row."""
    for name, field in section.model_fields.items():
        if status_of(field)[0] is not Status.ACTIVE:
            continue
        yield _row(prefix + name, field, section)
        inner, of = section_of(field), dict[str, list[str]]()
        if inner is None:
            continue
        base = list(_rows(inner, f"{prefix}{name}."))
        yield from base
        for kind, variant in section.variants.get(name, {}).items():
            for row in _rows(variant, f"{prefix}{name}."):
                of.setdefault(row, []).append(kind)
        for row, kinds in of.items():
            if row not in base:
                yield row.replace("` |", f"` of {', '.join(kinds)} |", 1)


def all_keys() -> str:
    """Return the tables of the keys that take effect: one for each long section at the top, and one for all other keys."""
    lines, tables = ["", "## Top level", "", *_HEAD], list[str]()
    for name, field in ConfigSections.model_fields.items():
        inner = section_of(field)
        rows = [] if inner is None else list(_rows(inner))
        if inner is not None and len(rows) > _FEW:
            tables += ["", f"## {name}", "", inspect.cleandoc(inner.__doc__ or ""), "", *_HEAD, *rows]
        elif status_of(field)[0] is Status.ACTIVE:
            lines += [_row(name, field, ConfigSections), *(() if inner is None else _rows(inner, f"{name}."))]
    return "\n".join([*lines, *tables]) + "\n"


_FEW = 5
"""Sections of at most so many keys are in the table of the top level."""
_HEAD = ["| key | value | default | effect |", "|---|---|---|---|"]
_STATUS = {Status.REFUSED: "refused", Status.NOT_IMPLEMENTED: "not implemented", Status.NO_EFFECT: "no effect"}


def missing_keys() -> str:
    """Return the table of the keys without effect; keys with the same reason share a row."""
    lines = ["", "| key | status | reason |", "|---|---|---|"]
    for status, shown in _STATUS.items():
        reasons: dict[str, list[str]] = {}
        for path, field in known_keys(ConfigSections):
            if section_of(field) is None and status_of(field)[0] is status:
                reasons.setdefault(status_of(field)[1], []).append(f"`{path}`")
        lines += [f"| {', '.join(dict.fromkeys(keys))} | {shown} | {_cell(why)} |" for why, keys in reasons.items()]
    return "\n".join(lines) + "\n\n"


PARTS: dict[str, Callable[[], str]] = {"keys": all_keys, "keys without effect": missing_keys}
END = "<!-- end of keys -->\n"


def mark(part: str) -> str:
    """Return the line that begins a part of `PARTS`, which goes on up to `END`."""
    return f"<!-- {part}: python docs/config_docs.py -->\n"


def updated(page: str) -> str:
    """Return a page with its part regenerated; one without marks is unchanged."""
    for part, make in PARTS.items():
        before, found, rest = page.partition(mark(part))
        if found:
            page = before + found + make() + END + rest.partition(END)[2]
    return page


if __name__ == "__main__":
    for _path in (Path("docs/config.md"), Path("docs/deepspeed.md")):
        _path.write_text(updated(_path.read_text(encoding="utf-8")), encoding="utf-8")
