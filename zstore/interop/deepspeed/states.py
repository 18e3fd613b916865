"""The trained parameters of a DeepSpeed checkpoint: the places of their masters and optimizer slots, at each stage.

Source of the layouts: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py and
checkpoint/ds_to_universal.py of 0.19. See [Note: flat tensors].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointMismatchError, CorruptionError
from ...io.files import Files
from ..pickles import brief
from ..torchfile import Storage, TorchTensor, load_torch_file
from .folder import CheckpointFiles, check_ranks, refusal
from .pieces import MASTER, Elements, Joined, Part, Shapes, States, Striped, TrainedParameter, Vector, whole
from .values import (
    CLASSES,
    Fields,
    enum_value,
    flat_of,
    indices_of,
    number_of,
    scalars_of,
    shapes_of,
    table_of,
    tensor_of,
)
from .whole import WholeStates


class StateReader:
    """Reads the optimizer's files of a folder whose model states, rank 0's, are `model`."""

    def __init__(self, folder: CheckpointFiles, model: Fields, files: Files) -> None:
        self._folder = folder
        self._model = model
        self._files = files

    def read(self) -> States:
        """Return the states; of a folder that has no optimizer's files, none of them."""
        if self._folder.universal:
            return self._universal()
        if not self._folder.optimizer:
            return WholeStates(self._model, self._files).read()
        first = min(self._folder.optimizer)
        head = self._state_of(self._folder.optimizer[first])
        stage, world_size = _stage_of(head), _world_size_of(head)
        if head.get("ds_zero_partition_groups") is not None:
            raise CheckpointMismatchError(
                refusal(self._folder.path, "expert parallel", "its ranks partition in groups")
            )
        check_ranks(self._folder, self._folder.optimizer, world_size, "optimizer states")
        ranks = [self._state_of(self._folder.optimizer[rank]) if rank != first else head for rank in range(world_size)]
        states = States(stage=stage, world_size=world_size, scaler=head.get("loss_scaler"))
        if stage == 3:
            _Stage3(self._folder, self._files, ranks, states).read(self._shapes("param_shapes"))
        else:
            _Stage2(self._folder, self._files, ranks, states).read(self._joined_shapes(ranks))
        return states

    def _state_of(self, path: Any) -> Fields:
        return Fields.load(path).fields("optimizer_state_dict")

    def _shapes(self, key: str) -> list[Shapes]:
        where = f"{self._model.where}: {key}"
        return [shapes_of(shapes, where) for shapes in self._model.items(key)]

    def _joined_shapes(self, ranks: Sequence[Fields]) -> list[Shapes]:
        if self._model.get("param_shapes") is not None:
            return self._shapes("param_shapes")
        # With bf16 and no stage the model states do not say; the fragments do, and the weights have the shapes.
        module = self._model.fields("module")
        groups: list[Shapes] = []
        for rank in ranks:
            for number, mapping in enumerate(rank.items("param_slice_mappings")):
                if number == len(groups):
                    groups.append({})
                for name in table_of(mapping):
                    groups[number].setdefault(name, tensor_of(module.get(name), f"{module.where}: {brief(name)}").shape)
        return groups

    # -- universal folders ------------------------------------------------------------------------------------------

    def _universal(self) -> States:
        folder, model = self._folder, self._model
        path = folder.universal.get("optimizer_state.pt")
        head = Fields.load(path) if path is not None else Fields({}, str(folder.path))
        striped = _stage_of(head) == 3
        states = States(
            stage=_stage_of(head), world_size=max(1, model.count("dp_world_size")), scaler=head.get("loss_scaler")
        )
        states.groups = [table_of(group) for group in head.items("param_groups")] if path is not None else []
        inner = table_of(table_of(head.get("optimizer_state_dict")).get("state")) if striped else {}
        for number, shapes in enumerate(self._shapes("param_shapes")):
            step = number_of(table_of(inner.get(number)).get("step"), self._files)
            for name, shape in shapes.items():
                states.parameters[name] = self._universal_parameter(name, shape, step)
        return states

    def _universal_parameter(self, name: str, shape: tuple[int, ...], step: float | None) -> TrainedParameter:
        # The name is looked up among the existing ones; it is never made a path.
        base = self._folder.universal.get(name)
        if base is None:
            raise CorruptionError(
                f"{self._folder.path}: the universal folder lacks parameter {name[:200]!r}: it is incomplete"
            )
        found: dict[str, Elements] = {}
        for file in sorted(base.iterdir()):
            key = file.name.removesuffix(".pt")
            if key == file.name:
                continue
            value = load_torch_file(file, CLASSES)
            value = value.get("param") if isinstance(value, dict) else value
            if key == "step":
                step = number_of(value, self._files)
                continue
            tensor = flat_of(value, str(file))
            if tensor.numel != math.prod(shape):
                raise CorruptionError(f"{file} holds {tensor.numel} elements, parameter {name!r} has shape {shape}")
            found[key] = whole(tensor)
        if MASTER not in found:
            raise CorruptionError(f"{base} has no {MASTER}.pt: the universal folder is incomplete")
        return TrainedParameter(shape, found, {} if step is None else {"step": step})


def _stage_of(state: Fields) -> int:
    stage = enum_value(state.get("zero_stage"))
    if stage is None:
        return 1 if state.get("single_partition_of_fp32_groups") is not None else 0
    if stage not in (1, 2, 3):
        raise CheckpointMismatchError(f"{state.where}: unknown ZeRO stage {brief(stage)}")
    return int(stage)


def _world_size_of(state: Fields) -> int:
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or any(type(n) is not int or not 0 < n <= 2**20 for n in counts):
        raise CorruptionError(f"{state.where}: invalid number of partitions")
    if len(set(counts)) > 1:
        raise CheckpointMismatchError(
            refusal(
                Path(state.where), "expert parallel", f"its parameter groups are cut for {sorted(set(counts))} ranks"
            )
        )
    return int(counts[0])


@dataclass
class _Layout:
    """The common part of the two layouts. `ranks` are the optimizer's states of each rank."""

    folder: CheckpointFiles
    files: Files
    ranks: Sequence[Fields]
    states: States

    def same_scalars(self, where: str, each: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return the numbers that all ranks have. Raises CorruptionError if they differ."""
        steps = {numbers.get("step") for numbers in each}
        if len(steps) > 1:
            raise CorruptionError(
                f"{self.folder.path}: {where}: ranks are at different steps ({sorted(map(str, steps))[:5]}): files of two "
                "saves are mixed; take another tag"
            )
        return each[0]

    def slot_names(self, state: Mapping[Any, Any], is_slot: Callable[[TorchTensor], bool]) -> list[str]:
        """Return the keys of a state that are cut as the master is; other tensors with extents are left out, and noted."""
        names = []
        for key, value in state.items():
            if not isinstance(key, str) or key == "step" or not isinstance(value, TorchTensor) or not value.shape:
                continue
            if key and "/" not in key and is_slot(value):
                names.append(key)
            else:
                self.states.notes.append(
                    f"the optimizer's {key[:80]!r}, which is not partitioned as the parameters are"
                )
        return names


class _Stage2(_Layout):
    """Flat groups: stages 1 and 2, and bf16 without a stage."""

    def read(self, groups: Sequence[Shapes]) -> None:
        """Fill in the parameters."""
        base = self.ranks[0].get("base_optimizer_state")
        if isinstance(base, dict):
            self.states.groups = [table_of(group) for group in Fields(base, self.ranks[0].where).items("param_groups")]
        else:  # an "elastic" checkpoint has no settings: the loader keeps its own
            self.states.groups = [{} for _ in groups]
        all_paddings = self.ranks[0].get("param_alignment_paddings")
        for number, shapes in enumerate(groups):
            paddings: Any = [0] * len(shapes)
            if isinstance(all_paddings, list) and number < len(all_paddings):
                paddings = all_paddings[number]
            if (
                not isinstance(paddings, list)
                or len(paddings) != len(shapes)
                or any(type(n) is not int or n < 0 for n in paddings)
            ):
                raise CorruptionError(
                    f"{self.ranks[0].where}: the paddings of group {number} do not fit its parameters"
                )
            self._group(number, shapes, paddings)

    def _group(self, number: int, shapes: Shapes, paddings: Sequence[int]) -> None:
        where = f"parameter group {number}"
        masters = [
            flat_of(_item(rank.items("single_partition_of_fp32_groups"), number, rank.where), f"{rank.where}: {where}")
            for rank in self.ranks
        ]
        states = [self._state(rank, number) for rank in self.ranks]
        group = self.states.groups[number] if number < len(self.states.groups) else {}
        least = masters[0].numel
        names = self.slot_names(states[0], lambda value: value.numel >= max(least, 1))
        flat: dict[str, Vector] = {MASTER: _vector(masters, where)}
        for name in names:
            flat[name] = _vector([flat_of(s.get(name), f"{where}: {name}") for s in states], where)
        scalars = self.same_scalars(where, [scalars_of(s, group, self.files) for s in states])
        if (
            "step" not in scalars
            and (step := number_of(self.ranks[0].get("base_optimizer_state_step"), self.files)) is not None
        ):
            scalars["step"] = step
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            self.states.parameters[name] = TrainedParameter(
                shape, {key: Joined(vector, start) for key, vector in flat.items()}, dict(scalars)
            )
            start += math.prod(shape)
            end, start = start, start + padding
            for key, vector in flat.items():
                if end > vector.numel:
                    raise _short(self.folder, f"{where}: {key}", vector.numel, end)
        # The padding for the ranks is less than two elements for each.
        if flat[MASTER].numel - start > 2 * len(self.ranks):
            raise _short(self.folder, where, flat[MASTER].numel, start)

    def _state(self, rank: Fields, number: int) -> Mapping[Any, Any]:
        base = rank.get("base_optimizer_state")
        if isinstance(base, list):  # an "elastic" checkpoint
            return table_of(_item(base, number, rank.where))
        fields = Fields(base, f"{rank.where}: base_optimizer_state")
        group = table_of(_item(fields.items("param_groups"), number, rank.where))
        indices = indices_of(group)
        key = indices[0] if len(indices) == 1 else number
        return table_of(table_of(fields.get("state")).get(key))


class _Stage3(_Layout):
    """Tensors that are cut one by one."""

    def read(self, groups: Sequence[Shapes]) -> None:
        """Fill in the parameters."""
        bases = [rank.fields("optimizer_state_dict") for rank in self.ranks]
        self.states.groups = [table_of(group) for group in bases[0].items("param_groups")]
        owners = {key: group for group in self.states.groups for key in indices_of(group)}
        for number, shapes in enumerate(groups):
            states = [table_of(table_of(base.get("state")).get(number)) for base in bases]
            self._sub_group(number, shapes, states, owners.get(number, {}))

    def _sub_group(
        self, number: int, shapes: Shapes, states: Sequence[Mapping[Any, Any]], group: Mapping[Any, Any]
    ) -> None:
        where = f"sub-group {number}"
        cuts = [-(-math.prod(shape) // len(self.ranks)) for shape in shapes.values()]
        numel = sum(cuts)
        masters = [
            tensor_of(_item(rank.items("fp32_flat_groups"), number, rank.where), f"{rank.where}: {where}")
            for rank in self.ranks
        ]
        # The file on NVMe is named by an attribute of the master.
        keys = [master.attributes.get("ds_id") for master in masters]
        flat: dict[str, list[Part]] = {
            MASTER: [self._part(m, numel, rank, f"{keys[rank]}", where) for rank, m in enumerate(masters)]
        }
        for name in self.slot_names(states[0], lambda value: value.numel in (0, numel)):
            tensors = [tensor_of(state.get(name), f"{where}: {name}") for state in states]
            flat[name] = [self._part(t, numel, rank, f"{name}-{keys[rank]}", where) for rank, t in enumerate(tensors)]
        scalars = self.same_scalars(where, [scalars_of(state, group, self.files) for state in states])
        start = 0
        for (name, shape), cut in zip(shapes.items(), cuts, strict=True):
            elements: dict[str, Elements] = {key: Striped(parts, start, cut) for key, parts in flat.items()}
            self.states.parameters[name] = TrainedParameter(shape, elements, dict(scalars))
            start += cut

    def _part(self, value: TorchTensor, numel: int, rank: int, file: str, where: str) -> Part:
        """Return a rank's flat tensor, from `file` beside the archive if it was on NVMe."""
        if value.numel == numel:
            return flat_of(value, where)
        if value.numel:
            raise _short(self.folder, f"{where} of rank {rank}", value.numel, numel)
        # The name is looked up among the existing ones; it is never made a path.
        path = self.folder.offloaded.get(rank, {}).get(f"{file}.tensor.swp")
        if path is None:
            raise CorruptionError(
                f"{self.folder.path}: state of {where} of rank {rank} was on NVMe, and offloaded_tensors/rank{rank:02d} does "
                f"not have {file[:80]!r}: copy that folder from the machine that rank ran on"
            )
        found, expected = path.stat().st_size, numel * value.itemsize
        if found < expected:
            raise CorruptionError(f"{path} has {found} bytes, expected at least {expected}: it is truncated")
        self.states.num_offloaded += 1
        return TorchTensor(storage=Storage(path, expected), dtype=value.dtype, first=0, shape=(numel,), stride=(1,))


def _vector(parts: Sequence[TorchTensor], where: str) -> Vector:
    if len({part.dtype for part in parts}) > 1:
        raise CorruptionError(f"{where}: the ranks' parts have different types")
    return Vector(parts)


def _item(items: Sequence[Any], number: int, where: str) -> Any:
    if number >= len(items):
        raise CorruptionError(f"{where}: expected at least {number + 1} parameter groups, got {len(items)}")
    return items[number]


def _short(folder: CheckpointFiles, where: str, found: int, expected: int) -> CorruptionError:
    return CorruptionError(
        f"{folder.path}: {where} has {found} elements, its parameters need {expected}: files of two runs are mixed, or damaged"
    )
