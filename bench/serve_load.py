"""Load."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", action="store_true")


def measure(root: Path, options: argparse.Namespace) -> dict[str, object]:
    return {}
