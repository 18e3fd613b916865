"""Writes `docs/config.md` from the schema: `python -m zstore.tools.config_docs > docs/config.md`.

With `--missing`, the keys that do not act, for `docs/deepspeed.md`: `python -m zstore.tools.config_docs --missing`
replaces that part of the page.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from zstore.engine.config.keys import Section, Status, about, known_keys, section_of, type_of
from zstore.engine.config.schema import Settings
from zstore.engine.config.values import expected, show

_INTRO = """\
# Configuration

A config is a dict, or a JSON file in which `//`, `#` and `/* */` comments, trailing commas, a byte order mark and `1e9`
for whole numbers are accepted. The keys are those of the DeepSpeed JSON dialect; zstore's own are under
[`zstore`](#zstore). An unknown key, a key given twice and a value out of range are errors, and all problems are
reported at once. `null` is the same as leaving a key out.

What becomes of a key that is set:

| status | meaning |
|---|---|
| acts | it does what it says |
| not built | what it asks for is not done, and training does not depend on it; it is reported once, with what happens instead |
| no effect | nothing of what it asks for is lost: it happens anyway, or there is nothing to do it to; it is reported likewise |
| refused | training without it would not be what the config asks for: an error |

A key is not reported where it asks for what happens anyway (its default), nor in a section that is switched off.

`"auto"` is filled in by `initialize`: by what the caller answers with `auto={"optimizer.params.lr": 1e-4}`; else by
what follows from the model (sizes of buckets from its hidden size) and from other keys; else by the key's default
below, and one line lists the keys and values. Batch sizes and `total_num_steps` have no default: without an answer they
are an error that names them. `zstore train` answers what its options say.

For `"auto"` in `bf16` or `fp16` the device's rates of matrix products are measured, once in a process and within some
50 ms; rank 0's rates count. A 16-bit type is native where it reaches a third of fp32's rate (on a GPU that has
instructions for it). With both `"auto"` bf16 is taken before fp16; where neither is native, the run is in fp32. One
line at the start gives the choice and the rates. A config that demands a 16-bit type over 4 times slower than fp32 is
followed, with a warning. `zstore doctor` shows the rates. Masters are fp32 in any case, and a checkpoint of one
precision loads in any other.

Batch sizes: `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size`. Any two
give the third; one of the first two alone takes accumulation as 1.

This page is made from the schema: `python -m zstore.tools.config_docs > docs/config.md`.
"""


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
        links = ", ".join(f"[{kind}](#{_anchor(path, kind)})" for kind in section.variants[name])
        return f"| `{name}` | an object, by `type`: {links} | | | {_cell((inner and inner.__doc__) or '')} |"
    if inner is not None:
        return f"| `{name}` | [an object](#{_anchor(path)}) | | | {_cell(inner.__doc__ or '')} |"
    status, why = about(field)
    also = [f"`{spelling}`" for spelling, target in section.renames.items() if target == name]
    text = (field.description or "") + (f" Also written {', '.join(also)}." if also else "")
    text += f" {status.value.capitalize()}: {why}." if status is not Status.BUILT else ""
    return (
        f"| `{name}` | {_cell(expected(type_of(field)))} | {_cell(_default(field))} | {status.value} | {_cell(text)} |"
    )


def _tables(section: type[Section], path: str = "", kind: str = "") -> Iterator[str]:
    """Yield the lines of the tables of `section`, used with the type `kind` if given, and of the sections in it."""
    yield from ["", f"## {path or 'Top level'}{f' of {kind}' if kind else ''}", "", section.__doc__ or "", ""]
    yield from ["| key | value | default | status | what it does |", "|---|---|---|---|---|"]
    prefix = f"{path}." if path else ""
    for name, field in section.model_fields.items():
        yield _row(name, field, section, prefix)
    for name, field in section.model_fields.items():
        inner = section_of(field)
        for variant, one in section.variants.get(name, {"": inner}).items():
            if one is not None:
                yield from _tables(one, prefix + name, variant)


def document() -> str:
    """Return the whole of `docs/config.md`."""
    return _INTRO + "\n".join(_tables(Settings)) + "\n"


_HEADINGS = {
    Status.REFUSED: "Refused: an error",
    Status.NOT_BUILT: "Not built: reported, and training goes on without it",
    Status.NO_EFFECT: "No effect: nothing is lost",
}
BEGIN, END = "<!-- keys: python -m zstore.tools.config_docs --missing -->\n", "<!-- end of keys -->\n"


def missing_keys() -> str:
    """Return the tables of the keys that do not act, keys of one reason in a row, between two marks."""
    lines: list[str] = []
    for status, heading in _HEADINGS.items():
        lines += ["", f"### {heading}", "", "| key | |", "|---|---|"]
        reasons: dict[str, list[str]] = {}
        for path, field in known_keys(Settings):
            if section_of(field) is None and about(field)[0] is status:
                reasons.setdefault(about(field)[1], []).append(f"`{path}`")
        lines += [f"| {', '.join(dict.fromkeys(keys))} | {_cell(why)} |" for why, keys in reasons.items()]
    return BEGIN + "\n".join(lines) + "\n\n" + END


def with_missing_keys(page: str) -> str:
    """Return a page with the part between the two marks made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + missing_keys() + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--missing"]:
        _PAGE = Path("docs/deepspeed.md")
        _PAGE.write_text(with_missing_keys(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(document())
