"""The progress of a DeepSpeed run: the record of its checkpoint, in the form of our engine's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...checkpoint.format import Record
from ...io.files import Files
from ..torchfile import Inert
from .pieces import States
from .values import Fields, Plain, number_of, table_of

DEEPSPEEDS_OWN = (
    {"module", "buffer_names", "optimizer", "lr_scheduler", "ds_config", "ds_version", "data_sampler", "random_ltd"}
    | {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "universal_checkpoint_info"}
    | {"skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"}
    | {"checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers"}
    | {"sparse_tensor_module_names", "csr_tensor_module_names"}
)
"""Entries of the model states; all others are the client's."""

_SETTINGS = (
    {"lr", "initial_lr", "max_lr", "min_lr", "lr_decay", "weight_decay", "eps", "maximize"}
    | {"betas", "amsgrad", "momentum_decay", "rho", "alpha", "centered", "lambd", "t0", "etas", "step_sizes"}
    | {"momentum", "dampening", "nesterov", "max_momentum", "base_momentum"}
)
"""Settings of parameter groups that torch's optimizers and schedulers know."""

_HYSTERESIS = 2
"""DeepSpeed's defaults, if a checkpoint has none."""

SCALE_RULES = {
    "loss_scale_window": "scale_window",
    "hysteresis": "delayed_shift",
    "min_loss_scale": "min_scale",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "raise_error_at_min_scale": "raise_error_at_min_scale",
}
"""Settings by which a dynamic loss scale changes, and their names in DeepSpeed's scaler."""


class ProgressRecord:
    """Builds the record. `model` are rank 0's model states, `states` the optimizer's."""

    def __init__(self, model: Fields, states: States, files: Files) -> None:
        self._model = model
        self._states = states
        self._files = files
        self._config = table_of(model.get("ds_config"))
        self.notes: list[str] = []
        """State that could not be carried over."""
        self.client = Plain(f"{model.where}: client state")
        """Has the tensors and numpy arrays of the client's state once `record` was made."""

    @property
    def version(self) -> str:
        """The version of DeepSpeed that wrote it."""
        found = self._model.get("ds_version")
        return found[:30].strip() if isinstance(found, str) else "of an unknown version"

    @property
    def precision(self) -> str:
        """The precision that the model computed in: "bf16", "fp16" or "fp32"."""
        for name, keys in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",))):
            if any(table_of(self._config.get(key)).get("enabled") is True for key in keys):
                return name
        return "fp32"

    def record(self, tag: str, parameters: Iterable[str]) -> Record:
        """Return the record of a checkpoint with these parameters."""
        model, world_size = self._model, self._states.world_size
        steps = model.count("global_steps")
        client = {
            key: self.client.of(value, key)
            for key, value in model.entries.items()
            if isinstance(key, str) and key not in DEEPSPEEDS_OWN
        }
        self.notes += [f"client_state: {what}" for what in self.client.left_out]
        self.notes += [f"{key!r}" for key in ("data_sampler", "random_ltd") if model.get(key) is not None]
        self.notes += self._states.notes
        return Record(
            id="",
            tag=tag,
            step=steps,
            world_size=world_size,
            training_world_size=world_size,
            metadata_sha256="",
            manifest_sha256=(),
            state={"client_state": client, "engine": self._engine(steps, parameters)},
        )

    def _engine(self, steps: int, parameters: Iterable[str]) -> dict[str, Any]:
        skipped = min(self._whole("skipped_steps", 0), steps)
        batch = self._batch()
        applied = {"step": float(steps - skipped), "updates": float(steps - skipped)}
        known = self._states.parameters
        return {
            "counters": {
                "global_steps": steps,
                "skipped_steps": skipped,
                "micro_steps": steps * batch["accumulation_steps"],
            },
            "batch": batch,
            "seed": None,
            "precision": self.precision,
            "scalars": {name: self._scalars(applied, name) if name in known else applied for name in parameters},
            "groups": [self._settings(group) for group in self._states.groups],
            "loss_scale": self._loss_scale(steps),
            "schedule": self._schedule(),
            "data_position": self._whole("global_samples", steps * batch["train_batch_size"]),
        }

    def _scalars(self, applied: Mapping[str, float], name: str) -> dict[str, float]:
        found = self._states.parameters[name].scalars
        # Ours counts the updates of any optimizer; DeepSpeed's of one that counts itself.
        return {**applied, **found, "updates": found.get("step", applied["updates"])}

    def _whole(self, key: str, default: int) -> int:
        value = self._model.get(key)
        return value if type(value) is int and 0 <= value < 2**53 else default

    def _batch(self) -> dict[str, int]:
        """Return the batch sizes; the config may leave out those that follow from the others."""

        def setting(key: str) -> int | None:
            value = self._config.get(key)
            return value if type(value) is int and 0 < value < 2**53 else None

        train, micro = setting("train_batch_size"), setting("train_micro_batch_size_per_gpu")
        accumulation = setting("gradient_accumulation_steps")
        ranks = self._states.world_size
        if train is None:
            train = (micro or 1) * (accumulation or 1) * ranks
        if accumulation is None:
            accumulation = max(1, train // ((micro or max(1, train // ranks)) * ranks))
        return {
            "train_batch_size": train,
            "micro_batch_size": micro or max(1, train // (accumulation * ranks)),
            "accumulation_steps": accumulation,
        }

    def _settings(self, group: Mapping[Any, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in group.items():
            if key not in _SETTINGS:
                continue
            if isinstance(value, bool):
                found[key] = value
            elif isinstance(value, list | tuple):
                numbers = [number_of(item, self._files) for item in value[:8]]
                if None not in numbers:
                    found[key] = numbers
            elif (number := number_of(value, self._files)) is not None:
                found[key] = number
        return found

    def _loss_scale(self, steps: int) -> dict[str, Any]:
        scaler = self._states.scaler
        found = table_of(scaler.state if isinstance(scaler, Inert) else scaler)

        def number(key: str, default: float) -> float:
            value = number_of(found.get(key), self._files)
            return value if value is not None and math.isfinite(value) else default

        configured = table_of(self._config.get("fp16")).get("hysteresis")
        return {
            "scale": number("cur_scale", 1.0),
            "hysteresis_left": int(number("cur_hysteresis", configured if type(configured) is int else _HYSTERESIS)),
            "iteration": int(number("cur_iter", steps)),
            "last_overflow": int(number("last_overflow_iter", -1)),
            "rules": self._rules(found),
        }

    def _rules(self, scaler: Mapping[Any, Any]) -> dict[str, Any] | None:
        """Return the settings by which a dynamic scale changes; None for any other, and if some are missing."""
        found: dict[str, Any] = {name: scaler.get(key) for name, key in SCALE_RULES.items()}
        known = all(isinstance(value, bool | int | float) for value in found.values())
        return found if known and scaler.get("dynamic") is True else None

    def _schedule(self) -> Any:
        """Return the schedule's state as the engine writes its own; DeepSpeed's schedulers and torch's keep the same."""
        state = self._model.get("lr_scheduler")
        if not isinstance(state, dict):
            return None
        plain = Plain(f"{self._model.where}: lr_scheduler")
        found = {
            key: number
            if (number := number_of(value, self._files)) is not None and not isinstance(value, int)
            else value
            for key, value in state.items()
        }
        result = plain.of(found, "lr_scheduler")
        self.notes += plain.left_out + [f"lr_scheduler: {name}" for name in plain.tensors]
        return result
