"""No key acts in its documentation alone: each that is said to act is read somewhere in the product."""

from __future__ import annotations

import re
from pathlib import Path

import zstore
from zstore.engine.config.keys import Status, about, known_keys, section_of
from zstore.engine.config.sections import ConfigSections

SOURCES = Path(zstore.__file__).parent
GIVEN_WHOLE = ("optimizer.params.", "scheduler.params.", "sparse_attention.")
"""Arguments that are looked up by name; their own tests say what they do."""


def test_every_key_that_acts_is_read() -> None:
    paths = [*SOURCES.rglob("*.py"), *(SOURCES / "engine").rglob("*.py"), *(SOURCES / "tools").rglob("*.py")]
    read = set(re.findall(r"\.([a-z]\w+)\b", "\n".join(path.read_text(encoding="utf-8") for path in paths)))
    acting = [
        path
        for path, field in known_keys(ConfigSections)
        if section_of(field) is None and about(field)[0] is Status.BUILT and not path.startswith(GIVEN_WHOLE)
    ]
    assert len(acting) > 50
    assert {path for path in acting if path.rpartition(".")[2] not in read} == set()
