"""Calls that all ranks make together: a rank that is alone in one hears so, and one that is late is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as torch_dist

from tests.waiting import until
from zstore.errors import RankError, UsageError
from zstore.ranks import incident
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks


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
            with pytest.raises(UsageError, match=r"^save\(\) was called on rank 0 while rank 1 .* together") as raised:
                _save(world)
            told = "is in step, collective control" if what == "own" else "closed its engine"
            assert told in str(raised.value)
        else:
            with (
                pytest.raises(RankError, match=r"rank 0 in save: .*UsageError: save\(\) was called"),
                world.calling("step"),
            ):
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
    incident.ABSENT_S = 1.0
    with _watched() as world:
        if rank == 1:
            os._exit(1)
        with pytest.raises(RankError, match="rank 1"):
            _save(world)


def test_nobody_waits_in_a_call_for_a_rank_that_died() -> None:
    run_ranks(_dying, 2, may_die=[1])
