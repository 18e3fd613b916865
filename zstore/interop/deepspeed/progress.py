"""The progress of a DeepSpeed run: the record of its checkpoint, in the form of zstore's engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...checkpoint.format import Record
from ...io.files import Files
from ..torchfile import Inert, TorchTensor
from .values import Fields, JsonConverter, States, number_of, table_of

DEEPSPEED_KEYS = (
    {"module", "buffer_names", "optimizer", "lr_scheduler", "ds_config", "ds_version", "data_sampler", "random_ltd"}
    | {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "universal_checkpoint_info"}
    | {"skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"}
    | {"checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers"}
    | {"sparse_tensor_module_names", "csr_tensor_module_names"}
)
"""DeepSpeed's own entries in the model states; all others belong to the client."""

_SETTINGS = (
    {"lr", "initial_lr", "max_lr", "min_lr", "lr_decay", "weight_decay", "eps", "maximize"}
    | {"betas", "amsgrad", "momentum_decay", "rho", "alpha", "centered", "lambd", "t0", "etas", "step_sizes"}
    | {"momentum", "dampening", "nesterov", "max_momentum", "base_momentum"}
)
"""Settings of parameter groups that torch's optimizers and schedulers use."""

SCALE_RULES = {
    "loss_scale_window": "scale_window",
    "hysteresis": "delayed_shift",
    "min_loss_scale": "min_scale",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "raise_error_at_min_scale": "raise_error_at_min_scale",
}
"""Settings of a dynamic loss scale -> their names in DeepSpeed's scaler."""


class Progress:
    """Creates the record from rank 0's model states and the optimizer's `states`."""

    def __init__(self, model: Fields, states: States, files: Files) -> None:
        self._model = model
        self._states = states
        self._files = files
        self._config = table_of(model.get("ds_config"))
        self.notes: list[str] = []
        """Descriptions of state that could not be carried over."""
        self.client = JsonConverter(f"{model.label}: client state")
        """Has the tensors and numpy arrays of the client state after `record` was called."""

    @property
    def version(self) -> str:
        """The version of DeepSpeed that wrote it."""
        version = self._model.get("ds_version")
        return version[:30].strip() if isinstance(version, str) else "of an unknown version"

    @property
    def precision(self) -> str:
        """The precision that the model computed in: "bf16", "fp16" or "fp32"."""
        sections = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}
        enabled = (p for p, keys in sections.items() if any(self._section(key).get("enabled") is True for key in keys))
        return next(enabled, "fp32")

    def _section(self, key: str) -> Mapping[Any, Any]:
        return table_of(self._config.get(key))

    def record(self, tag: str, parameters: Iterable[str]) -> Record:
        """Return the record of a checkpoint with these parameters."""
        client = {
            key: self.client.of(value, key)
            for key, value in self._model.entries.items()
            if isinstance(key, str) and key not in DEEPSPEED_KEYS
        }
        state = {"client_state": client, "engine": self._engine(parameters)}
        self.notes += [f"client_state: {name}" for name in self.client.omitted]
        self.notes += [f"{key!r}" for key in ("data_sampler", "random_ltd") if self._model.get(key) is not None]
        self.notes += self._states.notes
        return Record(
            id="",
            tag=tag,
            step=self._model.count("global_steps"),
            world_size=self._states.world_size,
            training_world_size=self._states.world_size,
            metadata_sha256="",
            manifest_sha256=(),
            state=state,
        )

    def _engine(self, parameters: Iterable[str]) -> dict[str, Any]:
        steps, batch, known = self._model.count("global_steps"), self._batch(), self._states.parameters
        skipped = min(_count_or_none(self._model.get("skipped_steps")) or 0, steps)
        samples = _count_or_none(self._model.get("global_samples"))
        # zstore counts the updates of every optimizer; DeepSpeed only those of optimizers that count them.
        applied = {"step": float(steps - skipped)}
        scalars = {name: applied | (known[name].scalars if name in known else {}) for name in parameters}
        return {
            "counters": {
                "global_steps": steps,
                "skipped_steps": skipped,
                "micro_steps": steps * batch["accumulation_steps"],
            },
            "batch": batch,
            "seed": None,
            "precision": self.precision,
            "scalars": {name: values | {"updates": values["step"]} for name, values in scalars.items()},
            "groups": [self._settings(group) for group in self._states.groups],
            "loss_scale": self._loss_scale(steps),
            "schedule": self._schedule(),
            "data_position": steps * batch["train_batch_size"] if samples is None else samples,
        }

    def _batch(self) -> dict[str, int]:
        """Return the batch sizes; the config may omit sizes that are implied by the others."""
        train, micro, accumulation = (
            _count_or_none(self._config.get(key))
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        ranks = self._states.world_size
        train = train or (micro or 1) * (accumulation or 1) * ranks
        accumulation = accumulation or max(1, train // ((micro or max(1, train // ranks)) * ranks))
        return {
            "train_batch_size": train,
            "micro_batch_size": micro or max(1, train // (accumulation * ranks)),
            "accumulation_steps": accumulation,
        }

    def _settings(self, group: Mapping[Any, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for key in (key for key in group if key in _SETTINGS):
            value = group[key]
            if isinstance(value, list | tuple):
                numbers = [number_of(item, self._files) for item in value[:8]]
                value = None if None in numbers else numbers
            elif not isinstance(value, bool):
                value = number_of(value, self._files)
            if value is not None:
                settings[key] = value
        return settings

    def _loss_scale(self, steps: int) -> dict[str, Any]:
        scaler = self._states.scaler
        scaler_state = table_of(scaler.state if isinstance(scaler, Inert) else scaler)

        def number(key: str, default: float) -> float:
            value = number_of(scaler_state.get(key), self._files)
            return value if value is not None and math.isfinite(value) else default

        rules: dict[str, Any] = {name: scaler_state.get(key) for name, key in SCALE_RULES.items()}
        is_complete = all(isinstance(value, bool | int | float) for value in rules.values())
        hysteresis = _count_or_none(self._section("fp16").get("hysteresis"))  # DeepSpeed's default is 2
        return {
            "scale": number("cur_scale", 1.0),
            "hysteresis_left": int(number("cur_hysteresis", 2 if hysteresis is None else hysteresis)),
            "iteration": int(number("cur_iter", steps)),
            "last_overflow": int(number("last_overflow_iter", -1)),
            # Only a dynamic scale has rules.
            "rules": rules if is_complete and scaler_state.get("dynamic") is True else None,
        }

    def _schedule(self) -> Any:
        """Return the schedule's state in the engine's form; DeepSpeed's and torch's schedulers have the same state."""
        state = self._model.get("lr_scheduler")
        if not isinstance(state, dict):
            return None
        plain = JsonConverter(f"{self._model.label}: lr_scheduler")
        tensors = {key: number_of(value, self._files) for key, value in state.items() if isinstance(value, TorchTensor)}
        numbers = {key: value for key, value in tensors.items() if value is not None}
        result = plain.of(state | numbers, "lr_scheduler")
        self.notes += plain.omitted + [f"lr_scheduler: {name}" for name in plain.tensors]
        return result


def _count_or_none(value: Any) -> int | None:
    """Return a count; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None
