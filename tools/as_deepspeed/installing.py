"""Answers `sys.meta_path` and `importlib.metadata` for the name deepspeed, in a process and in those that it starts.

Nothing is installed: it is gone with the process. Imported at the start of every Python of such a run, so without torch, which
is imported with the first name.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zstore._version import __version__
from zstore.errors import UsageError

_log = logging.getLogger("zstore")

LOOKED_ALREADY = ("accelerate.utils", "transformers.integrations.deepspeed", "transformers.trainer")
"""Modules that look for DeepSpeed once, when they are imported."""
_STARTUP = str(Path(__file__).with_name("startup"))
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Variables that a launcher sets for one rank; port 0 is any that is free."""


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


def install() -> None:
    """Let `import deepspeed` in this process, and in those that it starts, give zstore. Without a launcher the process is
    one rank.

    A second call has no effect. A DeepSpeed that is installed is not used then, and one line says so. Raises UsageError if
    DeepSpeed was imported already, or transformers or accelerate, which look for it only once.
    """
    if installed_finder() is not None:
        return
    early = next((name for name in LOOKED_ALREADY if name in sys.modules), None)
    if early is not None:
        raise UsageError(
            f"{early.partition('.')[0]} was imported in this process before, and has looked for DeepSpeed: put "
            "`import zstore.as_deepspeed` before that, or run the script by `zstore run --as-deepspeed`"
        )
    put_in_place()


def put_in_place(*, alone: bool = True) -> None:
    """Do the same as `install`, whatever looked for DeepSpeed before. Without `alone` it sets no variables of one rank."""
    if alone and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ):
        os.environ.update(_ALONE)
    if installed_finder() is not None:
        return
    if "deepspeed" in sys.modules:
        raise UsageError(
            "DeepSpeed was imported in this process before: put `import zstore.as_deepspeed` at its start, or run the "
            "script by `zstore run --as-deepspeed`"
        )
    other = _other_version()
    sys.meta_path.insert(0, AnswerFinder())
    _tell_children()
    if other is not None and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "DeepSpeed %s is installed here; in this run `import deepspeed` gives zstore %s", other, __version__
        )


def _other_version() -> str | None:
    """Return the version of a DeepSpeed that is installed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _tell_children() -> None:
    """Let each Python that this process starts install at its own start, when it imports `sitecustomize`."""
    before = os.environ.get("PYTHONPATH")
    if _STARTUP not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = _STARTUP if before is None else f"{_STARTUP}{os.pathsep}{before}"
