"""Tensors of each type and layout of torch, negated and conjugated ones too: kept to the bit in every file, or refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import load_file
from torch import nn

import zstore
from tests.engine.deep import BLOCKS, SAMPLES, TOKENS, WIDTH
from tests.engine.runs import make_config, start
from tests.tools.commands import run
from zstore.checkpoint.reader import open_checkpoint
from zstore.dcp import Writer
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


def _start_bits(model: nn.Module | None = None, stage: int = 3) -> Engine:
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
    with _start_bits(model) as engine:
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
            _start_bits(_Net(odd=buffer)).close()
        assert kind


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2])
def test_parameters_that_cannot_be_trained_are_refused_by_name(dtype: torch.dtype) -> None:
    for trained in (False, True):
        model = _Net()
        model.odd = nn.Parameter(torch.ones(3).to(dtype), requires_grad=trained)
        with pytest.raises(UsageError, match=r"parameter 'odd' is torch\."):
            _start_bits(model).close()


def test_a_buffer_that_is_not_saved_may_be_of_any_dense_type() -> None:
    model = _Net()
    model.register_buffer("angles", torch.ones(3, dtype=torch.complex128), persistent=False)
    with _start_bits(model) as engine:
        assert torch.equal(engine.module.angles, torch.ones(3, dtype=torch.complex128))


SETTINGS: dict[str, Any] = {"bf16": {"enabled": False}, "gradient_accumulation_steps": 1}


def negative(*shape: int) -> torch.Tensor:
    """Return a contiguous tensor that is the negative of its memory, as the imaginary part of a conjugate is."""
    made = torch._neg_view(torch.randn(shape))
    assert made.is_neg()
    assert made.is_contiguous()
    return made


class Negative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = nn.Linear(64, 64)
        self.weight = nn.Parameter(negative(64, 64))
        self.frozen = nn.Parameter(negative(8, 64), requires_grad=False)
        self.register_buffer("table", negative(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.plain(x) @ self.weight * self.table).square().mean() + self.frozen.sum()


def test_the_store_by_itself(tmp_path: Path) -> None:
    given = {"a/one": negative(300), "a/two": negative(40, 30), "a/none": negative(0)}
    given["a/strided"] = torch.randn(50, 2, dtype=torch.complex64).conj().imag
    for path in (tmp_path, None):
        with zstore.open_store(path) as store:
            for name, value in given.items():
                store.put(name, value)
                assert torch.equal(store.get(name).wait(), value)
            store.update("a/two", negative(2, 30), rows=slice(0, 2)).wait()
            with pytest.raises(UsageError, match="expected contiguous, writable"):
                store.get("a/one", out=negative(300)).wait()


def test_torchs_distributed_checkpoints(tmp_path: Path) -> None:
    state = {"a": negative(300), "b": {"c": negative(40, 30)}}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process
        dcp.save(state, storage_writer=Writer(tmp_path / "one"), no_dist=True)
    with open_checkpoint(tmp_path / "one") as reader:
        found = {name.rpartition("/")[2]: reader.read_array(name) for name in reader.arrays}
    assert torch.equal(torch.from_numpy(found["a"]), state["a"])
    assert torch.equal(torch.from_numpy(found["b.c"]), state["b"]["c"])


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "nvme"), (2, "cpu"), (3, "none"), (3, "nvme")])
def test_parameters_buffers_and_client_state(stage: int, tier: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = make_config(stage, tier, tmp_path / "run", **SETTINGS)
    plain, data, note = Negative(), torch.randn(2, 64), negative(5)
    for parameter in plain.parameters():
        parameter.data = parameter.data.resolve_neg()
    del config["scheduler"]
    with start(config, Negative()) as engine:
        train_both(engine, plain, data)
        engine.save_checkpoint(str(tmp_path), "one", client_state={"note": note})
        engine.save_16bit_model(tmp_path / "weights", dtype="fp32")
        state = engine.load_checkpoint(str(tmp_path))[1]
        assert torch.equal(state["note"], note)
        assert torch.equal(engine(data).detach(), plain(data).detach())
    weights = load_file(tmp_path / "weights/model.safetensors")
    with open_checkpoint(tmp_path, "one") as reader:
        for name, value in plain.state_dict().items():
            stored = reader.read_array(f"{'buffer' if name == 'table' else 'model'}/{name}")
            assert torch.equal(torch.from_numpy(stored), value), name
            assert torch.equal(weights[name], value), name


def train_both(engine: Engine, plain: nn.Module, data: torch.Tensor) -> None:
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(2):
        loss, expected = engine(data), plain(data)
        assert torch.equal(loss.detach(), expected.detach())
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


class Spectral(nn.Module):
    """Saves for its backward what is conjugated, and what is negated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            whole = torch.complex(x, x.sin()).conj()
            x = (whole * whole.conj()).real + torch.view_as_real(whole.resolve_conj())[..., 1].contiguous()
            hidden = torch._neg_view(x.cos())
            x = hidden * hidden * x
        return x.square().mean()


def test_activations_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(5)
    data = torch.randn(SAMPLES, TOKENS, WIDTH)
    own: dict[str, Any] = {"journal": False, "activations": "disk", "activations_path": str(tmp_path)}
    config = make_config(0, zstore=own, **SETTINGS | {"train_micro_batch_size_per_gpu": SAMPLES})
    plain = Spectral()
    del config["scheduler"]
    with start(config, Spectral()) as engine:
        train_both(engine, plain, data)
        found = engine.statistics().activations
        assert found.kept_bytes > 0
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
