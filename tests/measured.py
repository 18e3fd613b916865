"""What every process finds out or builds before it trains, found out and built before ranks are forked: they inherit it."""

import torch

import zstore.engine.api.initialize  # noqa: F401
from zstore.engine.config.config import load_config
from zstore.engine.plan.rates import measure_rates

measure_rates(torch.device("cpu"))
load_config({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "zero_optimization": {}})
