"""Tensors whose memory torch negates or conjugates when it is read: whoever takes the memory takes torch's values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import zstore
from tests.engine.deep import BLOCKS, SAMPLES, TOKENS, WIDTH
from tests.engine.runs import make_config, start
from zstore.checkpoint.reader import open_checkpoint
from zstore.dcp import Writer
from zstore.engine import Engine
from zstore.errors import UsageError

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
        train(engine, plain, data)
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


def train(engine: Engine, plain: nn.Module, data: torch.Tensor) -> None:
    """Take two steps of both, and compare."""
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
        train(engine, plain, data)
        found = engine.statistics().activations
        assert found is not None
        assert found.kept_bytes > 0
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
