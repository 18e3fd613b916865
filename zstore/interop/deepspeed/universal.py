"""The files of a universal folder of DeepSpeed, made from a checkpoint of ours. No torch.

[Note: the files]
    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt   {"cat_dim": 0, "param": the whole tensor, in fp32}
    <tag>/zero/<parameter>/step.pt                              updates so far
    <tag>/zero/optimizer_state.pt                               settings of the parameter groups, the loss scale
    <tag>/mp_rank_00_model_states.pt                            counters, schedule, client state, weights: stages 1 and 2
    <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt             the same without the weights: stage 3; all ranks read it
    latest_universal                                            the tag
DeepSpeed takes weights from `zero/` alone; those of the model states are for other readers, as in its own folders. Stage 3
gives every parameter group the settings of the first: the part that it reads lacks those that differ, so that
each keeps that of DeepSpeed's config.

Source: load_checkpoint in deepspeed/runtime/engine.py, deepspeed/checkpoint/universal_checkpoint.py,
runtime/base_optimizer.py and runtime/zero/stage3.py of 0.19.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoint.moments import POSITIVE, SIGNED, scale_slot
from ...checkpoint.source import ArraySource
from ...checkpoint.split import LOW, TIE
from ...errors import CheckpointMismatchError, CorruptionError, ZstoreError
from ...format.arrays import model_array, optimizer_array
from ..pickles import Global, PickledObject
from ..torch_archive import Tensor
from .folder import MODEL_STATES
from .pieces import MASTER
from .progress import DEEPSPEEDS_OWN, SCALE_RULES

VERSION = "0.19.8"
"""Of DeepSpeed, whose layout this is."""
MODEL_STATES_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER_STATE = "zero/optimizer_state.pt"
HINT = "latest_universal"

_SLOTS = ("exp_avg", "exp_avg_sq")
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
_RULES = {
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1.0,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
}
"""Of the loss scale, if a checkpoint does not say; DeepSpeed's own."""
_ITEMS, _TENSOR = "$items", "$tensor"


@dataclass(frozen=True)
class ArchiveStorage:
    """A storage of an archive: its content is array `array` as `dtype`, or `data` as it is."""

    array: str = ""
    dtype: str = ""
    nbytes: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Document:
    """A file: the value that torch.load returns, and the storages of the tensors in it, by number."""

    value: Any
    storages: list[ArchiveStorage]


class _Tensors:
    """Makes the tensors of a document."""

    def __init__(self, source: ArraySource) -> None:
        self._source = source
        self._made: dict[tuple[str, str], Tensor] = {}
        self.storages: list[ArchiveStorage] = []

    def of_array(self, name: str, dtype: str | None = None) -> Tensor:
        spec = self._source.array(name).spec
        return self._of(name, spec.shape, dtype or spec.dtype)

    def empty(self, dtype: str) -> Tensor:
        return self._of("", (0,), dtype)

    def _of(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        known = self._made.get((name, dtype))
        if known is None:
            known = self._made[name, dtype] = Tensor(len(self.storages), shape, dtype)
            self.storages.append(ArchiveStorage(name, dtype, known.nbytes))
        return known


class UniversalFolder:
    """The files of one checkpoint. See [Note: the files].

    Raises CheckpointMismatchError if `source` is no training run's, its optimizer is not Adam, or it has names that
    cannot be folders; CorruptionError if its record is damaged.
    """

    def __init__(self, source: ArraySource) -> None:
        self._source = source
        state = source.record.state
        engine = state.get("engine")
        if not isinstance(engine, dict):
            raise CheckpointMismatchError(
                f"{source.location} ({source.kind}) has no state of an engine, of which DeepSpeed could go on: expected a "
                "checkpoint that zstore's engine or DeepSpeed saved; weights alone go out with --to safetensors"
            )
        self._engine: dict[str, Any] = engine
        self._client = state.get("client_state")
        self.notes: list[str] = ["the states of random number generators"]
        """State that is not carried over."""
        if engine.get("accumulation") is not None:
            self.notes.append("gradients of the step that has begun, of which DeepSpeed's checkpoints have none")
        self.trained: list[str] = self._adam_parameters()
        """Names of the parameters that the optimizer updates, in the order in which the engine has them."""
        try:
            self._step = self._common_step()
            self.documents: dict[str, Document] = {
                OPTIMIZER_STATE: self._optimizer_state(),
                MODEL_STATES: self._model_states(whole=True),
                MODEL_STATES_3: self._model_states(whole=False),
            }
            """Files by their path in the tag's folder, but those of single parameters."""
        except ZstoreError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise CorruptionError(
                f"{source.location}: the engine's state in the record is damaged: {error!r:.200}"
            ) from error

    def parameter_files(self, name: str) -> dict[str, Document]:
        """Return the files of a parameter by their path in the tag's folder."""
        found = {MASTER: model_array(name)} | {slot: optimizer_array(slot, name) for slot in _SLOTS}
        files: dict[str, Document] = {}
        for key, array in found.items():
            tensors = _Tensors(self._source)
            tensor = tensors.of_array(array, "float32")
            # DeepSpeed cuts it along dim 0, which a scalar does not have.
            value = {"cat_dim": 0, "param": replace(tensor, shape=tensor.shape or (1,))}
            files[f"{folder_of(name)}/{key}.pt"] = Document(value, tensors.storages)
        files[f"{folder_of(name)}/step.pt"] = Document(_number(0), [self._stored_step()])
        return files

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _adam_parameters(self) -> list[str]:
        """Return the parameters with moments of Adam. Raises CheckpointMismatchError if there are others."""
        arrays, slots = self._source.arrays, dict[str, set[str]]()
        for array in arrays:
            group, _, rest = array.partition("/")
            slot, _, name = rest.partition("/")
            if group == "optimizer" and f"{group}/{slot}" not in (LOW, TIE):
                slots.setdefault(name, set()).add(slot)
        for found in slots.values():
            found -= {scale_slot(slot) for slot in found & (SIGNED | POSITIVE)}
        kept = sorted(set().union(*slots.values()))
        if any(found != set(_SLOTS) for found in slots.values()) or not slots:
            raise CheckpointMismatchError(
                f"{self._source.location}: the optimizer kept {', '.join(kept) or 'nothing'} of its parameters, and DeepSpeed "
                "goes on from exp_avg and exp_avg_sq, of Adam, alone: train on with zstore, or take the weights, with --to "
                "safetensors"
            )
        for name in slots:
            if "/" in name or "\0" in name or name in ("", ".", "..", "optimizer_state.pt"):
                raise CheckpointMismatchError(
                    f"{self._source.location}: the parameter {name!r} cannot be a folder, which DeepSpeed looks for: rename it"
                )
            self._source.array(model_array(name))
        scalars = self._engine.get("scalars")
        ordered = [name for name in scalars if name in slots] if isinstance(scalars, dict) else []
        if len(ordered) != len(slots):
            raise CorruptionError(f"{self._source.location}: the record lacks the step counts of some parameters")
        return ordered

    def _common_step(self) -> float:
        """Return the updates so far, which DeepSpeed counts for all parameters together."""
        steps: Counter[float] = Counter()
        for name in self.trained:
            scalars = self._engine["scalars"][name]
            if extra := set(scalars) - {"step", "updates"}:
                raise CheckpointMismatchError(
                    f"{self._source.location}: the optimizer kept {sorted(extra)} of {name!r}, for which DeepSpeed's folders "
                    "have no place: train on with zstore, or take the weights, with --to safetensors"
                )
            steps[float(scalars["step"])] += 1
        if unmoved := steps.pop(0.0, 0) if len(steps) > 1 else 0:
            self.notes.append(f"that {unmoved} parameters were never updated: DeepSpeed counts one step for all")
        if len(steps) > 1:
            listed = ", ".join(f"{count} at step {step:g}" for step, count in sorted(steps.items())[:5])
            raise CheckpointMismatchError(
                f"{self._source.location}: parameters were updated a different number of times ({listed}), and DeepSpeed "
                "counts one step for all: train on with zstore, or take the weights, with --to safetensors"
            )
        return next(iter(steps))

    def _stored_step(self) -> ArchiveStorage:
        data = struct.pack("<f", self._step)
        return ArchiveStorage(nbytes=len(data), data=data)

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def _optimizer_state(self) -> Document:
        groups = [
            {key: _setting(value) for key, value in group.items() if key != "params"} | {"params": [number]}
            for number, group in enumerate(self._engine["groups"])
        ]
        common = {key: value for key, value in groups[0].items() if all(key in g and g[key] == value for g in groups)}
        if differing := sorted(set().union(*groups) - set(common) - {"params"}):
            self.notes.append(
                f"at stage 3 the groups' own {', '.join(differing)}: DeepSpeed gives all groups the first one's, so there its "
                "config says them"
            )
        inner = {"state": {0: {"step": _number(0)}}, "param_groups": [common | {"params": [0]}]}
        value = {
            "zero_stage": 1,
            "overflow": False,
            "partition_count": [1] * len(groups),
            "ds_version": VERSION,
            "param_groups": groups,
            "optimizer_state_dict": inner,
        }
        return Document(value | self._loss_scaler(), [self._stored_step()])

    def _loss_scaler(self) -> dict[str, Any]:
        """Return the scaler of fp16 if the scale follows overflows; a fixed one is in DeepSpeed's config."""
        state = self._engine["loss_scale"]
        rules = state.get("rules")
        if self._engine["precision"] != "fp16" or not (rules or state["iteration"]):
            return {}
        if not rules:
            self.notes.append("how the loss scale changes: DeepSpeed's own rules are written")
        rules = _RULES | (rules or {})
        scaler = {
            "cur_scale": float(state["scale"]),
            "dynamic": True,
            "cur_iter": int(state["iteration"]),
            "last_overflow_iter": int(state["last_overflow"]),
            "scale_factor": 2.0,
            "cur_hysteresis": int(state["hysteresis_left"]),
            "dtype": Global("torch.float16"),
        } | {key: rules[name] for name, key in SCALE_RULES.items()}
        return {"loss_scaler": PickledObject(_SCALER, (), scaler), "dynamic_loss_scale": True}

    # -- the model ----------------------------------------------------------------------------------------------------

    def _model_states(self, *, whole: bool) -> Document:
        """Return a file of model states; unless `whole`, its parameters are empty, as stage 3 leaves them."""
        tensors = _Tensors(self._source)
        shapes = {name: self._source.arrays[model_array(name)].spec.shape for name in self.trained}
        value = {
            **self._module(tensors, whole=whole),
            "optimizer": None,
            "param_shapes": [{name: PickledObject("torch.Size", (shape,)) for name, shape in shapes.items()}],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "lr_scheduler": _plain(self._engine["schedule"]),
            "data_sampler": None,
            "random_ltd": None,
            **self._counters(),
        }
        return Document(self._client_state(tensors) | value, tensors.storages)

    def _module(self, tensors: _Tensors, *, whole: bool) -> dict[str, Any]:
        arrays, dtype = self._source.arrays, _COMPUTED_IN[self._engine["precision"]]
        trained = {model_array(name) for name in self.trained}
        module: dict[str, Tensor] = {}
        buffers: list[str] = []
        shared: dict[str, str] = {}
        for array in (*map(model_array, self.trained), *(name for name in arrays if name not in trained)):
            group, _, name = array.partition("/")
            if group == "buffer":
                module[name] = tensors.of_array(array)
                buffers.append(name)
            elif group == "model":
                stored = dtype if array in trained else arrays[array].spec.dtype
                module[name] = tensors.of_array(array, stored) if whole else tensors.empty(stored)
                for alias in arrays[array].spec.aliases:
                    module[alias], shared[alias] = module[name], name
        return {"module": module, "buffer_names": buffers, "shared_params": shared}

    def _counters(self) -> dict[str, Any]:
        counters, batch, record = self._engine["counters"], self._engine["batch"], self._source.record
        position, precision = self._engine["data_position"], self._engine["precision"]
        config = {
            "train_batch_size": int(batch["train_batch_size"]),
            "train_micro_batch_size_per_gpu": int(batch["micro_batch_size"]),
            "gradient_accumulation_steps": int(batch["accumulation_steps"]),
        }
        samples = int(counters["global_steps"]) * config["train_batch_size"] if position is None else int(position)
        return {
            "skipped_steps": int(counters["skipped_steps"]),
            "global_steps": int(counters["global_steps"]),
            "global_samples": samples,
            "dp_world_size": record.training_world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": config | ({} if precision == "fp32" else {precision: {"enabled": True}}),
            "ds_version": VERSION,
        }

    def _client_state(self, tensors: _Tensors) -> dict[str, Any]:
        found = _plain(self._client, tensors) if isinstance(self._client, dict) else {}
        taken = sorted(set(found) & DEEPSPEEDS_OWN)
        note = f"client_state: {', '.join(taken)}: names that DeepSpeed has for its own"
        if taken and note not in self.notes:
            self.notes.append(note)
        return {key: value for key, value in found.items() if key not in DEEPSPEEDS_OWN}


def folder_of(name: str) -> str:
    """Return the folder of a parameter in the tag's."""
    return f"zero/{name}"


def _number(storage: int) -> Tensor:
    return Tensor(storage, (), "float32")


def _setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else _plain(value)


def _plain(value: Any, tensors: _Tensors | None = None) -> Any:
    """Return JSON of the record as the value that it expresses."""
    if isinstance(value, Mapping):
        if list(value) == [_TENSOR] and tensors is not None:
            return tensors.of_array(value[_TENSOR])
        if list(value) == [_ITEMS]:
            return {_plain(key): _plain(item, tensors) for key, item in value[_ITEMS]}
        return {key: _plain(item, tensors) for key, item in value.items()}
    return [_plain(item, tensors) for item in value] if isinstance(value, list) else value
