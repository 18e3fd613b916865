"""Makes `import deepspeed` resolve to zstore at Python startup, then runs the environment's own sitecustomize."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    try:
        from zstore.tools.as_deepspeed import StandInFinder
    except (ImportError, SyntaxError):  # the Python of another environment, without zstore
        return
    sys.meta_path.insert(0, StandInFinder())


def _run_next() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


_install()
_run_next()
