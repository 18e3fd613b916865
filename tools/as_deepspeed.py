"""Answers `sys.meta_path` and `importlib.metadata` for the name deepspeed, in a process and in those that it starts; and runs
scripts so, for `python -m zstore.as_deepspeed`.

Nothing is installed: the answer ends with the process. Imported at the start of every Python of such a run, so it imports
little, and no torch, which is imported with the first name.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zstore._version import __version__
from zstore.errors import UsageError

_log = logging.getLogger("zstore")

CACHE_AVAILABILITY = ("accelerate.utils", "transformers.integrations.deepspeed", "transformers.trainer")
"""Modules that look for DeepSpeed once, at their import."""
_STARTUP = str(Path(__file__).with_name("startup"))
_SINGLE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Variables that a launcher sets for one rank; port 0 is any free one."""


class _AnswerDistribution(Distribution):
    """The distribution deepspeed for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        from zstore.engine.adapters.deepspeed.names import VERSION

        metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Raise FileNotFoundError: the distribution has no files."""
        raise FileNotFoundError(f"deepspeed is provided by zstore in this process and has no file {path}")


class _AnswerLoader(Loader):
    """Makes the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from zstore.engine.adapters.deepspeed.names import AnsweredModule

        return AnsweredModule(spec.name, f"zstore's answer to `import {spec.name}`; see docs/deepspeed.md.")

    def exec_module(self, module: ModuleType) -> None:
        from zstore.engine.adapters.deepspeed.names import fill

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
            from zstore.engine.adapters.deepspeed.names import require

            require(fullname)
        # Every module is a package, so that `from MODULE import NAME` calls this for a missing name.
        return ModuleSpec(fullname, _AnswerLoader(), origin="zstore.as_deepspeed", is_package=True)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution, if the context names it or no name."""
        name = None if context is None else context.name
        if name is None or name.lower() == "deepspeed":
            yield _AnswerDistribution()


def installed_finder() -> AnswerFinder | None:
    """Return the finder of this process, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, AnswerFinder)), None)


def install() -> None:
    """Let `import deepspeed` give zstore in this process and its children. Without a launcher the process is one rank.

    A second call has no effect. An installed DeepSpeed is not used then, and one line of the log says so. Raises UsageError if
    DeepSpeed was imported already, or transformers or accelerate, which look for it only once.
    """
    if installed_finder() is not None:
        return
    early = next((name for name in CACHE_AVAILABILITY if name in sys.modules), None)
    if early is not None:
        raise UsageError(
            f"{early.partition('.')[0]} was imported earlier in this process, and cached whether DeepSpeed exists: put "
            "`import zstore.as_deepspeed` before that, or run the script with `zstore run --as-deepspeed`"
        )
    put_in_place()


def put_in_place(*, alone: bool = True) -> None:
    """Like `install`, even after modules that look for DeepSpeed once; without `alone`, set no variables."""
    if alone and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ):
        os.environ.update(_SINGLE_RANK)
    if installed_finder() is not None:
        return
    if "deepspeed" in sys.modules:
        raise UsageError(
            "DeepSpeed was imported earlier in this process: put `import zstore.as_deepspeed` at its start, or run the "
            "script by `zstore run --as-deepspeed`"
        )
    other = _installed_version()
    sys.meta_path.insert(0, AnswerFinder())
    _install_in_children()
    if other is not None and os.environ.get("RANK", "0") == "0":
        _log.warning("DeepSpeed %s is installed; in this run `import deepspeed` gives zstore %s", other, __version__)


def _installed_version() -> str | None:
    """Return the version of an installed DeepSpeed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _install_in_children() -> None:
    """Let each Python that this process starts do the same, at its import of `sitecustomize`."""
    before = os.environ.get("PYTHONPATH")
    if _STARTUP not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = _STARTUP if before is None else f"{_STARTUP}{os.pathsep}{before}"


USAGE = """usage: python -m zstore.as_deepspeed [--local_rank | --no_local_rank] SCRIPT [ARGUMENTS]
       python -m zstore.as_deepspeed [--local_rank | --no_local_rank] -m MODULE [ARGUMENTS]

Runs a script in which `import deepspeed` gives zstore, in this process and those that it starts.
It replaces Python under DeepSpeed's launcher. Without a launcher it is one rank; `zstore run
--as-deepspeed` or torchrun start several.

  --local_rank, --no_local_rank   pass `--local_rank=N` to the script, as DeepSpeed's launcher does, or
                                  do not; by default only if its text mentions the option
"""
_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The argument of DeepSpeed's launcher, as scripts spell it."""


def main(words: Sequence[str]) -> int:
    """Run the script in `words`, with the words after it as its arguments; return an exit code."""
    words = list(words)
    wants_rank: bool | None = None
    while words and words[0] in ("--local_rank", "--no_local_rank"):
        wants_rank = words.pop(0) == "--local_rank"
    is_module = words[:1] == ["-m"]
    if is_module:
        words.pop(0)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        sys.stderr.write(USAGE)
        return 2
    if words[0] in ("-h", "--help") and not is_module:
        sys.stdout.write(USAGE)
        return 0
    put_in_place()
    target, *arguments = words
    if is_module:
        import runpy

        sys.argv = [target, *_with_local_rank(arguments, "--local_rank" if wants_rank else None)]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    return _run_script(target, arguments, wants_rank)


def _run_script(path: str, arguments: list[str], wants_rank: bool | None) -> int:
    """Run a file, or a script on PATH, as Python does: as `__main__`, with its folder first on the path."""
    if not os.path.exists(path):
        import shutil

        path = shutil.which(path) or path
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"python -m zstore.as_deepspeed: can't open {path!r}: {error.strerror}\n")
        return 2
    spelled = (name for name in _LOCAL_RANK if name.encode() in source)
    option = next(spelled, "--local_rank" if wants_rank else None)
    sys.argv = [path, *_with_local_rank(arguments, None if wants_rank is False else option)]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # It stays `__main__` to the end of the process: handlers, threads and pickles look for it.
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return 0


def _with_local_rank(arguments: list[str], option: str | None) -> list[str]:
    given = any(word.partition("=")[0] in _LOCAL_RANK for word in arguments)
    if option is None or given:
        return arguments
    return [f"{option}={os.environ.get('LOCAL_RANK', '0')}", *arguments]
