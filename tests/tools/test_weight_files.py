"""Weights that no safetensors file can hold as they are: their names, their number, and the number of their files."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import urllib3
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.checkpoints import save_arrays
from zstore.errors import CheckpointMismatchError
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.reshard import reshard_command
from zstore.weights.files import Weight, plan_files

RESERVED, MANY = "__metadata__", 400


@pytest.fixture(scope="module")
def reserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    save_arrays(folder, {f"model/{RESERVED}": np.ones(3, np.float32), "model/w": np.ones(2, np.float32)})
    return folder


def test_a_weight_with_the_name_of_the_files_metadata_is_refused(reserved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    as_files: list[Callable[[], int]] = [
        lambda: consolidate_command(reserved, out, "fp32"),
        lambda: convert_command(str(reserved), out, to="safetensors"),
    ]
    for write in as_files:
        with pytest.raises(CheckpointMismatchError, match=r"called '__metadata__'.*--to torch"):
            write()
        assert not out.exists()
    assert convert_command(str(reserved), tmp_path / "all.pt", to="torch") == 0
    assert torch.load(tmp_path / "all.pt", weights_only=True)[RESERVED].tolist() == [1, 1, 1]
    with serving(Settings(roots=(Root.parse(str(reserved.parent)),), port=0)) as url:
        refused = urllib3.request("GET", f"{url}/weights/one/latest/model.safetensors?dtype=fp32")
    assert (refused.status, "called '__metadata__'" in refused.data.decode()) == (422, True)


@pytest.mark.parametrize("names", [["\udc80"], ["a", "b", "a"]])
def test_names_that_are_no_text_or_come_twice_are_refused(names: list[str]) -> None:
    weights = [Weight(name=name, array=f"model/{n}", shape=(1,), dtype="float32") for n, name in enumerate(names)]
    with pytest.raises(CheckpointMismatchError, match="cannot have a weight called"):
        plan_files(weights, 10**9)


@pytest.mark.soak  # the names are 110 MB
def test_more_names_than_a_header_holds_go_to_several_files(tmp_path: Path) -> None:
    names = [f"{number:05d}{'x' * 1_000_000}" for number in range(110)]
    weights = [Weight(name=name, array=f"model/{name}", shape=(0, 3), dtype="float32") for name in names]
    layouts = plan_files(weights, 10**9)
    assert len(layouts) == 2
    found: list[str] = []
    for layout in layouts:
        (tmp_path / layout.name).write_bytes(layout.header)
        with safe_open(tmp_path / layout.name, "np") as file:  # which refuses headers of over 100 MB
            found += file.keys()
    assert sorted(found) == names


@contextmanager
def few_open_files() -> Iterator[None]:
    """Allow this process about a hundred open files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, len(os.listdir("/proc/self/fd")) + 100), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_model_may_have_more_files_than_a_process_opens(tmp_path: Path) -> None:
    arrays = {f"w.{number}": torch.full((30, 40), float(number)) for number in range(MANY)}
    save_arrays(tmp_path / "one", {f"model/{name}": value.numpy() for name, value in arrays.items()}, world_size=2)
    with few_open_files():
        assert consolidate_command(tmp_path / "one", tmp_path / "hf", "fp32", 4900) == 0
        assert len(list((tmp_path / "hf").glob("*.safetensors"))) == MANY
        reshard_command(tmp_path / "one", tmp_path / "three", 3)
        for to in ("torch", "safetensors"):
            assert convert_command(str(tmp_path / "three"), tmp_path / to, to=to) == 0
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    for name, value in arrays.items():
        assert torch.equal(load_file(tmp_path / "hf" / index["weight_map"][name])[name], value)
