"""DeepSpeed's own tests, on its stand-in."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.peers.suites import HERE, SOURCES, allowed_failures, passed

FETCH = """DeepSpeed's tests are not there, or DeepSpeed is not installed:
git clone --depth 1 --filter blob:none --sparse https://github.com/deepspeedai/DeepSpeed tests/peers/sources/deepspeed
git -C tests/peers/sources/deepspeed sparse-checkout set tests/unit
pip install deepspeed==0.19.8"""
CHOSEN = HERE / "deepspeed_tests.txt"
"""A sample of them, drawn with a seed."""
NOT_PUBLIC = "not public: "
"""Begins the reason of tests of DeepSpeed's inside, which do not count."""
SHARE = 0.96
"""Of those that count; bench/results/deepspeed-suite.md has the figures."""
_VARIABLES = {
    "CHOSEN": os.fspath(CHOSEN),
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",  # not read on the CPU, but looked for
    "DS_ACCELERATOR": "cpu",
    "DS_DISABLE_REUSE_DIST_ENV": "1",
    "DS_UNITTEST_TIMEOUT": "60",
    "LOCAL_SIZE": "4",
    "OMP_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "--timeout=120 --timeout-method=signal --continue-on-collection-errors",
}


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_what_passes_with_deepspeed_passes_on_the_stand_in(tmp_path: Path) -> None:
    folder = SOURCES / "deepspeed" / "tests"
    if not folder.is_dir() or importlib.util.find_spec("deepspeed") is None:
        pytest.skip(FETCH)
    files = sorted({line.partition("::")[0] for line in CHOSEN.read_text().splitlines()})
    files = [file for file in files if (folder / file).is_file()]
    wanted = passed(folder, files, tmp_path / "theirs.xml", plugin="standing_in", variables=_VARIABLES)
    assert wanted
    ours = {**_VARIABLES, "STANDS_IN": "1"}
    found = passed(folder, files, tmp_path / "ours.xml", plugin="standing_in", variables=ours)
    allowed = allowed_failures("deepspeed")
    # By a part of the name, as theirs have many parameters.
    reasons = {name: next((why for part, why in allowed.items() if part in name), None) for name in wanted}
    public = {name for name, why in reasons.items() if why is None or not why.startswith(NOT_PUBLIC)}
    lost = {name for name in wanted - found if reasons[name] is None}
    assert not lost, "\n".join(sorted(lost))
    covered = {part: {name for name in wanted if part in name} for part in allowed}
    stale = {part for part, names in covered.items() if names and names <= found}
    assert not stale, f"allowed to fail, but pass: {sorted(stale)}"
    share = len(public & found) / len(public)
    assert share >= SHARE, f"{len(public & found)} of {len(public)} pass on the stand-in"
