"""Other people's test suites, run twice in processes of their own: as they are, and with zstore in place of what they test."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
"""Where whoever runs a suite puts it, a folder a project; nothing of it is committed."""


def passed(
    folder: Path, what: Sequence[str], report: Path, *, plugin: str | None = None, variables: Mapping[str, str]
) -> set[str]:
    """Return the tests that pass of those in `what`, paths in a project's `folder`, with a plugin where one is named."""
    command = [sys.executable, "-m", "pytest", *what, "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-o", "junit_family=xunit1"] + ([] if plugin is None else ["-p", plugin])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.fspath(HERE), **variables}
    subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if not {child.tag for child in case} & {"failure", "error", "skipped"}
    }


def allowed_failures(suite: str) -> Mapping[str, str]:
    """Return the tests of a suite that need not pass on zstore, each with the reason."""
    found: dict[str, Mapping[str, str]] = tomllib.loads((HERE / "allowed.toml").read_text())
    return found[suite]
