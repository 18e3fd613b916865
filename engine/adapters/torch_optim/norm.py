"""The global norm of gradients, as `torch.nn.utils.clip_grad_norm_` takes it, and the factor that clips them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""torch's own."""


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients over all ranks that hold parts of them, 0-d in host memory (all ranks).

    Gradients are taken one after the other; DTensors of one mesh need one collective.
    """
    norms: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        where = gradient.device_mesh if isinstance(gradient, DTensor) else gradient.device
        norms.setdefault(where, []).append(torch.linalg.vector_norm(gradient, 2.0))
    totals: list[torch.Tensor] = []
    for each in norms.values():
        total = torch.linalg.vector_norm(torch.stack(each), 2.0)
        totals.append((total.full_tensor() if isinstance(total, DTensor) else total).cpu())
    if not totals:
        return torch.tensor(0.0)
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), 2.0)


def clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """Return the factor that clips gradients of that norm."""
    return float(torch.clamp(max_norm / (norm + _EPSILON), max=1.0))
