"""The Python face of a checkpoint: lazy arrays, the state, zarr, weights in any precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore.errors import CheckpointError, CheckpointMismatchError, UsageError
from zstore.weights.choose import choose

Array = npt.NDArray[Any]
RECORD = {"engine": {"counters": {"global_steps": 60}}, "client_state": {"best": float("inf")}}


def make_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "model/h.2.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "model/h.10.weight": rng.standard_normal((500, 300)).astype(ml_dtypes.bfloat16),
        "model/experts": rng.standard_normal((3, 40, 50)).astype(np.float16),
        "model/long.rows": rng.standard_normal((3, 900_000)).astype(np.float32),
        "model/none": np.zeros((0, 5), np.float32),
        "model/scalar": np.array(3.5, np.float32),
        "optimizer/exp_avg/h.2.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "buffer/steps": np.array(2**40 + 1, np.int64),
        "buffer/mask": rng.random((5, 5)) < 0.5,
    }


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return make_arrays()


@pytest.fixture(scope="module")
def saved(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    save_arrays(folder, arrays, world_size=3, step=60, record=RECORD)
    return folder


def as_torch(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


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
        assert repr(ckpt) == f"<Checkpoint 'step-00000060' of {saved}/step-00000060: step 60, 9 arrays>"


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


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", torch.bfloat16, np.float32, None], ids=str)
def test_consolidated_weights_are_torchs_casts(saved: Path, arrays: dict[str, Array], dtype: Any) -> None:
    kinds = {"fp16": torch.float16, np.float32: torch.float32}
    kind = kinds.get(dtype, dtype)
    with zstore.open_checkpoint(saved) as ckpt:
        weights = ckpt.load_state_dict(dtype=dtype)
        wanted = {n.partition("/")[2]: as_torch(a) for n, a in arrays.items() if n.startswith(("model/", "buffer/"))}
        assert set(weights) == set(wanted)
        for name, tensor in wanted.items():
            cast = tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor
            assert weights[name].dtype == cast.dtype
            assert torch.equal(weights[name], cast)


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
    assert sorted(zstore.load_state_dict(saved, names="h.*")) == ["h.10.weight", "h.2.weight"]
    assert sorted(zstore.load_state_dict(saved, names=["scalar", "mask"])) == ["mask", "scalar"]
    assert zstore.load_state_dict(saved, names=[]) == {}
    assert choose(["a0", "a[0]"], exclude=["a[0]"]) == ["a0"]
    with pytest.raises(
        CheckpointMismatchError, match=r"'h.2.wieght' matches none of the 8 names; close matches: h.2.weight"
    ):
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
