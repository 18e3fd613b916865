"""Masters and optimizer slots of a DeepSpeed checkpoint without ZeRO: all of it is in the one file of model states.

[Note: nameless tensors]
At stage 0 the optimizer's tensors have no names. In each parameter group they are in the order in which the program
listed the parameters, which is taken to be the model's. With 16-bit weights each master must give the weight that it is
matched with; in fp32, if groups have parameters of one shape, nothing could tell them apart. State that cannot be matched is
left out, and said: the weights are read in any case.
Source: deepspeed/runtime/fp16/fused_optimizer.py and unfused_optimizer.py of 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...format.arrays import numpy_dtype
from ...io.files import Files
from ..torchfile import TorchTensor
from .pieces import MASTER, Elements, States, TrainedParameter
from .values import Fields, buffer_names, indices_of, scalars_of, table_of

_COMPARED_NUMEL = 4096


class _UnmatchedError(Exception):
    """The optimizer's tensors do not tell which parameters they are of."""


def whole_states(model: Fields, files: Files) -> States:
    """Return the states in model states; without parameters if the optimizer kept none, or none that can be matched."""
    states = States(stage=0, world_size=max(1, model.count("dp_world_size")))
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, dict):
        return states
    inner = table_of(optimizer.get("optimizer_state_dict", optimizer))
    groups = inner.get("param_groups")
    states.groups = [table_of(group) for group in groups] if isinstance(groups, list) else []
    states.scaler = optimizer
    try:
        states.parameters = _Matching(model, files).match(optimizer, table_of(inner.get("state")), states.groups)
    except _UnmatchedError as error:
        states.notes.append(f"the optimizer's state, as {error}")
    return states


class _Matching:
    """Finds the parameters of nameless tensors, in the model's order. See [Note: nameless tensors]."""

    def __init__(self, model: Fields, files: Files) -> None:
        self._files = files
        self._weights: dict[str, TorchTensor] = {}
        """The model's parameters, tied ones under their first name."""
        self._found: dict[str, TrainedParameter] = {}
        buffers, seen = buffer_names(model), set[Any]()
        for name, value in model.fields("module").entries.items():
            if isinstance(value, TorchTensor) and name not in buffers and value.identity not in seen:
                self._weights[name] = value
                seen |= {value.identity} if value.numel else set()

    def match(
        self, optimizer: Mapping[Any, Any], states: Mapping[Any, Any], groups: Sequence[Mapping[Any, Any]]
    ) -> dict[str, TrainedParameter]:
        """Return the trained parameters. Raises _UnmatchedError."""
        flat, single = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
        if isinstance(flat, list) and len(flat) > len(groups):
            raise _UnmatchedError(f"it has {len(flat)} flat masters for {len(groups)} parameter groups")
        shapes: list[set[tuple[int, ...]]] = []
        for number, group in enumerate(groups):
            if isinstance(flat, list):
                self._match_flat(_nth(flat, number), table_of(states.get(number)), group)
            else:
                shapes.append(self._match_each(_nth(single, number), states, group))
        if not isinstance(single, list) and any(one & other for i, one in enumerate(shapes) for other in shapes[:i]):
            raise _UnmatchedError("its parameter groups have tensors of one shape and no names")
        return self._found

    def _match_flat(self, master: Any, own: Mapping[Any, Any], group: Mapping[Any, Any]) -> None:
        """Match one flat master, of a parameter group."""
        if not isinstance(master, TorchTensor):
            raise _UnmatchedError("a parameter group has no flat master")
        flat = {MASTER: master} | {key: value for key, value in _slots(own).items() if value.shape == master.shape}
        start, name = 0, None
        while start < master.numel:
            name = self._take(name, set(), master, start)
            self._add(name, flat, start, own, group)
            start += self._weights[name].numel

    def _match_each(self, masters: Any, states: Mapping[Any, Any], group: Mapping[Any, Any]) -> set[tuple[int, ...]]:
        """Match a state for each parameter, and a master for each if there are any; return the shapes of nameless ones."""
        shapes, name = set(), None
        for position, index in enumerate(indices_of(group)):
            own, master = table_of(states.get(index)), _nth(masters, position)
            found = _slots(own) | ({MASTER: master} if isinstance(master, TorchTensor) else {})
            if not own:
                continue
            if isinstance(given := _nth(group.get("param_names"), position), str) and given in self._weights:
                name = given
            else:
                name = self._take(name, {value.shape for value in found.values()}, found.get(MASTER))
                shapes.add(self._weights[name].shape)
            self._add(name, {MASTER: self._weights[name]} | found, 0, own, group)
        return shapes

    def _take(self, after: str | None, shapes: set[tuple[int, ...]], master: Any, start: int = 0) -> str:
        """Return the first parameter behind `after` of these shapes whose values are those of `master`, cast."""
        names = list(self._weights)
        for name in names[0 if after is None else names.index(after) + 1 :]:
            weight = self._weights[name]
            fits = name not in self._found and shapes <= {weight.shape}
            if fits and (master is None or self._agree(weight, master, start)):
                return name
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

    def _add(
        self, name: str, found: Mapping[str, TorchTensor], start: int, own: Mapping[Any, Any], group: Mapping[Any, Any]
    ) -> None:
        elements = {key: Elements([value], start) for key, value in found.items()}
        self._found[name] = TrainedParameter(self._weights[name].shape, elements, scalars_of(own, group, self._files))


def _slots(state: Mapping[Any, Any]) -> dict[str, TorchTensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(key, str) and "/" not in key and key != "step" and isinstance(value, TorchTensor) and value.shape
    }


def _nth(items: Any, position: int) -> Any:
    return items[position] if isinstance(items, list) and position < len(items) else None
