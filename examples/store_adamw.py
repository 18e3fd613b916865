"""torch's AdamW with its state in the store: [torchrun --nproc-per-node 2] examples/store_adamw.py --out FOLDER"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zstore


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that all ranks share")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from, of any number of ranks")
    options = parser.parse_args()
    rank, world_size, mesh = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), None
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)])
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))  # makes the process group
        fully_shard(model, mesh=mesh)
    parameters = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    rows = [own(parameter.detach()) for parameter in parameters.values()]  # the same memory
    optimizers = [torch.optim.AdamW([each], lr=1e-3) for each in rows]
    slots = [[f"optimizer/{slot}/{name[6:]}" for name in parameters] for slot in ("exp_avg", "exp_avg_sq")]
    with zstore.open_store(options.out / "run", host_budget_bytes=64e6, mesh=mesh) as store:
        for (name, parameter), *moments in zip(parameters.items(), *slots, strict=True):
            store.put(name, parameter)
            for moment in moments:
                store.put(moment, torch.zeros_like(parameter))
        first = 0 if options.resume is None else store.load(options.resume).wait()["step"]
        for name, each in zip(parameters, rows, strict=True):
            store.get(name, out=each).wait()
        for step in range(first, options.steps):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).tensor_split(world_size)[rank]
            (model(x) - x).square().mean().backward()
            for parameter, each in zip(parameters.values(), rows, strict=True):
                each.grad, parameter.grad = own(parameter.grad), None
            passes = [store.stream(slot) for slot in slots]  # read ahead, changed in place, written behind
            for each, optimizer, (_, m), (_, v) in zip(rows, optimizers, *passes, strict=True):
                optimizer.state[each] = {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v}
                optimizer.step()
        for name, parameter in parameters.items():
            store.update(name, parameter)
        store.checkpoint(options.out / f"step-{options.steps}", extra={"step": options.steps}, overwrite=True).wait()


if __name__ == "__main__":
    main()
