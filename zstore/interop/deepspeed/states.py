"""The trained parameters of a DeepSpeed checkpoint: the locations of their masters and optimizer slots, at each stage.

[Note: nameless tensors]
At stage 0 the optimizer's tensors have no names. In each parameter group they are in the order in which the program listed
the parameters, which is assumed to be the model's order. With 16-bit weights, each master must round to the weight that it is
matched with; in fp32, groups with parameters of the same shape cannot be distinguished. State that cannot be matched is
omitted with a note; the weights are read in any case.

Source of the layouts: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py,
runtime/fp16/fused_optimizer.py and unfused_optimizer.py, and checkpoint/ds_to_universal.py of 0.19. See [Note: flat tensors].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CheckpointMismatchError, CorruptionError
from ...format.arrays import numpy_dtype
from ...io.files import Files
from ..torchfile import Inert, TorchTensor, brief, load_torch_file
from .folder import CheckpointFiles, check_ranks, refusal
from .values import (
    MASTER,
    Elements,
    Fields,
    Part,
    Shapes,
    States,
    TrainedParameter,
    buffer_names,
    flat_of,
    indices_of,
    number_of,
    scalars_of,
    shapes_of,
    table_of,
    tensor_of,
)

_COMPARED_NUMEL = 4096


class StateReader:
    """Reads the optimizer state files of a folder; `model` are rank 0's model states."""

    def __init__(self, folder: CheckpointFiles, model: Fields, files: Files) -> None:
        self._folder = folder
        self._model = model
        self._files = files
        self._states = States(stage=0, world_size=1)
        self._ranks: list[Fields] = []
        """The optimizer states of each rank."""

    def read(self) -> States:
        """Return the states; if the folder has no optimizer files, those in the model states."""
        if self._folder.universal:
            return self._universal()
        if not self._folder.optimizer:
            return _unsharded_states(self._model, self._files)
        first = min(self._folder.optimizer)
        head = self._state_of(first)
        stage, world_size = _stage_of(head), _world_size_of(head)
        check_ranks(self._folder, self._folder.optimizer, world_size, "optimizer states")
        self._ranks = [head if rank == first else self._state_of(rank) for rank in range(world_size)]
        self._states = States(stage=stage, world_size=world_size, scaler=head.get("loss_scaler"))
        if stage == 3:
            self._stage_3()
        else:
            self._stage_2()
        return self._states

    def _state_of(self, rank: int) -> Fields:
        return Fields.load(self._folder.optimizer[rank]).fields("optimizer_state_dict")

    def _shapes(self) -> list[Shapes]:
        label = f"{self._model.label}: param_shapes"
        return [shapes_of(shapes, label) for shapes in self._model.items("param_shapes")]

    def _add(
        self,
        shapes: Shapes,
        starts: Sequence[tuple[int, int | None]],
        flat: Mapping[str, Sequence[Part]],
        states: Sequence[Mapping[Any, Any]],
        group: Mapping[Any, Any],
    ) -> None:
        """Add parameters, each with its start and part size in the ranks' flat tensors of each state.

        Raises CorruptionError if the step counts in the ranks' `states` differ.
        """
        scalars = [scalars_of(state, group, self._files) for state in states]
        steps = {numbers.get("step") for numbers in scalars}
        if len(steps) > 1:
            raise CorruptionError(
                f"{self._folder.path}: {', '.join(shapes)[:80]}: ranks are at different steps ({sorted(map(str, steps))[:5]}): "
                "files of two saves are mixed; use another tag"
            )
        if any(len({part.dtype for part in parts}) > 1 for parts in flat.values()):
            raise CorruptionError(
                f"{self._folder.path}: {', '.join(shapes)[:80]}: the ranks' parts have different types"
            )
        for (name, shape), (start, part_numel) in zip(shapes.items(), starts, strict=True):
            elements = {key: Elements(parts, start, part_numel) for key, parts in flat.items()}
            self._states.parameters[name] = TrainedParameter(shape, elements, dict(scalars[0]))

    def _slots(self, state: Mapping[Any, Any], is_slot: Callable[[int], bool]) -> list[str]:
        """Return the keys of a state whose number of elements `is_slot` accepts, which are split like the master; other
        tensors that are not scalars are omitted with a note."""
        names = []
        for key, value in state.items():
            if not isinstance(key, str) or key == "step" or not isinstance(value, TorchTensor) or not value.shape:
                continue
            if key and "/" not in key and is_slot(value.numel):
                names.append(key)
            else:
                self._states.notes.append(f"the optimizer's {key[:80]!r}, which is not partitioned like the parameters")
        return names

    def _size_error(self, label: str, actual: int, expected: int) -> CorruptionError:
        return CorruptionError(
            f"{self._folder.path}: {label} has {actual} elements, but its parameters need {expected}: files of two runs are "
            "mixed, or damaged"
        )

    def _stage_2(self) -> None:
        bases = [rank.get("base_optimizer_state") for rank in self._ranks]
        if isinstance(bases[0], list):
            raise CheckpointMismatchError(
                f"{self._folder.path} was saved with zero_optimization.elastic_checkpoint, which is not supported: save without"
            )
        optimizers = [
            Fields(base, f"{rank.label}: base_optimizer_state") for base, rank in zip(bases, self._ranks, strict=True)
        ]
        self._states.groups = [table_of(group) for group in optimizers[0].items("param_groups")]
        has_shapes = self._model.get("param_shapes") is not None
        for number, shapes in enumerate(self._shapes() if has_shapes else self._sliced()):
            self._group(number, shapes, [_state_of_group(optimizer, number) for optimizer in optimizers])

    def _sliced(self) -> list[Shapes]:
        """Return the shapes for bf16 without a stage: fragments have the parameters' names, and weights their shapes."""
        module = self._model.fields("module")
        groups: list[Shapes] = []
        for rank in self._ranks:
            for number, mapping in enumerate(rank.items("param_slice_mappings")):
                groups += [{}] if number == len(groups) else []
                for name in table_of(mapping):
                    groups[number].setdefault(name, tensor_of(module.get(name), f"{module.label}: {brief(name)}").shape)
        return groups

    def _group(self, number: int, shapes: Shapes, states: Sequence[Mapping[Any, Any]]) -> None:
        label = f"parameter group {number}"
        masters = [
            flat_of(rank.item("single_partition_of_fp32_groups", number), f"{rank.label}: {label}")
            for rank in self._ranks
        ]
        flat: dict[str, Sequence[TorchTensor]] = {MASTER: masters}
        for name in self._slots(states[0], lambda numel: numel >= max(masters[0].numel, 1)):
            flat[name] = [flat_of(state.get(name), f"{label}: {name}") for state in states]
        starts: list[tuple[int, int | None]] = []
        end = start = 0
        for shape, padding in zip(shapes.values(), self._paddings(number, len(shapes)), strict=True):
            starts.append((start, None))
            end = start + math.prod(shape)
            start = end + padding
        for key, parts in flat.items():
            if end > (numel := sum(part.numel for part in parts)):
                raise self._size_error(f"{label}: {key}", numel, end)
        # The padding for the ranks is less than two elements per rank.
        if (numel := sum(part.numel for part in masters)) - start > 2 * len(self._ranks):
            raise self._size_error(label, numel, start)
        self._add(shapes, starts, flat, states, self._states.groups[number])

    def _paddings(self, number: int, count: int) -> list[int]:
        """Return the elements of padding after each parameter of a group, which align the next one."""
        paddings = self._ranks[0].get("param_alignment_paddings")
        if not isinstance(paddings, list) or number >= len(paddings):
            return [0] * count
        if len(paddings[number]) != count or any(type(n) is not int or n < 0 for n in paddings[number]):
            raise CorruptionError(f"{self._ranks[0].label}: the paddings of group {number} do not match its parameters")
        return list(paddings[number])

    def _stage_3(self) -> None:
        bases = [rank.fields("optimizer_state_dict") for rank in self._ranks]
        self._states.groups = [table_of(group) for group in bases[0].items("param_groups")]
        owners = {key: group for group in self._states.groups for key in indices_of(group)}
        for number, shapes in enumerate(self._shapes()):
            states = [table_of(table_of(base.get("state")).get(number)) for base in bases]
            self._sub_group(number, shapes, states, owners.get(number, {}))

    def _sub_group(
        self, number: int, shapes: Shapes, states: Sequence[Mapping[Any, Any]], group: Mapping[Any, Any]
    ) -> None:
        label = f"sub-group {number}"
        starts: list[tuple[int, int | None]] = []
        numel = 0
        for shape in shapes.values():
            part_numel = -(-math.prod(shape) // len(self._ranks))
            starts.append((numel, part_numel))
            numel += part_numel
        masters = [tensor_of(rank.item("fp32_flat_groups", number), f"{rank.label}: {label}") for rank in self._ranks]
        # An attribute of the master names the file on NVMe.
        keys = [master.attributes.get("ds_id") for master in masters]
        flat: dict[str, Sequence[Part]] = {
            MASTER: [self._part(m, numel, rank, f"{keys[rank]}", label) for rank, m in enumerate(masters)]
        }
        for name in self._slots(states[0], lambda n: n in (0, numel)):
            tensors = [tensor_of(state.get(name), f"{label}: {name}") for state in states]
            flat[name] = [self._part(t, numel, rank, f"{name}-{keys[rank]}", label) for rank, t in enumerate(tensors)]
        self._add(shapes, starts, flat, states, group)

    def _part(self, value: TorchTensor, numel: int, rank: int, file: str, label: str) -> Part:
        """Return a rank's flat tensor; if it was on NVMe, that in `file` next to the archive."""
        if value.numel == numel:
            return flat_of(value, label)
        if value.numel:
            raise self._size_error(f"{label} of rank {rank}", value.numel, numel)
        # The name is looked up among existing names, and never used as a path.
        path = self._folder.offloaded.get(rank, {}).get(f"{file}.tensor.swp")
        if path is None:
            raise CorruptionError(
                f"{self._folder.path}: state of {label} of rank {rank} was on NVMe, and offloaded_tensors/rank{rank:02d} does "
                f"not have {file[:80]!r}: copy that folder from the machine that rank ran on"
            )
        size, expected = path.stat().st_size, numel * value.itemsize
        if size < expected:
            raise CorruptionError(f"{path} has {size} bytes, expected at least {expected}: it is truncated")
        self._states.num_offloaded += 1
        return TorchTensor(path=path, offset=0, shape=(numel,), stride=(1,), dtype=value.dtype, itemsize=value.itemsize)

    def _universal(self) -> States:
        path = self._folder.universal.get("optimizer_state.pt")
        head = Fields.load(path) if path is not None else Fields({}, str(self._folder.path))
        stage, world_size = _stage_of(head), max(1, self._model.count("dp_world_size"))
        states = States(stage=stage, world_size=world_size, scaler=head.get("loss_scaler"))
        states.groups = [table_of(group) for group in head.items("param_groups")] if path is not None else []
        inner = table_of(table_of(head.get("optimizer_state_dict")).get("state")) if stage == 3 else {}
        for number, shapes in enumerate(self._shapes()):
            step = number_of(table_of(inner.get(number)).get("step"), self._files)
            for name, shape in shapes.items():
                states.parameters[name] = self._universal_parameter(name, shape, step)
        return states

    def _universal_parameter(self, name: str, shape: tuple[int, ...], step: float | None) -> TrainedParameter:
        # The name is looked up among existing names, and never used as a path.
        base = self._folder.universal.get(name)
        if base is None:
            raise CorruptionError(
                f"{self._folder.path}: the universal folder lacks parameter {name[:200]!r}: it is incomplete"
            )
        elements: dict[str, Elements] = {}
        for file in sorted(base.glob("*.pt")):
            value = load_torch_file(file)
            value = value.get("param") if isinstance(value, dict) else value
            if file.stem == "step":
                step = number_of(value, self._files)
                continue
            tensor = flat_of(value, str(file))
            if tensor.numel != math.prod(shape):
                raise CorruptionError(f"{file} has {tensor.numel} elements, parameter {name!r} has shape {shape}")
            elements[file.stem] = Elements([tensor])
        if MASTER not in elements:
            raise CorruptionError(f"{base} has no {MASTER}.pt: the universal folder is incomplete")
        return TrainedParameter(shape, elements, {} if step is None else {"step": step})


def _stage_of(state: Fields) -> int:
    stage = state.get("zero_stage")
    if isinstance(stage, Inert) and len(stage.args) == 1:  # an enum member
        stage = stage.args[0]
    if stage is None:
        return 1 if state.get("single_partition_of_fp32_groups") is not None else 0
    if stage not in (1, 2, 3):
        raise CheckpointMismatchError(f"{state.label}: unknown ZeRO stage {brief(stage)}")
    return int(stage)


def _world_size_of(state: Fields) -> int:
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or any(type(n) is not int or not 0 < n <= 2**20 for n in counts):
        raise CorruptionError(f"{state.label}: invalid number of partitions")
    if len(set(counts)) > 1 or state.get("ds_zero_partition_groups") is not None:
        part_numel = f"its parameter groups are cut for {sorted(set(counts))} ranks"
        raise refusal(state.label, "expert parallel", part_numel)
    return int(counts[0])


def _state_of_group(optimizer: Fields, number: int) -> Mapping[Any, Any]:
    indices = indices_of(table_of(optimizer.item("param_groups", number)))
    return table_of(table_of(optimizer.get("state")).get(indices[0] if len(indices) == 1 else number))


class _UnmatchedError(Exception):
    """The optimizer's tensors cannot be matched with parameters."""


def _unsharded_states(model: Fields, files: Files) -> States:
    """Return the states in the model states, without parameters if the optimizer has none or they cannot be matched."""
    states = States(stage=0, world_size=max(1, model.count("dp_world_size")))
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, dict):
        return states
    inner = table_of(optimizer.get("optimizer_state_dict", optimizer))
    groups = inner.get("param_groups")
    states.groups = [table_of(group) for group in groups] if isinstance(groups, list) else []
    states.scaler = optimizer
    try:
        states.parameters = _Matcher(model, files).match(optimizer, table_of(inner.get("state")), states.groups)
    except _UnmatchedError as error:
        states.notes.append(f"the optimizer's state, as {error}")
    return states


class _Matcher:
    """Matches nameless tensors with parameters, in the model's order. See [Note: nameless tensors]."""

    def __init__(self, model: Fields, files: Files) -> None:
        self._files = files
        self._weights: dict[str, TorchTensor] = {}
        """The model's parameters; tied parameters under their first name."""
        self._matched: dict[str, TrainedParameter] = {}
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
                self._match_flat(_item_at(flat, number), table_of(states.get(number)), group)
            else:
                shapes.append(self._match_each(_item_at(single, number), states, group))
        if not isinstance(single, list) and any(a & b for i, a in enumerate(shapes) for b in shapes[:i]):
            raise _UnmatchedError("its parameter groups have tensors of the same shape without names")
        return self._matched

    def _match_flat(self, master: Any, state: Mapping[Any, Any], group: Mapping[Any, Any]) -> None:
        """Match the flat master of a parameter group."""
        if not isinstance(master, TorchTensor):
            raise _UnmatchedError("a parameter group has no flat master")
        flat = {MASTER: master} | {key: value for key, value in _slots(state).items() if value.shape == master.shape}
        start, name = 0, None
        while start < master.numel:
            name = self._next_match(name, set(), master, start)
            self._add(name, flat, start, state, group)
            start += self._weights[name].numel

    def _match_each(self, masters: Any, states: Mapping[Any, Any], group: Mapping[Any, Any]) -> set[tuple[int, ...]]:
        """Match the state, and the master if there is one, of each parameter; return the shapes of nameless ones."""
        shapes, name = set(), None
        for position, index in enumerate(indices_of(group)):
            state, master = table_of(states.get(index)), _item_at(masters, position)
            tensors = _slots(state) | ({MASTER: master} if isinstance(master, TorchTensor) else {})
            if not state:
                continue
            if isinstance(given := _item_at(group.get("param_names"), position), str) and given in self._weights:
                name = given
            else:
                name = self._next_match(name, {value.shape for value in tensors.values()}, tensors.get(MASTER))
                shapes.add(self._weights[name].shape)
            self._add(name, {MASTER: self._weights[name]} | tensors, 0, state, group)
        return shapes

    def _next_match(self, after: str | None, shapes: set[tuple[int, ...]], master: Any, start: int = 0) -> str:
        """Return the first parameter after `after` that has these shapes and equals `master` after a cast."""
        names = list(self._weights)
        for name in names[0 if after is None else names.index(after) + 1 :]:
            weight = self._weights[name]
            fits = name not in self._matched and shapes <= {weight.shape}
            if fits and (master is None or self._values_match(weight, master, start)):
                return name
        raise _UnmatchedError("its tensors do not match the weights in the model's order")

    def _values_match(self, weight: TorchTensor, master: TorchTensor, start: int) -> bool:
        if not weight.numel or start + weight.numel > master.numel:
            return False
        count = min(weight.numel, _COMPARED_NUMEL)
        weight_values = np.empty(count, numpy_dtype(weight.dtype))
        weight.read(self._files, 0, count, weight_values.view(np.uint8))
        master_values = np.empty(count, numpy_dtype(master.dtype))
        master.read(self._files, start, start + count, master_values.view(np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            return master_values.astype(weight_values.dtype).tobytes() == weight_values.tobytes()

    def _add(
        self, name: str, flat: Mapping[str, TorchTensor], start: int, state: Mapping[Any, Any], group: Mapping[Any, Any]
    ) -> None:
        elements, shape = {key: Elements([value], start) for key, value in flat.items()}, self._weights[name].shape
        self._matched[name] = TrainedParameter(shape, elements, scalars_of(state, group, self._files))


def _slots(state: Mapping[Any, Any]) -> dict[str, TorchTensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(key, str) and "/" not in key and key != "step" and isinstance(value, TorchTensor) and value.shape
    }


def _item_at(items: Any, position: int) -> Any:
    return items[position] if isinstance(items, list) and position < len(items) else None
