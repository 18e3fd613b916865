"""A drive that is full in the middle of a step, or would be after a save: an error, and nothing that was saved is lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.engine.bits import SPILLS, engine_digests
from tests.engine.runs import make_config, start, state_of, step, take_steps
from tests.engine.step_modes import say
from zstore.errors import DiskFullError, RankError
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

# Parameters are on disk too: their files, or those of the state; or of gradients that wait there.
FULL = [
    ("allocate", "none", "*.shard"),
    ("write", "backward", "*/parameter*.shard"),
    ("write", "none", "*/gradient*.shard"),
]
MORE_FULL = [
    ("allocate", "forward", "*/model*.shard"),
    *(("write", mode, "*.shard") for mode in ("none", "forward", "backward")),
    *(("write", mode, "*/parameter*.shard") for mode in ("none", "forward")),
]


def _full_in_mid_step(rank: int, folder: str, kind: str, mode: str, pattern: str) -> tuple[list[Any], list[Any], str]:
    waits = {"host_budget_bytes": SPILLS} if "gradient" in pattern else {}
    own = "none" if pattern == "*.shard" else "nvme"
    config = make_config(3, "nvme", f"{folder}/nvme", own, zstore={"step_overlap": mode} | waits)
    with start(config) as engine:
        whole = [engine_digests(engine) for _ in range(4) if step(engine) is None]
    files = FaultyFiles()
    with start(config, _files=files) as engine:
        assert bool(engine.training_state.state.spilled) == bool(waits)
        take_steps(engine, 2)
        engine.save_checkpoint(f"{folder}/ckpt")
        if rank == 1:
            full = {"first": int(pattern == "*.shard"), "times": None, "error_number": errno.ENOSPC}
            files.inject(Fault(kind=kind, pattern=pattern, **full))  # type: ignore[arg-type]
        with pytest.raises(DiskFullError if rank == 1 else RankError) as caught:
            take_steps(engine, 1 if mode == "none" else 2)
        files.heal()
    with start(config) as engine:
        engine.load_checkpoint(f"{folder}/ckpt")
        again = [engine_digests(engine)] + [engine_digests(engine) for _ in range(2) if step(engine) is None]
    return whole[1:], again, say(caught.value)


@pytest.mark.parametrize(
    ("kind", "mode", "pattern"), [*FULL, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_FULL)]
)
def test_a_full_disk_in_mid_step_and_the_last_checkpoint_goes_on_exactly(
    tmp_path: Path, kind: str, mode: str, pattern: str
) -> None:
    (tmp_path / "nvme").mkdir()
    for whole, again, text in run_ranks(_full_in_mid_step, 2, str(tmp_path), kind, mode, pattern, timeout_s=60):
        assert again == whole
        assert "No space left on device [ENOSPC]" in text
        assert "step" in text


def test_a_save_that_leaves_no_room_for_the_next_step_is_refused(nvme: Path) -> None:
    files = FaultyFiles()
    folder = nvme.parent / "ckpt"
    with start(make_config(3, "nvme", nvme), _files=files) as engine:
        step(engine)
        shards = {path: path.stat().st_size for path in nvme.rglob("*.shard")}
        before = state_of(engine)
        files.free = sum(shards.values()) - 1
        with pytest.raises(DiskFullError, match=f"the next step needs {files.free + 1} bytes .* only {files.free} are"):
            engine.save_checkpoint(str(folder))
        assert state_of(engine) == before
        step(engine)
        # Nothing was pinned: the files were changed in place.
        assert {path: path.stat().st_size for path in nvme.rglob("*.shard")} == shards
        files.free = sum(shards.values())
        with pytest.raises(DiskFullError, match=f"and the next step {files.free} beside it, but only {files.free} are"):
            engine.save_checkpoint(str(folder))
        files.free *= 3
        engine.save_checkpoint(str(folder))
        step(engine)
        assert not shards.keys() & set(nvme.rglob("*.shard"))
