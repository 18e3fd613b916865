"""States of the random number generators that a training loop draws from: torch, its CUDA device, Python, numpy."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch

from .client_state import understood


def rng_state() -> dict[str, Any]:
    """Return this rank's generator states as JSON data."""
    version, words, gauss = random.getstate()
    kind, key, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(word) for word in key], int(pos), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


@understood("state of the random number generators")
def load_rng_state(state: dict[str, Any]) -> None:
    """Set this rank's generators to a state that `rng_state` gave."""
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *rest))
    if torch.cuda.is_available():
        if "cuda" in state:
            torch.cuda.set_rng_state(_decode(state["cuda"]))
        else:  # saved without a device: resumes agree with each other all the same
            torch.cuda.manual_seed(_number(state["torch"]))


def derive_rng_state(seed: int, step: int, rank: int) -> None:
    """Seed this rank's generators from the three numbers alone."""
    number = _number(f"zstore {seed} {step} {rank}")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
