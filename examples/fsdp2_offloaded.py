"""FSDP2 with optimizer state on disk: torchrun --nproc-per-node 2 examples/fsdp2_offloaded.py --out FOLDER"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zstore.dcp
from zstore.optim import Offloaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that all ranks share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from, of any number of ranks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    # The one line that is another than torch.optim.AdamW(model.parameters(), lr=1e-3).
    optimizer = Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-3, path=options.out)
    if options.resume is not None:
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, storage_reader=zstore.dcp.Reader(options.resume))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    torch.manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(options.steps):
        x = torch.randn(16, 256, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.4f}")
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, storage_writer=zstore.dcp.Writer(options.out / f"step-{options.steps}", overwrite=True))
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
