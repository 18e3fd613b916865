"""The benchmarks run, tiny, and give figures; their rates are not judged. What `make gpu` records, and how it ends a run."""

import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import (
    checkpoint,
    children,
    clocked,
    disk,
    gpu,
    limits,
    links,
    offload,
    optimizer,
    overhead,
    serve,
    step,
    store,
    waits,
)
from bench.children import run_group
from bench.gpu_parts import FAULTS
from tests import warm
from tests.tools.commands import run_here

Bench = Callable[..., Any]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
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


def test_links_benchmark_measures_a_machine_without_a_device(bench: Bench) -> None:
    rates = bench(links, "--gib", "0.06")["rates"]
    products = [f"matrix products in {precision}" for precision in ("fp32", "bf16", "fp16")]
    expected = [links.HOST, links.ADAMW, *products, "disk read", "disk write", "disk mixed"]
    assert list(rates) == expected
    assert all(rate > 0 for rate in rates.values())


def test_clocked_benchmark_takes_steps_in_each_mode(bench: Bench) -> None:
    figures = bench(clocked, "--layers", "1", "--width", "64", "--steps", "1", "--rate", "40", path=False)
    assert set(figures) == {"none", "forward", "backward"}
    assert all(row["of the least"] > 1 for row in figures.values())


@pytest.mark.soak
def test_waits_benchmark_without_a_device(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "traces.zip"
    monkeypatch.setattr(waits, "MODES", {"on the device": ("none", "none", "none")})
    (row,) = bench(waits, "--model", "gpt-tiny", "--tokens", "8", "--trace", str(archive))["rows"]
    assert (row["waits"], row["iteration_s"] > row["least_s"] > 0) == ({}, True)
    with zipfile.ZipFile(archive) as traces:
        assert "aten::" in traces.read("on-the-device.json").decode()


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_optimizer_benchmark_counts_the_bytes_of_steps(bench: Bench) -> None:
    figures = bench(optimizer, "--layers", "4", "--width", "256", "--steps", "1", "--gib", "0.03")
    assert 15 < figures["bytes_per_parameter"] < 18  # two moments, read and written
    assert all(each["of_adamw"] > 0 for each in figures["kernels"].values())


@pytest.mark.soak
def test_offload_benchmark_compares_disk_with_computation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--models", "tiny", "--steps", "1", "--no-peer", "--overlap", "none", "--clip", "on"]
    arguments += ["--budget", "none"]
    monkeypatch.setattr(children, "subprocess", warm)
    monkeypatch.setattr(offload.signal, "signal", lambda *_: None)
    found = bench(offload, *arguments, "--gib", "0.03", out="--out")
    compute, ours = found["models"][0]["rows"]
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


def test_overhead_benchmark_sets_the_engine_beside_the_plain_loop_and_fsdp2(bench: Bench) -> None:
    shape = ["--hidden", "64", "--layers", "1", "--vocab", "64", "--batch", "1", "--tokens", "8", "--pairs", "1"]
    figures = bench(overhead, *shape, "--stages", "3", path=False)
    expected = [(n, precision, other) for n, other in ((1, "plain"), (2, "FSDP2")) for precision in ("fp32", "bf16")]
    assert [(row["processes"], row["precision"], row["other"]) for row in figures["rows"]] == expected
    for row in figures["rows"]:
        ((mine_s, theirs_s),) = row["pairs_s"]
        assert row["ratio"] == pytest.approx(mine_s / theirs_s)
        assert row["least_s"] > 0
        # The same training: the losses of both are those of one model, one batch and one optimizer.
        assert row["engine_loss"] == pytest.approx(row["other_loss"], rel=1e-5 if row["precision"] == "fp32" else 2e-2)


@pytest.mark.soak
def test_checkpoint_benchmark(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(checkpoint, "run_child", run_here)
    monkeypatch.setattr(checkpoint.signal, "signal", lambda *_: None)
    arguments = ["--models", "tiny", "--peers", "torch.save,safetensors", "--rounds", "1", "--gib", "0.03"]
    figures = bench(checkpoint, *arguments, out="--out")
    assert [row["error"] for row in figures["medians"]] == [None] * 17
    rows = {(row["who"], row["what"]): row for row in figures["rows"]}
    saved, loaded = rows["zstore, from memory", "save"], rows["torch.save", "load"]
    state_bytes = 12 * sum(math.prod(one) for one in checkpoint.state_shapes(checkpoint.MODELS["tiny"]).values()) // 3
    assert saved["bytes"] == loaded["bytes"] == state_bytes
    assert {who for who, what in rows if what == "verify"} == {"zstore, from memory"}
    assert saved["stall_s"] < saved["seconds"]
    assert saved["new_blocks_percent"] > 99
    assert rows["zstore, from disk", "save"]["new_blocks_percent"] < 10  # of a tiny model, small shards are much
    assert rows["zstore, the rows of one rank of 3, saved by 1", "load"]["over_read"] > 1
    assert rows["zstore, engines of 2 ranks, saved by 1", "load"]["bytes"] == state_bytes
    assert rows["zstore", "consolidate to fp16"]["bytes"] == state_bytes // 3 + state_bytes // 6
    assert "median  tiny torch.save: load: " in capsys.readouterr().out


def test_benchmark_of_dcp_saves_through_both_writers_in_turn(tmp_path: Path) -> None:
    options = ["--path", str(tmp_path), "--sizes", "1", "--ranks", "1", "--rounds", "2"]
    done = warm.run([sys.executable, "-m", "bench.dcp", *options], capture_output=True, text=True, check=True)
    line = r"1 MB, 1 ranks: zstore \d+ ms, torch \d+ ms, ratio [\d.]+ \([\d.]+ to [\d.]+, 2 pairs\)\n"
    assert re.fullmatch(line, done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_serve_benchmark_sets_the_service_beside_other_servers(bench: Bench) -> None:
    figures = bench(serve, "--gib", "0.001", "--rounds", "1")
    assert set(figures) == {pattern.name for pattern in serve.PATTERNS}
    assert all(row["requests_per_s"] > 0 for rows in figures.values() for row in rows.values())


def test_the_docs_count_the_tests_that_passed_on_a_device() -> None:
    root = Path(gpu.__file__).parent.parent
    (runs,) = [
        part["runs"] for part in gpu.Record(root / "bench" / "results").parts.values() if part["name"] == "ceilings"
    ]
    found = {run["label"]: run["figures"] for run in runs}
    rows = [line for line in (root / "docs" / "devices.md").read_text().splitlines() if "on an H200" in line]
    for label, name in (("cuda", "CUDA, one device"), ("late copies", "CUDA, one device"), ("nccl", "NCCL, one rank")):
        (row,) = [row for row in rows if name in row]
        passed, tests = map(int, re.search(r"(\d+) of (\d+)", row).groups())  # type: ignore[union-attr]
        figures = found[label]
        # Those that need a second device are a row of their own.
        assert (passed, tests) == (figures["passed"], figures["tests"] - sum(figures["skipped"].values()))


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = "sleep 1000 & echo begun; wait"  # what it started has its output, too, so that nobody else ends that
    assert run_group(["sh", "-c", script], 0.5, os.environ, folder=tmp_path) == "not done within 0.5 s: begun"
    assert run_group(["sh", "-c", "echo words; exit 3"], 60, os.environ) == "exit status 3: words"
    assert run_group(["true"], 60, os.environ) is None


def test_a_row_of_ours_that_failed_is_a_fault_and_a_peers_is_none() -> None:
    def figures(*rows: tuple[str, str | None]) -> dict[str, Any]:
        return {"models": [{"rows": [{"contender": who, "error": error} for who, error in rows]}]}

    faults = FAULTS["bench.offload"]
    assert faults(figures(("deepspeed", "no compiler"), ("zstore", None))) == []
    assert faults(figures(("zstore", "no room"))) == ["zstore: no room"]
    assert faults(figures(("compute", None))) == ["zstore was not reached"]
    rows = [
        {"who": "DCP async", "what": "save", "error": "x"},
        {"who": "zstore, from disk", "what": "load", "error": "y"},
    ]
    assert FAULTS["bench.checkpoint"]({"rows": rows}) == ["zstore, from disk, load: y"]
