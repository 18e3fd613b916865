"""`docs/deepspeed.md` says what is not there: every key that does not act, and names that are really missing."""

from __future__ import annotations

import operator
import pkgutil
import re
from pathlib import Path

import zstore
from tests.engine.runs import make_config, start
from zstore.tools.config_docs import missing_keys, updated

DOCUMENT = Path(__file__).parents[2] / "docs" / "deepspeed.md"
PAGE = DOCUMENT.read_text(encoding="utf-8")


def names() -> list[str]:
    """What the first column of the table of names lists."""
    table = PAGE.partition("### Names")[2].partition("### Keys")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_keys_are_up_to_date() -> None:
    assert missing_keys() in PAGE
    assert updated(PAGE) == PAGE, "run: python -m zstore.tools.config_docs"


def test_names_that_are_said_to_be_missing_are_missing() -> None:
    found = names()
    assert len(found) > 50
    with start(make_config(0)) as engine:
        for name in found:
            of, _, rest = name.partition(".")
            if of == "engine":
                assert not hasattr(engine, rest), name
            elif of == "deepspeed" and rest:
                holder, _, last = rest.rpartition(".")
                if not holder:
                    assert not hasattr(zstore, last), name
                elif holder == "zero":
                    assert not hasattr(zstore.zero, last), name


def test_what_the_page_names_in_their_place_is_there() -> None:
    table = PAGE.partition("### Names")[2].partition("### Keys")[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", "|".join(line.split("|")[2:]))}
    with start(make_config(0)) as engine:
        checked = 0
        for name in told:
            path = name.partition("(")[0]
            if path.startswith("engine."):
                operator.attrgetter(path.removeprefix("engine."))(engine)
            elif path.startswith(("zstore.", "torch.")) and " " not in path:
                pkgutil.resolve_name(path)
            else:
                continue
            checked += 1
    assert checked > 15
