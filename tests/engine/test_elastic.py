"""Saved at any world size and stage, loaded at any other: every array has the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_net
from tests.engine.resume_runs import config, train
from zstore import initialize
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.testing.ranks import run_ranks

Layout = tuple[int, int]
"""World size and stage."""

TIERS = {0: "none", 1: "cpu", 2: "nvme", 3: "nvme"}
"""Of each stage's optimizer state: every tier is saved from and loaded into."""
EVERY: list[Layout] = [(world_size, stage) for world_size in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]


def tag_of(layout: Layout) -> str:
    return "world-{}-stage-{}".format(*layout)


def start(stage: int, folder: str, seed: int) -> Engine:
    settings = config(stage, TIERS[stage], folder) | {"train_micro_batch_size_per_gpu": 1}
    return initialize(model=make_net(seed), config=settings)[0]


def _save(rank: int, folder: str, stage: int, tag: str) -> None:
    with start(stage, folder, seed=0) as engine:
        train(engine, 1)
        engine.save_checkpoint(f"{folder}/saved", tag, {"tag": tag})


def _load_all(rank: int, folder: str, stage: int, tags: Sequence[str], again: str) -> list[int]:
    with start(stage, folder, seed=1) as engine:
        steps = []
        for tag in tags:
            path, state = engine.load_checkpoint(f"{folder}/saved", tag)
            assert path == f"{folder}/saved/{tag}"
            assert state == {"tag": tag}
            engine.save_checkpoint(f"{folder}/{again}", tag, state)
            steps.append(engine.global_steps)
        train(engine, 1)  # what was loaded last can be trained
    return steps


def check_elastic(folder: Path, saved: Iterable[Layout], loaded: Iterable[Layout]) -> None:
    """Save at every layout of `saved`, load all of them at every one of `loaded`, and compare bytes."""
    saved = list(saved)
    for layout in saved:
        run_ranks(_save, layout[0], str(folder), layout[1], tag_of(layout), timeout_s=180)
    for layout in loaded:
        tags = [tag_of(other) for other in saved if other != layout]
        again = f"again-{tag_of(layout)}"
        results = run_ranks(_load_all, layout[0], str(folder), layout[1], tags, again, timeout_s=600)
        assert results == [[1] * len(tags)] * layout[0]
        for tag in tags:
            with open_checkpoint(folder / "saved", tag) as one, open_checkpoint(folder / again, tag) as other:
                assert other.record.world_size == layout[0]
                assert verify_checkpoint(other) == []
                assert one.arrays.keys() == other.arrays.keys()
                different = [
                    name for name in one.arrays if one.read_array(name).tobytes() != other.read_array(name).tobytes()
                ]
                assert different == [], (tag, layout)


def _read_bytes(rank: int, folder: str, stage: int) -> int:
    """Return the bytes that this rank's load reads, of state in memory, so that nothing is linked."""
    settings = config(stage, "none" if stage == 1 else "cpu", folder) | {"train_micro_batch_size_per_gpu": 1}
    with initialize(model=make_net(1, vocab=60_000), config=settings)[0] as engine:
        engine.load_checkpoint(f"{folder}/saved")
        assert engine.load_report is not None
        assert engine.load_report.linked_bytes == 0
        return engine.load_report.read_bytes


def _save_wide(rank: int, folder: str) -> None:
    with initialize(model=make_net(vocab=60_000), config=config(2, "cpu", folder))[0] as engine:
        train(engine, 1)
        engine.save_checkpoint(f"{folder}/saved")


@pytest.mark.parametrize(
    ("saved", "loaded", "stage"),
    [pytest.param(2, 2, 1, marks=pytest.mark.soak), (3, 2, 2), pytest.param(1, 3, 3, marks=pytest.mark.soak)],
)
def test_each_rank_reads_only_its_own_rows(tmp_path: Path, saved: int, loaded: int, stage: int) -> None:
    run_ranks(_save_wide, saved, str(tmp_path))
    with open_checkpoint(tmp_path / "saved") as reader:
        state_bytes = sum(array.spec.nbytes for array in reader.arrays.values())
    found = run_ranks(_read_bytes, loaded, str(tmp_path), stage)
    # Beside its rows a rank reads the rest of the chunks in which they begin and end; small arrays are one chunk.
    assert state_bytes <= sum(found) < 1.15 * state_bytes
    assert max(found) < 1.2 * state_bytes / loaded


def _load_from(rank: int, folder: str, source: str) -> Any:
    with start(3, folder, seed=1) as engine:
        engine.load_checkpoint(f"{folder}/{source}", "one")
        engine.save_checkpoint(f"{folder}/again", source)
        return train(engine, 1)


def test_an_archive_goes_on_as_what_it_was_made_of(tmp_path: Path) -> None:
    """At the same layout too, where files that are not compressed would be linked."""
    run_ranks(_save, 1, str(tmp_path), 3, "one")
    with open_checkpoint(tmp_path / "saved") as reader:
        reshard_checkpoint(reader, tmp_path / "archive", codec="zstd")
    assert run_ranks(_load_from, 1, str(tmp_path), "archive") == run_ranks(_load_from, 1, str(tmp_path), "saved")
    with open_checkpoint(tmp_path / "saved") as one, open_checkpoint(tmp_path / "again", "archive") as other:
        assert verify_checkpoint(other) == []
        assert {array.codec for array in other.arrays.values()} == {None}
        assert all(one.read_array(name).tobytes() == other.read_array(name).tobytes() for name in one.arrays)


@pytest.mark.soak
def test_every_layout_loads_at_every_other(tmp_path: Path) -> None:
    check_elastic(tmp_path, EVERY, EVERY)
