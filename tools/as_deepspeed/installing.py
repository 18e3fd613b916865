"""Puts the finder into a process, and into those that it starts."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from pathlib import Path

from zstore._version import __version__
from zstore.errors import UsageError

from .finder import AnswerFinder, installed_finder

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
