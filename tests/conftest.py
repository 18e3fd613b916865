"""Settings that all tests share."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

# Two workers on two cores: torch's threads would spin against each other. Before torch is imported, and for every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One that hangs is ended by SIGABRT, and then shows where its threads are.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# What a shell runs in the background ignores Ctrl-C, and so do its children: tests that press it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

from tests import warm
from zstore.io.machine import read_host_memory
from zstore.testing import ranks

pytest.register_assert_rewrite("zstore.testing.contract")

# No deadline: a busy machine is no bug.
settings.register_profile("zstore", deadline=None)
settings.load_profile("zstore")

ranks.PRELOADED.insert(0, "tests.forked")
# What many ranks import, too: seconds in each of them that reads a model of transformers.
ranks.PRELOADED += ["pytest", "hypothesis", "transformers.models.gpt_neo.modeling_gpt_neo", "tests.warm"]
# What one rank or process after the other would import: together half a second of each launcher or command.
ranks.PRELOADED += ["torch.distributed.run", *(f"zstore.tools.{name}" for name in ("cli", "sample", "train"))]
ranks.PRELOADED += ["tests.engine.runs", "tests.loaded"]
ranks.PRELOADED += ["zstore.serve.app"]  # what uploads lose by kills


WORKER_BYTES = 2**31
"""Of a worker, what it forks ranks from, and four of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return a number of workers for `-n auto`: three for two cores, as tests wait for ranks and drives, where memory
    lets them; the variable is xdist's own."""
    if given := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available_bytes = read_host_memory().available_bytes
    wanted = min(cores + cores // 2, 16)
    return wanted if available_bytes is None else max(min(wanted, 2), min(wanted, available_bytes // WORKER_BYTES))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--new-processes",
        action="store_true",
        help="run the tests that start Python processes, and start them as a user does, not by a fork of one with all loaded",
    )
    parser.addoption("--sqrt-errs", action="store_true", help="let torch's roots err by an ulp: tests/rounding.py")


def pytest_configure(config: pytest.Config) -> None:
    # Until all is imported: that leaves no garbage to speak of, and collections meanwhile take a sixth of its time.
    gc.disable()
    if config.getoption("--sqrt-errs"):
        os.environ["ZSTORE_TEST_SQRT_ERRS"] = "1"
        ranks.PRELOADED.append("tests.rounding")
        importlib.import_module("tests.rounding")
    if config.getoption("--new-processes"):
        os.environ[warm.NEW_PROCESSES] = "1"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed in the test is freed without the cyclic collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--new-processes"):
        chosen = [item for item in items if getattr(getattr(item, "module", None), "warm", None) is warm]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves torch.distributed's default group to the next test of its process."""
    yield
    torch_dist = sys.modules.get("torch.distributed")  # CI's runs on other Pythons have no torch
    if torch_dist is not None and torch_dist.is_available() and torch_dist.is_initialized():
        torch_dist.destroy_process_group()
        pytest.fail("the test left torch.distributed initialized; destroy the process group")


@pytest.fixture(autouse=True)
def no_path_is_left() -> Iterator[None]:
    """Fail a test that leaves PYTHONPATH changed, as the stand-in for DeepSpeed does: later processes would have it."""
    before = os.environ.get("PYTHONPATH")
    yield
    if os.environ.get("PYTHONPATH") != before:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        pytest.fail("the test left PYTHONPATH changed: let a process of its own install the stand-in for DeepSpeed")


def pytest_collection_finish() -> None:
    # What is there now stays: no collection need look at it again.
    gc.collect()
    gc.freeze()
    gc.enable()
    # Whichever test starts the server of this process: one without these would let each rank import them.
    ranks.loaded_context()


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    from tests.checkpoint.s3_server import s3_server

    with s3_server() as options:
        yield options
