"""A script to tune: TUNED.py --deepspeed_config FILE --mbs N. Each forward takes the same time, so large ones are faster."""

from __future__ import annotations

import argparse
import time

import torch

import zstore

parser = zstore.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--mbs", type=int)
parser.add_argument("--fail-at", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)
engine, *_ = zstore.initialize(args=args, model=torch.nn.Linear(4, 1))
size = engine.train_micro_batch_size_per_gpu()
if size != args.mbs:
    raise SystemExit(f"the config has {size} samples, --mbs {args.mbs}")
if size >= args.fail_at > 0:
    raise MemoryError("no room for so many samples")
with engine:
    while True:
        time.sleep(0.02)  # a forward's kernels
        engine.backward(engine(torch.ones(size, 4)).square().mean())
        engine.step()
