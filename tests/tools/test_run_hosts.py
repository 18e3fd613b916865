"""`zstore run`: what hostfiles, filters and options come to, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.errors import UsageError
from zstore.tools.run import plan as planning
from zstore.tools.run.hosts import Hosts, limit, parse_hostfile, select
from zstore.tools.run.plan import RunOptions, make_jobs
from zstore.tools.run.ranks import RunJob

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
        with pytest.raises(UsageError, match="leaves no slot"):
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


def test_the_first_hosts_and_slots_are_taken() -> None:
    assert limit(TWO, num_hosts=1, ranks_per_host=None) == {"a": (0, 1)}
    assert limit(TWO, num_hosts=None, ranks_per_host=2) == {"a": (0, 1), "b": (0, 1)}
    with pytest.raises(UsageError, match=r"--nnodes 3: there are only 2 \(a, b\)"):
        limit(TWO, num_hosts=3, ranks_per_host=None)
    with pytest.raises(UsageError, match="--nproc 3: host 'a' has 2 slots"):
        limit(TWO, num_hosts=None, ranks_per_host=3)


# -- plans ----------------------------------------------------------------------------------------------------------------


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
        ({"nnodes": 2}, "which machines"),
        ({"include": "a", "exclude": "b"}, "cannot both be given"),
        ({"module": True, "no_python": True}, "cannot both be given"),
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
