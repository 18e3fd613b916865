"""Packages that import a module when one of its names is first used: a command loads what it works with, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def on_first_use(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, which hands out `names`: module in the package -> what it defines."""
    homes = {name: module for module, defined in names.items() for name in defined}

    def __getattr__(name: str) -> Any:  # noqa: N807 - a module's
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
