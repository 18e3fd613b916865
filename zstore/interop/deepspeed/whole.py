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
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...format.arrays import numpy_dtype
from ...io.files import Files
from ..torchfile import TorchTensor
from .pieces import MASTER, Joined, States, TrainedParameter
from .values import Fields, buffer_names, indices_of, scalars_of, table_of

_COMPARED_NUMEL = 4096


class _UnmatchedError(Exception):
    """The optimizer's tensors do not tell which parameters they are of."""


class WholeStates:
    """Reads the optimizer's state from model states."""

    def __init__(self, model: Fields, files: Files) -> None:
        self._model = model
        self._files = files
        self._left = self._candidates()
        """Parameters that nothing was matched with yet, in the model's order."""

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
        flat, single = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
        try:
            if isinstance(flat, list):
                for number, master in enumerate(flat):
                    self._flat(number, master, table_of(table_of(inner.get("state")).get(number)), states)
            else:
                self._single(single if isinstance(single, list) else None, table_of(inner.get("state")), states)
        except _UnmatchedError as error:
            states.parameters.clear()
            states.notes.append(f"the optimizer's state, as {error}")
        return states

    def _candidates(self) -> dict[str, TorchTensor]:
        """Return the model's parameters, tied ones under their first name."""
        buffers, seen = buffer_names(self._model), set[Any]()
        found: dict[str, TorchTensor] = {}
        for name, value in self._model.fields("module").entries.items():
            if not isinstance(value, TorchTensor) or name in buffers or (value.numel and value.identity in seen):
                continue
            seen.add(value.identity)
            found[name] = value
        return found

    def _take(self, after: str | None, shapes: set[tuple[int, ...]], master: Any, start: int = 0) -> str:
        """Return the first parameter behind `after` of these shapes whose values are those of `master`, cast."""
        behind = after is None
        for name, weight in self._left.items():
            if behind and shapes <= {weight.shape} and (master is None or self._agree(weight, master, start)):
                return name
            behind = behind or name == after
        raise _UnmatchedError("its tensors do not fit the weights in the model's order")

    def _agree(self, weight: TorchTensor, master: TorchTensor, start: int) -> bool:
        if not weight.numel or start + weight.numel > master.numel:
            return False
        count = min(weight.numel, _COMPARED_NUMEL)
        kept = np.empty(count, numpy_dtype(weight.dtype))
        weight.read(self._files, 0, count, kept.view(np.uint8))
        exact = np.empty(count, numpy_dtype(master.dtype))
        master.read(self._files, start, start + count, exact.view(np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            return exact.astype(kept.dtype).tobytes() == kept.tobytes()

    def _flat(self, number: int, master: Any, own: Mapping[Any, Any], states: States) -> None:
        """Match one flat master, of a parameter group."""
        if not isinstance(master, TorchTensor):
            raise _UnmatchedError(f"group {number} has no flat master")
        group = states.groups[number] if number < len(states.groups) else {}
        flat = {MASTER: master} | {key: value for key, value in _slots(own).items() if value.shape == master.shape}
        start, name, used = 0, None, []
        while start < master.numel:
            name = self._take(name, set(), master, start)
            used.append(name)
            shape = self._left[name].shape
            states.parameters[name] = TrainedParameter(
                shape,
                {key: Joined([value], start) for key, value in flat.items()},
                scalars_of(own, group, self._files),
            )
            start += math.prod(shape)
        for name in used:
            del self._left[name]

    def _single(self, masters: list[Any] | None, state: Mapping[Any, Any], states: States) -> None:
        """Match a state for each parameter, and a master for each if there are any."""
        shapes_of_groups: list[set[tuple[int, ...]]] = []
        for number, group in enumerate(states.groups):
            names, own_masters = group.get("param_names"), masters[number] if masters else None
            name, used = None, []
            shapes_of_groups.append(set())
            for position, index in enumerate(indices_of(group)):
                own = table_of(state.get(index))
                if not own:
                    continue
                slots = _slots(own)
                master = _nth(own_masters, position)
                shapes = {value.shape for value in (*slots.values(), *((master,) if master else ()))}
                if (given := _nth(names, position)) in self._left:
                    name = given
                else:
                    name = self._take(name, shapes, master)
                    shapes_of_groups[-1].add(self._left[name].shape)
                used.append(name)
                weight = self._left[name]
                found = {MASTER: master or weight} | slots
                states.parameters[name] = TrainedParameter(
                    weight.shape,
                    {key: Joined([value]) for key, value in found.items()},
                    scalars_of(own, group, self._files),
                )
            for name in used:
                self._left.pop(name, None)
        if masters is None and any(
            one & other for i, one in enumerate(shapes_of_groups) for other in shapes_of_groups[:i]
        ):
            raise _UnmatchedError("its parameter groups have tensors of one shape and no names")


def _slots(state: Mapping[Any, Any]) -> dict[str, TorchTensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(key, str) and "/" not in key and key != "step" and isinstance(value, TorchTensor) and value.shape
    }


def _nth(items: Any, position: int) -> Any:
    return items[position] if isinstance(items, list) and position < len(items) else None
