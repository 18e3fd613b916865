"""The page that follows a parameter names files, classes and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")


def hops() -> list[tuple[str, str]]:
    """(file, name) of each hop; a file's names follow it until the next file."""
    found: list[tuple[str, str]] = []
    for row in re.findall(r"^\| \d+ \| .* \| ([^|]*) \|$", PAGE, re.MULTILINE):
        path = ""
        for text in re.findall(r"`([^`]+)`", row):
            if text.endswith(".py"):
                path = text
            else:
                found.append((path, text))
    return found


@pytest.mark.parametrize(("path", "name"), hops())
def test_a_hop_is_there(path: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        assert found, f"{path} has no {name}"
        body = found[0].body
