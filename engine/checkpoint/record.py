"""The plan of a load, and a checkpoint's JSON state: the engine's part of the record (counters, scalars, schedule, settings),
the client's state, whose tensors are arrays under `client/`, and each rank's random number generators.

[Note: client values]
A tensor is stored as `{"$tensor": "client/<path>"}`, and loaded as a tensor on the CPU. A numpy array is loaded as a tensor, a
numpy number as the plain number, an `argparse.Namespace` as the dict of its values, a path as text, a tuple as a list.
"""

from __future__ import annotations

import base64
import hashlib
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zstore.checkpoint import Range, encode_state, plain_value
from zstore.errors import CheckpointMismatchError, CorruptionError, UsageError, ZstoreError
from zstore.format import client_array
from zstore.io.memory import as_torch, dtype_name, host_values

from ..config.resolve import BatchSizes
from ..optim.rules import STATE_KEY
from ..params.record import ParameterRecord
from ..runtime.process import warn_once

if TYPE_CHECKING:
    from ..training.training import Training


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """DeepSpeed's options of `load_checkpoint`. State that is not loaded stays unchanged."""

    load_module_strict: bool = True
    """Reject a checkpoint with different parameters or buffers; if false, load the common ones and warn about the others.
    Shapes must agree in any case."""
    load_optimizer_states: bool = True
    """Load the optimizer's slots and step counts, and the loss scale of an fp16 run."""
    load_lr_scheduler_states: bool = True
    """Load the schedule and the learning rates."""
    load_module_only: bool = False
    """Load only parameters and buffers: no optimizer state, schedule, counters, data position or generator states."""

    @staticmethod
    def of(options: Mapping[str, Any]) -> LoadOptions:
        """Return the options of a call. Raises UsageError for an unknown option, or a value that is not True or False."""
        known = [field.name for field in fields(LoadOptions)]
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"load_checkpoint() has no option {name!r}; it has {', '.join(known)}")
            if not isinstance(value, bool):
                raise UsageError(f"load_checkpoint({name}={value!r}): expected True or False")
        return LoadOptions(**options)

    @property
    def optimizer(self) -> bool:
        """Whether slots, step counts and the loss scale are loaded."""
        return self.load_optimizer_states and not self.load_module_only

    @property
    def schedule(self) -> bool:
        """Whether schedule and learning rates are loaded."""
        return self.load_lr_scheduler_states and not self.load_module_only

    @property
    def everything(self) -> bool:
        """Whether everything is loaded."""
        return self.optimizer and self.schedule


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The parts of a checkpoint to load, determined by comparison with the model."""

    options: LoadOptions
    arrays: list[Range]
    """This rank's elements of the arrays, in reading order."""
    whole: Mapping[str, str]
    """Unsharded arrays and their names in the checkpoint: buffers, and parameters that were added after `initialize`."""
    resized: set[str]
    """Buffers among them whose changed shape the model's own `load_state_dict` accepts."""
    updated: list[ParameterRecord]
    """Parameters whose optimizer state is loaded."""
    missing: list[str]
    """Arrays of the model and its optimizer that the checkpoint does not have."""
    unexpected: list[str]
    """Arrays of the checkpoint, under its names, that the model and its optimizer do not have."""

    @property
    def is_whole(self) -> bool:
        """Whether the load replaces all state."""
        return self.options.everything and not (self.missing or self.unexpected)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The result of a load on this rank."""

    path: str
    """The checkpoint's folder or URL."""
    missing: tuple[str, ...]
    """Arrays that the checkpoint lacks, which are unchanged."""
    unexpected: tuple[str, ...]
    """Arrays that the engine lacks, except those that the options exclude."""
    read_bytes: int
    """Bytes read from the checkpoint's shard files."""
    linked_bytes: int
    """Bytes of its shard files linked into the run folder: they are read, and verified, when training first needs them."""


ClientValues = Mapping[str, Any] | Namespace
ClientState = ClientValues | Callable[[], ClientValues]
"""A script's own state in a save."""

_MARK = "$tensor"


@contextmanager
def raising_corruption(what: str) -> Iterator[None]:
    """Raise CorruptionError, naming `what`, if the block or function fails on JSON that no engine saves."""
    try:
        yield
    except ZstoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint's {what} is not what an engine saves ({type(error).__name__}: {error!s:.200}): the record was "
            "changed; load a different checkpoint, or pass load_module_only=True"
        ) from error


def split_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (state with marks in place of tensors, the tensors by array name, copied to host memory).

    See [Note: client values]. Raises UsageError with the key of a tensor that cannot be stored; the save checks other
    values.
    """
    tensors: dict[str, torch.Tensor] = {}
    marked = _split(state, "", tensors)
    return marked, tensors


def current_state(state: ClientState) -> ClientValues:
    """Return the current client state."""
    return state() if callable(state) else state


def as_mapping(state: ClientValues) -> Mapping[str, Any]:
    """Return the client's state as a mapping. Raises UsageError for any other type, and for a reserved key."""
    values = vars(state) if isinstance(state, Namespace) else state
    if not isinstance(values, Mapping):
        raise UsageError(f"client_state: expected a dict, got {type(values).__name__}")
    if STATE_KEY in values:
        raise UsageError(f"client_state: {STATE_KEY!r} is a reserved key; rename it")
    return values


def check_client_state(state: ClientValues) -> None:
    """Raise UsageError, with the key, for a value that a save cannot store."""
    encode_state(split_tensors(as_mapping(state))[0], "client_state")


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    value = plain_value(value)
    if isinstance(value, np.ndarray):
        value = _tensor_of(value, path)
    if isinstance(value, torch.Tensor):
        name = client_array(path)
        if name in tensors:
            raise UsageError(f"client_state: two tensors would be stored as {path!r}: a key contains a `.`; rename one")
        try:
            dtype_name(value.dtype)
            tensors[name] = host_values(value.to("cpu", copy=True))
        except (UsageError, NotImplementedError, RuntimeError) as error:
            raise UsageError(f"client_state: the tensor at {path!r} cannot be stored: {error}") from error
        return {_MARK: name}
    if isinstance(value, Mapping):
        if _MARK in value:
            raise UsageError(f"client_state: {_MARK!r} at {path!r} is a reserved key; rename it")
        return {key: _split(item, f"{path}.{key}" if path else str(key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    return value


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        # In this machine's byte order, and without negative strides, which a tensor cannot have.
        return as_torch(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))
    except (TypeError, ValueError) as error:
        raise UsageError(f"client_state: the array at {path!r} cannot be stored: {error}") from error


@raising_corruption("client state")
def join_tensors(state: Any, read: Callable[[str], Any]) -> Any:
    """Return the client's state with tensors in place of marks; `read` returns an array by name."""
    if isinstance(state, dict):
        if list(state) == [_MARK]:
            return as_torch(read(state[_MARK]))
        return {key: join_tensors(item, read) for key, item in state.items()}
    return [join_tensors(item, read) for item in state] if isinstance(state, list) else state


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics, which may be tensors of one element, as plain numbers. Raises UsageError for other values."""
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics: expected a dict of numbers by name, got {type(metrics).__name__}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"metrics: expected a number for {name!r}, got {type(value).__name__}") from error
    return numbers


_ITEMS = "$items"
_MAX_RANKS = 2**16
"""Largest world size that an error lists."""


def engine_record(training: Training) -> dict[str, Any]:
    """Return the engine's part of a checkpoint's record, without the step in progress."""
    counters = training.counters
    return {
        "counters": asdict(replace(counters, micro_steps=counters.micro_steps - training.accumulation.micro_steps)),
        "batch": asdict(training.accumulation.batch),
        "seed": training.config.settings.seed,
        "precision": training.config.precision,
        "offload_ratio": _offload_ratio(training),
        "host_kernel": "torch" if training.state.host is None else training.state.host.name,
        "scalars": {record.name: dict(scalars) for record, scalars in training.state.scalars.items()},
        "groups": [_group_settings(group) for group in training.optimizer.param_groups],
        "loss_scale": training.optimizer.scaler.state() | {"rules": training.optimizer.scaler.rules()},
        "schedule": None if training.schedule is None else to_json(training.schedule.state()),
        "data_position": None if training.loader is None else training.loader.position,
    }


def _offload_ratio(training: Training) -> float | None:
    """Return the share of optimizer state that the CPU updates, whose rounding differs from the device's; None without a
    device or an optimizer."""
    settings = training.plan.settings
    return None if settings.device_is_host or settings.optimizer == "none" else settings.ratio


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group's settings without its parameters; lr may be a tensor."""
    return {
        name: float(value) if hasattr(value, "item") else to_json(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


@raising_corruption("state of the engine")
def apply_record(training: Training, record: Mapping[str, Any], plan: LoadPlan, saved_world_size: int) -> None:
    """Restore counters, scalars, schedule and settings as planned, after `check_record`."""
    options = plan.options
    if not options.load_module_only:
        saved = record["batch"]
        training.accumulation.batch = batch = resumed_batch(training, saved, saved_world_size=saved_world_size)
        training.counters = type(training.counters)(**record["counters"])
        training.accumulation.earlier_samples = 0
        if not isinstance(saved, Mapping) or saved.get("accumulation_steps") != batch.accumulation_steps:
            training.counters.micro_steps = training.counters.global_steps * batch.accumulation_steps
        if training.loader is not None and record["data_position"] is not None:
            training.loader.restore(int(record["data_position"]), batch)
    for parameter in plan.updated:
        scalars = {name: float(v) for name, v in record["scalars"][parameter.name].items()}
        training.state.scalars[parameter] = scalars
    if options.schedule:
        _apply_groups(training, record["groups"], all_settings=options.optimizer)
    saved_ratio, ratio = record.get("offload_ratio"), _offload_ratio(training)
    if ratio != saved_ratio and None not in (ratio, saved_ratio):
        warn_once(
            'resumed with offload_optimizer "ratio": %s from a checkpoint with %s: a different part of the state is '
            "updated on the device, which rounds differently from the CPU, so the bits will differ from the run that saved it",
            ratio,
            saved_ratio,
        )
    # In other precisions the scale is 1, and was not adapted.
    if options.optimizer and record["precision"] == "fp16":
        training.scaler.load(record["loss_scale"])
    if options.schedule and training.schedule is not None and record["schedule"] is not None:
        training.schedule.load(from_json(record["schedule"]))


def _apply_groups(training: Training, saved: Sequence[Mapping[str, Any]], *, all_settings: bool) -> None:
    """Restore the groups' settings, or without `all_settings` only those that a schedule sets."""
    defaults = training.optimizer.defaults
    for group, settings in zip(training.optimizer.param_groups, saved, strict=True):
        for name, value in settings.items():
            if all_settings or name == "lr" or name not in defaults:
                group[name] = tuple(value) if isinstance(value, list) else from_json(value)


@raising_corruption("state of the engine")
def check_record(training: Training, record: Mapping[str, Any], plan: LoadPlan, saved_world_size: int) -> None:
    """Raise CheckpointMismatchError if the parts of the record to load do not fit the optimizer or the batch."""
    groups, saved = training.optimizer.param_groups, record["groups"]
    if plan.options.schedule and len(groups) != len(saved):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer has {len(groups)}: create the same groups, or "
            "pass load_lr_scheduler_states=False"
        )
    if plan.options.schedule:
        for group, settings in zip(groups, saved, strict=True):
            for name, value in settings.items():
                current = group.get(name)
                is_number = type(current) in (int, float) or hasattr(current, "item")
                if name == "params" or (is_number and type(value) not in (int, float)):
                    raise CorruptionError(
                        f"the checkpoint's parameter groups have a setting {name!r} that no engine saves"
                    )
    for parameter in plan.updated:
        saved_scalars = record["scalars"].get(parameter.name)
        expected = training.state.scalars[parameter]
        # An optimizer has fewer scalars before its first step.
        if saved_scalars is None or not {"step", "updates"} & set(expected) <= set(saved_scalars):
            raise CheckpointMismatchError(
                f"the checkpoint's optimizer kept {sorted(saved_scalars or {})} for {parameter.name!r}, this one "
                f"keeps {sorted(expected)}: use the optimizer that the checkpoint was trained with"
            )
    if not plan.options.load_module_only:
        for name, value in record["counters"].items():
            if type(value) is not int or not 0 <= value < 2**53:
                raise CorruptionError(f"the checkpoint's counter {name!r} is not a count")
        resumed_batch(training, record["batch"], saved_world_size=saved_world_size)


def resumed_batch(training: Training, saved: Mapping[str, Any], *, saved_world_size: int) -> BatchSizes:
    """Return the batch sizes to continue with: at a different world size the saved global batch size is kept, unless the
    caller sets step boundaries.

    Raises CheckpointMismatchError, which lists the possible world sizes.
    """
    world_size = training.world.world_size
    if world_size == saved_world_size or training.accumulation.boundary_override is not None:
        return training.accumulation.batch
    total, micro = int(saved["train_batch_size"]), training.accumulation.batch.micro_batch_size
    if total < 1:
        raise CorruptionError(f"the checkpoint's global batch size must be at least 1, got {total}")
    if total % (micro * world_size):
        fitting = next((size for size in range(micro, 0, -1) if total % (size * world_size) == 0), None)
        advice = (
            f'set "train_micro_batch_size_per_gpu": {fitting} ({total // (fitting * world_size)} per step) to keep it; with '
            f"the Trainer, per_device_train_batch_size x gradient_accumulation_steps must be {total // world_size}"
            if fitting is not None
            else f"no micro-batch size works with {world_size} ranks; the batch can be divided among "
            f"{', '.join(str(n) for n in range(1, min(total, _MAX_RANKS) + 1) if total % n == 0)}"
        )
        possible = [n for n in range(1, min(total // micro, _MAX_RANKS) + 1) if total % (micro * n) == 0]
        raise CheckpointMismatchError(
            f"the checkpoint's global batch of {total} samples cannot be kept at world size {world_size} with "
            f"micro-batches of {micro}: world sizes that work are {', '.join(map(str, possible)) or 'none'}; {advice}"
        )
    return replace(
        training.accumulation.batch, train_batch_size=total, accumulation_steps=total // (micro * world_size)
    )


def to_json(value: Any) -> Any:
    """Return `value` with tuples as lists, and dicts with keys other than strings (milestones) as `{"$items": pairs}`."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_ITEMS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """Undo `to_json`; tuples stay lists."""
    if isinstance(value, dict):
        if list(value) == [_ITEMS]:
            return {from_json(key): from_json(item) for key, item in value[_ITEMS]}
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def rng_state() -> dict[str, Any]:
    """Return this rank's generator states as JSON data."""
    version, words, gauss = random.getstate()
    kind, key, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(word) for word in key], int(pos), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


@raising_corruption("state of the random number generators")
def load_rng_state(state: dict[str, Any]) -> None:
    """Restore this rank's generators from a result of `rng_state`."""
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *position = state["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *position))
    if torch.cuda.is_available():
        if "cuda" in state:
            torch.cuda.set_rng_state(_decode(state["cuda"]))
        else:  # saved without a device: every resume draws the same numbers
            torch.cuda.manual_seed(_seed_from(state["torch"]))


def derive_rng_state(seed: int, step: int, rank: int) -> None:
    """Seed this rank's generators from these three numbers only."""
    derived_seed = _seed_from(f"zstore {seed} {step} {rank}")
    torch.manual_seed(derived_seed)
    random.seed(derived_seed)
    np.random.seed(derived_seed % 2**32)


def _seed_from(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
