"""A plugin of pytest for torch's tests of DCP: those that need no GPU run on the CPU, with STANDS_IN=1 through zstore's format.

`PYTHONPATH=tests/peers python -m pytest -p replacing_dcp test/distributed/checkpoint`. torch marks tests by how many GPUs
they are made for, also those that compute on whatever device there is: the marks are taken off.
"""

import multiprocessing.context
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
from torch.testing._internal import common_device_type, common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor

import zstore.dcp


class FileSystemWriter(zstore.dcp.Writer):
    def __init__(
        self, path: Any, *, thread_count: int = 1, cache_staged_state_dict: bool = False, overwrite: bool = True
    ) -> None:
        super().__init__(path, num_threads=thread_count, overwrite=overwrite)


class FileSystemReader(zstore.dcp.Reader):
    """torch's call for zstore's reader; as torch's it unpickles."""

    def __init__(self, path: Any) -> None:
        super().__init__(path, trust_pickles=True)


class Process(multiprocessing.context.SpawnProcess):
    """A rank: to find this class it imports this file, and so is prepared too."""


def _unmarked(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _for_the_cpu(theirs: Callable[..., None]) -> Callable[..., None]:
    return lambda kind, scope, **kwargs: theirs(kind, scope, only_for="cpu")


def _init_on_the_cpu(self: Any, eager_init: bool, backend: str | None = None) -> None:
    """Say the CPU's backend once: theirs say it beside the device's, which is the CPU."""
    named = backend or self.backend
    _init_pg(self, eager_init, "gloo" if set(named.split(",")) == {"cpu:gloo"} else named)


# One test saves there, and would find what the run with torch's writer left.
shutil.rmtree("/tmp/dcp_testing", ignore_errors=True)
_init_pg = common_dtensor.DTensorTestBase.init_pg
common_dtensor.DTensorTestBase.init_pg = _init_on_the_cpu  # type: ignore[method-assign]
for each in (common_distributed, common_dtensor):
    each.skip_if_lt_x_gpu = _unmarked  # type: ignore[attr-defined]
common_device_type.instantiate_device_type_tests = _for_the_cpu(common_device_type.instantiate_device_type_tests)
multiprocessing.context.SpawnContext.Process = Process  # type: ignore[misc, assignment]
if os.environ.get("STANDS_IN"):
    for module in (dcp, filesystem, _storage_utils, format_utils):
        module.FileSystemWriter = FileSystemWriter  # type: ignore[attr-defined]
        module.FileSystemReader = FileSystemReader  # type: ignore[attr-defined]
