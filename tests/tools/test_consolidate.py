"""Consolidating: safetensors that other software loads, cast to nearest even, in bounded memory. Resharding, there and back."""

import errno
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.checkpoints import arrays_of_model, check_weights, save_arrays, values
from tests.engine.models import make_net
from tests.engine.runs import make_config, start
from tests.interop.deepspeed_data import DATA
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CorruptionError,
    DiskFullError,
    StorageError,
    UsageError,
)
from zstore.format.arrays import WHOLE_BYTES, make_grid
from zstore.io.memory import as_torch
from zstore.io.shards import open_resources
from zstore.open.sources import open_source
from zstore.serve.app import serving
from zstore.serve.runs import Root, Settings
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import random_values
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.options import Common
from zstore.tools.reshard import reshard_command
from zstore.tools.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from zstore.weights.cast import CastLibrary, cast_into, cast_libraries
from zstore.weights.files import Weight, plan_files, plan_model
from zstore.weights.from_checkpoint import DTYPES, frozen_weights, list_weights, write_weights

Array = npt.NDArray[Any]
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return arrays_of_model()


@pytest.fixture(scope="module")
def saved(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    save_arrays(folder, arrays, world_size=3, step=60)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_load_with_torchs_casts(dtype: str, saved: Path, arrays: dict[str, Array], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert consolidate_command(saved, out, dtype, 5 * 10**9) == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    check_weights(load_file(out / "model.safetensors"), arrays, TORCH[dtype])
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_unknown_dtype_is_refused_with_those_that_are_known(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dtype fp8: expected one of fp16, bf16, fp32"):
        consolidate_command(saved, tmp_path / "out", "fp8")  # type: ignore[arg-type]


def test_large_models_are_numbered_files_with_an_index(saved: Path, arrays: dict[str, Array], tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate_command(saved / "step-00000060", out, "bf16", 1_000_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 2
    found: dict[str, torch.Tensor] = {}
    for name in names:
        part = load_file(out / name)
        assert all(index["weight_map"][key] == name for key in part)
        assert sum(t.nbytes for t in part.values()) <= 1_000_000 or len(part) == 1
        found |= part
    check_weights(found, arrays, torch.bfloat16)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    # Layers stay in the order of the model.
    weights = [name for name in index["weight_map"] if name.startswith("h.")]
    assert weights == ["h.2.bias", "h.2.weight", "h.10.weight"]


def test_config_and_tokenizer_files_are_copied(arrays: dict[str, Array], tmp_path: Path) -> None:
    path = save_arrays(tmp_path / "run", arrays)
    (tmp_path / "run/config.json").write_text("outer")
    (tmp_path / "run/tokenizer.json").write_text("tokens")
    (tmp_path / "run/notes.txt").write_text("mine")
    (path / "config.json").write_text("inner")
    consolidate_command(tmp_path / "run", tmp_path / "out", "fp16", 10**9)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "out/config.json").read_text() == "inner"


@pytest.fixture(scope="module")
def large_values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    weights = np.ones((600, 300), np.float32)
    weights[5, 7], weights[599, 299], weights[300] = 70000.0, -1e30, np.inf
    fine = np.array([65519.0, -65504.0, np.nan, -np.inf], np.float32)
    save_arrays(folder, {"model/a": weights, "model/fine": fine, "model/z": weights[:1] * 1e5}, world_size=2)
    return folder


def test_values_that_do_not_fit_stop_it_with_every_tensor_named(large_values: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        consolidate_command(large_values, tmp_path / "out", "fp16", 10**9)
    assert "2 tensor(s)" in str(caught.value)
    assert "\n  a: 2 value(s)\n  z: 300 value(s)" in str(caught.value)
    assert "--dtype bf16" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
@settings(max_examples=100)
def test_casts_are_those_of_torch(values: npt.NDArray[np.float32]) -> None:
    for dtype, native, kind in (
        ("float16", np.dtype(np.float16), torch.float16),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16), torch.bfloat16),
    ):
        found: set[bytes] = set()
        for by in cast_libraries():
            target = np.empty(values.size, native)
            lost = cast_into(values, target, dtype, "inf", by=by)
            wanted = torch.from_numpy(values.copy()).to(kind)
            assert torch.equal(torch.isnan(wanted), torch.isnan(as_torch(target)))
            assert torch.equal(torch.nan_to_num(wanted), torch.nan_to_num(as_torch(target)))
            assert lost == int((torch.isinf(wanted) & torch.isfinite(torch.from_numpy(values.copy()))).sum())
            found.add(target.tobytes())
        assert len(found) == 1, "NaNs have the same bits whoever casts"


@pytest.mark.parametrize("by", cast_libraries())
def test_fp32_becomes_fp16_as_numpy_has_it_at_every_rounding_border(by: CastLibrary) -> None:
    # All that fp16 tells apart, subnormal ones aside, and their signs.
    kept = np.arange(0, 2**32, 2**13, dtype=np.uint64)
    around = np.array([0, 1, 0xFFE, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint64)
    tiny = np.arange(0x33000000, 0x38800000, 997, dtype=np.uint64)  # less than 2^-14
    bits = np.concatenate([*(kept + each for each in around), tiny, tiny + 2**31]).astype(np.uint32)
    values = bits.view(np.float32)
    for part in (values[np.abs(values) < 65520], values):
        target = np.empty(part.size, np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = part.astype(np.float16)
            lost = cast_into(part, target, "float16", "inf", by=by)
        same = target.view(np.uint16) == expected.view(np.uint16)
        assert (same | np.isnan(expected)).all()
        assert np.isnan(target[np.isnan(expected)]).all()
        assert lost == np.count_nonzero(np.isinf(expected) & np.isfinite(part))


@pytest.mark.parametrize("by", cast_libraries())
def test_every_bit_pattern_of_fp16_becomes_the_same_fp32_whoever_casts(by: CastLibrary) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for part in (values, values[np.isfinite(values)]):
        target = np.empty(part.size, np.float32)
        assert cast_into(part, target, "float32", "error", by=by) == 0
        assert target.tobytes() == part.astype(np.float32).tobytes()


def test_doubles_may_not_fit_float32() -> None:
    target = np.empty(3, np.float32)
    assert cast_into(np.array([1e300, -1e39, 1.0]), target, "float32", "clamp") == 2
    assert target.tolist() == [np.finfo(np.float32).max, np.finfo(np.float32).min, 1.0]


@pytest.mark.parametrize("kind", ["allocate", "write", "fsync", "write_small"])
def test_a_full_disk_stops_all_threads_with_an_error(kind: Any, saved: Path, tmp_path: Path) -> None:
    files = FaultyFiles(faults=(Fault(kind=kind, pattern=f"{tmp_path}/*", error_number=errno.ENOSPC),))
    with open_resources(files=files) as resources, open_checkpoint(saved, resources=resources) as reader:
        layouts = plan_files(list_weights(reader, "float16"), 10**6)
        with pytest.raises(StorageError, match="No space left"):
            write_weights(reader, layouts, tmp_path, overflow="error", advance=lambda _: None)


ONE = np.ones((4, 3), np.float32)
WEIGHTS = {f"model/{name}": ONE * i for i, name in enumerate(("h.0.w", "h.1.w", "h.10.w", "norm.bias", "odd[0].w"), 1)}
ADAM = {f"optimizer/exp_avg/{name}": ONE for name in ("h.1.w", "norm.bias")}


def test_frozen_parameters_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_arrays(tmp_path / "ckpt", WEIGHTS | ADAM)
    common = Common(json=True)
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", exclude_frozen=True, common=common) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert set(found) == {"h.1.w", "norm.bias"}
    assert all(np.array_equal(found[name].numpy(), WEIGHTS[f"model/{name}"]) for name in found)
    printed = capsys.readouterr()
    assert printed.err.startswith("plan: 2 tensors as fp32")
    assert "omitting 3: " in printed.err.splitlines()[0]
    told = json.loads(printed.out)
    assert (told["path"], told["files"]) == (str(tmp_path / "out"), ["model.safetensors"])
    assert (told["left_out"], told["bytes"]) == (["h.0.w", "h.10.w", "odd[0].w"], 2 * ONE.nbytes)
    save_arrays(tmp_path / "none", WEIGHTS | {"optimizer/exp_avg/other": ONE})
    with pytest.raises(CheckpointMismatchError, match="only frozen weights"):
        consolidate_command(tmp_path / "none", tmp_path / "empty", exclude_frozen=True)


def test_without_any_state_it_cannot_be_known_which_are_frozen(tmp_path: Path) -> None:
    save_arrays(tmp_path, WEIGHTS, record={"engine": {"scalars": "odd"}})
    with open_checkpoint(tmp_path) as source, pytest.raises(CheckpointMismatchError, match="does not say which"):
        frozen_weights(source)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_engines_frozen_parameters_are_left_out(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    net, config = make_net(), make_config()
    del config["optimizer"]
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    names = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    with start(config, net, optimizer=kind(trained, lr=1e-2)) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", exclude_frozen=True) == 0
    assert set(load_file(tmp_path / "out/model.safetensors")) == names | {"shift"}


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


def test_only_weights_of_one_lora_are_named_by_peft(tmp_path: Path) -> None:
    q, k = "base_model.model.q.lora_A.one.weight", "base_model.model.k.lora_A.two.weight"
    long = "base_model.model" + ".modules_to_save.x.y" * 100_000 + "\n"  # takes minutes if the time is quadratic
    base, other = "base_model.model.head.weight", q.replace("one", "two")
    for names in ([q, k], [q, other], [q, base], [q.replace(".model", "")], [long]):
        weights = (Weight(name=name, array=name, shape=(1,), dtype="float32") for name in names)
        assert {weight.name for weight in plan_model(weights, 10**9, {})[0].weights} == set(names)
    convert_zero_checkpoint_to_fp32_state_dict(str(save_arrays(tmp_path, {f"model/{q}": ONE})), f"{tmp_path}/out")
    assert list(load_file(tmp_path / "out/model.safetensors")) == [q], "DeepSpeed's names are the model's"


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


DTYPES_RESHARD = ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float64"]
SMALL = {"client/history": np.arange(30_000, dtype=np.float64)}


@pytest.fixture(scope="module")
def saved_reshard(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {name: array for name, array in arrays.items() if not name.startswith("buffer/")}
    small = SMALL | {name: array for name, array in arrays.items() if name.startswith("buffer/")}
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"record": {"counters": [1, 2]}, "run_id": "run", "few_files": True}
    return save_arrays(folder, parts, world_size=3, step=60, small=small, **options)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("c.*")) if p.is_file()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_any_world_size(world_size: int, saved_reshard: Path, arrays: dict[str, Array], tmp_path: Path) -> None:
    assert reshard_command(saved_reshard.parent, tmp_path / "out", world_size) == 0
    with open_checkpoint(tmp_path / "out") as opened:
        assert verify_checkpoint(opened) == []
        for name, array in {**arrays, **SMALL}.items():
            assert opened.read_array(name).tobytes() == array.tobytes()
            spec = opened.arrays[name].spec
            whole = name in SMALL or "buffer/" in name or spec.nbytes < WHOLE_BYTES
            assert opened.arrays[name].grid == make_grid(spec.stored_shape, 1 if whole else world_size)
        record = opened.record
        assert (record.tag, record.step, record.run) == ("step-00000060", 60, "run")
        assert (record.world_size, record.training_world_size) == (world_size, 3)
        assert record.state == {"counters": [1, 2]}
        # They belong to the ranks that trained.
        states = [{"rank": rank} if world_size == 3 else {} for rank in range(world_size)]
        assert [opened.manifest(rank).rank_state for rank in range(world_size)] == states


def test_what_is_not_carried_over_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = DATA / "stage2-fp16-1"
    assert reshard_command(root, tmp_path / "out") == 0
    with open_source(root) as source:
        assert source.notes
        lines = capsys.readouterr().err.splitlines()
        assert lines[1 : 1 + len(source.notes)] == [f"not carried over: {note}" for note in source.notes]


SHAPES = st.lists(st.integers(0, 9) | st.integers(0, 300), max_size=2).map(tuple)
SHAPES |= st.tuples(st.integers(1, 9), st.integers(90_000, 130_000)) | st.tuples(*[st.integers(0, 40)] * 3)
RANKS = st.integers(1, 5)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES_RESHARD)), min_size=1, max_size=4),
    RANKS,
    RANKS,
    st.sampled_from(["none", "zstd"]),
)
def test_there_and_back_gives_the_same_files_for_any_array_and_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[tuple[int, ...], str]],
    first: int,
    other: int,
    codec: str,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    given_arrays = {
        f"model/{n}": random_values(dtype, math.prod(shape), n).reshape(shape) for n, (shape, dtype) in enumerate(kinds)
    }
    path = save_arrays(folder / "saved", given_arrays, world_size=first, few_files=True)
    reshard_command(path, folder / "other", other, compression=codec)
    reshard_command(folder / "other", folder / "back", first)
    assert values(folder / "other") == {name: array.tobytes() for name, array in given_arrays.items()}
    assert files_of(folder / "back" / path.name) == files_of(path)
    with open_checkpoint(folder / "back") as opened:
        assert opened.record.training_world_size == first
        states = [{"rank": rank} if other == first else {} for rank in range(first)]
        assert [opened.rank_state(rank) for rank in range(first)] == states


def test_no_stored_chunk_is_read_twice(saved_reshard: Path, tmp_path: Path) -> None:
    with open_checkpoint(saved_reshard) as reader:
        reshard_checkpoint(reader, tmp_path / "out", 4)
        stored = sum(array.file_bytes for array in reader.arrays.values())
        # Where a new shard begins inside a stored chunk, that chunk is read for both; these arrays have few chunks.
        assert reader.read_bytes < 1.5 * stored


def test_a_tag_that_is_there_is_not_replaced(saved_reshard: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointExistsError, match="already has a checkpoint 'step-00000060': choose another folder"):
        reshard_command(saved_reshard, saved_reshard.parent, 2)
    with pytest.raises(UsageError, match="at least 1"):
        reshard_command(saved_reshard, tmp_path / "out", 0)


def test_a_damaged_checkpoint_is_not_resharded(arrays: dict[str, Array], tmp_path: Path) -> None:
    path = save_arrays(tmp_path / "ckpt", arrays)
    shard = path / "model/h.2.weight/c.0.0"
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(8000)
        file.write(b"x")
    with pytest.raises(CorruptionError, match=r"'model/h\.2\.weight'"):
        reshard_command(path, tmp_path / "out", 2)
    assert tags(tmp_path / "out") == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["write", "fsync", "sync_folder", "rename", "write_small", "make_folder"])
def test_a_failure_leaves_nothing_and_is_told(kind: Any, saved_reshard: Path, tmp_path: Path) -> None:
    files = FaultyFiles(faults=(Fault(kind=kind, first=2, pattern=f"{tmp_path}/*", error_number=errno.EIO),))
    with (
        open_resources(files=files) as resources,
        open_checkpoint(saved_reshard, resources=resources) as reader,
        pytest.raises(StorageError, match="Input/output error"),
    ):
        reshard_checkpoint(reader, tmp_path / "out", 2)
    assert tags(tmp_path / "out") == []


def test_no_room_is_said_before_anything_is_written(saved_reshard: Path, tmp_path: Path) -> None:
    class Full(FaultyFiles):
        def free_bytes(self, path: str | Path) -> int:
            return 1000

    with (
        open_resources(files=Full()) as resources,
        open_checkpoint(saved_reshard, resources=resources) as reader,
        pytest.raises(DiskFullError, match="only 1000 are free"),
    ):
        reshard_checkpoint(reader, tmp_path / "out", 2)
