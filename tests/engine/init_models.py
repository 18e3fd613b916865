"""Models whose building touches parameters in every way, and what a plain build of them gives."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.runs import make_config
from zstore.engine.build.builder import find_built

WIDTH = 48


class Mixer(nn.Module):
    """Own parameters, set in ways of its own; one that is not contiguous, one of 16 bits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.experts = nn.Parameter(torch.empty(3, width, width))
        self.turned = nn.Parameter(torch.randn(width, 2 * width).t())
        self.small = nn.Parameter(torch.randn(width, width).to(torch.bfloat16))
        for expert in self.experts:
            nn.init.orthogonal_(expert.data)
        self.register_buffer("scale", self.turned.detach().abs().max())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x @ self.experts[0] + x @ self.experts[1]) @ self.experts[2].T
        turned = F.linear(F.linear(x, self.turned) / self.scale.to(x.dtype), self.down.weight)
        return x + self.down(F.gelu(self.up(x))) + 0.1 * mixed + 0.1 * turned + 0.1 * x @ self.small.to(x.dtype)


class Handmade(nn.Module):
    """A small language model with an initialisation that reads, writes, views, ties and copies."""

    def __init__(self, vocab: int = 300, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=3)
        self.first = Mixer(width)
        self.blocks = nn.ModuleList([copy.deepcopy(self.first) for _ in range(layers)])
        self.sequence = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._start)
        self._adjust()

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.05)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -0.01, 0.01)
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
            with torch.no_grad():
                module.weight[3].fill_(0)
                module.weight[5:7] = torch.rand(2, module.weight.shape[1])

    def _adjust(self) -> None:
        kept = self.first.up.weight.data
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("down.weight"):
                    parameter.mul_(1 / math.sqrt(2 * len(self.blocks)))
                if name.endswith("experts"):
                    parameter.data = parameter.data / parameter.norm()
            self.blocks[0].up.weight.copy_(self.first.up.weight * 2)
            self.sequence[0].weight.add_(self.sequence[2].weight @ self.sequence[2].weight.T)
            torch.nn.utils.parametrizations.orthogonal(self.sequence[2])
            torch.nn.utils.parametrize.remove_parametrizations(self.sequence[2], "weight")
            # A view that is taken early and written late.
            kept[0] = 1.0
            kept.view(-1)[-3:].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.sequence(x)))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Stack(nn.Module):
    """Many alike layers, of which the values of one are a small part."""

    def __init__(self, width: int = 128, layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            module.weight.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def config_of(folder: Any, stage: int = 3, state: str = "nvme", own: str = "nvme", **keys: Any) -> dict[str, Any]:
    return make_config(stage, state, folder, own, **keys)


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

    names = [name for name in expected if name not in found or not same(found[name], expected[name])]
    return [*names, *(name for name in found if name not in expected)]


def num_released(model: nn.Module) -> int:
    return sum(find_built(parameter) is not None for parameter in model.parameters())


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.shard"))


_PEAK = """
import sys, torch, zstore
from torch import nn
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
torch.set_num_threads(1)
folder = sys.argv[1]
place = lambda: {"device": "nvme", "nvme_path": folder}
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
          "zero_optimization": {"stage": 3, "offload_param": place(), "offload_optimizer": place()}}
"""


def grown_bytes(code: str, folder: Path) -> int:
    """Return how far the peak of a process's memory grows while it runs `code` after it took `before`."""
    command = [sys.executable, "-c", f"{_PEAK}{code}print(peak() - before)", str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
