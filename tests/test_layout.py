"""Limits on the size and shape of the source tree, so that it stays small enough to live in.

A feature that exceeds a limit lowers something else first. When a measure falls, its limit follows.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .layout import Layout, circles, floors, inside, per_ten_thousand_words

# Files that a run in the default config passes through (journeys.py).
JOURNEYS = {"step": 31, "iteration": 36, "save": 33, "load": 44, "reshard": 24, "consolidate": 24, "initialize": 65}


@cache
def _layout() -> Layout:
    return Layout()


@pytest.fixture(scope="module", autouse=True)
def no_trees_are_left() -> Iterator[None]:
    """Of every source file: each collection of later tests would walk over a million objects."""
    yield
    _layout.cache_clear()


def _rooms(top: str) -> tuple[int, int, int]:
    graph = _layout().graph(inside(top))
    return len(graph), sum(map(len, graph.values())), floors(graph)


def _lines_in(folder: str, pattern: str) -> int:
    """Return the lines of its files, without what others wrote (tests/peers/sources)."""
    files = (path for path in (_layout().root / folder).rglob(pattern) if "sources" not in path.parts)
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def _classes_with_several_meanings() -> int:
    return sum(count > 1 for count in Counter(name for name, _ in _layout().classes).values())


LIMITS = {
    "lines of engine, zstore, tools and assets": (
        lambda: _layout().lines("engine/", "zstore/", "tools/") + _layout().asset_lines(),
        53_781,
    ),
    "lines of engine": (lambda: _layout().lines("engine/"), 24_113),
    "lines of zstore": (lambda: _layout().lines("zstore/"), 23_515),
    "lines of tools": (lambda: _layout().lines("tools/"), 4_052),
    "lines of assets": (lambda: _layout().asset_lines(), 2_101),
    "lines of tests": (lambda: _lines_in("tests", "*.py"), 44_000),
    "lines of benchmarks": (lambda: _lines_in("bench", "*.py"), 5_501),
    "lines of docs": (lambda: _lines_in("docs", "*.md"), 4_000),
    "lines of engine without adapters and extras": (
        lambda: _layout().lines("engine/", without=("engine/adapters/", "engine/extras/")),
        19_607,
    ),
    "files of the core": (lambda: len(_layout().core), 25),
    "lines of the core": (lambda: _layout().lines(*_layout().core), 6_949),
    "imports of engine and tools from zstore": (lambda: len(_layout().upward()), 0),
    "widest hub": (lambda: max(map(len, _layout().imports.values())), 21),
    "rooms inside engine": (lambda: _rooms("engine")[0], 16),
    "arrows inside engine": (lambda: _rooms("engine")[1], 69),
    "floors inside engine": (lambda: _rooms("engine")[2], 9),
    "rooms inside zstore": (lambda: _rooms("zstore")[0], 24),
    "arrows inside zstore": (lambda: _rooms("zstore")[1], 62),
    "floors inside zstore": (lambda: _rooms("zstore")[2], 7),
    "circles of files": (lambda: len(circles(_layout().graph(lambda name: name))), 0),
    "class names with several meanings": (_classes_with_several_meanings, 3),
    "classes over 300 lines": (lambda: sum(lines > 300 for _, lines in _layout().classes), 4),
    "files over 500 lines": (lambda: sum(text.count("\n") > 500 for text in _layout().source.values()), 1),
    '"where" in 10,000 words of prose': (lambda: per_ten_thousand_words(_layout().prose, r"\bwhere\b"), 6),
    '"what is" in 10,000 words of prose': (
        lambda: per_ten_thousand_words(_layout().prose, r"\bwhat (is|are|was|were|has|it|they|the)\b"),
        5,
    ),
    '"lies", "rests" and "stands" in 10,000 words of prose': (
        lambda: per_ten_thousand_words(_layout().prose, r"\b(lie|lies|rest|rests|stand|stands)\b"),
        1,
    ),
}


def test_the_source_tree_stays_within_its_limits() -> None:
    found = {name: measure() for name, (measure, _) in LIMITS.items()}
    over = {name: (count, LIMITS[name][1]) for name, count in found.items() if count > LIMITS[name][1]}
    assert not over, f"measured, and the limit: {over}. Take something else out first"


def test_no_folder_of_a_package_is_in_a_circle() -> None:
    for top in ("engine", "zstore", "tools"):
        assert circles(_layout().graph(inside(top))) == []


def test_public_methods_are_described() -> None:
    assert _layout().undocumented() == []


def test_a_default_run_passes_through_few_files(tmp_path: Path) -> None:
    script = Path(__file__).with_name("journeys.py")
    over = dict(JOURNEYS)
    for attempt in range(3):  # on a busy machine threads of one journey may run in the next one
        command = [sys.executable, script, tmp_path / str(attempt)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        found = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
        assert found.keys() == JOURNEYS.keys()
        over = {name: count for name, count in found.items() if name in over and count > JOURNEYS[name]}
        if not over:
            break
    assert not over, f"files passed, and the limit: {over}"


_NAMES = r"one_?bit|1-bit|sends signs|sparse_attention|elastic"
_OF_THE_CONFIG = rf"{_NAMES}|muon|adafactor"
_OF_THE_CORE = (
    rf"{_NAMES}|zero\+\+|zeropp|hpz|mics|hybrid|second(ary)?_size|quantized|\bint8|\.moments|flops"
    r"|whole_tensors"
)


def test_the_core_and_the_config_name_no_extra() -> None:
    layout = _layout()
    others = {"engine/api/initialize.py"} | {name for name in layout.files if name.startswith("engine/config/")}
    keys = "engine/config/keys.py"
    # Not the table of keys that do not act.
    texts = layout.source | {keys: layout.source[keys].partition("\nINACTIVE:")[0]}
    found = {
        name: sorted({word.group() for word in re.finditer(names, texts[name], re.IGNORECASE)})
        for files, names in ((layout.core, _OF_THE_CORE), (others, _OF_THE_CONFIG))
        for name in files
    }
    assert {name: words for name, words in found.items() if words} == {}
