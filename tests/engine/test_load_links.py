"""Resuming with the same layout on the same file system links the checkpoint's files in place of reading them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.bits import engine_digests
from tests.engine.models import Net, make_net
from tests.engine.runs import make_config, start, state_of, step
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.errors import CorruptionError, UsageError
from zstore.testing.ranks import run_ranks

torch.set_num_threads(1)


def config(nvme: Path, *, stage: int = 3, params: bool = False) -> dict[str, Any]:
    return make_config(stage, "nvme", nvme, "nvme" if params else "none")


def net(seed: int = 0) -> Net:
    """A model of which several parameters are large enough to rest on disk."""
    return make_net(seed, width=112)


def moved(engine: Engine) -> tuple[int, int]:
    """Bytes read from and written to the disk so far."""
    found = engine.statistics().store
    return found.disk_read_bytes, found.disk_write_bytes


def arrays_on_disk(engine: Engine) -> dict[str, int]:
    """Bytes of the arrays that rest on disk and that a checkpoint has, by name."""
    store = engine.training_state.state.store
    return {
        name: store.local(name).nbytes
        for name in store.names()
        if store.tier(name).name == "disk" and name.startswith(("model/", "optimizer/"))
    }


@pytest.mark.parametrize("params", [False, True])
def test_a_resume_links_what_is_on_disk_and_goes_on_with_the_same_bits(
    tmp_path: Path, nvme: Path, params: bool
) -> None:
    ckpt = str(tmp_path / "ckpt")
    with start(config(nvme, params=params), net()) as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(ckpt)
        step(engine)
        step(engine)
        expected = state_of(engine)
    with start(config(nvme, params=params), net(seed=3)) as engine:
        on_disk = arrays_on_disk(engine)
        assert len(on_disk) >= 6
        before = moved(engine)
        engine.load_checkpoint(ckpt)
        read, written = (now - then for now, then in zip(moved(engine), before, strict=True))
        report = engine.load_report
        assert report is not None
        assert report.linked_bytes >= sum(on_disk.values())
        # What is small rests in memory, and is read; so are the masters of which parameters are cast.
        masters = sum(nbytes for name, nbytes in on_disk.items() if name.startswith("model/"))
        assert report.read_bytes < 0.25 * sum(on_disk.values())  # of small arrays much is index and padding
        assert masters <= read < 1.1 * masters + 0.25 * sum(on_disk.values())
        # Written are, if anything, the parameters' own rows.
        assert written < 0.6 * max(masters, 1) + 1
        run_files = {path.stat().st_ino for path in nvme.rglob("*.shard")}
        linked = [path for path in Path(ckpt).rglob("c.*") if path.stat().st_ino in run_files]
        assert len(linked) == len(on_disk)
        kept = {path: path.read_bytes() for path in linked}
        step(engine)
        # At once, while a part of what is held was linked and never changed since.
        engine.save_checkpoint(ckpt, "again")
        step(engine)
        assert state_of(engine) == expected
        assert {path: path.read_bytes() for path in linked} == kept
    for tag in ("step-00000002", "again"):
        with open_checkpoint(ckpt, tag) as reader:
            assert verify_checkpoint(reader) == []


def _run(rank: int, folder: str, tag: str | None) -> tuple[dict[str, str], int]:
    with start(config(Path(folder) / "nvme"), net(seed=rank)) as engine:
        if tag is not None:
            engine.load_checkpoint(f"{folder}/ckpt", tag)
        step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", f"after-{engine.global_steps}-{engine.world_size}")
        return engine_digests(engine), 0 if engine.load_report is None else engine.load_report.linked_bytes


def test_ranks_link_their_own_shards_and_another_layout_is_read(tmp_path: Path, nvme: Path) -> None:
    run_ranks(_run, 2, str(tmp_path), None)
    linked = run_ranks(_run, 2, str(tmp_path), "after-1-2")
    assert all(nbytes > 100_000 for _, nbytes in linked)
    with open_checkpoint(tmp_path / "ckpt", "after-2-2") as one:
        assert verify_checkpoint(one) == []
    # 4 samples of a global batch of 8, which one rank cannot take: only the weights count here.
    alone = run_ranks(_read_alone, 1, str(tmp_path))[0]
    assert alone == 0


def _read_alone(rank: int, folder: str) -> int:
    with start(config(Path(folder) / "nvme"), net(seed=5)) as engine:
        engine.load_checkpoint(f"{folder}/ckpt", "after-2-2", load_module_only=True)
        assert engine.load_report is not None
        return engine.load_report.linked_bytes


def test_on_another_file_system_it_is_read(nvme: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == nvme.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    with tempfile.TemporaryDirectory(dir=memory) as ckpt:
        with start(config(nvme), net()) as engine:
            step(engine)
            engine.save_checkpoint(ckpt)
            expected = state_of(engine)
        with start(config(nvme), net(seed=3)) as engine:
            engine.load_checkpoint(ckpt)
            assert engine.load_report is not None
            assert engine.load_report.linked_bytes == 0
            assert engine.load_report.read_bytes > sum(arrays_on_disk(engine).values())
            assert state_of(engine) == expected


def two_steps(engine: Engine) -> None:
    """In mode `forward`, the step after asks what became of a step's update."""
    step(engine)
    step(engine)


def damage(ckpt: Path, array: str, offset: int) -> Path:
    file = next((ckpt / array).glob("c.*"))
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    return file


def test_a_damaged_chunk_is_an_error_when_training_first_reads_it(tmp_path: Path, nvme: Path) -> None:
    ckpt = tmp_path / "ckpt"
    with start(config(nvme), net()) as engine:
        step(engine)
        engine.save_checkpoint(str(ckpt), "good")
        step(engine)
        engine.save_checkpoint(str(ckpt), "bad")
        step(engine)
        expected = state_of(engine)
    file = damage(ckpt / "bad", "optimizer/exp_avg/embed.weight", 70_000)
    with start(config(nvme), net(seed=3)) as engine:
        engine.load_checkpoint(str(ckpt), "bad")
        with pytest.raises(CorruptionError, match="crc32c") as caught:
            two_steps(engine)
        assert str(file) in str(caught.value)
        with pytest.raises(UsageError, match="load a checkpoint"):
            engine.save_checkpoint(str(ckpt), "worse")
        engine.load_checkpoint(str(ckpt), "good")
        step(engine)
        step(engine)
        assert state_of(engine) == expected


def test_a_file_that_was_swapped_is_noticed(tmp_path: Path, nvme: Path) -> None:
    ckpt = tmp_path / "ckpt"
    with start(config(nvme), net()) as engine:
        for tag in ("one", "two"):
            step(engine)
            engine.save_checkpoint(str(ckpt), tag)
    name = "optimizer/exp_avg/embed.weight/c.0.0"
    (ckpt / "two" / name).unlink()
    (ckpt / "two" / name).hardlink_to(ckpt / "one" / name)
    with start(config(nvme), net(seed=3)) as engine:
        engine.load_checkpoint(str(ckpt), "two")
        with pytest.raises(CorruptionError, match="not the one that the manifest names"):
            two_steps(engine)
