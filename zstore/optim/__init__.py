"""Optimizers of torch whose state rests on disk or in host memory, for plain PyTorch, DDP and FSDP2; and classes that torch
lacks.

    optimizer = zstore.optim.Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-4, device="nvme", path="/fast/run")

Read in this order: offloaded, records, local_state, stored_tensor, gradients, stepping.
"""

from zstore.engine.extras.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
from zstore.engine.optim.classes.lamb import Lamb
from zstore.engine.optim.classes.lion import Lion
from zstore.engine.optim.classes.muon import MuonWithAdam, split_for_muon

from .offloaded import Offloaded
from .registry import register
from .stored_tensor import StoredTensor

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
