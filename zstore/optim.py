"""Optimizers of torch whose state is on disk or in host memory, and classes that torch lacks: `zstore.optim.Offloaded`."""

from zstore.engine.adapters.torch_optim import Offloaded, StoredTensor
from zstore.engine.extras.whole_tensors import Lamb, MuonWithAdam, split_for_muon
from zstore.engine.optim.kernel import Lion

__all__ = [
    "Lamb",
    "Lion",
    "MuonWithAdam",
    "Offloaded",
    "StoredTensor",
    "split_for_muon",
]
