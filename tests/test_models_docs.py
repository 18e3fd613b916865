"""The tables of `docs/models.md` name what the tests do."""

from __future__ import annotations

from pathlib import Path

from tests.test_engine_transformers import REENTRANT, WRITERS
from tests.transformers_models import ARCHITECTURES, build

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
KINDS = {True: "reentrant", False: "non-reentrant", None: "no"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_architectures_is_the_tests() -> None:
    found = {name: (kind, layers, writes) for name, kind, _, layers, writes in rows("Architectures")}
    assert found == {
        name: (f"`{type(build(name)).__name__}`", KINDS[REENTRANT.get(name)], "yes" if name in WRITERS else "")
        for name in ARCHITECTURES
    }


def test_every_row_is_complete() -> None:
    assert {len(row) for row in rows("Mixes")} == {2}
    assert {len(row) for row in rows("What is not possible")} == {3}


def test_the_files_that_it_names_are_there() -> None:
    words = PAGE.read_text(encoding="utf-8").split("`")
    named = [word for word in words if word.startswith("tests/")]
    assert len(named) == 3
    assert all((PAGE.parent.parent / name).exists() for name in named)
