"""`--memory` is a bound that holds: what a process takes beside the interpreter and its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from zstore.testing.checkpoints import save_arrays
from zstore.tools.convert import ConvertOptions, convert_command
from zstore.tools.opening import LEAST_MEMORY_BYTES, MIB
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEASURE = """
import contextlib, io, os, sys
from zstore.tools import cli

os.cpu_count = lambda: 8  # with as many threads as on any machine

def run(words):
    sys.argv = ["zstore", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as end:
            return end.code

def kib(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

small, large = [[word for word in part.split("|")] for part in sys.argv[1:]]
assert run(small) in (0, 1, None)  # all modules are there, and what they make once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = kib("VmRSS")
code = run(large)
assert "torch" not in sys.modules or "dcp" in large  # DCP's own folders are written with its own classes
print(code or 0, (kib("VmHWM") - before) * 1024)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `small` and `large`, and such with split masters, for two ranks; `other` differs from `large`."""
    base = tmp_path_factory.mktemp("memory")
    one = np.ones((20, 30), np.float32)
    save_arrays(base / "small", {"model/w": one}, world_size=2)
    rows = np.random.default_rng(0).standard_normal((1250, 4000)).astype(np.float32)
    large = {f"model/h.{i}.w": rows for i in range(8)}  # 160 MB
    save_arrays(base / "large", large, world_size=2)
    save_arrays(base / "other", dict.fromkeys(large, rows + 1), world_size=2)
    for name, size in (("split-small", 20), ("split", 7_000)):
        weight = np.ones((size, 4000), ml_dtypes.bfloat16)
        arrays = {
            "model/w": weight,
            "optimizer/master_low/w": np.zeros(weight.shape, np.uint16),
            "optimizer/master_tie/w": np.zeros(-(-weight.size // 8), np.uint8),
        }
        save_arrays(base / name, arrays, world_size=2)
    for size in ("small", "large"):
        assert convert_command(base / size, base / f"dcp-{size}", ConvertOptions(to="dcp")) == 0
        assert reshard_command(base / size, base / f"archive-{size}", codec="zstd") == 0
    return base


def peak_bytes(small: list[str], large: list[str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "|".join(small), "|".join(large)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "ZSTORE_TRACEBACK": "1"},
    )
    code, peak = (int(word) for word in done.stdout.split())
    assert code in (0, 1), done.stderr
    return peak


COMMANDS = {
    "inspect": ["inspect", "{large}", "--stats"],
    "inspect-url": ["inspect", "file://{large}", "--stats"],
    "verify": ["verify", "{large}"],
    "verify-url": ["verify", "file://{large}"],
    "diff": ["diff", "{large}", "{other}", "--values"],
    "consolidate": ["consolidate", "{large}", "{out}"],
    "consolidate-url": ["consolidate", "file://{large}", "{out}"],
    "consolidate-split": ["consolidate", "{split}", "{out}", "--dtype", "fp32"],
    "reshard": ["reshard", "{large}", "{out}", "--world-size", "3"],
    "reshard-zstd": ["reshard", "{large}", "{out}", "--codec", "zstd"],
    "reshard-blosc": ["reshard", "{large}", "{out}", "--codec", "blosc"],
    "verify-archive": ["verify", "{archive}"],
    "consolidate-archive": ["consolidate", "{archive}", "{out}"],
    "convert-from-dcp": ["convert", "{dcp}", "{out}", "--world-size", "3"],
    "convert-to-dcp": ["convert", "{large}", "{out}", "--to", "dcp"],
    "convert-to-torch": ["convert", "{split}", "{out}", "--to", "torch"],
    "convert-to-safetensors": ["convert", "{dcp}", "{out}", "--to", "safetensors", "--dtype", "bf16"],
}


CASES = [(name, LEAST_MEMORY_BYTES) for name in COMMANDS] + [("consolidate", 2 * LEAST_MEMORY_BYTES)]


@pytest.mark.parametrize(("name", "memory_bytes"), CASES, ids=str)
def test_the_peak_stays_below_it(name: str, memory_bytes: int, base: Path, tmp_path: Path) -> None:
    def words(size: str) -> list[str]:
        split = "split-small" if size == "small" else "split"
        other = "small" if size == "small" else "other"
        dcp = base / f"dcp-{size}"
        places = {
            "dcp": dcp,
            "archive": base / f"archive-{size}",
            "large": base / size,
            "other": base / other,
            "split": base / split,
            "out": tmp_path / size,
        }
        return [word.format(**places) for word in COMMANDS[name]] + ["--memory", str(memory_bytes)]

    peak = peak_bytes(words("small"), words("large"))
    assert 0 < peak <= memory_bytes, f"{peak / MIB:.0f} MiB"
