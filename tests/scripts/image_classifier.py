"""A loop in the shape of the CIFAR tutorial: a process group of one's own, a config in the script, a loss beside the model."""

# ruff: noqa: T201

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zstore as deepspeed

NUM_CLASSES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.norm(self.conv2(x))))
        x = torch.flatten(x, 1)
        scores: Tensor = self.fc2(F.relu(self.fc1(x)))
        return scores


def stripes(count: int, seed: int) -> TensorDataset:
    """Noisy images of 14 x 14 whose stripes run in one of four directions, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    angles = labels * torch.pi / NUM_CLASSES
    y, x = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    along = torch.cos(angles).view(-1, 1, 1) * x + torch.sin(angles).view(-1, 1, 1) * y
    images = torch.sin(1.5 * along) + 0.3 * torch.randn(count, 14, 14, generator=generator)
    return TensorDataset(images.unsqueeze(1), labels)


def get_ds_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_batch_size": 32,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "loss_scale": 0, "initial_scale_power": 12},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 5e7, "overlap_comm": False},
    }


def evaluate(net: Any, loader: DataLoader[Any], dtype: torch.dtype) -> float:
    net.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = net(images.to(net.device, dtype)).argmax(dim=1).cpu()
            total += labels.size(0)
            right += int((predicted == labels).sum())
    net.train()
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2, 3])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    args = parser.parse_args()

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(alone)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    deepspeed.init_distributed("nccl")

    torch.manual_seed(3)
    net = Net()
    model_engine, optimizer, _, _ = deepspeed.initialize(
        model=net, config_params=get_ds_config(args), model_parameters=net.parameters()
    )
    rank = dist.get_rank()
    dtype = torch.float32
    if model_engine.fp16_enabled():
        dtype = torch.float16
    elif model_engine.bfloat16_enabled():
        dtype = torch.bfloat16
    print(f"rank {rank} of {dist.get_world_size()} over {dist.get_backend()} in {dtype}", flush=True)

    trainset, testset = stripes(256, seed=1), stripes(64, seed=2)
    sampler: DistributedSampler[Any] = DistributedSampler(trainset, shuffle=True)
    trainloader = DataLoader(trainset, batch_size=model_engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(trainloader):
            optimizer.zero_grad()
            outputs = model_engine(images.to(model_engine.device, dtype))
            loss = criterion(outputs.float(), labels.to(model_engine.device))
            model_engine.backward(loss)
            model_engine.step()
            print(f"rank {rank} step {epoch * len(trainloader) + i} loss {loss.item()!r}", flush=True)
    accuracy = evaluate(model_engine, DataLoader(testset, batch_size=32), dtype)
    print(f"rank {rank} accuracy {accuracy}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
