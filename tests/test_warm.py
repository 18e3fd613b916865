"""Processes that are forked from one that has everything loaded are as those that Python starts anew."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from tests import warm
from zstore.testing.ranks import PRELOADED, run_ranks


def test_a_process_that_hangs_is_killed_with_the_block_that_fails() -> None:
    command = [sys.executable, "-c", "import signal; print('there', flush=True); signal.pause()"]
    process = warm.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    assert process.poll() is None
    assert not warm.ends_within(process, 0.01)
    with pytest.raises(subprocess.TimeoutExpired), process:
        process.communicate(timeout=0.01)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def _ends_at_once(rank: int) -> int:
    return rank


def test_a_rank_that_ends_at_once_leaves_the_others_their_connections() -> None:
    for _ in range(8):
        assert run_ranks(_ends_at_once, 3) == [0, 1, 2]


def _not_loaded(rank: int, names: list[str]) -> list[str]:
    return [name for name in names if name not in sys.modules]


def test_ranks_inherit_all_modules_that_they_are_to_inherit() -> None:
    # A server passes over a module that it cannot import.
    ours = [name for name in PRELOADED if name.startswith(("tests.", "zstore."))]
    assert run_ranks(_not_loaded, 1, ours) == [[]]


def _ends_by_what_is_loaded() -> None:
    sys.exit(0 if "zstore.engine" in sys.modules else "the engine is to be imported in each")


def test_a_child_of_a_forkserver_has_all_loaded_whoever_started_the_server() -> None:
    child = multiprocessing.get_context("forkserver").Process(target=_ends_by_what_is_loaded)
    child.start()
    child.join()
    assert child.exitcode == 0
