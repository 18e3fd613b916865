"""The Python face of a checkpoint: lazy arrays, the state, zarr, weights in any precision."""

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import zstore
from tests.checkpoint.checkpoints import arrays_of_model, check_weights, save_arrays
from tests.waiting import until
from zstore.checkpoint import folder as folders
from zstore.checkpoint.folder import LocalFolder
from zstore.errors import BudgetError, CheckpointError, CheckpointMismatchError, CorruptionError, UsageError
from zstore.format.arrays import ArraySpec
from zstore.io.memory import as_torch
from zstore.open import sources
from zstore.open.checkpoint import LazyArray
from zstore.weights.from_checkpoint import choose

Array = npt.NDArray[Any]
RECORD = {"engine": {"counters": {"global_steps": 60}}, "client_state": {"best": float("inf")}}


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return arrays_of_model()


@pytest.fixture(scope="module")
def saved(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    save_arrays(folder, arrays, world_size=3, step=60, record=RECORD)
    return folder


def test_it_is_a_mapping_of_names_to_arrays(saved: Path, arrays: dict[str, Array]) -> None:
    with zstore.open_checkpoint(saved) as ckpt:
        assert set(ckpt) == set(arrays)
        assert len(ckpt) == len(arrays)
        assert list(ckpt).index("model/h.2.weight") < list(ckpt).index("model/h.10.weight")
        assert "model/experts" in ckpt
        assert "experts" not in ckpt
        for name, wanted in arrays.items():
            lazy = ckpt[name]
            assert (lazy.name, lazy.shape, lazy.dtype, lazy.nbytes) == (name, wanted.shape, wanted.dtype, wanted.nbytes)
            for found in (lazy.numpy(), np.asarray(lazy), lazy[...]):
                assert (found.shape, found.dtype, found.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes())
            assert torch.equal(lazy.torch(), as_torch(wanted))
        with pytest.raises(KeyError, match="has no array 'experts'"):
            ckpt["experts"]
        assert (ckpt.tag, ckpt.step, ckpt.world_size) == ("step-00000060", 60, 3)
        assert ckpt.state == RECORD
        assert repr(ckpt) == f"<Checkpoint 'step-00000060' of {saved}/step-00000060: step 60, 12 arrays>"


@pytest.mark.parametrize("key", [np.s_[::-1], np.s_[::7, 100:50:-3], np.s_[None, 3]], ids=str)
@pytest.mark.parametrize("name", ["model/h.2.weight", "model/h.10.weight"])
def test_slices_are_numpys(saved: Path, arrays: dict[str, Array], name: str, key: Any) -> None:
    with zstore.open_checkpoint(saved) as ckpt:
        found, wanted = ckpt[name][key], arrays[name][key]
        assert (found.shape, found.dtype, found.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes())
        assert torch.equal(ckpt[name].torch(key), as_torch(np.ascontiguousarray(wanted).reshape(wanted.shape)))


def test_a_slice_reads_only_its_chunks(saved: Path, arrays: dict[str, Array]) -> None:
    with zstore.open_checkpoint(saved) as ckpt:
        assert ckpt.source.read_bytes == 0
        row = ckpt["model/long.rows"][1, :10]
        assert row.size == 10
        assert 0 < ckpt.source.read_bytes <= 1024 * 1024 + 4096
        before = ckpt.source.read_bytes
        ckpt["model/h.2.weight"][:, 3]
        stored = ckpt.source.arrays["model/h.2.weight"].file_bytes
        assert ckpt.source.read_bytes - before <= stored


def test_a_closed_checkpoint_says_so(saved: Path) -> None:
    with zstore.open_checkpoint(saved) as ckpt:
        lazy = ckpt["model/h.2.weight"]
    for use in (lambda: lazy[0], ckpt.verify, lambda: ckpt.load_state_dict("h.2.weight")):
        with pytest.raises(UsageError, match="was closed"):
            use()
    ckpt.close()


@pytest.mark.parametrize("dtype", ["fp16", torch.bfloat16, np.float32, None], ids=str)
def test_consolidated_weights_are_torchs_casts(saved: Path, arrays: dict[str, Array], dtype: Any) -> None:
    kinds = {"fp16": torch.float16, np.float32: torch.float32}
    with zstore.open_checkpoint(saved) as ckpt:
        check_weights(ckpt.load_state_dict(dtype=dtype), arrays, kinds.get(dtype, dtype))


def test_a_dtype_that_is_none_is_refused(saved: Path) -> None:
    with zstore.open_checkpoint(saved) as ckpt:
        for dtype in ("fp8", "int8", np.int32, torch.int8, 3):
            with pytest.raises(UsageError, match="expected one of fp16, bf16, fp32"):
                ckpt.load_state_dict(dtype=dtype)


def test_values_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_arrays(tmp_path, {"model/big": np.array([1.0, 7e4], np.float32), "model/fine": np.ones(3, np.float32)})
    with zstore.open_checkpoint(tmp_path) as ckpt:
        assert ckpt.load_state_dict(exclude=["big"], dtype="fp16")["fine"].sum() == 3
        for names in ("big", None):
            with pytest.raises(CheckpointError, match=r"(?s)cannot hold.*big: 1 value"):
                ckpt.load_state_dict(names, dtype="fp16")
        assert ckpt.load_state_dict(dtype="fp16", overflow="clamp")["big"][1] == 65504
    assert zstore.load_state_dict(tmp_path, dtype="fp16", overflow="inf")["big"][1] == torch.inf


def test_a_state_dict_loads_into_a_tied_model(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(20, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

    torch.manual_seed(0)
    model = Tied()
    arrays = {f"model/{name}": tensor.detach().numpy() for name, tensor in model.named_parameters()}
    arrays |= {f"buffer/{name}": tensor.numpy() for name, tensor in model.named_buffers()}
    save_arrays(tmp_path, arrays, world_size=2, aliases={"model/embedding.weight": ("head.weight",)})
    state = zstore.load_state_dict(tmp_path)
    assert set(state) == set(model.state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    other = Tied()
    other.load_state_dict(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with zstore.open_checkpoint(tmp_path) as ckpt:
        third = Tied().to(torch.bfloat16)
        third.load_state_dict(ckpt.load_state_dict(dtype=torch.bfloat16))
        assert torch.equal(third.head.weight, model.head.weight.to(torch.bfloat16))
    assert list(zstore.load_state_dict(tmp_path, names="head.weight")) == ["head.weight"]


def test_names_may_be_patterns_or_a_list(saved: Path) -> None:
    assert sorted(zstore.load_state_dict(saved, names="h.*")) == ["h.10.weight", "h.2.bias", "h.2.weight"]
    assert sorted(zstore.load_state_dict(saved, names=["scalar", "mask"])) == ["mask", "scalar"]
    assert zstore.load_state_dict(saved, names=[]) == {}
    assert choose(["a0", "a[0]"], exclude=["a[0]"]) == ["a0"]
    with pytest.raises(CheckpointMismatchError, match=r"'h.2.wieght' matches none of .*close matches: h.2.weight"):
        zstore.load_state_dict(saved, names=["scalar", "h.2.wieght"])


def test_no_torch_until_a_tensor_is_asked_for(saved: Path) -> None:
    code = (
        "import sys, zstore, numpy as np\n"
        f"with zstore.open_checkpoint({str(saved)!r}) as ckpt:\n"
        "    ckpt['model/h.10.weight'][3:5], np.asarray(ckpt['model/scalar']), ckpt.state, ckpt.verify()\n"
        "    assert not {'torch', 'zarr', 'pickle5'} & set(sys.modules), sorted(sys.modules)\n"
        "    ckpt.zarr()['model/h.10.weight'][:2]\n"
        "    assert 'torch' not in sys.modules\n"
        "    ckpt['model/scalar'].torch()\n"
        "    assert 'torch' in sys.modules and 'zstore.engine' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number, tag in enumerate(("one", "two", "three"), 1):
        save_arrays(tmp_path / "run", {"model/w": np.full(100, number, np.float32)}, step=number, tag=tag)
    return tmp_path / "run"


def left_open() -> tuple[list[str], list[str]]:
    gc.collect()
    return sorted(os.listdir("/proc/self/fd")), [each.name for each in threading.enumerate() if "zstore" in each.name]


class Gate(threading.Event):
    """Holds whoever calls the attribute `name` of `owner` until it is set."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        super().__init__()
        self.callers: list[str] = []
        real = getattr(owner, name)

        def held(*given: Any) -> Any:
            self.callers.append(threading.current_thread().name)
            assert self.wait(60)
            return real(*given)

        patch.setattr(owner, name, held)


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "callers"), [(LocalFolder, "check_file", 3), (sources, "open_checkpoint", 1)]
)
def test_a_slow_opening_holds_up_no_loop_and_a_cancelled_one_leaves_nothing_open(
    owner: Any, name: str, callers: int, cancel: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        task = asyncio.create_task(zstore.open_checkpoint_async(run))
        await asyncio.to_thread(until, lambda: len(gate.callers) >= callers)  # side by side, and the loop goes on
        assert "MainThread" not in gate.callers
        if cancel:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.set()
        if not cancel:
            async with await task as found:
                assert (found.tag, found["model/w"][3]) == ("three", 3)
        await asyncio.to_thread(until, lambda: left_open()[1] == before[1])

    gate, before = Gate(monkeypatch, owner, name), left_open()
    asyncio.run(main())
    assert left_open() == before


def test_small_files_of_a_whole_checkpoint_come_by_aiofiles(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, folders, "read_json")
    gate.set()
    for place, tag in ((run, None), (run, "latest"), (run, "two"), (run / "one", None), (f"{run}@two", None)):
        asyncio.run(zstore.open_checkpoint_async(place, tag)).close()
    assert {name.partition("_")[0] for name in gate.callers} == {"asyncio"}  # and not the thread that opens it


def outcome(open_it: Callable[[], Any]) -> Any:
    try:
        with open_it() as found:
            return found.location, found.state, {name: array[...].tolist() for name, array in found.items()}
    except (OSError, ValueError, RuntimeError) as error:
        return type(error), str(error)


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "whole": (".", lambda _: None),
    "latest is edited": ("latest", lambda path: path.write_text("one\n")),
    "latest is large": ("latest", lambda path: os.truncate(path, 5000)),
    "latest leads out": ("latest", lambda path: path.write_text("../three")),
    "record is cut": ("three/zstore.json", lambda path: os.truncate(path, 50)),
    "record is large": ("three/zstore.json", lambda path: os.truncate(path, 2**26 + 1)),
    "record is a link": ("three/zstore.json", lambda path: path.symlink_to(path.rename(path.with_name("moved")))),
    "record is newer": ("three/zstore.json", lambda path: path.write_text(path.read_text().replace(": 1,", ": 9,", 1))),
    "metadata is cut": ("three/zarr.json", lambda path: os.truncate(path, 50)),
    "metadata is large": ("three/zarr.json", lambda path: os.truncate(path, 2**28 + 1)),
    "metadata is gone": ("three/zarr.json", os.unlink),
    "metadata is a pipe": ("three/zarr.json", lambda path: (os.unlink(path), os.mkfifo(path))),
    "set aside": ("three", lambda path: path.rename(f"{path}.old-{'0' * 32}")),
    "nothing is there": (".", shutil.rmtree),
    "a file is there": (".", lambda path: (shutil.rmtree(path), path.write_text(""))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_content_and_errors_are_those_without_a_loop(change: str, run: Path) -> None:
    name, act = CHANGES[change]
    act(run / name)
    places = [(run, None), (run, "three"), (run, 3), (run, "four"), (run / "three", None), (f"{run}@three", None)]
    for place in (*places, (f"{run}@three", "two"), ("what://run/x", None), ("memory://none/run", "x")):
        wanted = outcome(lambda place=place: zstore.open_checkpoint(*place))
        assert outcome(lambda place=place: asyncio.run(zstore.open_checkpoint_async(*place))) == wanted


def test_files_that_a_save_replaces_meanwhile_are_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(folder: LocalFolder, file: str, *most_bytes: int) -> bytes:
        by_aiofiles = threading.current_thread().name.startswith("asyncio")
        return real(LocalFolder(run / "one") if by_aiofiles and file == "zarr.json" else folder, file, *most_bytes)

    real = LocalFolder.read_small
    save_arrays(run, {"model/v": np.zeros(3, np.float32)}, tag="four")
    monkeypatch.setattr(LocalFolder, "read_small", mixed)
    with asyncio.run(zstore.open_checkpoint_async(run)) as found:
        assert list(found) == ["model/v"]
        save_arrays(run, {"model/v": np.ones(3, np.float32)}, tag="four", overwrite=True)
        with pytest.raises(CorruptionError, match="was replaced by another save while it was read"):
            found["model/v"][...]


class Stored:
    """An array in memory that notes what is read of it."""

    def __init__(self, values: Array) -> None:
        self.flat = values.reshape(-1)
        self.reads: list[tuple[int, int]] = []
        spec = ArraySpec(name="model/x", shape=values.shape, dtype=values.dtype.name)
        self.lazy = LazyArray(spec, self.read)

    def read(self, first: int, stop: int, out: Array) -> None:
        assert 0 <= first < stop <= self.flat.size
        assert out.flags.c_contiguous
        assert out.shape == (stop - first,)
        self.reads.append((first, stop))
        out[:] = self.flat[first:stop]


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)


@settings(max_examples=200)
@given(data=st.data())
def test_every_key_selects_what_numpy_selects(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    key = data.draw(keys(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zstore.open.checkpoint._BLOCK_BYTES", data.draw(st.integers(1, 2000)))
        found, wanted = Stored(values).lazy[key], values[key]
    assert type(found) is type(wanted)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("key", "numel"), [(np.s_[10:20], 10 * 80), (np.s_[::50], 2 * 80), (np.s_[3, 2], 20), (np.s_[::30, 1, ::7], 4 * 15)]
)
def test_rows_that_are_apart_are_read_apart(key: Any, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstore.open.checkpoint._BLOCK_BYTES", 2000)
    values = np.arange(100 * 4 * 20, dtype=np.int32).reshape(100, 4, 20)
    stored = Stored(values)
    assert np.array_equal(stored.lazy[key], values[key])
    assert sum(stop - first for first, stop in stored.reads) == numel


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([0, 1], "got a list: read what is around it"),
        (np.array([True] * 3), "got a ndarray"),
        (True, "got a bool"),
        (1.0, "got a float"),
        ("x", "got a str"),
        (3, "index 3 is out of bounds for axis 0 with size 3"),
        (-4, "index -4 is out of bounds"),
        ((0, 5), "out of bounds for axis 1 with size 5"),
        ((0, 0, 0), "too many indices"),
        ((..., 0, ...), "single ellipsis"),
    ],
)
def test_other_keys_are_refused(key: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        Stored(np.zeros((3, 5))).lazy[key]


def test_a_lazy_array_says_what_it_is() -> None:
    lazy = Stored(np.zeros((6, 5), np.float32)).lazy
    assert (lazy.shape, lazy.dtype) == ((6, 5), np.float32)
    assert (lazy.ndim, lazy.size, lazy.nbytes, len(lazy)) == (2, 30, 120, 6)
    assert repr(lazy) == "<LazyArray 'model/x' [6, 5] float32>"
    with pytest.raises(TypeError, match="no length"):
        len(Stored(np.zeros((), np.float32)).lazy)


def test_rows_are_iterated_without_reading_chunks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.int32).reshape(12, 5)
    stored = Stored(values)
    monkeypatch.setattr("zstore.open.checkpoint._BLOCK_BYTES", 80)
    assert np.array_equal(np.stack(list(stored.lazy)), values)
    assert len(stored.reads) == 3


def test_what_no_memory_holds_is_an_error_that_says_so() -> None:
    spec = ArraySpec(name="model/x", shape=(2**45, 2**12), dtype="float32")
    lazy = LazyArray(spec, lambda *_: None)
    for read in (lazy.numpy, lambda: lazy[::-1], lambda: lazy[1:]):
        with pytest.raises(BudgetError, match=r"'model/x': no memory for .* read a part of it"):
            read()
    assert lazy[2**44, :3].shape == (3,)
