"""Gradients on their way from the backward to the update, left in `.grad` or taken away as they arrive, and their norm."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zstore.engine.runtime.device import D2HQueue, Transfers
from zstore.errors import UsageError

from .records import LocalRecord, local_part

Final = Callable[[LocalRecord, torch.Tensor], None]
"""Called with each gradient of a backward, 1-D in the order of the parameter's memory, once it is final."""


class LocalGradients:
    """Gradients of the parameters of `watch`. With `frees` they go to host memory as the backward makes them, and are summed
    there over micro-batches; `on_final` takes them instead, if it is set."""

    def __init__(self, transfers: Transfers, *, frees: bool, on_final: Final | None) -> None:
        self._transfers = transfers
        self._frees = frees
        self._on_final = on_final
        self._held: dict[LocalRecord, torch.Tensor] = {}
        self._queue = D2HQueue(transfers)
        self._handles: list[Any] = []

    def watch(self, record: LocalRecord) -> None:
        """Take the parameter's gradients as they arrive, if that was requested."""
        if not self._frees and self._on_final is None:
            return
        this = weakref.ref(self)

        def final(parameter: torch.Tensor) -> None:
            gradients = this()
            if gradients is not None and parameter.grad is not None:
                gradients._note_final(record, parameter)

        parameter: Any = record.parameter
        self._handles.append(parameter.register_post_accumulate_grad_hook(final))

    def _note_final(self, record: LocalRecord, parameter: torch.Tensor) -> None:
        rows = rows_of(record, parameter.grad)
        if self._frees:
            parameter.grad = None
        if self._on_final is not None:
            self._on_final(record, rows)
            return
        held = self._held.get(record)
        if self._transfers.streams.device_is_host:
            self._held[record] = rows if held is None else held.add_(rows)
            return
        if held is None:
            self._held[record] = self._transfers.empty_host(rows.numel(), rows.dtype)
        add = None if held is None else torch.Tensor.add_
        self._queue.put(self._held[record], rows, add=add, arrived=_nothing)

    def collect(self, records: Mapping[torch.Tensor, LocalRecord]) -> dict[LocalRecord, torch.Tensor]:
        """Return this rank's rows of each gradient of the step, 1-D, and hold them no longer."""
        self._queue.drain()
        found, self._held = self._held, {}
        for parameter, record in records.items():
            if parameter.grad is None:
                continue
            if record in found:
                raise UsageError(
                    f"parameter {record.name!r} has a gradient again after it was freed: DistributedDataParallel reduces "
                    "gradients after they are handed over; use free_grads=False there"
                )
            found[record] = rows_of(record, parameter.grad)
        return {record: found[record] for record in records.values() if record in found}

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._queue.drop()
        for handle in self._handles:
            handle.remove()


def _nothing() -> None:
    """Nobody waits for it."""


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
