"""Host memory that is registered with CUDA, so that copies to and from the device run beside everything else."""

from __future__ import annotations

import threading
from typing import Any

from .buffers import Bytes, make_slab


class PinnedSlabs:
    """Makes slabs and registers them until `close()`. Where that cannot be, slabs are ordinary, and `messages` has why,
    once."""

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = _cuda_runtime() if runtime is None else runtime
        self._registered: list[int] = []
        self._lock = threading.Lock()
        self._failed = False
        self.pinned_bytes = 0
        """Bytes registered now."""
        self.messages: list[str] = []
        if self._runtime is None:
            self._give_up("there is no CUDA device")

    def make(self, nbytes: int) -> Bytes:
        """Return a slab as `make_slab` does, registered where that can be."""
        slab = make_slab(nbytes)
        with self._lock:
            if self._failed or nbytes == 0:
                return slab
            try:
                code = int(self._runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0))
            except RuntimeError as error:  # torch's binding raises where CUDA cannot be started
                self._give_up(str(error))
                return slab
            if code:
                self._give_up(f"cudaHostRegister of {slab.nbytes} bytes gave error {code}")
                return slab
            self._registered.append(slab.ctypes.data)
            self.pinned_bytes += slab.nbytes
        return slab

    def _give_up(self, reason: str) -> None:
        self._failed = True
        self.messages.append(f"host memory is not pinned, so that copies to the device may wait: {reason}")

    def close(self) -> None:
        """Take all registrations back. Nothing may be copying to or from the slabs any more."""
        with self._lock:
            for address in self._registered:
                self._runtime.cudaHostUnregister(address)
            self._registered.clear()
            self.pinned_bytes = 0


def _cuda_runtime() -> Any:
    """Return torch's binding of the CUDA runtime; None without a CUDA device."""
    import torch

    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
