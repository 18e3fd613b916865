"""Who may read what is written: files and folders have the modes that the process's umask gives to `open()` and `mkdir`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.checkpoints import save_arrays
from tests.engine.runs import make_config, start, step
from zstore import open_store
from zstore.dcp import Writer
from zstore.tools import cli

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARRAYS = {"model/w": np.arange(300_000, dtype=np.float32).reshape(1000, 300), "model/b": np.zeros(77, np.float32)}


def by_engine(place: Path) -> None:
    config = make_config(2, "nvme", place / "nvme")
    with start(config) as engine:
        step(engine)
        engine.save_checkpoint(str(place / "run"))
        engine.save_checkpoint(str(place / "run"), tag="behind", wait=False).wait()
        engine.save_16bit_model(str(place / "weights"))


def by_store(place: Path) -> None:
    with open_store(place / "store") as store:
        for name, value in ARRAYS.items():
            store.put(name, value).wait()
        store.checkpoint(place / "run" / "one").wait()


def by_dcp(place: Path) -> None:
    dcp.save(
        {name.replace("/", "."): torch.from_numpy(value) for name, value in ARRAYS.items()},
        storage_writer=Writer(place / "run" / "one"),
        no_dist=True,
    )


def by_command(*words: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        saved = save_arrays(place / "run", ARRAYS, world_size=2, step=1)
        places = {"last": saved, "out": place / "out", "run": place / "run"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["zstore", *(word.format(**places) for word in words)])
            with contextlib.suppress(SystemExit):
                cli.main()
        assert (place / "out").exists()

    return write


WRITERS = {
    "engine": by_engine,
    "store": by_store,
    "dcp": by_dcp,
    "consolidate": by_command("consolidate", "{last}", "{out}", "--dtype", "fp32"),
    "reshard": by_command("reshard", "{last}", "{out}", "--world-size", "3"),
    "reshard --codec": by_command("reshard", "{last}", "{out}", "--codec", "zstd"),
    "convert --to torch": by_command("convert", "{last}", "{out}", "--to", "torch"),
    "convert --to safetensors": by_command("convert", "{last}", "{out}", "--to", "safetensors"),
}


@pytest.fixture(params=[0o022, 0o027, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A umask for the test, and the modes that Python's own `open` and `mkdir` make under it."""
    before = os.umask(request.param)
    try:
        yield SimpleNamespace(value=request.param)
    finally:
        os.umask(before)


@pytest.mark.parametrize("writer", WRITERS)
def test_modes_are_those_of_open_and_mkdir(
    writer: str, umask: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_folder, plain_file = tmp_path / "plain", tmp_path / "plain.pt"
    plain_folder.mkdir()
    torch.save(torch.zeros(3), plain_file)
    expected = {True: mode_of(plain_folder), False: mode_of(plain_file)}
    place = tmp_path / "place"
    place.mkdir()
    WRITERS[writer](place)
    found = list(place.rglob("*"))
    assert len(found) > 1
    wrong = {
        str(path.relative_to(place)): oct(mode)
        for path in found
        if (mode := mode_of(path)) not in (expected[path.is_dir()], expected[path.is_dir()] & ~0o222)
    }
    assert not wrong, f"expected {oct(expected[False])} or read-only"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
