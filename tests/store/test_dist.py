"""Ranks, what they tell each other, and how one rank's error reaches all."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from zstore.errors import DiskFullError, RankError
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks


def _exchange(rank: int) -> dict[str, Any]:
    world = World.current()
    values = world.all_gather_object({"rank": rank, "text": "é" * rank})
    first = world.broadcast_object(["from", rank], source=1)
    world.all_gather_object(None)
    second = world.second()
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
    second = world.second()
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
    world.raise_together(None)
    try:
        world.raise_together(DiskFullError("no room", path="/x") if rank == 1 else None)
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
            world.raise_together(error)
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
    assert world.second() is world
    assert world.all_gather_object({"a": 1}) == [{"a": 1}]
    assert world.broadcast_object(3) == 3
    out = torch.zeros(2)
    world.all_gather(out, torch.ones(2))
    assert out.tolist() == [1, 1]
    assert not world.sent_bytes
    world.all_gather_object(None)
    world.raise_together(None)
    with pytest.raises(KeyError):
        world.raise_together(KeyError("mine"))
