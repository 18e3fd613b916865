"""torch optimizers whose state is on disk or in host memory, for plain PyTorch, DDP and FSDP2.

Read in this order: offloaded, local_state, stored_tensor.
"""

from .offloaded import Offloaded
from .stored_tensor import StoredTensor

__all__ = ["Offloaded", "StoredTensor"]
