"""Rates of matrix products, what "auto" takes by them, and the quick start on a CPU with and without 16-bit instructions."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import zstore
from tests.engine.models import make_net
from tests.engine.runs import make_config, start, step
from zstore.engine.config.config import load_config
from zstore.engine.params.record import PRECISIONS
from zstore.engine.plan.rates import (
    _CLOCKS,
    SLOW_RATIO,
    MatmulRates,
    _timed,
    find_rates,
    measure_rates,
    tell_choice,
    warn_of_slow,
)
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[3]
NO_16_BITS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Makes torch take the paths of a CPU that has AVX2 and no 16-bit instructions."""
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="imitates a lesser x86 CPU")


def rates(kind: str = "cpu", emulated: tuple[str, ...] = (), **flops: float) -> MatmulRates:
    return MatmulRates(kind="cuda" if kind == "cuda" else "cpu", flops=flops, emulated=emulated)


LAPTOP = rates(fp32=20e9, bf16=0.35e9, fp16=0.4e9)
SERVER = rates(fp32=150e9, bf16=80e9, fp16=140e9)


def with_types(bf16: object, fp16: object = False) -> dict[str, object]:
    return {"train_batch_size": 2, "bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}


def test_the_rates_are_the_operations_that_torch_counts_by_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tick_s = 1e-6
    ticks = itertools.count()
    monkeypatch.setitem(_CLOCKS, "cpu", lambda: next(ticks) * tick_s)
    with FlopCounterMode(display=False) as counter:
        _timed(torch.device("cpu"), torch.float32, 256)()
    found = measure_rates.__wrapped__(torch.device("cpu"))
    # A run of products is all that is between two looks at the clock.
    assert found.flops == pytest.approx(dict.fromkeys(PRECISIONS, counter.get_total_flops() / tick_s))


def test_the_rates_are_found_once_in_a_process_and_leave_torch_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    measure_rates.cache_clear()
    started = time.thread_time()
    first = measure_rates(torch.device("cpu"))
    assert time.thread_time() - started < 1  # some 50 ms where the machine is quiet
    assert measure_rates(torch.device("cpu")) is first
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.cuda
def test_a_gpu_is_measured_as_a_whole() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = measure_rates(torch.device("cuda", 0))
    assert found.kind == "cuda"
    assert found.flops["fp32"] > 10 * measure_rates(torch.device("cpu")).flops["fp32"]
    assert ("bf16" in found.native) == torch.cuda.is_bf16_supported(including_emulation=False)
    assert find_rates(load_config(with_types("auto")), World.current()) == found


@pytest.mark.parametrize(
    ("found", "native"),
    [
        (LAPTOP, ""),
        (SERVER, "bf16 fp16"),
        (rates(fp32=150e9, bf16=49e9, fp16=140e9), ""),  # a CPU's fp16 without bf16 sums up in fp16
        (rates(fp32=150e9, bf16=51e9, fp16=2e9), "bf16"),
        (rates(fp32=20e9), ""),
        (rates("cuda", fp32=60e12, bf16=700e12, fp16=700e12), "bf16 fp16"),
        (rates("cuda", ("bf16",), fp32=8e12, bf16=7e12, fp16=25e12), "fp16"),
        (rates("cuda", ("bf16",), fp32=8e12, fp16=0.1e12), ""),
    ],
)
def test_a_type_is_native_from_a_third_of_the_rate_of_fp32_on(found: MatmulRates, native: str) -> None:
    assert found.native == set(native.split())


@pytest.mark.parametrize(
    ("config", "found", "chosen", "line"),
    [
        (with_types("auto"), LAPTOP, "fp32",
         'precision: "auto" takes fp32, since this CPU has no fast bf16 (GFLOP/s a core: fp32 20, bf16 0.35, fp16 0.4)'),
        (with_types("auto", "auto"), SERVER, "bf16",
         'precision: "auto" takes bf16, since this CPU computes bf16 natively (GFLOP/s a core: fp32 150, bf16 80, fp16 140)'),
        (with_types("auto", "auto"), rates("cuda", ("bf16",), fp32=8e12, bf16=7e12, fp16=25e12), "fp16",
         'precision: "auto" takes fp16, since this GPU computes fp16 natively (TFLOP/s: fp32 8, bf16 7, fp16 25)'),
        (with_types(True), LAPTOP, "bf16", None),
        (with_types("auto", True), SERVER, "fp16", None),
    ],
)  # fmt: skip
def test_the_line_says_what_auto_took_and_why(
    config: dict[str, object], found: MatmulRates, chosen: str, line: str | None
) -> None:
    assert tell_choice(load_config(config), chosen, found) == line


def test_a_demanded_type_is_warned_of_when_fp32_is_over_four_times_as_fast() -> None:
    text = warn_of_slow(load_config(with_types(True)), LAPTOP)
    assert text == (
        "config: bf16.enabled: matrix products in bf16 are 57 times slower than in fp32 on this CPU (GFLOP/s a core: "
        'fp32 20, bf16 0.35, fp16 0.4); write "bf16": {"enabled": "auto"}, which takes it only where it is fast, or false'
    )
    half = warn_of_slow(load_config(with_types(False, True)), LAPTOP)
    assert half is not None
    assert "are 50 times slower than in fp32 on this CPU" in half
    assert 'write "fp16": {"enabled": "auto"}' in half
    assert warn_of_slow(load_config(with_types(True)), rates(fp32=SLOW_RATIO * 1e9, bf16=1e9)) is None
    assert warn_of_slow(load_config(with_types("auto")), LAPTOP) is None
    assert warn_of_slow(load_config(with_types(True)), SERVER) is None


def test_a_run_takes_what_its_device_computes_natively_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zstore"), start(make_config(bf16={"enabled": "auto"})) as engine:
        precision = engine.training_state.config.precision
        assert {parameter.dtype for parameter in engine.module.parameters()} == {PRECISIONS[precision]}
    assert precision == ("bf16" if "bf16" in measure_rates(torch.device("cpu")).native else "fp32")
    lines = [record.getMessage() for record in caplog.records if "precision:" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f'precision: "auto" takes {precision}, since this CPU ')


def test_fp32_asks_for_no_rates() -> None:
    measure_rates.cache_clear()
    with start(make_config(bf16={"enabled": False})) as engine:
        assert engine.training_state.config.precision == "fp32"
    assert measure_rates.cache_info().currsize == 0


def _found_by_rank(rank: int) -> tuple[str, int]:
    measure_rates.cache_clear()  # ranks of tests inherit what was measured before
    found = find_rates(load_config(with_types("auto")), World.current())
    return repr(found), measure_rates.cache_info().currsize


def test_the_rates_of_rank_0_count_on_all_ranks() -> None:
    (first, measured), (second, others) = run_ranks(_found_by_rank, 2)
    assert first == second
    assert (measured, others) == (1, 0)


# -- a CPU without 16-bit instructions ----------------------------------------------------------------------------------


def python(code: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **env}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def quick_start(tmp_path: Path) -> str:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "/tmp" in code
    return str(code.replace("/tmp", str(tmp_path)))


@x86
def test_the_quick_start_runs_again_and_goes_on_where_bf16_is_slow(tmp_path: Path) -> None:
    steps = "\nimport json; print(json.dumps([engine.global_steps, str(model[0].weight.dtype)]))"
    names: dict[str, object] = {}
    exec(quick_start(tmp_path), names)
    assert isinstance(names["engine"], zstore.engine.Engine)
    assert names["engine"].global_steps == 10
    again = python(quick_start(tmp_path) + steps, env=NO_16_BITS)
    assert json.loads(again.stdout) == [20, "torch.float32"]
    assert '"auto" takes fp32, since this CPU has no fast bf16' in again.stderr
    assert f"loaded {tmp_path}/ckpt/step-00000010; at step 10" in again.stderr
    exec(quick_start(tmp_path), names)
    assert names["engine"].global_steps == 30


DEMANDING = """
import sys, torch, zstore
from tests.engine.models import make_net
from tests.engine.runs import make_config
from tests.engine.bits import engine_digests
from zstore.engine.plan.rates import measure_rates
for enabled in (True, "auto"):
    with zstore.initialize(model=make_net(), config=make_config(bf16={"enabled": enabled}))[0] as engine:
        engine.load_checkpoint(sys.argv[1])
        arrays = {k: v for k, v in engine_digests(engine).items() if k.startswith(("model/", "optimizer/"))}
        print(engine.training_state.config.precision, sorted(arrays.items()))
"""


@x86
def test_a_slow_type_is_obeyed_with_one_warning_and_its_checkpoint_goes_on_in_fp32(tmp_path: Path) -> None:
    with start(make_config(bf16={"enabled": True}), make_net()) as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(str(tmp_path))
    done = python(DEMANDING, str(tmp_path), env=NO_16_BITS)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and "slower" in line]
    assert len(warnings) == 1
    assert re.search(r"matrix products in bf16 are \d+ times slower than in fp32 on this CPU", warnings[0])
    assert 'write "bf16": {"enabled": "auto"}' in warnings[0]
    demanded, chosen = done.stdout.splitlines()
    assert demanded.startswith("bf16 ")
    assert chosen.startswith("fp32 ")
    assert demanded.removeprefix("bf16 ") == chosen.removeprefix("fp32 ")


def test_what_users_copy_says_auto() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.json"))]
    found = [
        value for page in pages for value in re.findall(r'"(?:bf16|fp16)": \{"enabled": ([^,}]+)', page.read_text())
    ]
    assert len(found) >= 4
    assert set(found) == {'"auto"'}


def test_an_answered_precision_is_a_demanded_one() -> None:
    config = load_config(with_types("auto")).answered({"bf16.enabled": True})
    assert warn_of_slow(config, LAPTOP) is not None
    assert tell_choice(config, "bf16", LAPTOP) is None
