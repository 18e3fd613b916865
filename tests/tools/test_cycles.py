"""Samples fall under their causes, counters count, and the benchmark of cycles runs, tiny; its figures are not judged."""

from __future__ import annotations

import json
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import children, cycles
from bench.cycle_causes import CAUSES, PERIOD_S, Frame, find_sampler, read_samples, sort_samples
from bench.cycle_causes import cause_of as _cause_of
from bench.cycle_paths import Watch
from bench.cycle_tables import describe
from tests import warm

_KERNEL = "[kernel.kallsyms]"


def cause_of(*chain: tuple[str, str]) -> str:
    places = [Frame((1 << 63 if file == _KERNEL else 0) + 4096, symbol, file) for symbol, file in chain]
    return _cause_of(places)[0]


def _system_call(*names: str) -> str:
    inside = [(name, _KERNEL) for name in (*names, "do_syscall_64", "entry_SYSCALL_64_after_hwframe")]
    return cause_of(*inside, ("preadv64v2", "/usr/lib/libc.so.6"))


@pytest.mark.parametrize(
    ("cause", "symbol", "file"),
    [
        ("checksum", "_crc32c_hw_adler", "/v/site-packages/crc32c/_crc32c.cpython-311-x86_64-linux-gnu.so"),
        ("copy", "__memmove_avx512_unaligned_erms", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("libc", "_int_malloc", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("cast", "_aligned_contig_cast_float_to_half", "/v/site-packages/numpy/_core/_multiarray_umath.cpython-311.so"),
        ("cast", "UINT_right_shift_X86_V3", "/v/site-packages/numpy/_core/_multiarray_umath.cpython-311.so"),
        ("update", "FLOAT_multiply_X86_V3", "/v/site-packages/numpy/_core/_multiarray_umath.cpython-311.so"),
        ("model", "[unknown]", "perf-28109.map"),
        ("update", "at::native::fused_adam_impl", "/v/site-packages/torch/lib/libtorch_cpu.so"),
        ("model", "mkl_blas_avx512_sgemm_kernel_0", "/v/site-packages/torch/lib/libtorch_cpu.so"),
        ("python", "_PyEval_EvalFrameDefault", "/usr/bin/python3.13"),
        ("dispatch", "c10::impl::OperatorEntry::lookup", "/v/site-packages/torch/lib/libtorch_cpu.so"),
        ("dispatch", "THPVariable_add", "/v/site-packages/torch/lib/libtorch_python.so"),
        ("spin", "gomp_barrier_wait_end", "/v/site-packages/torch/lib/libgomp-24e2ab19.so.1.0.0"),
        ("other", "main", "/usr/bin/fio"),
    ],
)
def test_a_sample_in_the_program_falls_under_the_cause_of_its_file_and_symbol(
    cause: str, symbol: str, file: str
) -> None:
    assert cause_of((symbol, file)) == cause


def test_a_sample_in_the_kernel_falls_under_the_cause_by_which_it_was_entered() -> None:
    assert cause_of(("clear_page_erms", _KERNEL), ("do_anonymous_page", _KERNEL), ("exc_page_fault", _KERNEL)) == (
        "page faults"
    )
    assert _system_call("gup_fast_fallback", "iomap_dio_rw", "vfs_readv", "do_preadv") == "disk calls"
    assert _system_call("clear_page_erms", "handle_mm_fault", "__x64_sys_preadv2") == "page faults"
    assert _system_call("schedule", "futex_wait", "__x64_sys_futex") == "lock calls"
    assert _system_call("path_openat", "do_filp_open", "__x64_sys_openat") == "file calls"
    assert _system_call("unmap_region", "__x64_sys_munmap") == "memory calls"
    assert _system_call("__x64_sys_getrandom") == "other calls"
    assert _system_call("perf_swevent_event", "__x64_sys_futex") == "sampling"
    assert cause_of(("handle_softirqs", _KERNEL), ("asm_common_interrupt", _KERNEL)) == "kernel"


_LINES = """
 7 10.0005:  cpu-clock/period=1000000/:
\t          17635a float_dealloc (/usr/lib/libpython3.11.so.1.0)
\t    7ff1c43ba940 [unknown] ([unknown])

 7 11.5:     cpu-clock/period=1000000/:
\t          17635a outside_of_both_windows (/usr/lib/libpython3.11.so.1.0)

 8 10.1: syscalls:sys_enter_futex: uaddr: 0x7000000000f0, op: 0x00000089, val: 0x0, utime: 0x7fff73e86490, uaddr2: 0x0
\t           85f16 __futex_abstimed_wait_common (/usr/lib/libc.so.6)

 7 10.2:     syscalls:sys_exit_futex: 0x1
\t           87ebf pthread_cond_signal (/usr/lib/libc.so.6)

 8 10.4:     syscalls:sys_exit_futex: 0x0
 9 10.5: syscalls:sys_enter_futex: uaddr: 0x600000000000, op: 0x00000089, val: 0x0, utime: 0x7fff73e86490, uaddr2: 0x0
 9 10.6:     syscalls:sys_exit_futex: 0x0
 8 10.9: syscalls:sys_enter_futex: uaddr: 0x7000000000f0, op: 0x00000089, val: 0x0, utime: 0x7fff73e86490, uaddr2: 0x0
 8 12.1:     syscalls:sys_exit_futex: 0x0
 7 12.5:     cpu-clock/period=1000000/:
\tffffffff815d4c20 clear_page_erms ([kernel.kallsyms])
\tffffffff821f2fa7 exc_page_fault ([kernel.kallsyms])
"""


def test_only_waits_for_the_interpreters_lock_within_a_window_count() -> None:
    found = sort_samples(_LINES.splitlines(keepends=True), [(10, 11), (12, 13)], 0x700000000000)
    assert found.causes == {"python": 1, "page faults": 1}
    assert found.places["python"] == {"float_dealloc (libpython3.11.so.1.0)": 1}
    assert found.lock_waits == 1
    assert found.lock_wait_s == pytest.approx(0.3)


def test_a_watch_counts_what_is_done_within_it() -> None:
    watch, pages = Watch(), 1000
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for half in (0, pages // 2):
            with watch.on():
                for page in range(half, half + pages // 4):
                    memory[page * mmap.PAGESIZE] = 1
    assert watch.total is not None
    assert pages // 2 <= watch.total.page_faults < pages
    (begin, end), (later, last) = watch.windows
    assert begin < end < later < last
    assert watch.total.seconds == pytest.approx(end - begin + last - later)


@pytest.mark.skipif(not find_sampler().kernel, reason="perf may not sample the kernel here")
def test_perf_finds_time_by_its_cause(tmp_path: Path) -> None:
    program = (
        "import time, zlib\nbegin, data = time.monotonic(), bytes(1 << 20)\n"
        "while time.monotonic() < begin + 0.2: zlib.crc32(data)\nprint(begin, time.monotonic())"
    )
    sampler, data = find_sampler(), tmp_path / "data"
    command = [*sampler.words, str(data), "--", sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    begin, end = map(float, done.stdout.split())
    found = read_samples(data, [(begin, end)], 0)
    assert 0 < found.samples * PERIOD_S <= 1.1 * (end - begin)
    assert any("crc32" in place for places in found.places.values() for place in places)


def test_cycles_benchmark_sets_two_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "subprocess", warm)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    common = ["--path", str(tmp_path), "--model", "gpt-tiny", "--tokens", "16", "--times", "1", "--no-perf"]
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    monkeypatch.setattr(sys, "argv", ["cycles", *common, "--paths", "verify", "--json", str(before)])
    cycles.main()
    monkeypatch.setattr(
        sys, "argv", ["cycles", *common, "--paths", "step", "--json", str(now), "--compare", str(before)]
    )
    cycles.main()
    (verified,) = json.loads(before.read_text())["paths"]["verify"].values()
    # A master and two moments of each parameter, and the model's own; verified, so each is read once.
    parameters = json.loads(before.read_text())["parameters"]
    assert 12 < verified["read_bytes"] / parameters < 16
    (stepped,) = json.loads(now.read_text())["paths"]["step"].values()
    assert stepped["core_s"] == stepped["user_s"] + stepped["system_s"] > 0
    assert stepped["written_bytes"] > 11 * parameters
    assert "perf was not asked for" in capsys.readouterr().out


def test_tables_set_before_and_now_side_by_side() -> None:
    row = {
        **dict.fromkeys(["user_s", "seconds", "runnable_s", "page_faults", "involuntary_switches"], 1.0),
        "system_s": 1.0,
        "core_s": 2.0,
        "read_bytes": 10**9,
        "written_bytes": 10**9,
        "times": 1,
        "voluntary_switches": 10,
        "causes": {"python": 1.5, "copy": 0.5},
        "places": {},
    }
    half = row | {"core_s": 1.0, "causes": {"python": 1.0}}
    figures = {
        "names": ["before", "now"],
        "parameters": 10**6,
        "model": "gpt",
        "machine": {"cpu": "a", "cores": 1, "memory_bytes": 1, "drive": "b", "system": "c", "python": "3"},
        "sampler": {"perf": True, "why": ""},
        "paths": {"step": {"before": row, "now": half}},
    }
    lines = [[cell.strip() for cell in line.split("|")] for line in describe(figures).splitlines()]
    cells = {line[1]: line[2] for line in lines if len(line) == 4}
    assert cells["all"] == "1000 > 500"
    assert cells["core-s now / before"] == "0.50"
    assert (cells["python"], cells["copy"]) == ("750 > 500", "250 > 0")
    assert set(cells) <= {"all", "core-s now / before", "core-ms / GB", *CAUSES} | {
        cell for cell in cells if "-" in cell
    }
