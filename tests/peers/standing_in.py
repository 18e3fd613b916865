"""A plugin of pytest for tests of DeepSpeed, of its own and of others': with STANDS_IN=1 they run on zstore's stand-in.

`PYTHONPATH=tests/peers python -m pytest -p standing_in unit`, since theirs is a package of its own. Of the module that the
variable UNMARKED names, marks that ask for a GPU are taken off: DeepSpeed runs on the CPU too, and whether a test does shows
when it runs.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib import import_module
from typing import Any

from zstore.tools.as_deepspeed.installing import put_in_place

MARKS = {
    "accelerate.test_utils.testing": ("require_fp16", "require_multi_device", "require_non_cpu"),
    "transformers.testing_utils": ("require_torch_accelerator", "require_torch_fp16"),
}


def _unmarked(test: Any) -> Any:
    return test


if os.environ.get("STANDS_IN"):
    put_in_place()
for name in MARKS.get(os.environ.get("UNMARKED", ""), ()):
    setattr(import_module(os.environ["UNMARKED"]), name, _unmarked)
# DeepSpeed's ranks are children of the forkserver: what it has imported they need not import, each for each test.
multiprocessing.set_forkserver_preload(["torch", "deepspeed"])
