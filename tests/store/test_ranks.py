"""Ranks: groups, boards, calls that all make together, launchers' variables, and what they make of each other's reports."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d

from tests.waiting import until
from zstore.errors import DiskFullError, RankError, UsageError
from zstore.io.closing import wait_until
from zstore.ranks import board, reports
from zstore.ranks.board import Connections
from zstore.ranks.reports import AGREEMENT_TIMEOUT_S, RESPONSE_TIMEOUT_S, Outcome, RankReport, explain, judge
from zstore.ranks.world import World, make_groups
from zstore.testing.ranks import run_ranks


def test_messages_and_bytes_of_any_length_are_there_until_they_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_MAX_VALUE_BYTES", 4)
    found = board.Board(torch_dist.HashStore())  # type: ignore[attr-defined]
    assert found.read("a") is None
    for data in (b"", b"1 2", b"four", b" 9 bytes."):
        found.post_bytes("a", data)
        assert found.read_bytes("a") == data
        found.remove("a")
        assert found.read_bytes("a") is None
    found.post("b", {"rank": 1})
    assert found.read("b") == {"rank": 1}
    assert [found.add("n", 1), found.add("n", 2), found.add("n", 0)] == [1, 3, 3]


def test_boards_share_posts_and_a_store_that_is_gone_is_not_asked_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = torch_dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    client: Any = torch_dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(c10d, "_get_default_store", lambda: client)
    monkeypatch.setattr(board, "_CONNECT_TIMEOUT", timedelta(seconds=0.5))
    usual, data = client.timeout, bytes(range(256)) * 40_000  # more than the store takes in one value
    board.Board.connect("a").post_bytes("large", data)
    other = board.Board.connect("a")
    assert (
        wait_until(lambda: other.read_bytes("large"), 60, str, check=lambda: None) == data
    )  # a post is not waited for
    other.remove("large")
    wait_until(lambda: other.read_bytes("large") is None, 60, str, check=lambda: None)
    del server
    gc.collect()
    began = time.monotonic()
    with pytest.raises(torch_dist.DistError):
        board.Board.connect("a")
    assert time.monotonic() - began < usual.total_seconds() / 5
    assert client.timeout == usual


def _in_groups_of_two(rank: int) -> dict[str, Any]:
    world = World.current()
    within, between = make_groups(world, 2)
    second = world.on_new_group()
    found: dict[str, Any] = {}
    mine = torch.full((3,), float(rank))
    for name, one in (("world", second), ("within", within), ("between", between)):
        everyone = torch.empty(3 * one.world_size)
        one.all_gather(everyone, mine)
        told = torch.full((1,), float(rank))
        one.broadcast(told, one.world_size - 1)
        found[name] = [one.rank, everyone[::3].tolist(), told.item()]
    moved = torch.full((2,), float(rank))
    if rank in (1, 2):
        world.transfer(moved, 1, 2)
    found["links"] = {name: link.bytes for name, link in world.links.statistics().items() if "group" in name}
    found["sent"] = sum(world.sent_bytes.values())
    for one in (second, within, between):
        one.release()
    return found


def test_groups_are_of_consecutive_ranks_and_bytes_are_counted_by_reach() -> None:
    for rank, found in enumerate(run_ranks(_in_groups_of_two, 4)):
        group, place = divmod(rank, 2)
        near, far = [2.0 * group, 2.0 * group + 1], [float(place), place + 2.0]
        assert found["world"] == [rank, [0.0, 1.0, 2.0, 3.0], 3.0]
        assert found["within"] == [place, near, near[-1]]
        assert found["between"] == [group, far, far[-1]]
        # Gathers of 12 bytes to 3, 1 and 1 others, broadcasts of 4 bytes from the last of each, 8 bytes from 1 to 2.
        within = 12 + 12 + (4 if rank == 3 else 0) + (4 if place == 1 else 0)
        between = 24 + 12 + (8 if rank == 3 else 0) + (4 if group == 1 else 0) + (8 if rank == 1 else 0)
        assert found["links"] == {"within_group": within, "between_groups": between}
        assert found["sent"] == within + between


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 2"):
        make_groups(World(), 2)


@contextmanager
def _watched() -> Iterator[World]:
    world = World.current()
    world.begin_watch()
    try:
        yield world
    finally:
        world.watch.close()


def _save(world: World, call: str = "save()") -> list[int]:
    with world.calling("save", meeting=call):
        found: list[int] = world.all_gather_object(world.rank)
        return found


def _late(rank: int) -> None:
    with _watched() as world:
        board = world.watch.board
        for number in (1, 2):
            if rank == number % 2:
                # It has said where it is, in a collective that the other has left, and the other is waiting.
                torch_dist.barrier()
                until(lambda: board.read(f"place/{rank}") and board.add(f"meeting/{number}/ranks", 0))  # noqa: B023
            else:
                torch_dist.barrier()
            assert _save(world) == [0, 1]


def test_ranks_wait_for_one_that_is_late() -> None:
    run_ranks(_late, 2)


def _alone(rank: int, what: str) -> None:
    with _watched() as world:
        if rank == 1 and what == "left":
            world.watch.close()
            return
        if rank == 0:
            with pytest.raises(UsageError, match=r"called on rank 0 while rank 1 .* every rank must call it") as raised:
                _save(world)
            told = "is in step, collective control" if what == "own" else "closed its engine"
            assert told in str(raised.value)
        else:
            with pytest.raises(RankError, match=r"rank 0 in save: .*UsageError: save\(\)"), world.calling("step"):
                world.all_gather_object(None)


@pytest.mark.parametrize("what", ["own", "left"])
def test_a_rank_that_is_alone_in_a_call_ends_all(what: str) -> None:
    run_ranks(_alone, 2, what)


def _apart(rank: int) -> None:
    with _watched() as world:
        call = ("save()", "load()")[rank]
        with pytest.raises((UsageError, RankError), match=r"save\(\).*load\(\)|load\(\).*save\(\)"):
            _save(world, call)


def test_two_calls_do_not_meet() -> None:
    run_ranks(_apart, 2)


def _dying(rank: int) -> None:
    reports.RESPONSE_TIMEOUT_S = 1.0
    with _watched() as world:
        if rank == 1:
            os._exit(1)
        with pytest.raises(RankError, match="rank 1"):
            _save(world)


def test_nobody_waits_in_a_call_for_a_rank_that_died() -> None:
    run_ranks(_dying, 2, may_die=[1])


def at(num_collectives: int, **more: object) -> RankReport:
    return RankReport(location="forward", num_collectives=num_collectives, **more)  # type: ignore[arg-type]


FAILED = {"cause": "ValueError: x", "details": "a traceback"}


@pytest.mark.parametrize(
    ("reports", "waited_s", "outcome"),
    [
        ({0: at(3, **FAILED), 1: at(3, **FAILED)}, 0.0, Outcome.HEALTHY),
        # The same error, but after another number of collectives: the next ones would not fit together.
        ({0: at(3, **FAILED), 1: at(4, **FAILED)}, 0.0, Outcome.BROKEN),
        # Rank 1 waits where rank 0 will never come.
        ({0: at(3, **FAILED), 1: at(4)}, 0.0, Outcome.BROKEN),
        # Rank 1 computes, and may come to the same error yet.
        ({0: at(3, **FAILED), 1: at(3)}, 0.0, None),
        ({0: at(3, **FAILED), 1: at(3)}, AGREEMENT_TIMEOUT_S + 1, Outcome.BROKEN),
        ({0: at(3, **FAILED)}, 0.0, None),
        ({0: at(3, **FAILED)}, RESPONSE_TIMEOUT_S, Outcome.BROKEN),
        ({0: at(3, connection_error="closed"), 1: at(2)}, 0.0, Outcome.BROKEN),
        ({0: at(3, is_fatal=True, **FAILED), 1: at(3, **FAILED)}, 0.0, Outcome.BROKEN),
        # Who has left needs nobody.
        ({0: at(3, **FAILED), 1: at(3, is_closed=True)}, 0.0, Outcome.HEALTHY),
        ({0: at(3, connection_error="closed"), 1: at(3, is_closed=True)}, 0.0, Outcome.BROKEN),
    ],
)
def test_outcomes_of_reports(reports: dict[int, RankReport], waited_s: float, outcome: Outcome | None) -> None:
    assert judge(reports, 2, waited_s) is outcome


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ({0: at(3), 1: at(2, **FAILED)}, r"rank 1 of 2 failed \(rank 1 in forward: ValueError: x\)"),
        ({0: at(3, connection_error="closed")}, r"rank 1 of 2 failed \(rank 1 is gone\)"),
        ({0: at(3, connection_error="closed"), 1: at(3, is_closed=True)}, r"rank 1 closed its engine"),
        # As after a timeout of the process group.
        ({0: at(3, connection_error="late"), 1: at(2, details="stack")}, r"(?s)rank 1 did not reach .*forward.*stack"),
        ({0: at(3, connection_error="a cable fell out"), 1: at(3)}, r"rank 0 in forward: a cable fell out"),
    ],
)
def test_the_error_names_the_rank_that_failed_and_why(reports: dict[int, RankReport], said: str) -> None:
    error = explain(reports, 2, 0, "step, unit 'blocks.1', collective all_gather")
    assert "rank 0 is stopping too, in step, unit 'blocks.1', collective all_gather" in str(error)
    with pytest.raises(type(error), match=said):
        raise error


def test_only_connections_between_ranks_are_cut() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with (
        server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
        socket.create_connection(server.getsockname()) as other,
        server.accept()[0] as its_end,
    ):
        mine = (*ours.getsockname(), *ours.getpeername())
        connections = Connections()
        assert mine in connections.list_endpoints()
        assert mine not in Connections(server.getsockname()[1]).list_endpoints()
        connections.learn([connections.list_endpoints(), [[*mine[2:], *mine[:2]]]], 0)
        assert len(connections._peers) == 1
        connections.cut()
        assert theirs.recv(1) == b""
        other.sendall(b"x")
        assert its_end.recv(1) == b"x"


def _exchange(rank: int) -> dict[str, Any]:
    world = World.current()
    values = world.all_gather_object({"rank": rank, "text": "é" * rank})
    first = world.broadcast_object(["from", rank], source=1)
    world.all_gather_object(None)
    second = world.on_new_group()
    send = torch.arange(world.world_size * 3, dtype=torch.bfloat16).view(world.world_size, 3) + 10 * rank
    out = torch.empty_like(send)
    second.all_to_all(out, send, kind="reduce_scatter").wait()
    gathered = torch.empty(world.world_size * 2, dtype=torch.float16)
    world.all_gather(gathered, torch.full((2,), rank, dtype=torch.float16))
    world.broadcast(torch.zeros(5, dtype=torch.float16))
    links = world.links.statistics()
    return {
        "values": values,
        "first": first,
        "out": out.tolist(),
        "gathered": gathered.tolist(),
        "sent": {kind: world.sent_bytes[kind] for kind in ("reduce_scatter", "all_gather", "broadcast")},
        "operations": {kind: link.operations for kind, link in links.items()},
        "stalls": {kind: list(link.stall_s) for kind, link in links.items()},
        "times": [(link.busy_s, sum(link.stall_s.values())) for link in links.values()],
    }


def _threads_of_a_second_group(world: World) -> list[int]:
    counts = [_count_threads()]
    second = world.on_new_group()
    assert second is not world
    parts = torch.ones(world.world_size, 4)
    for _ in range(3):
        second.all_to_all(torch.empty_like(parts), parts, kind="reduce_scatter").wait()
    counts.append(_count_threads())
    second.release()
    second.release()
    counts.append(_count_threads())
    world.all_gather_object(None)
    return counts


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _one_fails(world: World, rank: int) -> list[str]:
    world.raise_on_all_ranks(None)
    try:
        world.raise_on_all_ranks(DiskFullError("no room", path="/x") if rank == 1 else None)
    except DiskFullError as error:
        return ["own", str(error)]
    except RankError as error:
        return ["other", str(error), *map(str, error.failures)]
    return ["nothing"]


def _messages(world: World, rank: int) -> list[Any]:
    numbers, found = [None if rank == 1 else 10 * rank] * 2, []
    world.messages["number"] = lambda: numbers.pop() if numbers else None
    for error in (None, KeyError(rank) if rank == 2 else None, None, None):
        with suppress(KeyError, RankError):
            world.raise_on_all_ranks(error)
        found.append(world.received["number"])
    return found


def _all_of_it(rank: int) -> tuple[dict[str, Any], list[int], list[Any], list[str]]:
    world = World.current()
    threads = _threads_of_a_second_group(world)
    return _exchange(rank), threads, _messages(world, rank), _one_fails(world, rank)


def test_ranks_exchange_objects_tensors_and_errors() -> None:
    world_size = 3
    results = run_ranks(_all_of_it, world_size)
    first, second, third = (told for *_, told in results)
    assert second == ["own", "no room (path=/x)"]
    for other in (first, third):
        assert other[0] == "other"
        assert other[2:] == ["1"]
        assert "rank 1 of 3 failed" in other[1]
        assert "DiskFullError: no room (path=/x)" in other[1]
    for rank, (result, (before, during, after), messages, _) in enumerate(results):
        assert messages == [[0, 20], [0], [20], [20]]  # a rank with an error sends none; the last ones stay
        assert before == after < during  # a released group leaves no threads to the end of the process
        assert result["values"] == [{"rank": r, "text": "é" * r} for r in range(world_size)]
        assert result["first"] == ["from", 1]
        assert result["out"] == [[10 * r + 3 * rank + i for i in range(3)] for r in range(world_size)]
        assert result["gathered"] == [r for r in range(world_size) for _ in range(2)]
        # Each rank sends 3 bf16 values, and 2 fp16 values, to each other rank; rank 0 alone 5 fp16 values.
        assert result["sent"] == {
            "reduce_scatter": (world_size - 1) * 6,
            "all_gather": (world_size - 1) * 4,
            "broadcast": (world_size - 1) * 10 * (rank == 0),
        }
        # An object travels in two: its size and itself.
        assert result["operations"] == {"control": 6, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
        assert result["stalls"] == {
            "control": ["blocking call"],
            "reduce_scatter": ["begun earlier"],
            "all_gather": ["blocking call"],
            "broadcast": ["blocking call"],
        }
        assert all(busy_s >= stalled_s > 0 for busy_s, stalled_s in result["times"])


@pytest.mark.parametrize("named", [None, "cpu:gloo", "gloo"])
def test_the_backend_is_that_of_the_device_that_computes(named: str | None, tmp_path: Path) -> None:
    """A group that was started without naming one has a backend for each kind of device."""
    where = {"init_method": f"file://{tmp_path}/ranks", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group(named, **where)
    try:
        world = World.current()
    finally:
        torch.distributed.destroy_process_group()
    if named is not None or not torch.cuda.is_available():
        assert (world.backend, world.device) == ("gloo", torch.device("cpu"))
    else:
        assert (world.backend, world.device) == ("nccl", torch.device("cuda", 0))


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 3)])
def test_a_rank_that_sees_one_device_computes_on_it(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers let each rank see its own device alone, or all of them."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert World.current().device == torch.device("cuda", index)


def test_a_world_of_one_needs_no_process_group() -> None:
    world = World.current()
    assert (world.rank, world.world_size, world.backend) == (0, 1, None)
    assert world.on_new_group() is world
    assert world.all_gather_object({"a": 1}) == [{"a": 1}]
    assert world.broadcast_object(3) == 3
    out = torch.zeros(2)
    world.all_gather(out, torch.ones(2))
    assert out.tolist() == [1, 1]
    assert not world.sent_bytes
    world.all_gather_object(None)
    world.raise_on_all_ranks(None)
    with pytest.raises(KeyError):
        world.raise_on_all_ranks(KeyError("mine"))
