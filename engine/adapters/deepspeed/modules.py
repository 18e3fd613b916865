"""The modules that `import deepspeed` gives: made when they are imported, of the names that `names` lists."""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .absent import absent
from .names import ABSENT, MODULES, WITH_CONSTANTS, missing

KNOWN = frozenset({*MODULES, *ABSENT, *WITH_CONSTANTS})
"""The modules that are there."""


class AnsweredModule(ModuleType):
    """A module of DeepSpeed's name whose contents are zstore's. A name that is not there is an error that says what to
    use instead."""

    def __getattr__(self, name: str) -> Any:
        """Return the submodule of that name, which DeepSpeed imports with itself, if there is one."""
        dotted = f"{self.__name__}.{name}"
        if dotted in KNOWN:
            return importlib.import_module(dotted)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(missing(dotted), name=name, obj=self)

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        inner = (dotted.removeprefix(prefix) for dotted in KNOWN if dotted.startswith(prefix))
        return sorted({*self.__dict__, *(name for name in inner if "." not in name)})


class _AnswerLoader(Loader):
    """Makes the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return AnsweredModule(spec.name, f"zstore's answer to `import {spec.name}`; see docs/deepspeed.md.")

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names that are listed for it."""
        for home, names in MODULES.get(module.__name__, {}).items():
            source = importlib.import_module(home if "." in home else f"{__package__}.{home}")
            for name in names:
                setattr(module, name, getattr(source, name))
        for name in ABSENT.get(module.__name__, ()):
            setattr(module, name, absent(f"{module.__name__}.{name}"))
        if module.__name__ in WITH_CONSTANTS:
            vars(module).update(importlib.import_module(f"{__package__}.constants").CONSTANTS[module.__name__])


def spec_of(fullname: str) -> ModuleSpec:
    """Return the spec of a module of DeepSpeed's name.

    Raises ModuleNotFoundError for one that is not there. Its `name` stays empty: with it, `from deepspeed import NAME`
    would drop this message for Python's own.
    """
    if fullname not in KNOWN:
        raise ModuleNotFoundError(missing(fullname))
    # Every module is a package, so that `from MODULE import NAME` comes here for a name that it lacks.
    return ModuleSpec(fullname, _AnswerLoader(), origin="zstore.as_deepspeed", is_package=True)
