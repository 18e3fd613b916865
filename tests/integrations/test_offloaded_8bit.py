"""`zstore.optim.Offloaded` with optimizers that keep their state in blocks: a class of the test's own, and, where they are
installed (soak), those of torchao and bitsandbytes, beside the same class without zstore."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zstore.errors import UsageError
from zstore.optim import Offloaded, register
from zstore.testing.ranks import run_ranks

BLOCK = 64
SHAPES = ((300, 256), (1500,), (513, 129), (7,), (1024, 300))
"""Of several tiles, under the least size, with a last block that is not whole, of one tile and of many chunks on disk."""


class Momentum8bit(torch.optim.Optimizer):
    """SGD with momentum of 8 bits, in blocks with a scale each: of parameters of at least 2048 elements."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, least: int = 2048) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.least = least

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch's has made floats of the codes
            state["sum"] = state["sum"].to(torch.int8 if "absmax" in state else torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, numel = self.state[p], p.numel()
                if not state:
                    state["step"] = 0
                    if numel < self.least:
                        state["sum"] = torch.zeros_like(p)
                    else:
                        state["sum"] = torch.zeros(p.shape, dtype=torch.int8)
                        state["absmax"] = torch.zeros(-(-numel // BLOCK))
                        state["levels"] = torch.linspace(-1, 1, 255)
                state["step"] += 1
                if "absmax" not in state:
                    state["sum"].mul_(group["momentum"]).add_(p.grad)
                    p.sub_(state["sum"], alpha=group["lr"])
                    continue
                scale = state["absmax"].repeat_interleave(BLOCK)[:numel].view(p.shape)
                total = group["momentum"] * state["levels"][state["sum"].int() + 127] * scale + p.grad
                p.sub_(total, alpha=group["lr"])
                padded = nn.functional.pad(total.reshape(-1), (0, -numel % BLOCK)).view(-1, BLOCK)
                state["absmax"].copy_(padded.abs().amax(1).clip(1e-12))
                codes = (padded / state["absmax"][:, None] * 127).round().to(torch.int8)
                state["sum"].copy_(codes.view(-1)[:numel].view(p.shape))


class Whole8bit(Momentum8bit):
    """It looks beyond a block."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad /= p.grad.norm()
        super().step()


def blocks(numel: int, settings: Mapping[str, Any]) -> int | None:
    return BLOCK if numel >= settings.get("least", 2048) else None


def parts(value: Any) -> list[Any]:
    """What a tensor is made of; a number as it is."""
    names = getattr(value, "__tensor_flatten__", lambda: ((), None))()[0]
    return [getattr(value, name) for name in names] or [value]


def assert_same(theirs: torch.optim.Optimizer, ours: Offloaded) -> None:
    """The same state, in the same types."""
    own = theirs.state_dict()["state"]
    for entry in own.values():
        entry.update(entry.pop("__bnb_optimizer_quant_state__", {}))
    found = copy.deepcopy(ours.state_dict())["state"]
    for key, entry in own.items():
        assert set(entry) == set(found[key])
        for name, value in entry.items():
            assert type(value) is type(found[key][name])
            for a, b in zip(parts(value), parts(found[key][name]), strict=True):
                assert a == b if not isinstance(a, torch.Tensor) else a.dtype == b.dtype and torch.equal(a, b)


def saved(optimizer: torch.optim.Optimizer) -> Any:
    """The state dict, through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Pair:
    """An optimizer and an offloaded one of its class, over equal parameters."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.theirs, self.ours = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
        self.own = kind(self.theirs, **settings)

    def steps(self, number: int, optimizer: Offloaded) -> None:
        for _ in range(number):
            for p, q in zip(self.theirs, self.ours, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            self.own.step()
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(self.theirs, self.ours, strict=True))
        assert_same(self.own, optimizer)


def compare(
    kind: Any, path: Path, num_steps: int, *, devices: tuple[str, ...] = ("cpu", "nvme"), **settings: Any
) -> None:
    """Steps beside the class itself, and state dicts to and fro."""
    for device in devices:
        pair = Pair(kind, **settings)
        with Offloaded(kind, pair.ours, device=device, path=path, **settings) as optimizer:
            pair.steps(num_steps, optimizer)
            assert (optimizer.statistics().disk_bytes > 0) == (device == "nvme")
            pair.own.load_state_dict(saved(optimizer))
            pair.steps(1, optimizer)
            pair.own.load_state_dict(optimizer.state_dict())
            pair.steps(1, optimizer)
            state = saved(pair.own)
        with Offloaded(kind, pair.ours, device=device, path=path, **settings | {"lr": 1.0}) as optimizer:
            optimizer.load_state_dict(state)
            pair.steps(1, optimizer)
            model = nn.ParameterList(pair.ours)
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path / device, no_dist=True)
            optimizer.state.clear()
            loaded = get_optimizer_state_dict(model, optimizer)
            dcp.load(loaded, checkpoint_id=path / device, no_dist=True)
            set_optimizer_state_dict(model, optimizer, loaded)
            pair.steps(1, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_in_blocks_has_the_bits_of_its_class(tmp_path: Path) -> None:
    register(Momentum8bit, block=blocks)
    compare(Momentum8bit, tmp_path, 3, lr=1e-2, least=1024)
    with Offloaded(Momentum8bit, [nn.Parameter(torch.ones(64, 64))], device="cpu") as optimizer:
        assert optimizer.statistics().host_bytes == 64 * 64 + 4 * 64
        with pytest.raises(UsageError, match="int8"):
            optimizer.load_state_dict(torch_momentum())

    register(Whole8bit, block=blocks)
    for message, kind, given in (
        ("looks beyond a block", Whole8bit, torch.zeros(4096)),
        ("make it contiguous", Momentum8bit, torch.zeros(64, 64).t()),
    ):
        with pytest.raises(UsageError, match=message):
            Offloaded(kind, [nn.Parameter(given)], device="cpu")
    with pytest.raises(UsageError, match="leave out"):
        register(Momentum8bit, block=blocks, like=torch.optim.SGD)


def torch_momentum() -> dict[str, Any]:
    group = {"lr": 1.0, "momentum": 0.9, "params": [0]}
    return {"state": {0: {"step": 1, "sum": torch.zeros(64, 64), "absmax": torch.zeros(64)}}, "param_groups": [group]}


# -- the libraries ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_torchao_in_eager_mode(name: str, tmp_path: Path) -> None:
    kind = getattr(pytest.importorskip("torchao.optim"), name)
    with torch.compiler.set_stance("force_eager"):
        compare(kind, tmp_path, 10, lr=1e-2)
        compare(kind, tmp_path, 2, devices=("cpu",), lr=1e-2, block_size=128)


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_torchao_compiled(tmp_path: Path) -> None:
    """As it runs by default: compiled for the lengths of pieces here, for the parameters' shapes there."""
    compare(pytest.importorskip("torchao.optim").AdamW8bit, tmp_path, 10, lr=1e-2)


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "Lion8bit", "RMSprop8bit", "SGD8bit", "Adagrad8bit"])
def test_bitsandbytes(name: str, tmp_path: Path) -> None:
    settings = {"momentum": 0.9} if name == "SGD8bit" else {}
    compare(getattr(pytest.importorskip("bitsandbytes").optim, name), tmp_path, 10, lr=1e-2, **settings)


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", ["torchao.optim", "bitsandbytes.optim"])
def test_16_bit_parameters_have_an_fp32_master(library: str, tmp_path: Path) -> None:
    kind = pytest.importorskip(library).AdamW8bit
    torch.manual_seed(0)
    start = torch.randn(300, 256).bfloat16()
    ours, master = nn.Parameter(start.clone()), nn.Parameter(start.float())
    with (
        torch.compiler.set_stance("force_eager"),
        Offloaded(kind, [ours], path=tmp_path, overlap="forward") as optimizer,
    ):
        own = kind([master])
        for _ in range(3):
            ours.grad = torch.randn_like(ours)
            master.grad = ours.grad.float()
            own.step()
            optimizer.step()
        optimizer.wait()
        assert torch.equal(ours, master.bfloat16())
        assert torch.equal(optimizer.state[ours]["master"].read(), master.detach())


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("torchao.optim:AdamW4bit", {}, "of torchao there are"),
        ("torchao.optim:AdamWFp8", {}, "of torchao there are"),
        ("torchao.optim:AdamW8bit", {"bf16_stochastic_round": True}, "random rounding"),
        ("torchao.optim:AdamW8bit", {"amsgrad": True}, "takes no step"),
        ("bitsandbytes.optim:PagedAdamW8bit", {}, "of bitsandbytes there are"),
        ("bitsandbytes.optim:AdamW8bit", {"is_paged": True}, "paged by the store"),
        ("bitsandbytes.optim:LAMB8bit", {}, "of bitsandbytes there are"),
    ],
)
def test_what_cannot_be_offloaded(name: str, settings: dict[str, Any], message: str) -> None:
    module, _, kind = name.partition(":")
    with pytest.raises(UsageError, match=message):
        Offloaded(
            getattr(pytest.importorskip(module), kind), [nn.Parameter(torch.ones(8192))], device="cpu", **settings
        )


def sharded() -> nn.Sequential:
    """Of each of two ranks the first weight's rows are whole blocks, the second's on one rank alone, the third is small."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 129), nn.Tanh(), nn.Linear(129, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def local_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's parameters and state."""
    found: list[torch.Tensor] = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    for entry in get_optimizer_state_dict(model, optimizer)["state"].values():
        for value in entry.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            found += [torch.as_tensor(copy.deepcopy(part)) for part in parts(local)]
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def on_fsdp2(rank: int, folder: str) -> list[str]:
    """Beside torchao's class on the same model; each loads what the other saved."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    wrong = []
    theirs = sharded()
    own = AdamW8bit(theirs.parameters(), lr=1e-2)
    for number in range(10):
        step(theirs, own, number)
    dcp.save(app(theirs, own), checkpoint_id=f"{folder}/torchao")
    for device in ("cpu", "nvme"):
        ours = sharded()
        with Offloaded(AdamW8bit, ours.parameters(), device=device, path=folder, lr=1e-2) as optimizer:
            for number in range(10):
                step(ours, optimizer, number)
            if not same(local_parts(theirs, own), local_parts(ours, optimizer)):
                wrong.append(f"steps on {device}")
            dcp.save(app(ours, optimizer), checkpoint_id=f"{folder}/{device}")
    step(theirs, own, 10)
    truth = local_parts(theirs, own)
    for source in ("torchao", "cpu", "nvme"):
        for offloads in (True, False):
            model = sharded()
            make: Any = functools.partial(Offloaded, AdamW8bit, path=folder) if offloads else AdamW8bit
            optimizer = make(model.parameters(), lr=1.0)
            state = app(model, optimizer)
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optim"])
            step(model, optimizer, 10)
            if not same(truth, local_parts(model, optimizer)):
                wrong.append(f"{source} into {type(optimizer).__name__}")
            if offloads:
                optimizer.close()
    return wrong


def app(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_torchao_on_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    assert run_ranks(on_fsdp2, 2, str(tmp_path)) == [[], []]


def bitsandbytes_on_fsdp2(rank: int) -> str:
    from bitsandbytes.optim import AdamW8bit

    with pytest.raises(UsageError, match="no mesh") as found:
        Offloaded(AdamW8bit, sharded().parameters(), device="cpu")
    return str(found.value)


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_bitsandbytes_takes_no_shards() -> None:
    pytest.importorskip("bitsandbytes")
    assert all("FSDP2" in found for found in run_ranks(bitsandbytes_on_fsdp2, 2))
