"""Gradients as the update takes them, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zstore.errors import UsageError

from .records import LocalRecord, local_part


def rows_of(record: LocalRecord, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of a gradient, 1-D in the order of the parameter's memory."""
    if gradient is None or gradient.layout is not torch.strided:
        raise UsageError(f"parameter {record.name!r} has a sparse gradient, which offloaded optimizers do not take")
    parameter: torch.Tensor = record.parameter
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = local_part(gradient)
    if local.shape != record.local_shape:
        raise UsageError(
            f"parameter {record.name!r}: the rank has {list(record.local_shape)} of it, but {list(local.shape)} of the gradient"
        )
    return record.flat(local)


def laid_out(rows: Mapping[LocalRecord, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield gradients in the shapes, on the devices and over the meshes of their parameters, one at a time."""
    for record, flat in rows.items():
        parameter: torch.Tensor = record.parameter
        local = record.in_shape(flat.to(record.full.device))
        if isinstance(parameter, DTensor):
            yield DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            yield local


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
