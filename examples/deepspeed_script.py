"""A script for DeepSpeed, as it is: `zstore run --as-deepspeed examples/deepspeed_script.py`."""

import argparse
import tempfile

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.utils import logger


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="from the launcher")
    parser.add_argument("--out", help="folder for checkpoints; a temporary one by default")
    parser.add_argument("--steps", type=int, default=20)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    out = [args.out or tempfile.mkdtemp()]
    dist.broadcast_object_list(out, src=0)  # one folder for all ranks
    train(args, out[0])


def train(args: argparse.Namespace, out: str) -> None:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 8 * dist.get_world_size(),
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config)

    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(args.steps):
        x = torch.randn(8, 8, generator=generator).to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if step % 5 == 4 and engine.global_rank == 0:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    engine.save_checkpoint(out)
    logger.info("saved %s", out)


if __name__ == "__main__":
    main()
