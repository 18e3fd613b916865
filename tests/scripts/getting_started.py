"""A loop in the shape of "getting started": arguments, a loader of one's own, a model that gives its loss, checkpoints."""

# ruff: noqa: T201

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import zstore as deepspeed


class Text(Dataset[Tensor]):
    """Windows of bytes out of a source file that every Python has."""

    def __init__(self, seq_len: int) -> None:
        with open(os.__file__, "rb") as file:
            data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        count = len(data) // seq_len
        self.windows = data[: count * seq_len].view(count, seq_len).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class NextByte(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU()) for _ in "ab"
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]
            x = x + block(torch.cat((x, before), dim=-1))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def get_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="given by some launchers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save_interval", type=int, default=4)
    parser.add_argument("--save_dir")
    parser.add_argument("--load_dir")
    parser.add_argument("--ckpt_id")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_loader(engine: Any) -> DataLoader[Tensor]:
    data = Text(seq_len=64)
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, engine.world_size, engine.global_rank, shuffle=False)
    return DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)


def to_step(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
    """Go on with the batch of a step, as if the ones before had been drawn."""
    return itertools.islice(enumerate(loader), step, None)


def main() -> None:
    args = get_arguments()
    torch.manual_seed(7)
    model = NextByte()
    model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank = model_engine.global_rank
    first = 0
    client_sd: dict[str, Any] = {}
    if args.load_dir:
        _, client_sd = model_engine.load_checkpoint(args.load_dir, args.ckpt_id)
        first = client_sd["step"] + 1
        print(f"rank {rank} resumed at {first} after {client_sd['seen']}", flush=True)

    for step, batch in to_step(make_loader(model_engine), first):
        if step == args.steps:
            break
        loss = model_engine(batch.to(model_engine.device))
        model_engine.backward(loss)
        model_engine.step()
        print(f"rank {rank} step {step} loss {loss.item()!r} lr {optimizer.param_groups[0]['lr']!r}", flush=True)

        if args.save_dir and step % args.save_interval == args.save_interval - 1:
            client_sd["step"] = step
            client_sd["seen"] = (step + 1) * model_engine.train_batch_size()
            ckpt_id = loss.item()
            model_engine.save_checkpoint(args.save_dir, ckpt_id, client_sd=client_sd)
            print(f"rank {rank} saved {ckpt_id!r}", flush=True)


if __name__ == "__main__":
    main()
