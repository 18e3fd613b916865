"""How much memory a process takes that uses files from elsewhere, and what one does with a checkpoint."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zstore.checkpoint.reader import CheckpointReader
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import ZstoreError
from zstore.format.arrays import numpy_dtype
from zstore.open.sources import open_source
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.inspect import inspect_command

MOST_GROWN_BYTES = 160 * 2**20
"""No file may make a process grow by more."""
_MOST_READ_BYTES = 2**20

_WATCHED = """
import contextlib, importlib, json, resource, sys
from pathlib import Path

module = importlib.import_module(sys.argv[1])
use, opened = module.use, json.loads(sys.argv[4])

# Not ru_maxrss: a process inherits that of the one that started it.
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

def begin_anew():
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()

use(Path(sys.argv[2]), Path(sys.argv[3]) / "warm")
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30,) * 2)
for number, path in enumerate(sys.argv[5:]):
    before = begin_anew()
    problems = (module.use_opening if path in opened else use)(Path(path), Path(sys.argv[3]) / str(number))
    assert problems, path
    print("grew", path, peak() - before, flush=True)
"""


def grown(module: str, good: Path, out: Path, paths: Sequence[Path], *, opened: Sequence[Path] = ()) -> dict[str, int]:
    """By how many bytes a process grows as `use` of a module uses each of `paths`, after a good one, and finds problems.

    Those of `opened` are used by `use_opening` instead: their problem is met at the same place, whatever is done with them.
    """
    words = [module, good, out, json.dumps(list(map(str, opened))), *paths]
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _WATCHED, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    lines = [line[5:].rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("grew ")]
    return {path: int(nbytes) for path, nbytes in lines}


def sparse(path: Path, nbytes: int) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, nbytes)


def use(path: Path, out: Path) -> list[str]:
    """Do all that one does with a checkpoint; return the errors and faults. Anything but an error of ours fails."""
    out.mkdir(parents=True)
    return _errors_of(
        lambda: read_some(path),
        lambda: verify(path),
        lambda: convert_command(path, out / "ours", to="zstore", world_size=3),
        lambda: convert_command(path, out / "it.pt", to="torch"),
        lambda: consolidate_command(path, out / "weights", "fp32", 10**9),
        lambda: inspect_command(path),
    )


def use_opening(path: Path, out: Path) -> list[str]:
    return _errors_of(lambda: convert_command(path, out / "ours", to="zstore"))


def _errors_of(*actions: Callable[[], Any]) -> list[str]:
    problems: list[str] = []
    for action in actions:
        try:
            found = action()
            problems += map(str, found if isinstance(found, list) else ())
        except ZstoreError as error:
            problems.append(str(error))
    return problems


def verify(path: Path) -> list[Any]:
    """Return the faults of one of ours; of others, which have no checksums, none."""
    with open_source(path) as source:
        return verify_checkpoint(source) if isinstance(source, CheckpointReader) else []


def read_some(path: Path) -> None:
    """Read all of small arrays, both ends of large ones."""
    with open_source(path) as source:
        for rank in range(source.record.world_size):
            source.rank_state(rank)
        for name, array in source.arrays.items():
            if array.spec.nbytes <= _MOST_READ_BYTES:
                source.read_array(name)
                continue
            part = np.empty(1000, numpy_dtype(array.spec.dtype))
            source.read(name, 0, part.size, part)
            source.read(name, array.spec.numel - part.size, array.spec.numel, part)
