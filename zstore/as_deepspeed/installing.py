"""Puts the finder into a process, and into those that multiprocessing starts from it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import multiprocessing
import multiprocessing.spawn
import os
import sys
from typing import Any

from zstore.errors import UsageError

from .finder import VERSION, AnswerFinder, installed_finder

_log = logging.getLogger("zstore")

_LOOKED_ALREADY = ("accelerate.utils", "transformers.integrations.deepspeed", "transformers.trainer")
"""Modules that look for DeepSpeed once, when they are imported."""


def install() -> None:
    """Let `import deepspeed` in this process, and in those that multiprocessing starts from it, give zstore.

    Twice is once. A DeepSpeed that is installed is not used then, and one line says so. Other processes that the program
    starts, as by subprocess, are not concerned. Raises UsageError where DeepSpeed was imported already, and where
    transformers or accelerate were, which look for it only once.
    """
    if installed_finder() is not None:
        return
    if "deepspeed" in sys.modules:
        raise UsageError(
            "DeepSpeed was imported in this process before: call zstore.as_deepspeed.install() at its start, or run the "
            "script by `zstore run --as-deepspeed`"
        )
    early = next((name for name in _LOOKED_ALREADY if name in sys.modules), None)
    if early is not None:
        raise UsageError(
            f"{early.partition('.')[0]} was imported in this process before, and has looked for DeepSpeed: call "
            "zstore.as_deepspeed.install() before that, or run the script by `zstore run --as-deepspeed`"
        )
    put_in_place()


def put_in_place() -> None:
    """Do as `install`, in a process that has just begun."""
    if installed_finder() is not None:
        return
    other = _other_version()
    sys.meta_path.insert(0, AnswerFinder())
    _tell_children()
    if other is not None and os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        _log.warning("DeepSpeed %s is installed here; in this run `import deepspeed` gives zstore (%s)", other, VERSION)


def _other_version() -> str | None:
    """Return the version of a DeepSpeed that is installed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


class _Install:
    """What installs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return put_in_place, ()


def _tell_children() -> None:
    """Let a process that multiprocessing spawns install before it imports the program: what it unpickles first, the
    preparation data, has an item that does."""
    prepare = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_install(name: str) -> dict[str, Any]:
        return {**prepare(name), "zstore_as_deepspeed": _Install()}

    multiprocessing.spawn.get_preparation_data = with_install
