"""Processes that are forked from one that has everything loaded are as those that Python starts anew."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from zstore.testing.ranks import PRELOADED, run_ranks

PROGRAMS = {
    "prints": "import sys; print(sys.argv, sys.path[0], __name__); print('to stderr', file=sys.stderr)",
    "exit code": "raise SystemExit(7)",
    "exit text": "import sys; sys.exit('what went wrong')",
    "exception": "def f():\n    raise ValueError('deep')\nf()",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at exit": (
        "import atexit, threading, time, weakref\n"
        "class A: pass\n"
        "a = A()\n"
        "weakref.finalize(a, print, 'finalized')\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.01), print('thread'))).start()\n"
        "print('end')"
    ),
    "environment": "import os; print(os.environ['A_VARIABLE'], os.getcwd(), os.environ.get('HOME'))",
    "reads": "import sys; print(sys.stdin.read().upper())",
    "session": "import os; print(os.getsid(0) == os.getpid())",
    "starts": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'raise SystemExit(3)']).returncode)",
    "catches": (
        "import subprocess, sys; code = 'import sys; print(sys.argv, file=sys.stderr); print(1); input()'\n"
        "done = subprocess.run([sys.executable, '-c', code, 'x'], input='a', capture_output=True, text=True)\n"
        "print(done.returncode, done.stdout, done.stderr)"
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_process_does_as_one_started_anew(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program, "a", "b c"]
    options = {"env": {"A_VARIABLE": "value"}, "cwd": tmp_path, "start_new_session": True, "text": True}
    forked, anew = (
        run(command, capture_output=True, check=False, timeout=200, input="some text", **options)
        for run in (warm.run, subprocess.run)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (anew.returncode, anew.stdout, anew.stderr)


def test_a_pipe_that_another_process_keeps_open_stops_nobody() -> None:
    """It did: the timeout came, and then closing the stream waited for the thread that read it."""
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, file=sys.stderr)"
    with warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        sleeping = int(process.stderr.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.5)
    os.kill(sleeping, signal.SIGKILL)


def test_modules_and_scripts_run_too(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5")
    (tmp_path / "script.py").write_text("import sys, beside\nprint(beside.VALUE, sys.argv, __name__, __file__)")
    for words in (["-m", "zstore", "--version"], ["-m", "beside"], [str(tmp_path / "script.py"), "x"]):
        command = [sys.executable, *words]
        forked, anew = (run(command, capture_output=True, cwd=tmp_path) for run in (warm.run, subprocess.run))
        assert (forked.returncode, forked.stdout, forked.stderr) == (0, anew.stdout, b"")


def test_a_process_that_hangs_is_killed_with_the_block_that_fails() -> None:
    command = [sys.executable, "-c", "import signal; print('there', flush=True); signal.pause()"]
    process = warm.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert process.poll() is None
    assert not warm.ends_within(process, 0.01)
    with pytest.raises(subprocess.TimeoutExpired), process:
        process.communicate(timeout=0.01)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_with_the_option_processes_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm.NEW_PROCESSES, "1")
    with warm.Popen([sys.executable, "-c", ""]) as process:
        assert isinstance(process, subprocess.Popen)


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
