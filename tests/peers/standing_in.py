"""A plugin of pytest for tests of DeepSpeed, of its own and of others': with STANDS_IN=1 they run on zstore's stand-in.

`PYTHONPATH=tests/peers python -m pytest -p standing_in unit`, since theirs is a package of its own. The library that the
variable UNMARKED names marks tests that need a GPU, and refuses bf16 without one: DeepSpeed has both on the CPU, and whether
a test has shows when it runs.
"""

import multiprocessing
import os
from importlib import import_module
from typing import Any

from zstore.tools.as_deepspeed import install_finder

MARKS = {
    "accelerate": (
        "accelerate.test_utils.testing.require_fp16",
        "accelerate.test_utils.testing.require_multi_device",
        "accelerate.test_utils.testing.require_non_cpu",
    ),
    "transformers": (
        "transformers.testing_utils.require_torch_accelerator",
        "transformers.testing_utils.require_torch_fp16",
        "transformers.training_args.is_torch_bf16_gpu_available",
    ),
}
"""By library what marks, or asks; both are answered by `_allowed`."""


def _allowed(test: Any = True) -> Any:
    return test


PRELOADED = ["torch", "deepspeed"]
if os.environ.get("STANDS_IN"):
    install_finder()
    if "UNMARKED" not in os.environ:  # DeepSpeed's own
        import_module("lenient")
        PRELOADED.append("lenient")
for mark in MARKS.get(os.environ.get("UNMARKED", ""), ()):
    module, _, name = mark.rpartition(".")
    setattr(import_module(module), name, _allowed)
# DeepSpeed's ranks are children of the forkserver: what it has imported they need not import, each for each test.
multiprocessing.set_forkserver_preload(PRELOADED)
