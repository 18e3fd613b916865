"""DeepSpeed's engine: zstore's, with the other names that scripts and libraries call on it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from torch import nn

from zstore.engine.api.engine import Engine
from zstore.engine.checkpoint.client_state import ClientValues
from zstore.engine.optim.loss_scale import LossScaler
from zstore.engine.params.record import Residency
from zstore.errors import UsageError
from zstore.io import UserPath, is_url, user_path
from zstore.journal.names import CHECKPOINT_FOLDER

from . import comm, saves
from .config import ZeroParamStatus
from .names import missing_of_engine
from .peft import adapter_names, is_peft
from .zero import mark

_TO_FP32 = "zero_to_fp32.py"
_TO_FP32_TEXT = """#!/usr/bin/env python3
\"\"\"Writes the fp32 weights of a checkpoint as safetensors: `python zero_to_fp32.py . OUT`.\"\"\"
import sys

from zstore.tools.zero_to_fp32 import main

sys.exit(main())
"""
"""The script that DeepSpeed writes beside its checkpoints, and that libraries tell people to run."""


class CallError(UsageError, AssertionError):
    """A call at the wrong time, for which DeepSpeed has an assertion."""


class StageError(UsageError, NotImplementedError):
    """A call that a ZeRO stage has no use for, which DeepSpeed answers with NotImplementedError."""


class _NoParameters:
    """A module without parameters, for trl, which walks over those that have a state of their own in DeepSpeed."""

    def named_parameters(self, *, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing."""
        return iter(())


class ParameterOffload:
    """The object whose hooks trl removes and restores around a generation with gathered parameters: none need go."""

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: object) -> None:
        """Do nothing: the engine's hooks stayed."""


class _View:
    """A part of the engine under DeepSpeed's names, read-only; `answers` has them."""

    answers: ClassVar[Mapping[str, Callable[[Any], Any]]]

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(
                f"{type(self).__name__} has {', '.join(self.answers)}, not {name}", name=name, obj=self
            )
        return self.answers[name](self._source)


def _is_dynamic(scaler: LossScaler) -> bool:
    return scaler.settings is not None and not scaler.settings.loss_scale


class LossScaleView(_View):
    """A LossScaler: its factor, the steps seen, overflows until it halves, the last of them, and steps until it doubles."""

    answers: ClassVar = {
        "cur_scale": lambda scaler: scaler.scale,
        "loss_scale": lambda scaler: scaler.scale,
        "cur_iter": lambda scaler: scaler.iteration,
        "cur_hysteresis": lambda scaler: scaler.hysteresis_left,
        "last_overflow_iter": lambda scaler: scaler.last_overflow,
        "scale_window": lambda scaler: 1 if scaler.settings is None else scaler.settings.loss_scale_window,
        "dynamic_loss_scale": _is_dynamic,
        "dynamic": _is_dynamic,
    }


def _elapsed_s(engine: Engine) -> float:
    spent = engine.statistics()
    return float(spent.forward_s + spent.backward_s + spent.optimizer_s)


def _samples(engine: Engine) -> int:
    return int(engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps())


class ThroughputTimer(_View):
    """An engine's throughput: samples of this rank in a step, steps, micro-batches of the step under way, seconds within the
    engine's calls; and a count of epochs."""

    answers: ClassVar = {
        "batch_size": _samples,
        "global_step_count": lambda engine: int(engine.global_steps),
        "micro_step_count": lambda engine: int(engine.micro_steps % engine.gradient_accumulation_steps()),
        "total_elapsed_time": _elapsed_s,
    }

    def __init__(self, engine: Engine) -> None:
        super().__init__(weakref.proxy(engine))
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the samples of this rank in a second within the engine's calls; 0 before a step."""
        seconds = _elapsed_s(self._source)
        return self.global_step_count * self.batch_size / seconds if seconds else 0.0


def get_state_devices(model: DeepSpeedEngine, state: Any) -> set[torch.device]:
    """Return the device of an engine's state of a kind, an OffloadStateTypeEnum: its own, or the one that files are read to."""
    kind, training = str(getattr(state, "value", state)), model.training_state
    config = training.config
    of_optimizer = kind in ("hp_params", "optim_states") and config.offload_optimizer.device != "none"
    of_parameters = kind == "lp_params" and config.offload_param.device != "none"
    on_host = kind in training.away or of_optimizer or of_parameters
    return {torch.device("cpu") if on_host else training.world.device}


WRAPPERS = {
    0: "FP16_UnfusedOptimizer DeepSpeedOptimizer",
    1: "ZeROOptimizer DeepSpeedOptimizer DeepSpeedZeroOptimizer",
    2: "ZeROOptimizer DeepSpeedOptimizer DeepSpeedZeroOptimizer",
    3: "ZeROOptimizer DeepSpeedOptimizer DeepSpeedZeroOptimizer_Stage3",
}
"""Stage -> the classes that DeepSpeed's optimizer is an instance of; at stage 0 in 16 bits alone."""


def _zero_key(engine: DeepSpeedEngine, key: str) -> Any:
    return (engine.config.get("zero_optimization") or {}).get(key)


def _client(engine: DeepSpeedEngine) -> Any:
    return None if engine.optimizer is None else engine.optimizer.client


def _scheduler_name(engine: DeepSpeedEngine) -> str | None:
    section = engine.training_state.config.scheduler
    return None if section is None else section.type


_ATTRIBUTES: Mapping[str, Callable[[DeepSpeedEngine], Any]] = {
    "dp_world_size": lambda engine: engine.world_size,
    "mp_world_size": lambda _: 1,  # there is no model parallelism
    "data_parallel_group": lambda _: torch_dist.group.WORLD if torch_dist.is_initialized() else None,
    "client_optimizer": _client,
    "basic_optimizer": _client,
}
"""Attribute of DeepSpeed's engine -> its value."""
_CALLS: Mapping[str, Callable[[DeepSpeedEngine], Any]] = {
    "managed_gradient_accumulation": lambda engine: engine.is_managed,
    "zero_gather_16bit_weights_on_model_save": lambda engine: bool(
        _zero_key(engine, "stage3_gather_16bit_weights_on_model_save")
    ),
    "zero_offload_optimizer": lambda engine: _zero_key(engine, "offload_optimizer"),
    "zero_offload_param": lambda engine: _zero_key(engine, "offload_param"),
    "zero_cpu_offload": lambda engine: engine.training_state.config.offload_optimizer.device == "cpu",
    "dynamic_loss_scale": lambda engine: _is_dynamic(engine.training_state.scaler),
    "optimizer_name": lambda engine: None if engine.optimizer is None else type(_client(engine)).__name__.lower(),
    "scheduler_name": _scheduler_name,
    "curriculum_enabled_legacy": lambda _: False,
    "curriculum_learning_enabled": lambda _: False,
    "empty_partition_cache": lambda _: None,  # gathered parameters are released by themselves
}
"""Method of DeepSpeed's engine without arguments -> the result of a call."""


class DeepSpeedEngine(Engine):
    """zstore's engine under DeepSpeed's name. `config` is the dict that it was made from."""

    config: dict[str, Any]
    is_managed: bool
    """Whether the engine counts the micro-batches of a step."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        training = self.training_state
        self.config = {}
        self.tput_timer = ThroughputTimer(self)
        self.is_managed = True
        self._coalesces = self._has_coalesced = False  # within such a block; between one and its step
        comm.know(self)
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.overflow = False  # whether the last step was skipped
            optimizer.optimizer = optimizer.client
            optimizer.parameter_offload = ParameterOffload()
            wraps = training.config.stage > 0 or self.fp16_enabled() or self.bfloat16_enabled()
            optimizer.wrappers = WRAPPERS[training.config.stage].split() if wraps else ()
            if optimizer.scaler is not None:
                optimizer.loss_scaler = optimizer.loss_scale_config = LossScaleView(optimizer.scaler)
        # Scripts ask on every rank, and save rank 0's: DeepSpeed's values there, which nothing takes for weights.
        self.access.guard.give_empties(self.module, logs=self.global_rank == 0)
        if training.config.stage == 3:
            for record in training.state.records:
                whole = record.residency is Residency.RESIDENT
                status = ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE
                in_files = record.rest is not None
                rows = (
                    torch.empty(record.owned_numel, dtype=record.dtype, device="meta") if in_files else record.owned()
                )
                mark(record.parameter, status, rows.detach())

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take an optimizer step, as `Engine.step` does. Raises UsageError for `lr_kwargs`."""
        if lr_kwargs:
            raise UsageError("engine.step(lr_kwargs=...): schedules take no arguments; leave it out")
        if self._coalesces:
            raise CallError("engine.step() within `with engine.coalesce_grad_reduction()`: call it after the block")
        skipped = self.skipped_steps
        if not self.is_managed:
            super().set_gradient_accumulation_boundary(True)
        super().step()
        if not self.is_managed:
            super().set_gradient_accumulation_boundary(False)
        self.optimizer.overflow = self.skipped_steps > skipped
        if self._has_coalesced:
            self._has_coalesced = False
            self.set_gradient_accumulation_boundary(None)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: UserPath,
        tag: str | float | None = None,
        client_state: ClientValues | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> Any:
        """See `zstore.engine.Engine.save_checkpoint`; the tag is by default DeepSpeed's, `global_step` and the step.

        A checkpoint of that name is replaced, as in DeepSpeed, and beside it is a `zero_to_fp32.py`, which writes its weights.
        """
        if self._coalesces:
            raise CallError("engine.save_checkpoint() within coalesce_grad_reduction(): call it after the block")
        options.setdefault("overwrite", True)
        if exclude_frozen_parameters and is_peft(self.module):
            options.setdefault("keep_frozen", adapter_names(self))
        handle = super().save_checkpoint(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            client_state,
            save_latest,
            exclude_frozen_parameters,
            **options,
        )
        decoupled = self.training_state.config.settings.checkpoint.writer.decoupled
        if not options.get("wait", not decoupled) and not is_url(save_dir):
            saves.watch(os.fspath(user_path(save_dir)), handle)
        if self.global_rank == 0 and not is_url(save_dir):
            folder = user_path(save_dir)
            if not (script := folder / _TO_FP32).exists():
                script.write_text(_TO_FP32_TEXT)
                script.chmod((mode := script.stat().st_mode) | (mode & 0o444) >> 2)
            if CHECKPOINT_FOLDER.fullmatch(
                folder.name
            ):  # a loop that makes a folder for each save, and removes the oldest
                self.journal.file.follow(folder)
        return handle

    def load_checkpoint(
        self,
        load_dir: UserPath,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        **options: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, as `Engine.load_checkpoint` does. Raises UsageError for `custom_load_fn`."""
        if custom_load_fn is not None:
            raise UsageError(
                "engine.load_checkpoint(custom_load_fn=...): tensors are read by name; for others call "
                "load_module_state_dict(state, custom_load_fn=...)"
            )
        saves.complete()
        return super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            **options,
        )

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the model's whole state dict on rank 0, None on others (all ranks). As long as it is alive, the state dicts of
        the model's modules there have its values: classes that save in their own way read those.

        `exclude_frozen_parameters` leaves out all that is frozen but a PEFT model's adapters.
        """
        found = self.module_state_dict()
        if exclude_frozen_parameters:
            kept = adapter_names(self) if is_peft(self.module) else ()
            frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
            found = {name: value for name, value in found.items() if name not in frozen or name in kept}
        self.access.guard.give_whole(found)
        return found if self.global_rank == 0 else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Do as `_zero3_consolidated_16bit_state_dict`, which serves every stage."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def close(self) -> None:
        """See `zstore.engine.Engine.close`; the removals that waited for a save end too."""
        super().close()
        saves.complete()

    # -- backwards and steps -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Let several backwards in the block be one step's: each rank's own gradients add up in `.grad`, in the parameters'
        type, which `safe_get_full_grad` returns there, and are reduced once, at the end of the block (all ranks).

        The `step()` after the block is the step's. Raises StageError at stage 0, CallError within `no_sync()` or another such
        block and if every `step()` ends a step; a `step()` in the block raises CallError too.
        """
        if not self.zero_optimization_stage():
            raise StageError("engine.coalesce_grad_reduction() needs ZeRO stage 1, 2 or 3; set zero_optimization.stage")
        if self._coalesces or self._open_no_syncs or not self.is_managed:
            raise CallError(
                "engine.coalesce_grad_reduction() cannot be nested in another such block or in no_sync(), and is not needed "
                'with "managed_gradient_accumulation": false, where gradients add up until step()'
            )
        self._coalesces = True
        self.set_gradient_accumulation_boundary(False)
        try:
            with self.training_state.coalesced():
                yield
        finally:
            self._coalesces, self._has_coalesced = False, True
            self.set_gradient_accumulation_boundary(True)

    def leave_accumulation(self) -> None:
        """Let every `step()` from now on end a step, whatever the number of backwards before it."""
        self.set_gradient_accumulation_boundary(False)
        self.is_managed = False

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """See `zstore.engine.Engine`. Raises CallError with `"managed_gradient_accumulation": false`."""
        if not self.is_managed:
            raise CallError(
                'engine.set_gradient_accumulation_boundary(): with "managed_gradient_accumulation": false every step() ends a '
                "step; leave it out"
            )
        super().set_gradient_accumulation_boundary(is_boundary)

    def __getattr__(self, name: str) -> Any:
        """Return the value that DeepSpeed's engine has under that name, else the model's attribute."""
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        if name in _CALLS:
            return partial(_CALLS[name], self)
        text = missing_of_engine(name)
        if text is not None:
            raise AttributeError(text, name=name, obj=self)
        return super().__getattr__(name)
