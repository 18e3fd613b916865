"""`zstore run`: what hostfiles, filters and options come to, before anything starts."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.errors import UsageError
from zstore.tools import cli
from zstore.tools.run import plan as planning
from zstore.tools.run.command import EPILOG
from zstore.tools.run.hosts import Host, limit, parse_filter, parse_hostfile, select
from zstore.tools.run.job import RunJob
from zstore.tools.run.options import RunOptions
from zstore.tools.run.plan import LaunchPlan, make_plan

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
POOLS = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=5)


def pool_of(slots: Mapping[str, int]) -> list[Host]:
    return [Host(name=name, slots=tuple(range(count))) for name, count in slots.items()]


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
    assert parse_hostfile(text, name="hosts") == pool_of(slots)


@settings(max_examples=40)
@given(pools_and_filters())
def test_include_and_exclude_share_out_all_slots(case: tuple[dict[str, int], dict[str, set[int]], str]) -> None:
    pool, named, text = case
    everything = {(name, slot) for name, count in pool.items() for slot in range(count)}
    wanted = {(name, slot) for name, slots in named.items() for slot in slots}
    taken = select(pool_of(pool), include=text)
    assert {(host.name, slot) for host in taken for slot in host.slots or ()} == wanted
    assert [host.name for host in taken] == [name for name in pool if name in named]
    if wanted == everything:
        with pytest.raises(UsageError, match="leaves no slot"):
            select(pool_of(pool), exclude=text)
    else:
        left = select(pool_of(pool), exclude=text)
        assert {(host.name, slot) for host in left for slot in host.slots or ()} == everything - wanted


@settings(max_examples=60)
@given(st.text(max_size=30))
def test_any_text_is_a_filter_or_wrong_usage(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_filter(text, option="--include")
    with contextlib.suppress(UsageError):
        parse_hostfile(text, name="hosts")


TWO = [Host(name="a", slots=(0, 1)), Host(name="b", slots=(0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("c", "", "unknown host 'c'; expected one of a, b"),
        ("", "c:1", "unknown host 'c'"),
        ("a:2", "", "host 'a' has no slot 2; it has slots 0 and 1"),
        ("b:4", "", "it has slots 0 to 3"),
        ("a:0@a", "", "named with and without slots"),
        ("a@a", "", "named with and without slots"),
        ("a:0@a:0", "", "names slot 0 twice"),
        ("a:1,1", "", "names slot 1 twice"),
        ("a:", "", "expected HOST"),
        ("a:x", "", "expected HOST"),
        ("@a", "", "expected HOST"),
        ("a", "b", "cannot both be given"),
        ("", "a@b", "leaves no slot"),
    ],
)
def test_a_wrong_filter_is_wrong_usage(include: str, exclude: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(TWO, include=include, exclude=exclude)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no host in the file"),
        ("# a\n", "no host in the file"),
        ("a", "hosts, line 1: expected HOST slots=N, got 'a'"),
        ("a slots=1\nb slots=x", "line 2: expected HOST slots=N"),
        ("a slots=1\na slots=2", "line 2: host 'a' stands there twice"),
        ("a slots=0", "at least one slot"),
        ("-oProxyCommand=x slots=1", "line 1: expected HOST"),
    ],
)
def test_a_wrong_hostfile_is_wrong_usage(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hostfile(text, name="hosts")


def test_a_host_of_several_parts_of_a_filter_has_the_slots_of_all() -> None:
    assert select(TWO, include="b:3@a:1@b:0") == [Host(name="a", slots=(1,)), Host(name="b", slots=(0, 3))]


def test_the_first_hosts_and_slots_are_taken() -> None:
    assert limit(TWO, num_hosts=1, ranks_per_host=None) == TWO[:1]
    assert [host.slots for host in limit(TWO, num_hosts=None, ranks_per_host=2)] == [(0, 1), (0, 1)]
    with pytest.raises(UsageError, match=r"--nnodes 3: there is only 2 hosts \(a, b\)"):
        limit(TWO, num_hosts=3, ranks_per_host=None)
    with pytest.raises(UsageError, match="--nproc 3: host 'a' has 2 slots"):
        limit(TWO, num_hosts=None, ranks_per_host=3)


# -- plans ----------------------------------------------------------------------------------------------------------------


def planned(environment: Mapping[str, str] | None = None, gpus: int = 0, **options: Any) -> LaunchPlan:
    return make_plan(RunOptions(script="train.py", **options), environment or {}, lambda: gpus)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=4\n")
    return path


def test_a_script_alone_runs_here_as_it_is() -> None:
    plan = planned(args=["--lr", "$x", "--", "--help"])
    assert plan.job.command == (sys.executable, "-u", "train.py", "--lr", "$x", "--", "--help")
    assert (plan.starts, plan.job.num_nodes, plan.job.master_port, plan.job.num_ranks) == ((), 1, 0, None)
    assert planned(module=True).job.command[1:] == ("-u", "-m", "train.py")
    assert planned(no_python=True, args=["x"]).job.command == ("train.py", "x")


def test_deepspeed_scripts_run_under_their_module() -> None:
    job = planned(as_deepspeed=True, args=["--x"]).job
    assert job.command[1:] == ("-u", "-m", "zstore.as_deepspeed", "train.py", "--x")
    assert job.environment == {"ZSTORE_AS_DEEPSPEED": "1"}
    job = planned(as_deepspeed=True, module=True, no_local_rank=True).job
    assert job.command[3:] == ("zstore.as_deepspeed", "--no_local_rank", "-m", "train.py")


def test_slots_of_this_machine_are_its_gpus_or_what_is_named() -> None:
    assert planned(gpus=4, include="localhost:1,3").job.slots == (1, 3)
    assert planned(gpus=4, exclude="localhost:1,3").job.slots == (0, 2)
    assert planned(gpus=4, include="localhost", nproc=2).job.slots == (0, 1)
    assert planned(include="localhost:0,5").job.slots == (0, 5)
    with pytest.raises(UsageError, match="no slot 4"):
        planned(gpus=4, include="localhost:4")
    with pytest.raises(UsageError, match="has 2 slots"):
        planned(gpus=4, include="localhost:0,1", nproc=3)
    assert "CUDA_VISIBLE_DEVICES=7" in planned({"CUDA_VISIBLE_DEVICES": "7"}, gpus=2, include="localhost:1").note


def test_hosts_are_reached_by_ssh(hostfile: Path) -> None:
    environment = {"NCCL_DEBUG": "INFO", "SECRET": "s", "MINE": "m", "PYTHONPATH": "/a b"}
    plan = planned(environment, hostfile=hostfile, export=["MINE", "X=1=2"], ssh_port=2222, launcher_args="-i 'my key'")
    assert [start.name for start in plan.starts] == ["a", "b"]
    one = plan.starts[1]
    assert one.command[:3] == ("ssh", "-i", "my key")
    assert one.command[-4:-1] == ("-p", "2222", "b")
    assert "PYTHONPATH='/a b'" in one.command[-1] or "'PYTHONPATH=/a b'" in one.command[-1]
    assert one.job.environment == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a b", "MINE": "m", "X": "1=2"}
    assert (one.job.node_rank, one.job.num_nodes, one.job.master_addr, one.job.master_port) == (1, 2, "a", 29500)
    assert [start.job.slots for start in plan.starts] == [(0, 1), (0, 1, 2, 3)]
    assert RunJob.from_json(one.job.to_json()) == one.job
    assert [start.name for start in planned(hostfile=hostfile, include="b:2").starts] == ["b"]
    assert [start.name for start in planned(hostfile=hostfile, nnodes=1).starts] == ["a"]


def test_the_shell_of_another_machine_finds_folder_and_program(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    program = folder / "my python"
    program.write_text('#!/bin/sh\npwd\nprintf "%s|" "$PYTHONPATH" "$@"\n')
    program.chmod(0o700)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.executable", str(program))
    shell = planned({"PYTHONPATH": "/a b;c"}, hostfile=hostfile).starts[0].command[-1]
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}\n/a b;c|-u|-m|zstore.tools.run.remote|"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "a"}, "unknown host 'a'; without a --hostfile there is only localhost"),
        ({"hostfile": Path("/nowhere")}, "--hostfile /nowhere: No such file"),
        ({"nnodes": 2}, "which machines"),
        ({"include": "a", "exclude": "b"}, "cannot both be given"),
        ({"module": True, "no_python": True}, "cannot both be given"),
        ({"as_deepspeed": True, "no_python": True}, "cannot both be given"),
        ({"no_local_rank": True}, "belongs to --as-deepspeed"),
        ({"export": ["NOT_SET"]}, "--export NOT_SET: the variable is not set"),
        ({"export": ["1=2"]}, "expected NAME or NAME=VALUE"),
    ],
)
def test_what_cannot_be_met_is_wrong_usage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(**options)


def test_several_machines_do_not_start_ranks_anew(hostfile: Path) -> None:
    with pytest.raises(UsageError, match="on one machine only"):
        planned(hostfile=hostfile, max_restarts=1)


def test_files_of_deepspeed_are_read_for_its_scripts(
    tmp_path: Path, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("env").write_text("A=1\n\nB=x=y\n")
    environment = {"DS_ENV_FILE": "env"}
    assert planned(environment, hostfile=hostfile).starts[0].job.environment == {}
    job = planned(environment, hostfile=hostfile, as_deepspeed=True).starts[0].job
    assert job.environment == {"A": "1", "B": "x=y", "ZSTORE_AS_DEEPSPEED": "1"}
    Path("env").write_text("A\n")
    with pytest.raises(UsageError, match="line 1: expected NAME=VALUE"):
        planned(environment, hostfile=hostfile, as_deepspeed=True)
    monkeypatch.setattr(planning, "_JOB_HOSTFILE", hostfile)
    os.unlink("env")
    assert [start.name for start in planned(as_deepspeed=True).starts] == ["a", "b"]
    assert planned().starts == ()


# -- the command line -----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/launch.md"


def parsed(line: str) -> RunOptions:
    """The options of a command line, as `zstore` reads it."""
    group: Any = typer.main.get_command(cli.app)
    _, name, *rest = shlex.split(line, comments=True)
    _, command, rest = group.resolve_command(group.make_context("zstore", [name]), [name, *rest])
    return RunOptions(**command.make_context("run", rest).params)


def test_every_command_line_that_is_printed_is_understood() -> None:
    text = PAGE.read_text() + EPILOG
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("zstore run ")]
    assert len(lines) > 15
    for line in lines:
        options = parsed(line)
        assert options.script.endswith((".py", ".sh", ".train")), line


def test_options_of_torchrun_and_deepspeed_are_understood() -> None:
    options = parsed("zstore run --num_gpus 2 --master_port 1 --no_python -H hosts x --num_gpus 3 -- --help")
    assert (options.nproc, options.master_port, options.no_python, options.hostfile) == (2, 1, True, Path("hosts"))
    assert (options.script, options.args) == ("x", ["--num_gpus", "3", "--", "--help"])
    options = parsed("zstore run --nproc-per-node 2 --num_nodes 3 x")
    assert (options.nproc, options.nnodes) == (2, 3)
