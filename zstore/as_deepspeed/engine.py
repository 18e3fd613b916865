"""DeepSpeed's engine: zstore's, with what else scripts and libraries call on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from torch import nn

from zstore.engine import Engine
from zstore.engine.checkpoint.client_state import ClientValues
from zstore.engine.params.record import Residency
from zstore.engine.report.monitors import Monitors
from zstore.engine.training import Training
from zstore.errors import UsageError
from zstore.remote.url import is_url

from . import comm
from .names import missing_of_engine
from .zero import mark
from .zero_types import ZeroParamStatus

_TO_FP32 = "zero_to_fp32.py"
_TO_FP32_TEXT = """#!/usr/bin/env python3
\"\"\"Writes the fp32 weights of a checkpoint as safetensors: `python zero_to_fp32.py . OUT`.\"\"\"
import sys

from zstore.as_deepspeed.zero_to_fp32 import main

sys.exit(main())
"""
"""The script that DeepSpeed leaves beside its checkpoints, and libraries tell people to run."""


class _NoParameters:
    """A module without any, for trl, which walks over those that have a state of their own in DeepSpeed."""

    def named_parameters(self, *, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing."""
        return iter(())


class ParameterOffload:
    """What trl takes the hooks of, and gives them back to, around a generation with gathered parameters: none need go."""

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: object) -> None:
        """Do nothing: the engine's hooks stayed."""


class ThroughputTimer:
    """What scripts tell of the end of an epoch; `engine.statistics()` has the times."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1


class DeepSpeedEngine(Engine):
    """zstore's engine under DeepSpeed's name. `config` is the dict that it was made from."""

    config: dict[str, Any]

    def __init__(self, training: Training, monitors: Monitors) -> None:
        super().__init__(training, monitors)
        self.config = {}
        self.tput_timer = ThroughputTimer()
        comm.know(self.world)
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.overflow = False  # whether the last step was skipped
            optimizer.optimizer = optimizer.client
            optimizer.parameter_offload = ParameterOffload()
        # Scripts ask on every rank, and save what rank 0 has: what DeepSpeed gives there, which nothing takes for weights.
        self.access.guard.lets_state_dicts_pass = True
        if self.global_rank == 0:
            self.access.guard.give_empties(self.module)
        if training.config.stage == 3:
            for record in training.state.records:
                whole = record.residency is Residency.RESIDENT
                mark(record.parameter, ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """See `zstore.engine.Engine.step`. Raises UsageError for `lr_kwargs`."""
        if lr_kwargs:
            raise UsageError("engine.step(lr_kwargs=...): schedules take no arguments; leave it out")
        skipped = self.skipped_steps
        super().step()
        self.optimizer.overflow = self.skipped_steps > skipped

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | float | None = None,
        client_state: ClientValues | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> Any:
        """See `zstore.engine.Engine.save_checkpoint`; the tag is by default DeepSpeed's, `global_step` and the step.

        A checkpoint of that name is replaced, as in DeepSpeed, and beside it is a `zero_to_fp32.py`, which writes its weights.
        """
        options.setdefault("overwrite", True)
        handle = super().save_checkpoint(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            client_state,
            save_latest,
            exclude_frozen_parameters,
            **options,
        )
        if self.global_rank == 0 and not is_url(save_dir) and not (script := Path(save_dir, _TO_FP32)).exists():
            script.write_text(_TO_FP32_TEXT)
            script.chmod(0o755)
        return handle

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        **options: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """See `zstore.engine.Engine.load_checkpoint`. Raises UsageError for `custom_load_fn`."""
        if custom_load_fn is not None:
            raise UsageError(
                "engine.load_checkpoint(custom_load_fn=...): tensors are read by name; pass names={...} for those that the "
                "model calls otherwise, or load_module_state_dict(state, custom_load_fn=...)"
            )
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
        """Return the model's whole state dict on rank 0, None on others (all ranks)."""
        found = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return found if self.global_rank == 0 else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Do as `_zero3_consolidated_16bit_state_dict`, which serves every stage."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    # -- what is asked of it ----------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        """Number of ranks."""
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        """Return 1: there is no model parallelism."""
        return 1

    @property
    def data_parallel_group(self) -> Any:
        """The group of all ranks; None where torch.distributed is not started."""
        return torch_dist.group.WORLD if torch_dist.is_initialized() else None

    @property
    def client_optimizer(self) -> Any:
        """The optimizer that was given, or made from the config; None without one."""
        return None if self.optimizer is None else self.optimizer.client

    @property
    def basic_optimizer(self) -> Any:
        """Another name of `client_optimizer`."""
        return self.client_optimizer

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether the config wants whole weights where a model is saved at stage 3."""
        return bool(self._zero("stage3_gather_16bit_weights_on_model_save"))

    def zero_offload_optimizer(self) -> Any:
        """Return the config's `offload_optimizer`; None without it."""
        return self._zero("offload_optimizer")

    def zero_offload_param(self) -> Any:
        """Return the config's `offload_param`; None without it."""
        return self._zero("offload_param")

    def zero_cpu_offload(self) -> bool:
        """Return whether optimizer state rests in host memory."""
        return self.training_state.config.offload_optimizer.device == "cpu"

    def _zero(self, key: str) -> Any:
        return (self.config.get("zero_optimization") or {}).get(key)

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts itself: in fp16 without a fixed one."""
        scaling = self.training_state.config.loss_scaling
        return scaling is not None and not scaling.loss_scale

    def optimizer_name(self) -> str | None:
        """Return the class of the optimizer in lower case, as "adamw"; None without one."""
        return None if self.optimizer is None else type(self.optimizer.client).__name__.lower()

    def scheduler_name(self) -> str | None:
        """Return the name of the config's schedule; None without one."""
        section = self.training_state.config.scheduler
        return None if section is None else section.type

    def curriculum_enabled_legacy(self) -> bool:
        """Return whether `curriculum_learning` is on."""
        return self.curriculum is not None

    def curriculum_learning_enabled(self) -> bool:
        """Return whether samples are drawn by a curriculum of `data_efficiency`."""
        return self.training_dataloader is not None and self.training_dataloader.curriculum is not None

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered parameters are released by themselves."""

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the engine has none of that name."""
        text = missing_of_engine(name)
        if text is not None:
            raise AttributeError(text, name=name, obj=self)
        return super().__getattr__(name)
