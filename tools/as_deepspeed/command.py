"""`python -m zstore.as_deepspeed [--local_rank | --no_local_rank] [-m] SCRIPT ...`: a script of DeepSpeed's, on zstore."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader

from .installing import put_in_place

USAGE = """usage: python -m zstore.as_deepspeed [--local_rank | --no_local_rank] SCRIPT [ARGUMENTS]
       python -m zstore.as_deepspeed [--local_rank | --no_local_rank] -m MODULE [ARGUMENTS]

Runs a script in which `import deepspeed` gives zstore, in this process and those that it starts.
It stands where DeepSpeed's launcher starts Python: by itself it is one rank, and `zstore run --as-deepspeed`
or torchrun start several.

  --local_rank, --no_local_rank   give the script `--local_rank=N`, as DeepSpeed's launcher does, or
                                  do not; by default a script gets it whose text mentions it
"""
_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The argument of DeepSpeed's launcher, as scripts spell it."""


def main(words: Sequence[str]) -> int:
    """Run the script that `words` name, with the words after it as its arguments; return the exit code of a wrong call."""
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
        sys.argv = [target, *_with_local_rank(arguments, "--local_rank" if wants_rank else None)]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    return _run_script(target, arguments, wants_rank)


def _run_script(path: str, arguments: list[str], wants_rank: bool | None) -> int:
    """Run a file, or a program on PATH that is a script, as Python does: as `__main__`, with its folder first on the path."""
    if not os.path.exists(path):
        path = shutil.which(path) or path
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"python -m zstore.as_deepspeed: can't open {path!r}: {error.strerror}\n")
        return 2
    spelled = (name for name in _LOCAL_RANK if name.encode() in source)  # a script that mentions it gets it
    option = next(spelled, "--local_rank" if wants_rank else None)
    sys.argv = [path, *_with_local_rank(arguments, None if wants_rank is False else option)]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # A module of its own, which stays `__main__` to the end: handlers, threads and pickles look for it there.
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
