"""Makes the name deepspeed resolve to zstore for imports and `importlib.metadata`, in this process and its children; and runs
scripts that way, for `python -m zstore.as_deepspeed`.

Nothing is installed: the effect ends with the process. This is imported at the start of every Python process of such a run,
so it imports little, and not torch, which is imported with the first name.
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
"""Modules that look for DeepSpeed only once, when they are imported."""
_STARTUP = str(Path(__file__).with_name("startup"))
_SINGLE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Variables that a launcher sets for a single rank; port 0 means any free port."""


class _StandInDistribution(Distribution):
    """The distribution deepspeed for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        from zstore.engine.adapters.deepspeed.names import VERSION

        metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Raise FileNotFoundError, since the distribution has no files."""
        raise FileNotFoundError(f"deepspeed is provided by zstore in this process and has no file {path}")


class _StandInLoader(Loader):
    """Creates the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from zstore.engine.adapters.deepspeed.names import StandInModule

        return StandInModule(spec.name, f"zstore's {spec.name}; see docs/deepspeed.md.")

    def exec_module(self, module: ModuleType) -> None:
        from zstore.engine.adapters.deepspeed.names import populate

        populate(module)


class StandInFinder(DistributionFinder):
    """The finder in `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a DeepSpeed module, None for any other name. Raises ModuleNotFoundError if there is no such
        module."""
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname != "deepspeed":
            from zstore.engine.adapters.deepspeed.names import require_module

            require_module(fullname)
        # Every module is a package, so that `from MODULE import NAME` calls this method for a missing name.
        return ModuleSpec(fullname, _StandInLoader(), origin="zstore.as_deepspeed", is_package=True)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution, if the context has its name or no name."""
        name = None if context is None else context.name
        if name is None or name.lower() == "deepspeed":
            yield _StandInDistribution()


def installed_finder() -> StandInFinder | None:
    """Return the finder of this process, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, StandInFinder)), None)


def install() -> None:
    """Make `import deepspeed` resolve to zstore in this process and its children. Without a launcher there is one rank.

    A second call has no effect. If DeepSpeed is installed it is not used, and a log line says so. Raises UsageError if
    DeepSpeed was already imported, or transformers or accelerate, which look for it only once.
    """
    if installed_finder() is not None:
        return
    imported = next((name for name in CACHE_AVAILABILITY if name in sys.modules), None)
    if imported is not None:
        raise UsageError(
            f"{imported.partition('.')[0]} was already imported, and has cached whether DeepSpeed exists: put "
            "`import zstore.as_deepspeed` before that, or run the script with `zstore run --as-deepspeed`"
        )
    install_finder()


def install_finder(*, set_rank_variables: bool = True) -> None:
    """Like `install`, but also after modules that look for DeepSpeed once. `set_rank_variables`: unless a launcher did."""
    if set_rank_variables and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ):
        os.environ.update(_SINGLE_RANK)
    if installed_finder() is not None:
        return
    if "deepspeed" in sys.modules:
        raise UsageError(
            "DeepSpeed was already imported in this process: put `import zstore.as_deepspeed` at its start, or run the "
            "script with `zstore run --as-deepspeed`"
        )
    installed = _installed_version()
    sys.meta_path.insert(0, StandInFinder())
    _install_in_children()
    if installed is not None and os.environ.get("RANK", "0") == "0":
        _log.warning("DeepSpeed %s is installed; this run uses zstore %s in its place", installed, __version__)


def _installed_version() -> str | None:
    """Return the version of an installed DeepSpeed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _install_in_children() -> None:
    """Do the same in each Python process that this one starts, through its import of `sitecustomize`."""
    python_path = os.environ.get("PYTHONPATH")
    if _STARTUP not in (python_path or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = _STARTUP if python_path is None else f"{_STARTUP}{os.pathsep}{python_path}"


USAGE = """usage: python -m zstore.as_deepspeed [--local_rank | --no_local_rank] SCRIPT [ARGUMENTS]
       python -m zstore.as_deepspeed [--local_rank | --no_local_rank] -m MODULE [ARGUMENTS]

Runs a script whose `import deepspeed` imports zstore, in this process and its children.
It replaces Python under DeepSpeed's launcher. Without a launcher there is one rank; `zstore run
--as-deepspeed` or torchrun start several.

  --local_rank, --no_local_rank   pass `--local_rank=N` to the script, as DeepSpeed's launcher does, or
                                  do not; default: only if its text mentions the option
"""
_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The argument of DeepSpeed's launcher, as scripts spell it."""


def main(argv: Sequence[str]) -> int:
    """Run the script in `argv`, with the words after it as its arguments; return an exit code."""
    argv = list(argv)
    passes_local_rank: bool | None = None
    while argv and argv[0] in ("--local_rank", "--no_local_rank"):
        passes_local_rank = argv.pop(0) == "--local_rank"
    is_module = argv[:1] == ["-m"]
    if is_module:
        argv.pop(0)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        sys.stderr.write(USAGE)
        return 2
    if argv[0] in ("-h", "--help") and not is_module:
        sys.stdout.write(USAGE)
        return 0
    install_finder()
    target, *arguments = argv
    if is_module:
        import runpy

        sys.argv = [target, *_with_local_rank(arguments, "--local_rank" if passes_local_rank else None)]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    return _run_script(target, arguments, passes_local_rank)


def _run_script(path: str, arguments: list[str], passes_local_rank: bool | None) -> int:
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
    mentioned = (name for name in _LOCAL_RANK if name.encode() in source)
    option = next(mentioned, "--local_rank" if passes_local_rank else None)
    sys.argv = [path, *_with_local_rank(arguments, None if passes_local_rank is False else option)]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # It stays `__main__` until the process ends, since handlers, threads and pickles look for it.
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return 0


def _with_local_rank(arguments: list[str], option: str | None) -> list[str]:
    has_option = any(word.partition("=")[0] in _LOCAL_RANK for word in arguments)
    if option is None or has_option:
        return arguments
    return [f"{option}={os.environ.get('LOCAL_RANK', '0')}", *arguments]
