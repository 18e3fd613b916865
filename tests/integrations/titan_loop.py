"""A small run of torchtitan without its Trainer, which imports triton: its parts, its order of calls, FSDP2 on gloo."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

STEPS = 6


class Model(nn.Module):
    """Two layers and a head, one of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(12, 17), "1": nn.Linear(17, 12)})
        self.head = nn.Linear(12, 5, bias=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(torch.relu(self.layers["1"](torch.relu(self.layers["0"](x)))))


class Names(StateDictAdapter):
    """Other names, and one tensor transposed, as models of Hugging Face may have it."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(None, hf_assets_path)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items() if name != "seen"}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}


class Loader(Stateful):
    """Batches by their number."""

    def __init__(self) -> None:
        self.next = 0

    def batch(self) -> torch.Tensor:
        self.next += 1
        return torch.randn(4, 12, generator=torch.Generator().manual_seed(self.next))

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": repr(self.next).encode(), "world_size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = int(state_dict["dp_rank_0"])


class Run(Stateful):
    """What torchtitan's Trainer is to a checkpoint manager."""

    def __init__(self, manager: Any, folder: str, *, sd_adapter: Any = None, seed: int = 1, **options: Any) -> None:
        # Of torchtitan's schedule as it loads, and of DCP's own writer.
        for message in ("To get the last learning rate", "Detected an existing checkpoint"):
            warnings.filterwarnings("ignore", message=message)
        torch.manual_seed(seed)
        self.model = Model()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        config = default_adamw(lr=1e-2)
        config.implementation = "for-loop"
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.loader = Loader()
        self.step, self.ntokens_seen = 0, 0
        options = {"interval": 2, "keep_latest_k": 0, "last_save_model_only": False} | options
        self.load_step = options.get("load_step", -1)
        self.manager = manager.Config(enable=True, folder="checkpoint", **options).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=sd_adapter,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def load(self) -> bool:
        return bool(self.manager.load(step=self.load_step))

    def train(self, stop: int = STEPS) -> Run:
        while self.step < stop:
            self.step += 1
            self.optimizers.zero_grad()
            self.model(self.loader.batch()).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.ntokens_seen += 48
            self.manager.save(self.step, last_step=self.step == STEPS)
        return self

    def weights(self) -> dict[str, Any]:
        """Return the whole weights, as numbers."""
        state = self.model.state_dict()
        return {k: (v.full_tensor() if isinstance(v, DTensor) else v).tolist() for k, v in state.items()}

    def close(self) -> str:
        """End the run and return a digest of all that it trained."""
        self.manager.close()
        return self.digest()

    def digest(self) -> str:
        state: dict[str, Any] = {**self.model.state_dict(), **self.optimizers.state_dict()}
        found = hashlib.sha256(repr((self.step, self.ntokens_seen, self.loader.next)).encode())
        found.update(repr(self.lr_schedulers.state_dict()).encode())
        for name in sorted(state):
            value = state[name]
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(name.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        return found.hexdigest()
