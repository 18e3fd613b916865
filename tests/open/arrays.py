"""Arrays to put into stores."""

from __future__ import annotations

from typing import Any

import numpy as np

LARGE = (300, 100, 2)
"""240 kB in fp32: rests on disk."""


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.integers(0, 100, shape)).astype(dtype)
