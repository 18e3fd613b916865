"""Optimizers of torch whose state is on disk or in host memory, and classes that torch lacks: `zstore.optim.Offloaded`."""

from zstore.engine.adapters.torch_optim import Offloaded, StoredTensor, register
from zstore.engine.extras.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
from zstore.engine.optim.classes.lamb import Lamb
from zstore.engine.optim.classes.lion import Lion
from zstore.engine.optim.classes.muon import MuonWithAdam, split_for_muon

__all__ = [
    "Lamb",
    "Lion",
    "MuonWithAdam",
    "Offloaded",
    "OneBitAdam",
    "OneBitLamb",
    "StoredTensor",
    "ZeroOneAdam",
    "register",
    "split_for_muon",
]
