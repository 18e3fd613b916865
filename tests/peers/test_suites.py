"""Other projects' own tests of what zstore stands in for: what passes with the original passes with zstore."""

import importlib.util
from pathlib import Path

import pytest

from tests.peers.suites import NOT_PUBLIC, SUITES, Suite, allowed_failures, reported


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_what_passes_with_the_original_passes_with_zstore(suite: Suite, tmp_path: Path) -> None:
    if not suite.cwd.is_dir() or None in map(importlib.util.find_spec, suite.needs):
        pytest.skip(suite.fetch)
    wanted = suite.passed(suite.chosen, tmp_path / "theirs.xml", stands_in=False)
    assert wanted
    found = set(suite.passed(wanted, tmp_path / "ours.xml", stands_in=True))
    allowed = allowed_failures(suite.name)
    # By a part of the name, as theirs have many parameters.
    reasons = {name: next((why for part, why in allowed.items() if part in reported(name)), None) for name in wanted}
    public = {name for name, why in reasons.items() if why is None or not why.startswith(NOT_PUBLIC)}
    lost = [name for name in wanted if name not in found and reasons[name] is None]
    assert not lost, "\n".join(lost)
    covered = {part: {name for name in wanted if part in reported(name)} for part in allowed}
    stale = {part for part, names in covered.items() if names and names <= found}
    assert not stale, f"allowed to fail, but pass: {sorted(stale)}"
    share = len(public & found) / len(public)
    assert share >= suite.share, f"{len(public & found)} of {len(public)} pass with zstore"
