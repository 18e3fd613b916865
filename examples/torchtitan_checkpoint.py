"""torchtitan's parts on FSDP2, saving and resuming through zstore.

    python examples/torchtitan_checkpoint.py            # or: torchrun --nproc-per-node 2 examples/torchtitan_checkpoint.py

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


def train(folder: str, stop: int, steps: int = 6) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer_config = default_adamw(lr=1e-2)
    optimizer_config.implementation = "for-loop"  # "fused" is torchtitan's for CUDA
    optimizers = OptimizersContainer(optimizer_config, model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=steps)
    state = {"step": 0}
    # The one changed line: torchtitan's own is torchtitan.components.checkpointer.CheckpointManager.Config.
    config = zstore.torchtitan.CheckpointManager.Config(
        enable=True, interval=2, async_mode="async", last_save_model_only=False
    )
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    checkpointer.load()
    while state["step"] < stop:
        state["step"] += 1
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(state["step"]))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizers.zero_grad()
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedule.step()
        checkpointer.save(state["step"], last_step=state["step"] == steps)
        print(f"step {state['step']} loss {loss.item():.6f}", flush=True)
    checkpointer.close()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "zstore-torchtitan"))
    folder = parser.parse_args().out
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(folder, stop=4)  # interrupted
    train(folder, stop=6)  # goes on from step 4
    dist.destroy_process_group()
