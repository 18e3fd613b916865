"""Answers `sys.meta_path` and `importlib.metadata` for the name deepspeed. Nothing is installed: it is gone with the
process. Imported at the start of every Python of such a run, so without torch, which is imported with the first name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any


class _AnswerDistribution(Distribution):
    """The distribution deepspeed as `importlib.metadata` sees it."""

    def read_text(self, filename: str) -> str | None:
        from zstore.engine.adapters.deepspeed.names import VERSION

        metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Raise FileNotFoundError: there are no files."""
        raise FileNotFoundError(f"deepspeed is answered by zstore in this process and has no file {path}")


class _AnswerLoader(Loader):
    """Makes the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from zstore.engine.adapters.deepspeed.modules import AnsweredModule

        return AnsweredModule(spec.name, f"zstore's answer to `import {spec.name}`; see docs/deepspeed.md.")

    def exec_module(self, module: ModuleType) -> None:
        from zstore.engine.adapters.deepspeed.modules import fill

        fill(module)


class AnswerFinder(DistributionFinder):
    """The entry of `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of DeepSpeed's name, None for any other. Raises ModuleNotFoundError if it does not
        exist."""
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname != "deepspeed":
            from zstore.engine.adapters.deepspeed.modules import require

            require(fullname)
        # Every module is a package, so that `from MODULE import NAME` comes here for a name that it lacks.
        return ModuleSpec(fullname, _AnswerLoader(), origin="zstore.as_deepspeed", is_package=True)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution, if that name or any is asked for."""
        name = None if context is None else context.name
        if name is None or name.lower() == "deepspeed":
            yield _AnswerDistribution()


def installed_finder() -> AnswerFinder | None:
    """Return the finder of this process; None if there is none."""
    return next((finder for finder in sys.meta_path if isinstance(finder, AnswerFinder)), None)
