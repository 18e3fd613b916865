"""The benchmarks run, tiny, and give figures; their rates are not judged here."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench import (
    bare_checkpoint,
    bare_step,
    checkpoint,
    children,
    disk,
    limits,
    links,
    offload,
    optimizer,
    overhead,
    serve,
    small_arrays,
    step,
    store,
    waits,
)
from bench.checkpoint_figures import describe, goals, medians
from bench.children import Outcome, limited_memory, run_contender
from bench.offload import Limits, figures_of
from tests import warm
from tests.checkpoint.checkpoints import Array, save_arrays
from tests.tools.commands import run_here
from zstore.checkpoint.reader import open_checkpoint
from zstore.io.buffers import make_slab
from zstore.tools.sample.models import build_model

ROOT = Path(__file__).parents[2]


Bench = Callable[..., Any]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run a benchmark in this process, which leaves its figures alone; return them."""
    monkeypatch.setattr(limits.shutil, "which", lambda *_, **_more: None)  # fio needs seconds to start its jobs

    def run(module: ModuleType, *arguments: str, out: str = "--json", path: bool = True) -> Any:
        figures = tmp_path / "figures.json"
        where = ["--path", str(tmp_path)] if path else []
        monkeypatch.setattr(sys, "argv", [module.__name__, *where, *arguments, out, str(figures)])
        module.main()
        assert [left.name for left in tmp_path.iterdir() if left.suffix != ".zip"] == [figures.name]
        return json.loads(figures.read_text())

    return run


def test_disk_benchmark_compares_every_pattern_with_the_limit(bench: Bench) -> None:
    figures = bench(disk, "--gib", "0.03", "--rounds", "1")
    assert set(figures) == {"write", "read", "mixed"}
    for row in figures.values():
        assert row["percent"] == pytest.approx(100 * row["store"] / row["limit"])
        assert row["front_percent"] == pytest.approx(100 * row["front"] / row["store"])


def test_store_benchmark_compares_every_store_within_its_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BUDGET_BYTES", 32 * 2**20)
    monkeypatch.setattr(store, "WIDTH", 4)
    small, large = bench(store, "--cases", "5x64,24x8192", "--rounds", "1")["cases"].values()
    assert set(large) - set(small) == {limits.limit_name()}
    assert {"zstore", "tensorstore", "torch.save", "aiofiles"} <= set(small)
    assert large["zstore"]["write_ratio"] == large["zstore"]["read_ratio"] == 1
    # 192 MiB are written in half of the budget, and read into four arrays at a time.
    assert large["zstore"]["write_growth_bytes"] < 32 * 2**20
    assert large["zstore"]["read_growth_bytes"] < 36 * 2**20 + 4 * 8 * 2**20  # and what Python itself takes


def test_step_benchmark_counts_the_bytes_of_a_step(bench: Bench) -> None:
    figures = bench(step, "--model", "gpt-tiny", "--steps", "2", "--tokens", "16", "--gib", "0.03")
    # Master and two moments, read and written; small parameters rest in memory, padding and checksums add to the others.
    assert 20 < figures["bytes_per_parameter"] < 27
    assert 0 < figures["save_least_s"] < figures["save_s"]
    assert min(figures["forward_least_s"], figures["backward_least_s"]) > 0
    assert step.describe(figures).count("where the machine allows") == 3
    assert 0 < figures["save_new_blocks_percent"] < 25  # of a tiny model, the small parameters are much


def test_the_benchmark_of_small_arrays_saves_beside_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_arrays", "--path", str(tmp_path), "--parameters", "5", "--rounds", "1"])
    small_arrays.main()
    assert "15 arrays in" in capsys.readouterr().out


def test_links_benchmark_measures_a_machine_without_a_device(bench: Bench) -> None:
    rates = bench(links, "--gib", "0.06")["rates"]
    products = [f"matrix products in {precision}" for precision in ("fp32", "bf16", "fp16")]
    expected = [links.HOST, links.ADAMW, *products, "disk read", "disk write", "disk mixed"]
    assert list(rates) == expected
    assert all(rate > 0 for rate in rates.values())


def test_waits_benchmark_counts_none_without_a_device(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "traces.zip"
    monkeypatch.setattr(waits, "MODES", {"on the device": ("none", "none", "none")})
    (row,) = bench(waits, "--model", "gpt-tiny", "--tokens", "8", "--trace", str(archive))["rows"]
    assert (row["waits"], row["iteration_s"] > row["least_s"] > 0) == ({}, True)
    with zipfile.ZipFile(archive) as traces:
        assert "aten::" in traces.read("on-the-device.json").decode()


def test_the_bare_step_moves_what_a_step_does(bench: Bench) -> None:
    figures = bench(bare_step, "--model", "gpt-tiny", "--steps", "1", "--gib", "0.03", "--consumers", "2")
    num_parameters = sum(parameter.numel() for parameter in build_model("gpt-tiny", 64).parameters())
    assert 20 < figures["moved_bytes"] / num_parameters < 27


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_optimizer_benchmark_counts_the_bytes_of_steps_and_saves(bench: Bench) -> None:
    figures = bench(optimizer, "--layers", "4", "--width", "256", "--steps", "1", "--gib", "0.03")
    assert 15 < figures["bytes_per_parameter"] < 18  # two moments, read and written
    assert figures["checkpoints"]["save by zstore.dcp.Writer"]["new_blocks_bytes"] > 0


@pytest.mark.parametrize("budgets", ["none", pytest.param("none,peer", marks=pytest.mark.soak)])
def test_offload_benchmark_compares_training_from_disk_with_the_computation(
    budgets: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--models", "tiny", "--steps", "1", "--no-peer", "--overlap", "none", "--clip", "on"]
    arguments += ["--budget", budgets, "--peer-memory", "2GB"]
    monkeypatch.setattr(children, "subprocess", warm)
    monkeypatch.setattr(offload.signal, "signal", lambda *_: None)
    found = bench(offload, *arguments, "--gib", "0.03", out="--out")
    compute, ours, *within_budget = found["models"][0]["rows"]
    assert compute["error"] is None
    assert ours["error"] is None
    assert compute["parameters"] == ours["parameters"]
    # The same model and batches; only the update differs, and comes after the first loss.
    assert compute["losses"][0] == pytest.approx(ours["losses"][0], rel=1e-2)
    assert compute["losses"][2] != ours["losses"][2]
    assert compute["read_bytes_per_parameter"] == 0
    # Masters and two moments, read and written; bf16 parameters read twice and written; small ones rest in memory.
    assert 12 < ours["read_bytes_per_parameter"] < 18
    assert 12 < ours["write_bytes_per_parameter"] < 16
    assert ours["step_percent_of_limit"] > 0
    assert ours["iteration_s"] == pytest.approx(ours["forward_s"] + ours["backward_s"] + ours["step_s"])
    assert len(within_budget) == budgets.count("peer")
    for row in within_budget:
        assert row["host_budget_bytes"] == 2 * 10**9 - ours["steps_peak_bytes"]
        assert row["read_bytes_per_parameter"] == 0
        assert row["losses"] == ours["losses"]


def _outcome() -> Outcome:
    """Return a run of 100 parameters whose third step takes 1, 2 and 4 s, and moves 400 bytes each way in its step."""
    steps = [{"times": [0, 9, 9, 9], "moved": [[0, 0]] * 4, "kernel": [[0, 0]] * 2, "loss": 1.0}] * 2
    third = {"times": [0, 1, 3, 7], "moved": [[0, 0], [200, 0], [400, 0], [800, 400]], "kernel": [[0, 0], [800, 400]]}
    return Outcome(
        built={"parameters": 100, "seconds": 1.0, "peak_bytes": 10, "versions": {}},
        steps=[*steps, {**third, "loss": 1.0}],
        end={"peak_bytes": 20, "page_cache_bytes": 0},
        error=None,
        memory_limit="none asked for",
        limited_peak_bytes=None,
    )


def test_figures_are_counted_bytes_at_the_measured_limit_and_leave_out_the_first_steps() -> None:
    rates = Limits(read=200.0, write=100.0, mixed=400.0)
    compute = {"forward_s": 0.5, "backward_s": 1.6}
    row = figures_of(_outcome(), rates, {"contender": "zstore", "overlap": "none"}, compute)
    assert row["iteration_s"] == 7
    assert row["read_bytes_per_parameter"] == 8
    assert row["write_bytes_per_parameter"] == 4
    assert row["step_percent_of_limit"] == pytest.approx(100 * 2 / 4)  # 800 bytes at 400 a second, in 4 s
    assert row["io_s"] == pytest.approx(800 / 400 + 400 / 200)
    reached = row["overlap_reached"]
    assert reached["iteration"] == pytest.approx(7 / 4)
    assert reached["forward"] == pytest.approx(1 / 1)
    assert reached["backward_and_step"] == pytest.approx(6 / 3)
    assert reached["iteration_by_phase"] == pytest.approx(7 / 4)


def test_a_contender_that_fails_is_reported_with_its_words(tmp_path: Path) -> None:
    outcome = run_contender({"contender": "nobody"})
    assert outcome.built is None
    assert outcome.error is not None
    assert "KeyError: 'nobody'" in outcome.error
    row = figures_of(outcome, Limits(read=1.0, write=1.0, mixed=1.0), {"contender": "zstore"}, None)
    assert "FAILED" in offload.describe({**row, "contender": "deepspeed", "tier": "nvme"})


def test_overhead_benchmark_sets_the_engine_beside_the_plain_loop_and_fsdp2(bench: Bench) -> None:
    shape = ["--hidden", "64", "--layers", "1", "--vocab", "64", "--batch", "1", "--tokens", "8", "--pairs", "1"]
    figures = bench(overhead, *shape, "--stages", "3", path=False)
    assert [(row["processes"], row["precision"], row["other"]) for row in figures["rows"]] == [
        (1, "fp32", "plain"),
        (1, "bf16", "plain"),
        (2, "fp32", "FSDP2"),
        (2, "bf16", "FSDP2"),
    ]
    for row in figures["rows"]:
        ((mine_s, theirs_s),) = row["pairs_s"]
        assert row["ratio"] == pytest.approx(mine_s / theirs_s)
        assert row["least_s"] > 0
        # The same training: the losses of both are those of one model, one batch and one optimizer.
        assert row["engine_loss"] == pytest.approx(row["other_loss"], rel=1e-5 if row["precision"] == "fp32" else 2e-2)


def test_memory_of_a_contender_is_limited_where_the_system_allows_it() -> None:
    with limited_memory(64 * 2**20) as limit:
        taken = subprocess.run(
            [*limit.prefix, sys.executable, "-c", "print(len(bytearray(256 * 2**20)))"],
            check=False,
            capture_output=True,
        )
    if limit.how.startswith("not limited"):
        assert taken.returncode == 0
    else:
        assert taken.returncode != 0  # killed


def test_checkpoint_benchmark_sets_saves_and_loads_beside_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "run_child", run_here)
    monkeypatch.setattr(checkpoint.signal, "signal", lambda *_: None)
    arguments = ["--models", "tiny", "--peers", "torch.save,safetensors", "--rounds", "1", "--gib", "0.03"]
    figures = bench(checkpoint, *arguments, out="--out")
    assert [row["error"] for row in figures["medians"]] == [None] * 17
    rows = {(row["who"], row["what"]): row for row in figures["rows"]}
    saved, loaded = rows["zstore, from memory", "save"], rows["torch.save", "load"]
    state_bytes = (
        12 * sum(math.prod(shape) for shape in checkpoint.state_shapes(checkpoint.MODELS["tiny"]).values()) // 3
    )
    for row in (saved, loaded):
        assert row["bytes"] == state_bytes
        assert row["percent_of_limit"] == pytest.approx(
            100 * state_bytes / row["seconds"] / 1e9 / row["limit_gb_per_s"]
        )
    plain = rows["the plain program", "save"]
    assert saved["percent_of_bare"] == pytest.approx(100 * plain["seconds"] / saved["seconds"])
    assert {who for who, what in rows if what == "verify"} == {"zstore, from memory"}
    assert saved["stall_s"] < saved["seconds"]
    assert saved["new_blocks_percent"] > 99
    assert rows["zstore, from disk", "save"]["new_blocks_percent"] < 10  # of a tiny model, small shards are much
    assert rows["zstore, the rows of one rank of 3, saved by 1", "load"]["over_read"] > 1
    assert rows["zstore, engines of 2 ranks, saved by 1", "load"]["bytes"] == state_bytes
    assert rows["zstore", "consolidate to fp16"]["bytes"] == state_bytes // 3 + state_bytes // 6
    judged = " ".join(goal["what"] for goal in figures["goals"])
    for goal in ("stall under 100 ms", "save at 90 %", "consolidate to fp16 at 85 %", "completes in that limit"):
        assert goal in judged
    assert "median  tiny torch.save: load: " in capsys.readouterr().out


def test_the_plain_program_of_checkpoints_makes_the_same_files(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {
        "model/w": np.arange(1171 * 256, dtype=np.float32).reshape(-1, 256),
        "model/b": np.arange(7, dtype=np.int16),
    }
    path = save_arrays(tmp_path, arrays)
    with open_checkpoint(path) as reader:
        memories = {name: make_slab(array.nbytes) for name, array in arrays.items()}
        for name, memory in memories.items():
            memory[:] = arrays[name].reshape(-1).view(np.uint8)
        files = bare_checkpoint.files_of(reader, memories)
    bare_checkpoint.save(files, tmp_path / "bare")
    found = {path.relative_to(tmp_path / "bare"): path for path in (tmp_path / "bare").rglob("*.*") if path.is_file()}
    assert {name: file.read_bytes() for name, file in found.items()} == {
        file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }
    for memory in memories.values():
        memory[:] = 0
    bare_checkpoint.load(files, tmp_path / "bare")
    assert all(memory.tobytes() == arrays[name].tobytes() for name, memory in memories.items())
    (damaged := tmp_path / "bare/model/w/c.0.0").chmod(0o644)
    damaged.write_bytes(bytes([*damaged.read_bytes()[:5000], 255, *damaged.read_bytes()[5001:]]))
    with pytest.raises(ValueError, match="a damaged chunk"):
        bare_checkpoint.load(files, tmp_path / "bare")


def test_medians_and_goals_of_checkpoints_say_what_failed() -> None:
    row = {"model": "m", "who": "zstore, from memory", "what": "save", "error": None, "percent_of_limit": 91.0}
    rows = [row | {"seconds": seconds, "stall_s": 0.01} for seconds in (1.0, 9.0, 2.0)]
    peer = row | {"who": "DCP 4 threads", "seconds": 3.9, "stall_s": 3.9}
    failed = {"model": "m", "who": "zero_to_fp32", "what": "consolidate to fp32", "error": "out of words"}
    found = medians([*rows, peer, failed])
    assert [each.get("seconds") for each in found] == [2.0, 3.9, None]
    assert found[0]["rounds"] == 3
    assert [(goal["reached"], goal["text"]) for goal in goals(found)] == [(True, "91 %"), (False, "1.95 times")]
    assert describe(failed) == "m zero_to_fp32: consolidate to fp32 FAILED: out of words"


def test_benchmark_of_dcp_saves_through_both_writers_in_turn(tmp_path: Path) -> None:
    options = ["--pairs", "--path", str(tmp_path), "--sizes", "1", "--ranks", "1", "--rounds", "2"]
    done = warm.run([sys.executable, "-m", "bench.dcp", *options], capture_output=True, text=True, check=True)
    line = r"1 MB, 1 ranks: zstore \d+ ms, torch \d+ ms, ratio [\d.]+ \([\d.]+ to [\d.]+, 2 pairs\)\n"
    assert re.fullmatch(line, done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_serve_benchmark_sets_the_service_beside_other_servers(bench: Bench) -> None:
    figures = bench(serve, "--gib", "0.001", "--rounds", "1")
    assert set(figures) == {pattern.name for pattern in serve.PATTERNS}
    assert all(row["requests_per_s"] > 0 for rows in figures.values() for row in rows.values())
