"""A GPT in the shape of those that train with DeepSpeed and without Megatron: everything that such scripts import."""

import argparse
import os
import random

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import RepeatingLoader, log_dist, logger, safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH = 64, 16


class Tokens(Dataset):
    """Sequences that count up from a number, each by a step of its own."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return (index + torch.arange(LENGTH + 1) * (1 + index % 5)) % VOCABULARY


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList([Block(width, 2) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x) if deepspeed.checkpointing.is_configured() else layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="passed from the distributed launcher")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--nvme_path")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_ds_config(args):
    offload = {"device": "nvme", "nvme_path": args.nvme_path} if args.nvme_path else {"device": "cpu"}
    zero = {"stage": args.zero_stage, "offload_optimizer": offload, "contiguous_gradients": True}
    if args.zero_stage == 3:
        zero |= {"offload_param": offload, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "gradient_accumulation_steps": 2,
        "steps_per_print": 100,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "activation_checkpointing": {"cpu_checkpointing": True},
    }


def set_random_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def print_rank_0(text):
    if torch.distributed.get_rank() == 0:
        print(f"rank 0 {text}", flush=True)


def maybe_zero_3(param):
    if hasattr(param, "ds_id"):
        assert param.ds_numel == param.ds_shape.numel()
        if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            with deepspeed.zero.GatheredParameters([param]):
                assert param.ds_status == ZeroParamStatus.AVAILABLE
                return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def main():
    args = get_args()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        get_accelerator().set_device(args.local_rank)
        device = torch.device(get_accelerator().device_name(), args.local_rank)
        deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    assert args.local_rank == int(os.environ["LOCAL_RANK"])
    set_random_seed(1234)
    dist.barrier()
    logger.info("started")
    log_dist("started together", ranks=[0])

    config = get_ds_config(args)
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.zero_stage == 3):
        model = GPT()
    see_memory_usage("built", force=True)
    adam = DeepSpeedCPUAdam if args.nvme_path else FusedAdam
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = adam(groups, lr=3e-3, betas=(0.9, 0.95))
    model_engine, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3)),
        dist_init_required=True,
    )
    assert isinstance(model_engine, deepspeed.DeepSpeedEngine)
    if args.load:
        path, state = model_engine.load_checkpoint(args.load)
        assert path is not None
        args.seen = state["seen"]

    data = Tokens()
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loader = DataLoader(data, batch_size=model_engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    batches = iter(RepeatingLoader(loader))
    for _ in range(model_engine.micro_steps):
        next(batches)
    while model_engine.global_steps < args.steps:
        batch = next(batches).to(device)
        loss = model_engine(batch[:, :-1], batch[:, 1:])
        model_engine.backward(loss)
        if model_engine.micro_steps == 0:
            assert safe_get_full_grad(model.head.weight).shape == (VOCABULARY, 32)
        model_engine.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        print_rank_0(f"step {model_engine.micro_steps - 1} loss {loss.item() / dist.get_world_size()!r}")

    master = safe_get_full_fp32_param(model.head.weight)
    assert torch.equal(maybe_zero_3(model.head.weight), master)
    if args.save:
        model_engine.save_checkpoint(args.save, client_state={"seen": model_engine.global_samples})
        state = get_fp32_state_dict_from_zero_checkpoint(args.save)
        assert torch.equal(state["head.weight"], master)
        fresh = load_state_dict_from_zero_checkpoint(GPT(), args.save)
        print_rank_0(
            f"saved {sorted(os.listdir(args.save))} sum {sum(p.double().sum().item() for p in fresh.parameters())!r}"
        )


if __name__ == "__main__":
    main()
