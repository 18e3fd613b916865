"""Masters and optimizer slots of a DeepSpeed checkpoint without ZeRO: all of it is in the one file of model states.

[Note: nameless tensors]
At stage 0 the optimizer's tensors have no names. In each parameter group they are in the order in which the program
listed the parameters, which is taken to be the model's. With 16-bit weights each master must give the weight that it is
matched with; in fp32, if groups have parameters of one shape, nothing could tell them apart. State that cannot be matched is
left out, and said: the weights are read in any case.
Source: deepspeed/runtime/fp16/fused_optimizer.py and unfused_optimizer.py of 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...format.arrays import numpy_dtype
from ...io.files import Files
from ..torchfile import TorchTensor
from .pieces import MASTER, Joined, States, TrainedParameter, Vector, whole
from .values import Fields, buffer_names, indices_of, scalars_of, table_of

_COMPARED_NUMEL = 4096


class _UnmatchedError(Exception):
    """The optimizer's tensors do not tell which parameters they are of."""


class WholeStates:
    """Reads the optimizer's state from model states."""

    def __init__(self, model: Fields, files: Files) -> None:
        self._model = model
        self._files = files
        self._buffers = buffer_names(model)

    def read(self) -> States:
        """Return the states; without parameters if the optimizer kept none, or none that can be matched."""
        states = States(stage=0, world_size=max(1, self._model.count("dp_world_size")))
        optimizer = self._model.get("optimizer")
        if not isinstance(optimizer, dict):
            return states
        inner = table_of(optimizer.get("optimizer_state_dict", optimizer))
        groups = inner.get("param_groups")
        states.groups = [table_of(group) for group in groups] if isinstance(groups, list) else []
        states.scaler = optimizer
        try:
            if isinstance(optimizer.get("fp32_groups_flat"), list):
                self._flat(optimizer["fp32_groups_flat"], table_of(inner.get("state")), states)
            else:
                self._single(optimizer.get("fp32_groups"), table_of(inner.get("state")), states)
        except _UnmatchedError as error:
            states.parameters.clear()
            states.notes.append(f"the optimizer's state, as {error}")
        return states

    def _candidates(self) -> dict[str, TorchTensor]:
        """Return the model's parameters, tied ones under their first name, in order."""
        seen: set[Any] = set()
        found: dict[str, TorchTensor] = {}
        for name, value in self._model.fields("module").entries.items():
            if not isinstance(value, TorchTensor) or name in self._buffers or (value.numel and value.identity in seen):
                continue
            seen.add(value.identity)
            found[name] = value
        return found

    # -- one flat tensor for each group -------------------------------------------------------------------------------

    def _flat(self, masters: Sequence[Any], state: Mapping[Any, Any], states: States) -> None:
        candidates = self._candidates()
        for number, master in enumerate(masters):
            group = states.groups[number] if number < len(states.groups) else {}
            own = table_of(state.get(number))
            flat = {MASTER: master} | {key: value for key, value in own.items() if key != "step"}
            vectors = {
                key: Vector([value])
                for key, value in flat.items()
                if isinstance(value, TorchTensor) and isinstance(master, TorchTensor) and value.shape == master.shape
            }
            if MASTER not in vectors:
                raise _UnmatchedError(f"group {number} has no flat master")
            start, names = 0, list(candidates)
            while start < master.numel:
                name = self._match(names, candidates, master, start)
                names = names[names.index(name) + 1 :]
                shape = candidates.pop(name).shape
                states.parameters[name] = TrainedParameter(
                    shape,
                    {key: Joined(vector, start) for key, vector in vectors.items()},
                    scalars_of(own, group, self._files),
                )
                start += math.prod(shape)

    def _match(
        self, names: Sequence[str], candidates: Mapping[str, TorchTensor], master: TorchTensor, start: int
    ) -> str:
        """Return the first of `names` whose values are equal to those of `master` from `start` on, cast."""
        for name in names:
            weight = candidates[name]
            if weight.numel and start + weight.numel <= master.numel and self._agree(weight, master, start):
                return name
        raise _UnmatchedError("the masters do not give the weights in the model's order")

    def _agree(self, weight: TorchTensor, master: TorchTensor, start: int) -> bool:
        count = min(weight.numel, _COMPARED_NUMEL)
        kept = np.empty(count, numpy_dtype(weight.dtype))
        weight.read(self._files, 0, count, kept.view(np.uint8))
        exact = np.empty(count, numpy_dtype(master.dtype))
        master.read(self._files, start, start + count, exact.view(np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            return exact.astype(kept.dtype).tobytes() == kept.tobytes()

    # -- a tensor for each parameter --------------------------------------------------------------------------------

    def _single(self, masters: Any, state: Mapping[Any, Any], states: States) -> None:
        candidates = self._candidates()
        shapes_of_groups: list[set[tuple[int, ...]]] = []
        for number, group in enumerate(states.groups):
            given = group.get("param_names")
            own_masters = masters[number] if isinstance(masters, list) and number < len(masters) else None
            names = list(candidates)
            shapes_of_groups.append(set())
            for position, index in enumerate(indices_of(group)):
                own = table_of(state.get(index))
                slots = {key: v for key, v in own.items() if isinstance(v, TorchTensor) and v.shape and key != "step"}
                if not own:
                    continue
                master = (
                    own_masters[position] if isinstance(own_masters, list) and position < len(own_masters) else None
                )
                if isinstance(given, list) and position < len(given) and given[position] in candidates:
                    name = given[position]
                else:
                    name = self._match_shape(names, candidates, slots, master)
                    names = names[names.index(name) + 1 :]
                    shapes_of_groups[-1].add(candidates[name].shape)
                states.parameters[name] = self._parameter(
                    candidates.pop(name), slots, master, scalars_of(own, group, self._files)
                )
        if not isinstance(masters, list) and any(
            one & other for i, one in enumerate(shapes_of_groups) for other in shapes_of_groups[:i]
        ):
            raise _UnmatchedError("its parameter groups have tensors of one shape and no names")

    def _match_shape(
        self, names: Sequence[str], candidates: Mapping[str, TorchTensor], slots: Mapping[Any, TorchTensor], master: Any
    ) -> str:
        shapes = {value.shape for value in slots.values()}
        for name in names:
            weight = candidates[name]
            if shapes <= {weight.shape} and (
                not isinstance(master, TorchTensor) or (master.shape == weight.shape and self._agree(weight, master, 0))
            ):
                return name
        raise _UnmatchedError("its tensors do not fit the weights in the model's order")

    def _parameter(
        self, weight: TorchTensor, slots: Mapping[Any, TorchTensor], master: Any, scalars: dict[str, float]
    ) -> TrainedParameter:
        best = master if isinstance(master, TorchTensor) else weight
        found = {MASTER: best} | {key: value for key, value in slots.items() if isinstance(key, str) and "/" not in key}
        return TrainedParameter(weight.shape, {key: whole(value) for key, value in found.items()}, scalars)
