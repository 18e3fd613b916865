"""Answers `import deepspeed` in this process: what `sys.meta_path` and `importlib.metadata` ask for by that name.

Nothing is installed: the modules are made when they are imported, of the names that `names` lists, and are gone
with the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from zstore._version import __version__

from .absent import absent
from .names import ABSENT, MODULES, WITH_CONSTANTS, missing

ANSWERS_FOR = "0.19.8"
"""The DeepSpeed whose names these are."""
VERSION = f"{ANSWERS_FOR}+zstore.{__version__.replace('+', '.')}"
"""What is told as DeepSpeed's version."""

_HOME = __package__
KNOWN = frozenset({*MODULES, *ABSENT, *WITH_CONSTANTS})
"""The modules that are there."""
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: zstore, answering `import deepspeed` in this process
"""


class AnsweredModule(ModuleType):
    """A module of DeepSpeed's name whose contents are zstore's. A name that is not there is an error that says what to
    use instead."""

    def __getattr__(self, name: str) -> Any:
        """Return the submodule of that name, which DeepSpeed imports with itself, where there is one."""
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
            source = importlib.import_module(home if "." in home else f"{_HOME}.{home}")
            for name in names:
                setattr(module, name, getattr(source, name))
        for name in ABSENT.get(module.__name__, ()):
            setattr(module, name, absent(f"{module.__name__}.{name}"))
        if module.__name__ in WITH_CONSTANTS:
            vars(module).update(importlib.import_module(f"{_HOME}.constants").CONSTANTS[module.__name__])


class _AnswerDistribution(Distribution):
    """What `importlib.metadata` knows of a distribution named deepspeed."""

    def read_text(self, filename: str) -> str | None:
        """See Distribution."""
        return {"METADATA": _METADATA, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Raise FileNotFoundError: there are no files."""
        raise FileNotFoundError(f"deepspeed is answered by zstore in this process and has no file {path}")


class AnswerFinder(DistributionFinder):
    """The entry of `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of DeepSpeed's name, None for any other.

        Raises ModuleNotFoundError for one that is not there. Its `name` stays empty: with it, `from deepspeed import NAME`
        would drop this message for Python's own.
        """
        if fullname != "deepspeed" and not fullname.startswith("deepspeed."):
            return None
        if fullname not in KNOWN:
            raise ModuleNotFoundError(missing(fullname))
        # Every module is a package, so that `from MODULE import NAME` comes here for a name that it lacks.
        return ModuleSpec(fullname, _AnswerLoader(), origin="zstore.as_deepspeed", is_package=True)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution, where that name or any is asked for."""
        name = None if context is None else context.name
        if name is None or name.lower() == "deepspeed":
            yield _AnswerDistribution()


def installed_finder() -> AnswerFinder | None:
    """Return the finder of this process, None where there is none."""
    return next((finder for finder in sys.meta_path if isinstance(finder, AnswerFinder)), None)
