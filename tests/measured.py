"""What every process finds out about this machine before it trains, found out before ranks are forked: they inherit it."""

import torch

from zstore.engine.plan.rates import measure_rates

measure_rates(torch.device("cpu"))
