"""`deepspeed.runtime.utils` and other functions of its runtime that scripts take."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version is within the bounds."""
    from packaging.version import parse

    found = parse(torch.__version__)
    return (min_version is None or parse(str(min_version)) <= found) and (
        max_version is None or found <= parse(str(max_version))
    )


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as Python writes it."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def is_model_parallel_parameter(p: Any) -> bool:
    """Return whether a parameter is marked as a part of one."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return `item` with the values for which `criterion_func` is true, through lists, tuples and dicts, on `device`."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, list | tuple):
        return type(item)([copy_to_device(each, device, criterion_func) for each in item])
    if isinstance(item, dict):
        return {key: copy_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


move_to_device = copy_to_device


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the norm of the whole from these norms of parts; infinity if one is -1, infinite or NaN."""
    norms = [float(norm) for norm in norm_list]
    valid = all(math.isfinite(norm) and norm != -1 for norm in norms)
    return math.sqrt(sum(norm**2 for norm in norms)) if valid else math.inf


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Do as `torch.nn.utils.clip_grad_norm_`, for gradients that are whole on each rank."""
    del mpu
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts of `num_items`; the first parts have one item more, at most."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of parts of consecutive weights; the heaviest and the lightest differ least."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0.0, *itertools.accumulate(weights)]
    # Of the first `stop` weights in so many parts: (heaviest, lightest, begins), by how far those two are apart.
    best: dict[int, tuple[float, float, list[int]]] = {0: (-math.inf, math.inf, [])}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for stop in range(1, len(sums)):
            tried = (
                (max(high, sums[stop] - sums[first]), min(low, sums[stop] - sums[first]), [*begins, first])
                for first, (high, low, begins) in best.items()
                if first < stop
            )
            found = min(tried, key=lambda each: each[0] - each[1], default=None)
            if found is not None:
                longer[stop] = found
        best = longer
    return [*best[len(weights)][2], len(weights)]
