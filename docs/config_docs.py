"""Generates the reference of config keys in the docs from the schema: `python docs/config_docs.py`.

In `docs/config.md` that is the tables of the keys that act, in `docs/deepspeed.md` those of the others: the parts
between two marks. Everything else is written by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from zstore.engine.config.keys import Section, Status, about, description, known_keys, section_of, type_of
from zstore.engine.config.sections import ConfigSections
from zstore.engine.config.values import expected, show


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "unset" if field.default is None else f"`{show(field.default)}`"


def _anchor(path: str, kind: str = "") -> str:
    """Return the anchor of the heading of a section."""
    return path.replace(".", "") + (f"-of-{kind.lower()}" if kind else "")


def _row(name: str, field: FieldInfo, section: type[Section], prefix: str) -> str:
    path, inner = prefix + name, section_of(field)
    if name in section.variants:
        shown = _first_names(section.variants[name])
        links = ", ".join(f"[{kind}](#{_anchor(path, shown[one])})" for kind, one in section.variants[name].items())
        return f"| `{name}` | an object, by `type`: {links} | | {_cell((inner and inner.__doc__) or '')} |"
    if inner is not None:
        return f"| `{name}` | [an object](#{_anchor(path)}) | | {_cell(inner.__doc__ or '')} |"
    also = [f"`{spelling}`" for spelling, target in section.renames.items() if target == name]
    text = description(section, name) + (f" Also written {', '.join(also)}." if also else "")
    return f"| `{name}` | {_cell(expected(type_of(field)))} | {_cell(_default(field))} | {_cell(text)} |"


def _tables(section: type[Section], path: str = "", kind: str = "", base: type[Section] | None = None) -> Iterator[str]:
    """Yield the lines of the tables of `section`, used with the type `kind` if given, and of the sections in it; rows that
    its `base` has are left out."""
    prefix = f"{path}." if path else ""
    heading, text = f"{path or 'Top level'}{f' of {kind}' if kind else ''}", inspect.cleandoc(section.__doc__ or "")
    known = set() if base is None else set(_rows(base, prefix))
    yield from [
        "",
        f"## {heading}",
        "",
        text,
        "",
        "| key | value | default | effect |",
        "|---|---|---|---|",
    ]
    yield from (row for row in _rows(section, prefix) if row not in known)
    for name, field in section.model_fields.items():
        inner, variants = section_of(field), section.variants.get(name, {})
        if inner is not None:
            yield from _tables(inner, prefix + name)
        for one, variant in _first_names(variants).items():
            yield from _tables(one, prefix + name, variant, inner)


def _first_names(variants: Mapping[str, type[Section]]) -> dict[type[Section], str]:
    """Return the first name of each section that has several."""
    names: dict[type[Section], str] = {}
    for name, one in variants.items():
        names.setdefault(one, name)
    return names


def _rows(section: type[Section], prefix: str) -> list[str]:
    fields = section.model_fields.items()
    return [_row(name, field, section, prefix) for name, field in fields if about(field)[0] is Status.BUILT]


def all_keys() -> str:
    """Return the tables of the keys that act."""
    return "\n".join(_tables(ConfigSections)) + "\n"


_HEADINGS = {
    Status.REFUSED: "Refused: an error",
    Status.NOT_BUILT: "Not built: reported, and training goes on without it",
    Status.NO_EFFECT: "No effect: nothing is lost",
}


def missing_keys() -> str:
    """Return the tables of the keys without effect; keys with the same reason share a row."""
    lines: list[str] = []
    for status, heading in _HEADINGS.items():
        lines += ["", f"### {heading}", "", "| key | |", "|---|---|"]
        reasons: dict[str, list[str]] = {}
        for path, field in known_keys(ConfigSections):
            if section_of(field) is None and about(field)[0] is status:
                reasons.setdefault(about(field)[1], []).append(f"`{path}`")
        lines += [f"| {', '.join(dict.fromkeys(keys))} | {_cell(why)} |" for why, keys in reasons.items()]
    return "\n".join(lines) + "\n\n"


PARTS: dict[str, Callable[[], str]] = {"keys": all_keys, "keys that do not act": missing_keys}
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
