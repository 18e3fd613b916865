"""A DeepSpeed checkpoint as named arrays. No torch.

[Note: which value a parameter has]
`model/<name>` is the master if the optimizer has one, otherwise (for frozen parameters, or without an optimizer) the parameter
in the model states. Tied parameters are stored once, under the name that comes first in the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointMismatchError, CorruptionError
from ...format.arrays import ArraySpec, Bytes, buffer_array, model_array, optimizer_array
from ...io.files import Files
from ...io.shards import IoResources
from ..source import ForeignSource
from ..torchfile import TorchTensor
from .folder import CheckpointFiles, check_ranks, find, refusal
from .progress import Progress
from .states import StateReader
from .values import MASTER, Elements, Fields, MemoryPart, States, buffer_names, shapes_of, table_of, tensor_of

_NEVER_CONVERTED = "the states of random number generators"


def open_deepspeed(
    location: str | Path, tag: str | None = None, *, resources: IoResources | None = None
) -> DeepSpeedSource | None:
    """Open the DeepSpeed checkpoint that `location` and `tag` select; None if it is not DeepSpeed's.

    Raises CheckpointNotFoundError, CorruptionError if it is damaged or incomplete, CheckpointMismatchError for an
    unsupported layout or object.
    """
    folder = find(Path(location), tag)
    return None if folder is None else DeepSpeedSource(folder, resources)


class DeepSpeedSource(ForeignSource):
    """An open DeepSpeed checkpoint. See [Note: which value a parameter has]."""

    def __init__(self, folder: CheckpointFiles, resources: IoResources | None = None) -> None:
        files = Files(direct=False)
        self._folder = folder
        self._model = _model_states(folder)
        self._elements: dict[str, Elements] = {}
        self._specs: dict[str, ArraySpec] = {}
        states = StateReader(folder, self._model, files).read()
        self._add_arrays(states)
        progress = Progress(self._model, states, files)
        parameters = [name.removeprefix("model/") for name in self._specs if name.startswith("model/")]
        record = progress.record(folder.path.name, parameters)
        for name, value in progress.client.tensors.items():
            part = value if isinstance(value, TorchTensor) else MemoryPart(value.reshape(-1), value.dtype.name)
            self._add(name, value.shape, Elements([part]))
        super().__init__(folder.path, record, self._specs.values(), resources, files)
        self.kind = _kind(folder, states, progress)
        self.notes = (*progress.notes, _NEVER_CONVERTED)

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        itemsize, offset = self._specs[name].itemsize, 0
        for part, low, high in self._elements[name].pieces(first, stop):
            size = (high - low) * itemsize
            part.read(self._files, low, high, out[offset : offset + size])
            offset += size

    def _add(self, name: str, shape: tuple[int, ...], elements: Elements, aliases: tuple[str, ...] = ()) -> None:
        try:
            self._specs[name] = ArraySpec(name=name, shape=shape, dtype=elements.dtype, aliases=aliases)
        except ValueError as error:
            raise CheckpointMismatchError(f"{self._folder.path}: {error}") from error
        self._elements[name] = elements

    def _add_arrays(self, states: States) -> None:
        module = {name: value for name, value in self._model.fields("module").entries.items() if isinstance(name, str)}
        tensors = {name: value for name, value in module.items() if isinstance(value, TorchTensor)}
        buffers = buffer_names(self._model)
        aliases = self._aliases({} if states.stage == 3 else tensors)
        other_names: dict[str, tuple[str, ...]] = {}
        for alias, name in aliases.items():
            other_names[name] = (*other_names.get(name, ()), alias)
        for name, parameter in states.parameters.items():
            for key, elements in parameter.states.items():
                if key == MASTER:
                    self._add(model_array(name), parameter.shape, elements, other_names.get(name, ()))
                else:
                    self._add(optimizer_array(key, name), parameter.shape, elements)
        seen, others = set(), {*buffers, *aliases, *states.parameters}
        for name, value in tensors.items():
            if name in buffers and (not value.numel or value.identity not in seen):
                seen.add(value.identity)
                self._add(buffer_array(name), value.shape, Elements([value]))
            elif name not in others and states.stage != 3:
                self._add(model_array(name), value.shape, Elements([value]), other_names.get(name, ()))
        if states.stage == 3:
            self._add_frozen_fragments(states.world_size, other_names)

    def _add_frozen_fragments(self, world_size: int, aliases: Mapping[str, tuple[str, ...]]) -> None:
        shapes = self._model.get("frozen_param_shapes")
        if not shapes:
            return
        check_ranks(self._folder, self._folder.model, world_size, "model states")
        others = [Fields.load(self._folder.model[rank]) for rank in range(1, world_size)]
        ranks = [model.fields("frozen_param_fragments") for model in (self._model, *others)]
        for name, shape in shapes_of(shapes, f"{self._model.label}: frozen_param_shapes").items():
            parts = [tensor_of(rank.get(name), f"{rank.label}: {name[:200]!r}") for rank in ranks]
            numel, part_numel = math.prod(shape), -(-math.prod(shape) // world_size)
            if any(part.numel < min(part_numel, numel - rank * part_numel) for rank, part in enumerate(parts)):
                raise CorruptionError(
                    f"{self._folder.path}: the frozen parameter {name!r} has no values in the model states (it may have been "
                    "on NVMe, where DeepSpeed saves no parameters): save again without offload_param"
                )
            self._add(model_array(name), shape, Elements(parts, 0, part_numel), aliases.get(name, ()))

    def _aliases(self, tensors: Mapping[str, TorchTensor]) -> dict[str, str]:
        """Return the tied parameters that are stored under another name (their first one), with that name."""
        shared = self._model.get("shared_params")
        if isinstance(shared, dict):
            return {a: b for a, b in shared.items() if isinstance(a, str) and isinstance(b, str)}
        first_names: dict[Any, str] = {}
        names = {name: first_names.setdefault(value.identity, name) for name, value in tensors.items() if value.numel}
        return {name: stored for name, stored in names.items() if stored != name}


def _model_states(folder: CheckpointFiles) -> Fields:
    """Return rank 0's model states. Raises CheckpointMismatchError for parallel layouts that file names do not reveal."""
    if 0 not in folder.model:
        raise CorruptionError(
            f"{folder.path} has no model states of rank 0, *_model_states.pt: it is incomplete; copy it again, also from "
            "the machine that rank 0 ran on, or use another tag"
        )
    model = Fields.load(folder.model[0])
    dims = table_of(model.get("checkpoint_parallel_dimensions"))
    degrees = {
        "tensor parallel": (model.get("mp_world_size"), dims.get("tp_degree")),
        "pipeline parallel": (dims.get("pp_degree"),),
    }
    for kind, values in degrees.items():
        if degree := max((value for value in values if type(value) is int and value > 1), default=0):
            raise refusal(folder.path, kind, f"of degree {degree}")
    if any(model.get(key) for key in ("ds_autoep_layers", "autoep_layers", "num_experts")):
        raise refusal(folder.path, "expert parallel", "its model states have experts")
    return model


def _kind(folder: CheckpointFiles, states: States, progress: Progress) -> str:
    details = [f"stage {states.stage}", progress.precision]
    if folder.universal:
        details.append("universal")
    if states.num_offloaded:
        details.append("with offloaded state")
    return f"DeepSpeed {progress.version}, {', '.join(details)}"
