"""A loop over a model that is built in shards, and whose weights are set and read through `deepspeed.zero`; the process group
is the script's own."""

# ruff: noqa: T201

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zstore as deepspeed

WIDTH, CLASSES = 96, 8


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


def start_weights(model: nn.Module) -> None:
    """Set each weight on rank 0, as scripts do that load a checkpoint of their own."""
    first = dist.get_rank() == 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=0):
                if first:
                    nn.init.orthogonal_(module.weight)
            with deepspeed.zero.GatheredParameters([module.bias], modifier_rank=0, enabled=True):
                if first:
                    nn.init.zeros_(module.bias)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--nvme_path", required=True)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()

    where = {"device": "nvme", "nvme_path": args.nvme_path}
    config: dict[str, Any] = {
        "train_batch_size": 16,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": where,
            "offload_param": where,
            "stage3_param_persistence_threshold": 1000,
        },
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(alone)
    dist.init_process_group("gloo")
    deepspeed.init_distributed("nccl")
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
        model = Classifier()
    start_weights(model)
    engine: Any
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config_params=config)
    rank = engine.global_rank
    with deepspeed.zero.GatheredParameters(model.layers[0].weight):
        weight = model.layers[0].weight.float()
        print(f"rank {rank} off by {(weight @ weight.T - torch.eye(WIDTH)).abs().max().item()!r}", flush=True)

    centers = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        y = torch.randint(CLASSES, (engine.train_micro_batch_size_per_gpu(),), generator=generator)
        x = centers[y] + torch.randn(len(y), WIDTH, generator=generator)
        loss = engine(x.bfloat16(), y)
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        print(f"rank {rank} sum {sum(p.double().sum().item() for p in model.parameters())!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
