"""`zstore run`: what hostfiles, filters and options come to; scripts that know nothing of it, on one machine, and over ssh."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import process
from tests import warm
from tests.pages import blocks
from zstore.errors import UsageError
from zstore.tools.run import command as planning
from zstore.tools.run.command import Hosts, RunOptions, limit, make_jobs, parse_hostfile, select
from zstore.tools.run.ranks import RunJob

SSH = """
import os, shlex, subprocess, sys, threading
*_, host, command = sys.argv
change, folder, _, _, *words = shlex.split(command)
assert change == "cd"
os.chdir(folder)
if words[0] == "env":
    name, _, value = words[1].partition("=")
    os.environ[name] = value
    words = words[2:]
far = subprocess.Popen(words, stdin=subprocess.PIPE)
with open(os.path.join(os.environ["TEST_FOLDER"], "ssh-" + host), "w") as file:
    file.write(str(os.getpid()))
def forward():
    while chunk := os.read(0, 65536):
        os.write(far.stdin.fileno(), chunk)
    far.stdin.close()
threading.Thread(target=forward, daemon=True).start()
code = far.wait()
sys.stdout.flush()
os._exit(code if code >= 0 else 255)
"""
"""A connection: when it is killed, the far end sees its stdin end, and nothing else."""


def with_programs(folder: Path) -> dict[str, str]:
    path = folder / "ssh"
    path.write_text(f"#!{sys.executable}\n{SSH}")
    path.chmod(0o700)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}


RUN = [sys.executable, "-m", "zstore", "run", "--shutdown-timeout", "1"]

SUMS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
seen = [os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "MINE")]
os.write(1, f"{dist.get_rank()}/{dist.get_world_size()} {total.item()} {seen} {sys.argv[1:]}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit(3) if "QUIET" in os.environ else ValueError("broken here")
time.sleep(60)
"""
WAITS = """
import os, signal, subprocess, sys, time
def stop(number, frame):
    os.write(1, f"rank {os.environ['RANK']} got {number}\\n".encode())
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if "STUBBORN" in os.environ else stop)
if "STUBBORN" in os.environ:
    subprocess.Popen(["sleep", "1000"])  # has this stdout
os.write(1, b"up\\n")
while True:
    time.sleep(0.1)  # not pause(): a signal may come just before that
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in (("sums.py", SUMS), ("fails.py", FAILS), ("waits.py", WAITS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\nlocalhost slots=1\n")
    return with_programs(tmp_path)


@pytest.fixture
def free_port() -> str:
    return str(process.free_port())


def finish(tmp_path: Path, environment: Mapping[str, str], *words: str) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout in order of their text, and stderr."""
    done = warm.run([*RUN, *words], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@contextmanager
def running(tmp_path: Path, environment: Mapping[str, str], *words: str, ranks: int = 2) -> Iterator[Any]:
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with warm.Popen([*RUN, *words, "waits.py"], env=environment, cwd=tmp_path, **how) as process:
        assert [process.stdout.readline() for _ in range(ranks)] == ["up\n"] * ranks
        yield process


def rest(process: Any) -> tuple[int, list[str], str]:
    """What `finish` returns. It comes when no process has the pipes any more: none of the run is left."""
    out, err = process.communicate(timeout=200)
    return process.wait(200), sorted(out.splitlines()), err


def test_ranks_find_each_other_and_get_the_arguments_as_they_are(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ["--lr", "$x $$ ${local_rank}", "--", "--help", ""]
    options = ["--include", "localhost:1,3", "--export", "MINE=a b"]
    code, out, err = finish(tmp_path, environment, *options, "sums.py", *words)
    assert (code, err) == (0, "")
    assert out == [f"{rank}/2 3 {[str(rank), '2', '1,3', 'a b']} {words}" for rank in (0, 1)]


def test_the_script_of_the_page_runs_as_it_is_printed(tmp_path: Path, environment: dict[str, str]) -> None:
    (script,) = blocks("docs/launch.md")
    (tmp_path / "hello.py").write_text(script)
    code, out, _ = finish(tmp_path, environment, "--nproc", "2", "hello.py")
    assert (code, out) == (0, ["rank 0 of 2: 3", "rank 1 of 2: 3"])


def test_a_script_of_deepspeed_runs_on_zstore(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "theirs.py").write_text(
        "import argparse, os, deepspeed\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\n"
        "args = deepspeed.add_config_arguments(parser).parse_args()\n"
        "deepspeed.init_distributed()\n"
        "os.write(1, f'{args.local_rank} {args.deepspeed_config}\\n'.encode())\n"
    )
    # The script's rank has imported nothing before.
    environment[warm.NEW_PROCESSES] = "1"
    words = ["--as-deepspeed", "--num_gpus", "1", "theirs.py", "--deepspeed_config", "ds.json"]
    code, out, err = finish(tmp_path, environment, *words)
    assert (code, out) == (0, ["0 ds.json"]), err


def test_the_first_rank_to_fail_gives_the_code(tmp_path: Path, environment: dict[str, str]) -> None:
    code, _, err = finish(tmp_path, environment, "--num_gpus", "2", "fails.py")
    assert code == 1
    assert "ValueError: broken here" in err
    assert err.endswith("zstore: rank 1 failed with exit code 1 (the first to fail); see its output above\n")


def test_a_killed_rank_is_told_with_the_memory_as_a_cause(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    code, _, err = finish(tmp_path, environment, "--nproc", "2", "killed.py")
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 1 was killed by SIGKILL \(the first to fail\); .* lack of memory .*offload_optimizer", err)


def test_ranks_start_anew_where_they_may(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "again.py").write_text("import os\nos._exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    assert finish(tmp_path, environment, "--max-restarts", "1", "again.py")[0] == 0
    assert finish(tmp_path, environment, "again.py")[0] == 1


def test_a_signal_reaches_the_ranks_which_stop_with_75(tmp_path: Path, environment: dict[str, str]) -> None:
    with running(tmp_path, environment, "--nproc", "2") as process:
        process.send_signal(signal.SIGTERM)
        code, out, err = rest(process)
    assert (code, out, err) == (75, ["rank 0 got 15", "rank 1 got 15"], "")


def test_ctrl_c_ends_the_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    with running(tmp_path, environment, "--nproc", "2") as process:
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = rest(process)
    assert code == 130
    # Of both ranks, which may write into each other's lines.
    assert "KeyboardInterrupt" in err
    assert err.endswith("zstore: stopped by SIGINT\n")


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    # A forked rank may say that it is up before its launcher has told the guard of it; one that starts anew takes longer.
    stubborn = environment | {"STUBBORN": "1", warm.NEW_PROCESSES: "1"}
    with running(tmp_path, stubborn, "--nproc", "2") as process:
        process.kill()
        assert rest(process)[0] == -signal.SIGKILL


def test_wrong_usage_ends_with_2(tmp_path: Path, environment: dict[str, str]) -> None:
    code, _, err = finish(tmp_path, environment, "--hostfile", "hosts", "--include", "c", "sums.py")
    assert code == 2
    assert "unknown host 'c'; expected one of 127.0.0.1, localhost" in err


HOSTS = ["--hostfile", "hosts", "--master-addr", "127.0.0.1"]


def test_hosts_over_ssh_are_one_run(tmp_path: Path, environment: dict[str, str], free_port: str) -> None:
    more = ["--master_port", free_port, "--export", "MINE"]
    environment["MINE"] = "a 'b'"
    code, out, err = finish(tmp_path, environment, *HOSTS, *more, "sums.py", "--x", "$y")
    assert (code, err) == (0, "")
    mine = environment["MINE"]
    seen = [["0", "2", "0,1", mine], ["1", "2", "0,1", mine], ["0", "1", "0", mine]]
    assert out == [f"{rank}/3 6 {each} ['--x', '$y']" for rank, each in enumerate(seen)]


def test_a_failure_on_one_host_ends_all(tmp_path: Path, environment: dict[str, str], free_port: str) -> None:
    more = ["--nproc", "1", "--master-port", free_port, "--export", "QUIET=1"]
    code, _, err = finish(tmp_path, environment, *HOSTS, *more, "fails.py")
    assert code == 3
    assert "zstore: rank 1 on localhost failed with exit code 3; see its output above\n" in err
    assert "zstore: localhost failed with exit code 3 (the first to fail); see its output above\n" in err


def test_a_signal_reaches_ranks_on_every_host(tmp_path: Path, environment: dict[str, str], free_port: str) -> None:
    with running(tmp_path, environment, *HOSTS, "--nproc", "1", "--master-port", free_port) as process:
        process.send_signal(signal.SIGUSR1)
        code, out, err = rest(process)
    assert (code, out, err) == (75, ["rank 0 got 10", "rank 1 got 10"], "")


@pytest.mark.parametrize("lost", ["launcher", "connection"])
def test_no_host_keeps_ranks_alone(tmp_path: Path, environment: dict[str, str], free_port: str, lost: str) -> None:
    more = ["--nproc", "1", "--master-port", free_port, "--export", "STUBBORN=1"]
    with running(tmp_path, environment, *HOSTS, *more) as process:
        if lost == "launcher":
            process.kill()
        else:
            os.kill(int((tmp_path / "ssh-localhost").read_text()), signal.SIGKILL)
        code, _, err = rest(process)
    assert code == (-signal.SIGKILL if lost == "launcher" else 128 + signal.SIGKILL)
    assert lost == "launcher" or "zstore: localhost was killed by SIGKILL" in err


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
POOLS = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=5)


def pool_of(slots: Mapping[str, int]) -> Hosts:
    return {name: tuple(range(count)) for name, count in slots.items()}


@st.composite
def pools_and_filters(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, set[int]], str]:
    """Slots by host, those that a filter names, and its text."""
    pool = draw(POOLS)
    named: dict[str, set[int]] = {}
    words = []
    for name in draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True)):
        slots = draw(st.lists(st.integers(0, pool[name] - 1), unique=True))
        named[name] = set(slots or range(pool[name]))
        words.append(f"{name}:{','.join(map(str, slots))}" if slots else name)
    return pool, named, "@".join(words)


@settings(max_examples=30)
@given(POOLS, st.sampled_from(["", "# a comment\n", "\n"]))
def test_a_hostfile_gives_its_hosts_in_order(slots: dict[str, int], between: str) -> None:
    text = "".join(f"{between}{name}  slots={count} # so many\n" for name, count in slots.items())
    assert list(parse_hostfile(text, name="hosts").items()) == list(pool_of(slots).items())


@settings(max_examples=40)
@given(pools_and_filters())
def test_include_and_exclude_share_out_all_slots(case: tuple[dict[str, int], dict[str, set[int]], str]) -> None:
    pool, named, text = case
    everything = {(name, slot) for name, count in pool.items() for slot in range(count)}
    wanted = {(name, slot) for name, slots in named.items() for slot in slots}
    taken = select(pool_of(pool), include=text)
    assert {(host, slot) for host, slots in taken.items() for slot in slots} == wanted
    assert list(taken) == [name for name in pool if name in named]
    if wanted == everything:
        with pytest.raises(UsageError, match="no slot remains"):
            select(pool_of(pool), exclude=text)
    else:
        left = select(pool_of(pool), exclude=text)
        assert {(host, slot) for host, slots in left.items() for slot in slots} == everything - wanted


TWO = {"a": (0, 1), "b": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("c", "", "unknown host 'c'; expected one of a, b"),
        ("a:2", "", "host 'a' has no slot 2; it has 0, 1"),
        ("a:0@a:1", "", "host 'a' is named twice"),
        ("a:x", "", "expected HOST"),
        ("@a", "", "expected HOST"),
        ("", "a@b", "no slot remains"),
    ],
)
def test_a_wrong_filter_is_wrong_usage(include: str, exclude: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(TWO, include=include, exclude=exclude)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no host in the file"),
        ("a", "hosts, line 1: expected HOST slots=N, got 'a'"),
        ("a slots=1\nb slots=x", "line 2: expected HOST slots=N"),
        ("a slots=1\na slots=2", "line 2: host 'a' is listed twice"),
        ("a slots=0", "at least one slot"),
        ("-oProxyCommand=x slots=1", "line 1: expected HOST"),
    ],
)
def test_a_wrong_hostfile_is_wrong_usage(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hostfile(text, name="hosts")


def test_the_first_hosts_and_slots_are_taken() -> None:
    assert limit(TWO, num_hosts=1, ranks_per_host=None) == {"a": (0, 1)}
    assert limit(TWO, num_hosts=None, ranks_per_host=2) == {"a": (0, 1), "b": (0, 1)}
    with pytest.raises(UsageError, match=r"--nnodes 3: only 2 hosts \(a, b\)"):
        limit(TWO, num_hosts=3, ranks_per_host=None)
    with pytest.raises(UsageError, match="--nproc 3: host 'a' has 2 slots"):
        limit(TWO, num_hosts=None, ranks_per_host=3)


def planned(environment: Mapping[str, str] | None = None, gpus: int = 0, **options: Any) -> list[RunJob]:
    return make_jobs(RunOptions(script="train.py", **options), environment or {}, lambda: gpus)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=4\n")
    return path


def test_a_script_alone_runs_here_as_it_is() -> None:
    (job,) = planned(args=["--lr", "$x", "--", "--help"])
    assert job.command == (sys.executable, "-u", "train.py", "--lr", "$x", "--", "--help")
    assert (job.ssh, job.world_size, job.master_port, job.num_ranks) == ((), None, 0, None)
    assert planned(module=True)[0].command[1:] == ("-u", "-m", "train.py")
    assert planned(no_python=True, args=["x"])[0].command == ("train.py", "x")
    job = planned(as_deepspeed=True, module=True, args=["--x"])[0]
    assert job.command[1:] == ("-u", "-m", "zstore.as_deepspeed", "-m", "train.py", "--x")
    assert job.environment == {"ZSTORE_AS_DEEPSPEED": "1"}


def test_slots_of_this_machine_are_its_gpus_or_what_is_named() -> None:
    assert planned(gpus=4, include="localhost:1,3")[0].slots == (1, 3)
    assert planned(gpus=4, exclude="localhost:1,3")[0].slots == (0, 2)
    assert planned(gpus=4, include="localhost", nproc=2)[0].slots == (0, 1)
    assert planned(include="localhost:0,5")[0].slots == (0, 5)


def test_hosts_are_reached_by_ssh(hostfile: Path) -> None:
    environment = {"NCCL_DEBUG": "INFO", "SECRET": "s", "MINE": "m", "PYTHONPATH": "/a b"}
    first, one = planned(environment, hostfile=hostfile, export=["MINE", "X=1=2"], launcher_args="-i 'my key'")
    assert one.ssh[:3] == ("ssh", "-i", "my key")
    assert one.ssh[-2] == "b"
    assert one.environment == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a b", "MINE": "m", "X": "1=2"}
    assert (one.first_rank, one.world_size, one.master_addr, one.master_port) == (2, 6, "a", 29500)
    assert [job.slots for job in (first, one)] == [(0, 1), (0, 1, 2, 3)]
    assert [job.machine for job in planned(hostfile=hostfile, include="b:2")] == ["b"]
    assert [job.machine for job in planned(hostfile=hostfile, nnodes=1)] == ["a"]
    with pytest.raises(UsageError, match="on one machine only"):
        planned(hostfile=hostfile, max_restarts=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "a"}, "unknown host 'a'; without a --hostfile there is only localhost"),
        ({"hostfile": Path("/nowhere")}, "--hostfile /nowhere: No such file"),
        ({"nnodes": 2}, "no machines are named"),
        ({"include": "a", "exclude": "b"}, "cannot be combined"),
        ({"module": True, "no_python": True}, "cannot be combined"),
        ({"export": ["NOT_SET"]}, "--export NOT_SET: the variable is not set"),
        ({"export": ["1=2"]}, "expected NAME or NAME=VALUE"),
    ],
)
def test_what_cannot_be_met_is_wrong_usage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(**options)


def test_the_hostfile_of_deepspeed_is_read_for_its_scripts(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_JOB_HOSTFILE", hostfile)
    assert [job.machine for job in planned(as_deepspeed=True)] == ["a", "b"]
    assert planned()[0].ssh == ()
