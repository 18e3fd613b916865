"""What every process builds before it trains, built before ranks are forked: they inherit it."""

import zstore.engine.api.initialize  # noqa: F401
from zstore.engine.config.config import load_config

load_config({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "zero_optimization": {}})
