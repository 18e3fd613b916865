"""`--memory` is a bound that holds: what a process takes beside the interpreter and its modules."""

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from tests.checkpoint.checkpoints import save_arrays
from tests.interop.deepspeed_data import states, write
from tests.tools.commands import run
from zstore.checkpoint.reader import open_checkpoint
from zstore.tools.options import MIB, MIN_MEMORY_BYTES
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEASURE = """
import contextlib, io, json, os, sys
from zstore.tools import cli, consolidate, convert, diff, inspect, ls, prune, reshard, verify
import tests.checkpoint.object_store  # makes its URLs known

os.cpu_count = lambda: 8  # with as many threads as on any machine
os.sched_getaffinity = lambda pid: set(range(8))

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

def measure(small, large):
    assert run(small) in (0, 1, None)  # all modules are there, and what they make once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kib("VmRSS")
    code = run(large)
    assert "torch" not in sys.modules or any(word in str(large) for word in ("dcp", "deepspeed", "'torch'"))
    print(code or 0, (kib("VmHWM") - before) * 1024, flush=True)

# A fork has all modules, and no command ran in it before.
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            measure(*json.loads(line))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            print("failed", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `small` and `large` for two ranks; `other` is cut unlike `large`."""
    base = tmp_path_factory.mktemp("memory")
    one = np.ones((20, 30), np.float32)
    save_arrays(base / "small", {"model/w": one}, world_size=2)
    rows = np.random.default_rng(0).standard_normal((1250, 4000)).astype(np.float32)
    large = {f"model/h.{i}.w": rows for i in range(8)}  # 160 MB
    save_arrays(base / "large", large, world_size=2)
    save_arrays(base / "other", dict.fromkeys(large, rows + 1), world_size=3)
    for size, rows in (("small", 20), ("large", 2500)):
        weight = np.ones((rows, 4000), np.float32)
        write_deepspeed(base / f"deepspeed-{size}", weight)
        (base / f"hf-{size}").mkdir()
        save_file({f"h.{i}.w": weight for i in range(3)}, base / f"hf-{size}/model.safetensors")
    for size in ("small", "large"):
        with open_checkpoint(base / size) as reader:
            weights = {name.partition("/")[2]: torch.from_numpy(reader.read_array(name)) for name in reader.arrays}
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            dcp.save({"model": weights}, checkpoint_id=base / f"dcp-{size}", no_dist=True)
        assert reshard_command(base / size, base / f"archive-{size}", compression="zstd") == 0
    return base


def write_deepspeed(root: Path, weight: Array) -> None:
    shapes = OrderedDict(w=torch.Size(weight.shape))
    model = {"module": OrderedDict(w=torch.from_numpy(weight).bfloat16()), "buffer_names": [], "param_shapes": [shapes]}
    ranks = []
    for part in torch.from_numpy(weight).reshape(-1).chunk(2):
        base = {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": part * 2, "exp_avg_sq": part * 3}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        }
        ranks.append(states(0) | {"single_partition_of_fp32_groups": [part.clone()], "base_optimizer_state": base})
    write(root, model=model, ranks=ranks)


@functools.cache
def measuring() -> subprocess.Popen[str]:
    """A process that has a fork of itself run a small command and measure a large one, for each line that it reads."""
    environment = {**os.environ, "ZSTORE_TRACEBACK": "1"}
    command = [sys.executable, "-c", MEASURE]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    with measuring() as process:
        process.communicate()
    measuring.cache_clear()


def peak_bytes(small: list[str], large: list[str]) -> int:
    process = measuring()
    process.stdin.write(json.dumps([small, large]) + "\n")
    process.stdin.flush()
    code, peak = (int(word) for word in process.stdout.readline().split())
    assert code in (0, 1)
    return peak


COMMANDS = {
    "inspect": ["inspect", "{large}"],
    "verify": ["verify", "{large}"],
    "diff": ["diff", "{large}", "{other}"],
    "consolidate": ["consolidate", "{large}", "{out}"],
    "reshard": ["reshard", "{large}", "{out}", "--world-size", "3"],
    "reshard-zstd": ["reshard", "{archive}", "{out}", "--compression", "zstd"],
    "convert-from-dcp": ["convert", "{dcp}", "{out}", "--world-size", "3"],
    "consolidate-deepspeed": ["consolidate", "{deepspeed}", "{out}"],
    "consolidate-hf": ["consolidate", "{hf}", "{out}"],
    "convert-from-hf": ["convert", "{hf}", "{out}", "--world-size", "2"],
    "reshard-to-url": ["reshard", "{large}", "{url}"],
    "convert-to-torch": ["convert", "{large}", "{out}", "--to", "torch"],
    "convert-to-safetensors": ["convert", "{large}", "{out}", "--to", "safetensors", "--dtype", "bf16"],
}


CASES = [pytest.param(name, MIN_MEMORY_BYTES, id=name) for name in COMMANDS]
CASES.append(pytest.param("consolidate", 2 * MIN_MEMORY_BYTES, id="consolidate-more"))


@pytest.mark.parametrize(("name", "memory_bytes"), CASES)
def test_the_peak_stays_below_it(name: str, memory_bytes: int, base: Path, tmp_path: Path) -> None:
    def words(size: str) -> list[str]:
        other = "small" if size == "small" else "other"
        places: dict[str, Any] = {kind: base / f"{kind}-{size}" for kind in ("dcp", "archive", "deepspeed", "hf")}
        places |= {"large": base / size, "other": base / other, "out": tmp_path / size}
        places["url"] = f"objects://bucket/{size}"
        return [word.format(**places) for word in COMMANDS[name]] + [
            "--memory",
            str(memory_bytes),
            "--storage-option",
            f"folder={tmp_path}/objects",
        ]

    peak = peak_bytes(words("small"), words("large"))
    assert 0 < peak <= memory_bytes, f"{peak / MIB:.0f} MiB"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    save_arrays(folder, {f"model/h.{i}.w": np.full(20, i, np.float32) for i in range(1500)})
    return folder


def test_the_metadata_of_many_arrays_is_counted_in(many: Path, base: Path, tmp_path: Path) -> None:
    def words(place: Path) -> list[str]:
        return ["reshard", str(place), str(tmp_path / place.name), "--world-size", "2", "--memory"]

    done = run(*words(many), "64MiB")
    assert done.returncode == 1, done.stderr
    least = re.search(r"1500 arrays, whose metadata .* use `--memory (\d+)MiB` or more", done.stderr)
    assert least
    peak = peak_bytes([*words(base / "small"), f"{least[1]}MiB"], [*words(many), f"{least[1]}MiB"])
    assert 0 < peak <= int(least[1]) * MIB, f"{peak / MIB:.0f} of {least[1]} MiB"
