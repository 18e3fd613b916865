"""Optimizers of torch whose state is on disk or in host memory, for plain PyTorch, DDP and FSDP2.

    optimizer = zstore.optim.Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-4, device="nvme", path="/fast/run")

Read in this order: offloaded, records, local_state, stored_tensor, gradients.
"""

from .offloaded import Offloaded
from .registry import register
from .stored_tensor import StoredTensor

__all__ = ["Offloaded", "StoredTensor", "register"]
