"""engine.statistics(): bytes and times of every link, against what can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engine.runs import make_config, moved_since, start, step
from zstore.engine import Engine
from zstore.testing.ranks import run_ranks


def on_disk_bytes(engine: Engine) -> int:
    """Bytes of one pass over the arrays that rest on disk, checksums and padding included, from the files."""
    store = engine.training_state.state.store
    total = 0
    for name in store.names():
        if store.tier(name).name == "disk":
            local = store.local(name)
            payload = local.grid.chunk_numel * local.spec.itemsize
            slot = -(-(payload + 4) // 4096) * 4096
            total += slot * local.grid.present_chunks(local.shard)
    return total


def test_a_step_reads_and_writes_the_state_that_rests_on_disk(tmp_path: Path) -> None:
    with start(make_config(3, "nvme", tmp_path)) as engine:
        step(engine)
        before = engine.statistics()
        step(engine)
        moved = moved_since(engine, before)
        one_pass = on_disk_bytes(engine)
        # One parameter got no gradient and none of its state is touched; it is small, and rests in host memory.
        assert one_pass > 0
        for name in ("disk_read", "disk_write", "optimizer_read", "optimizer_write"):
            assert (name, moved[name].bytes) == (name, one_pass)
            assert moved[name].operations > 0
            assert moved[name].busy_s > 0
        assert engine.statistics().links["disk_read"].stall_s["not read yet"] > 0
        # Of so few requests none waits for room.
        assert "queue full" not in engine.statistics().links["disk_write"].stall_s
        assert "all_gather" not in moved  # alone


def test_what_a_save_copies_and_how_long_it_held_training_up(tmp_path: Path) -> None:
    with start(make_config(1)) as engine:
        step(engine)
        assert "checkpoint_write" not in engine.statistics().links
        tickets = [engine.save_checkpoint(str(tmp_path), "a")]
        step(engine)  # else the second save would link what the first one wrote
        tickets.append(engine.save_checkpoint(str(tmp_path), "b"))
        found = engine.statistics().links["checkpoint_write"]
        state = sum(
            engine.training_state.state.store.local(name).nbytes for name in engine.training_state.state.store.names()
        )
    assert found.bytes > 2 * state
    assert found.stall_s == {"save called": sum(ticket.stall_s for ticket in tickets)}


def test_statistics_become_json(tmp_path: Path) -> None:
    with start(make_config(3, "nvme", tmp_path)) as engine:
        step(engine)
        found = engine.statistics()
        data = asdict(found)
        assert set(json.loads(json.dumps(data))) == set(data)
        assert data["links"]["disk_read"]["bytes"] == found.links["disk_read"].bytes
        assert data["process_peak_bytes"] > 10**7
        step(engine)
        assert asdict(found) == data


def _links(rank: int, stage: int) -> dict[str, Any]:
    with start(make_config(stage)) as engine:
        step(engine)
        before = engine.statistics()
        step(engine)
        return {
            name: [link.bytes, link.operations, link.busy_s, link.stall_s]
            for name, link in moved_since(engine, before).items()
        }


def test_collectives_are_counted_and_timed() -> None:
    ranks = run_ranks(_links, 2, 3)
    for links in ranks:
        for name in ("all_gather", "reduce_scatter", "control"):
            nbytes, operations, busy_s, stall_s = links[name]
            assert nbytes > 0
            assert operations > 0
            assert busy_s >= sum(stall_s.values()) > 0
            assert stall_s["begun earlier"] > 0
    assert [links["all_gather"][0] for links in ranks] == [ranks[0]["all_gather"][0]] * 2
    # Sent when the model was laid out, and not in a step.
    assert ranks[0]["broadcast"][:2] == [0, 0]
