"""Buffers of each type and layout of torch: kept to the bit in every file, or refused by name before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zarr
from torch import nn

import zstore
from tests.tools.commands import run
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

KEPT = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
_BITS = {name: dtype for dtype in KEPT if (name := f"b_{str(dtype).removeprefix('torch.')}")}


class _Net(nn.Module):
    """Has a buffer of each kept type, with every bit pattern of a byte in it; those of `more` too."""

    def __init__(self, **more: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, dtype in _BITS.items():
            values = torch.arange(256, dtype=torch.uint8).repeat(8).reshape(64, 32)
            self.register_buffer(name, values.bool() if dtype is torch.bool else values.view(dtype))
        for name, buffer in more.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _start(model: nn.Module | None = None, stage: int = 3) -> Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    return zstore.initialize(model=model or _Net(), config=config)[0]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def _assert_same(found: Any, wanted: Any) -> None:
    for name, dtype in _BITS.items():
        assert (name, found[name].dtype, found[name].shape) == (name, dtype, wanted[name].shape)
        assert _bytes(found[name]) == _bytes(wanted[name]), name


def _trained(rank: int, folder: str) -> None:
    wanted = _Net().state_dict()
    model = _Net()
    if rank:  # rank 0's values count
        for buffer in model.buffers():
            buffer.view(torch.uint8).zero_()
    with _start(model) as engine:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        _assert_same(engine.module.state_dict(), wanted)
        engine.save_checkpoint(folder, "one")
        for buffer in engine.module.buffers():
            buffer.view(torch.uint8).zero_()
        engine.load_checkpoint(folder, "one")
        _assert_same(engine.module.state_dict(), wanted)
        engine.save_16bit_model(f"{folder}/weights")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_each_type_comes_back_to_the_bit_from_every_file(world_size: int, tmp_path: Path) -> None:
    run_ranks(_trained, world_size, str(tmp_path))
    torch.save(_Net().state_dict(), tmp_path / "torch.pt")
    wanted = torch.load(tmp_path / "torch.pt", weights_only=True)
    _assert_same(safetensors.torch.load_file(tmp_path / "weights/model.safetensors"), wanted)
    for number, words in enumerate(
        [
            ("consolidate", str(tmp_path / "one"), str(tmp_path / "flat")),
            ("reshard", str(tmp_path / "one"), str(tmp_path / "three"), "--world-size", "3"),
            ("convert", str(tmp_path / "flat"), str(tmp_path / "back")),
            ("convert", str(tmp_path / "one"), str(tmp_path / "pickled"), "--to", "torch"),
            ("verify", str(tmp_path / "one")),
        ]
    ):
        done = run(*words)
        assert (number, done.returncode) == (number, 0), done.stdout + done.stderr
    _assert_same(safetensors.torch.load_file(tmp_path / "flat/model.safetensors"), wanted)
    _assert_same(torch.load(tmp_path / "pickled", weights_only=True), wanted)
    for folder in ("one", "three", "flat"):
        with zstore.open_checkpoint(tmp_path / folder) as checkpoint:
            _assert_same(checkpoint.load_state_dict(), wanted)
    for name, dtype in _BITS.items():
        array = zarr.open_array(tmp_path / "one/buffer" / name, mode="r")
        values = torch.from_numpy(array[...].view("uint8")) if dtype != torch.bool else torch.from_numpy(array[...])
        assert _bytes(values) == _bytes(wanted[name]), name


def _refused() -> dict[str, torch.Tensor]:
    """A tensor of each type and layout of torch that can be made and is not kept."""
    found: dict[str, torch.Tensor] = {
        "sparse_coo": torch.eye(4).to_sparse(),
        "sparse_csr": torch.eye(4).to_sparse_csr(),
        "sparse_csc": torch.eye(4).to_sparse_csc(),
        "sparse_bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "sparse_bsc": torch.eye(4).to_sparse_bsc((2, 2)),
        "mkldnn": torch.eye(4).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "meta": torch.ones(3, device="meta"),
        "qint8": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quint8": torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
        "qint32": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint32),
        "quint4x2": torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint4x2),
    }
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in sorted(every - set(KEPT) - {one.dtype for one in found.values()}, key=str):
        try:
            found[str(dtype).removeprefix("torch.")] = torch.empty(2, dtype=dtype)
        except (RuntimeError, NotImplementedError, TypeError):  # torch has no such tensors
            continue
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_other_type_and_layout_is_refused_by_name_before_training() -> None:
    refused = _refused()
    assert {"complex128", "complex32", "float8_e8m0fnu", "sparse_csr", "quint4x2"} <= set(refused)
    for kind, buffer in refused.items():
        with pytest.raises(UsageError, match=r"buffer 'odd'.*(register|cast|Cast)"):
            _start(_Net(odd=buffer)).close()
        assert kind


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2])
def test_parameters_that_cannot_be_trained_are_refused_by_name(dtype: torch.dtype) -> None:
    for trained in (False, True):
        model = _Net()
        model.odd = nn.Parameter(torch.ones(3).to(dtype), requires_grad=trained)
        with pytest.raises(UsageError, match=r"parameter 'odd' is torch\."):
            _start(model).close()


def test_a_buffer_that_is_not_saved_may_be_of_any_dense_type() -> None:
    model = _Net()
    model.register_buffer("angles", torch.ones(3, dtype=torch.complex128), persistent=False)
    with _start(model) as engine:
        assert torch.equal(engine.module.angles, torch.ones(3, dtype=torch.complex128))
