"""torchtitan's parts on FSDP2, interrupted and resumed through zstore: `python` or `torchrun --nproc-per-node 2` this file.

torchtitan's Trainer takes the same Config: `checkpoint=zstore.torchtitan.CheckpointManager.Config(...)`.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

import zstore.torchtitan

STEPS = 6


def train(folder: str, stop: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"  # "fused" is torchtitan's for CUDA
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
    progress = {"step": torch.tensor(0)}
    # The one changed line: torchtitan's own is torchtitan.components.checkpointer.CheckpointManager.Config.
    checkpoint = zstore.torchtitan.CheckpointManager.Config(enable=True, interval=2, async_mode="async")
    parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedule, "sd_adapter": None}
    states = {"train_state": progress}
    checkpointer = checkpoint.build(**parts, dataloader=None, states=states, base_folder=folder)
    checkpointer.load()
    for step in range(int(progress["step"]) + 1, stop + 1):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizers.zero_grad()
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedule.step()
        progress["step"].fill_(step)
        checkpointer.save(step, last_step=step == STEPS)
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    checkpointer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(tempfile.mkdtemp(), "run"))
    out = parser.parse_args().out
    one = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **one)
    train(out, stop=4)  # interrupted
    train(out, stop=STEPS)  # goes on from step 4
    dist.destroy_process_group()
