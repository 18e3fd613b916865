"""Weights that a run publishes, in a torch module that serves them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointMismatchError, UsageError
from ..interop.huggingface import WeightsReader
from ..io.tensors import dtype_name, torch_dtype
from ..weights.delta import fold, spans_of
from ..weights.versions import WeightsVersion
from .arrived import Arrived, arrived
from .sources import folder_of


class Receiver:
    """Keeps the weights of `model`, in bf16 or fp32 on any device, at those that a run publishes at `source`: a folder, or the
    URL `http://HOST:PORT/RUN/weights` of a service, whose token is in `storage_options`.

    Parameters and persistent buffers are changed in place, by their names in the state dict; nobody else may write to them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        source: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._source = folder_of(source, storage_options)
        self._at: WeightsVersion | None = None

    @property
    def version(self) -> int | None:
        """The version that the model has; None before the first `update`."""
        return None if self._at is None else self._at.number

    def update(self) -> int:
        """Bring the model to the newest version, and return that; several versions are folded in one pass.

        All is verified before the first write. Raises CheckpointNotFoundError if nothing is published, CorruptionError for
        files or weights that differ from the published ones, CheckpointMismatchError for a model with other names, shapes or
        types: then the model is as it was. A new Receiver begins with a full version.
        """
        with arrived(self._source, None if self._at is None else self._at.id) as found, ExitStack() as opened:
            if found is not None:
                reader = None if found.full is None else opened.enter_context(WeightsReader(found.full))
                targets = self._targets(reader)
                for _ in _ranges(found, reader, targets):
                    pass
                for target, values in _ranges(found, reader, targets):
                    target.copy_(values)
                self._at = found.chain.newest
        if self._at is None:
            raise AssertionError("no weights are of no version")
        return self._at.number

    def _targets(self, reader: WeightsReader | None) -> dict[str, torch.Tensor]:
        """Return the memory of each weight, 1-D. Raises CheckpointMismatchError unless those of a full version are all."""
        state = {name: value.detach() for name, value in self._model.state_dict(keep_vars=True).items()}
        for name, weight in {} if reader is None else reader.weights.items():
            kinds = {weight.dtype, "float32"} if weight.dtype == "bfloat16" else {weight.dtype}
            ours = state.get(name)
            if ours is None or tuple(ours.shape) != weight.shape or dtype_name(ours.dtype) not in kinds:
                has = "none" if ours is None else f"{tuple(ours.shape)} in {dtype_name(ours.dtype)}"
                raise CheckpointMismatchError(
                    f"{name!r} was published as {weight.shape} in {weight.dtype}, and the model has {has}: expected the model "
                    f"that is trained, in {' or '.join(sorted(kinds))}"
                )
            if not ours.is_contiguous():
                raise UsageError(f"{name!r} is not contiguous: make it so, then it can be changed in place")
        if reader is not None:
            places = {state[name].data_ptr() for name in reader.weights}
            missing = [name for name, ours in state.items() if ours.numel() and ours.data_ptr() not in places]
            if missing:
                raise CheckpointMismatchError(
                    f"{len(missing)} weights of the model are not published, as {missing[0]!r}: expected the model that is "
                    "trained"
                )
        return {name: ours.view(-1) for name, ours in state.items() if ours.is_contiguous()}


def _ranges(
    found: Arrived, reader: WeightsReader | None, targets: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield memory of the model and its new values, on the host. Raises CorruptionError."""
    if reader is not None:
        for name, weight in reader.weights.items():
            kind = torch_dtype(weight.dtype)
            for first, stop, data in found.blocks(reader, weight):
                yield targets[name][first:stop], torch.from_numpy(data).view(kind)
        return
    for name, patches in found.patches.items():
        if name not in targets:
            raise CheckpointMismatchError(f"{name!r} was published, and the model has it no more")
        for first, stop, changes in spans_of(patches):
            target = targets[name][first:stop]
            values = target.to("cpu", torch.bfloat16, copy=True)
            fold(name, first, values.view(torch.int16).numpy().view(np.uint16), changes)
            if any(patch.values.size for patch in changes):
                yield target, values
