"""DeepSpeed's engine: zstore's engine with the other names that scripts and libraries call on it; and `deepspeed.initialize`,
with DeepSpeed's arguments.

[Note: what waits for a commit]
With `checkpoint.writer.decoupled`, a save is committed while training continues. Libraries do not expect that: they remove the
oldest checkpoint (`save_total_limit`), upload the newest, or copy it in a callback. So while a save of this process is in
progress, listing its folder on any thread but zstore's own waits for the commit, and so does removing a folder that contains
it. Other checkpoints in the folder are removed in the background after the commit. They are renamed first, since removing
files would make them the newest by modification time. If the save fails, the older checkpoint stays.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from zstore.checkpoint import SaveHandle
from zstore.engine.access.module_state import state_entries
from zstore.engine.api.engine import Engine
from zstore.engine.api.initialize import config_source
from zstore.engine.api.initialize import initialize as zstore_initialize
from zstore.engine.checkpoint.record import ClientValues
from zstore.engine.params.record import Residency
from zstore.errors import UsageError
from zstore.io import Ticket, UserPath, is_url, run_in_thread, user_path

from .names import VERSION, missing_attribute_text
from .utils import log_dist, raw_config, without_ignored_keys
from .zero import ZeroParamStatus, mark

_log = logging.getLogger("zstore")

_TO_FP32 = "zero_to_fp32.py"
_TO_FP32_TEXT = """#!/usr/bin/env python3
\"\"\"Writes the fp32 weights of a checkpoint as safetensors: `python zero_to_fp32.py . OUT`.\"\"\"
import sys

from zstore.tools.zero_to_fp32 import main

sys.exit(main())
"""
"""The script that DeepSpeed writes next to its checkpoints, and that libraries tell users to run."""


class _NoParameters(nn.Module):
    """A module without parameters, for trl, which iterates over DeepSpeed's external parameters."""

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an empty iterator."""
        return iter(())


class ParameterOffload:
    """The object whose hooks trl removes and restores around generation with gathered parameters; it has no hooks."""

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: object) -> None:
        """Do nothing, since the engine's hooks were not removed."""


def _zero_setting(engine: DeepSpeedEngine, key: str) -> Any:
    return (engine.config.get("zero_optimization") or {}).get(key)


def _client(engine: DeepSpeedEngine) -> Any:
    return None if engine.optimizer is None else engine.optimizer.client


_ATTRIBUTES: Mapping[str, Callable[[DeepSpeedEngine], Any]] = {
    "dp_world_size": lambda engine: engine.world_size,
    "mp_world_size": lambda _: 1,  # there is no model parallelism
    "data_parallel_group": lambda _: torch_dist.group.WORLD if torch_dist.is_initialized() else None,
    "client_optimizer": _client,
    "basic_optimizer": _client,
}
"""Attributes of DeepSpeed's engine -> their values."""
_CALLS: Mapping[str, Callable[..., Any]] = {
    "dump_state": lambda engine: engine.training_state.config.settings.dump_state,
    "get_batch_info": lambda engine: astuple(engine.training_state.accumulation.batch),
    "get_mom": lambda engine: [  # betas, or momentum
        group.get("betas", group.get("momentum", 0.0)) for group in engine.training_state.optimizer.param_groups
    ],
    "gradient_clipping": lambda engine: engine.training_state.clip_norm,
    "save_fp16_model": lambda engine, *args, **options: engine.save_16bit_model(*args, **options),  # an older name
    "scale": lambda _, loss: loss,  # `loss.backward()` applies the loss scale
    "steps_per_print": lambda engine: engine.training_state.config.settings.steps_per_print,
    "wall_clock_breakdown": lambda engine: engine.training_state.config.settings.wall_clock_breakdown,
    "zero_optimization": lambda engine: engine.training_state.config.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.training_state.config.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.training_state.config.stage >= 3,
    "zero_optimization_stage": lambda engine: engine.training_state.config.zero.stage,
    "zero_gather_16bit_weights_on_model_save": lambda engine: bool(
        _zero_setting(engine, "stage3_gather_16bit_weights_on_model_save")
    ),
    "zero_offload_optimizer": lambda engine: _zero_setting(engine, "offload_optimizer"),
    "zero_offload_param": lambda engine: _zero_setting(engine, "offload_param"),
    "zero_cpu_offload": lambda engine: engine.training_state.config.offload_optimizer.device == "cpu",
    "dynamic_loss_scale": lambda engine: (
        (settings := engine.training_state.scaler.settings) is not None and not settings.loss_scale
    ),
    "optimizer_name": lambda engine: None if engine.optimizer is None else type(_client(engine)).__name__.lower(),
    "scheduler_name": lambda engine: (
        None if (section := engine.training_state.config.settings.scheduler) is None else section.type
    ),
    "curriculum_enabled_legacy": lambda _: False,
    "curriculum_learning_enabled": lambda _: False,
    "empty_partition_cache": lambda _: None,  # gathered parameters are released automatically
}
"""Methods of DeepSpeed's engine -> their results."""


class DeepSpeedEngine(Engine):
    """zstore's engine under DeepSpeed's name. `config` is the dict passed to `initialize`."""

    config: dict[str, Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        training = self.training_state
        self.config = {}
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.overflow = False  # whether the last step was skipped
            optimizer.optimizer = optimizer.client
            optimizer.parameter_offload = ParameterOffload()
        # Scripts call state_dict() on every rank and save rank 0's; as in DeepSpeed, its tensors are empty, not weights.
        self.access.guard.emit_empty_tensors(warns=self.global_rank == 0)
        if training.config.stage == 3:
            for record in training.state.records:
                is_resident = record.residency is Residency.RESIDENT
                status = ZeroParamStatus.AVAILABLE if is_resident else ZeroParamStatus.NOT_AVAILABLE
                if record.stored_array is None:
                    rows = record.owned().detach()
                else:
                    rows = torch.empty(record.owned_numel, dtype=record.dtype, device="meta")
                mark(record.parameter, status, rows)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take an optimizer step, as `Engine.step` does. Raises UsageError for `lr_kwargs`."""
        if lr_kwargs:
            raise UsageError("engine.step(lr_kwargs=...): schedules take no arguments; leave it out")
        skipped = self.skipped_steps
        super().step()
        self.optimizer.overflow = self.skipped_steps > skipped

    def save_checkpoint(
        self,
        save_dir: UserPath,
        tag: str | float | None = None,
        client_state: ClientValues | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> Any:
        """See `zstore.engine.Engine.save_checkpoint`; the default tag is DeepSpeed's, `global_step` and the step number.

        As in DeepSpeed, an existing checkpoint of that name is replaced, and `zero_to_fp32.py` is written next to it.
        """
        options.setdefault("overwrite", True)
        if exclude_frozen_parameters and _is_peft(self.module):
            options.setdefault("keep_frozen", _adapter_names(self))
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
            _watch_save(os.fspath(user_path(save_dir)), handle)
        if self.global_rank == 0 and not is_url(save_dir):
            folder = user_path(save_dir)
            if not (script := folder / _TO_FP32).exists():
                script.write_text(_TO_FP32_TEXT)
                script.chmod((mode := script.stat().st_mode) | (mode & 0o444) >> 2)
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
                "engine.load_checkpoint(custom_load_fn=...): tensors are read by name; to load them otherwise call "
                "load_module_state_dict(state, custom_load_fn=...)"
            )
        complete_saves()
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
        """Return the model's full state dict on rank 0, None on others (all ranks). While it exists, the state dicts of the
        model's modules on rank 0 have its values, for classes that save them.

        `exclude_frozen_parameters` omits all frozen parameters except a PEFT model's adapters.
        """
        state_dict = self.module_state_dict()
        if exclude_frozen_parameters:
            adapters = _adapter_names(self) if _is_peft(self.module) else ()
            frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
            state_dict = {name: value for name, value in state_dict.items() if name not in frozen or name in adapters}
        self.access.guard.emit_full_tensors(state_dict)
        return state_dict if self.global_rank == 0 else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Alias of `_zero3_consolidated_16bit_state_dict`, which works at every stage."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def close(self) -> None:
        """See `zstore.engine.Engine.close`; also completes removals that wait for a save."""
        super().close()
        complete_saves()

    def __getattr__(self, name: str) -> Any:
        """Return the value of DeepSpeed's attribute of that name, otherwise the model's attribute."""
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        if name in _CALLS:
            return partial(_CALLS[name], self)
        text = missing_attribute_text(name)
        if text is not None:
            raise AttributeError(text, name=name, obj=self)
        return super().__getattr__(name)


def initialize(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return (engine, optimizer, loader, scheduler), as `zstore.initialize` does (all ranks).

    `optimizer` may be a function of `model_parameters`. If neither it nor the config gives an optimizer, the engine only
    evaluates, and the optimizer and scheduler returned are None. The process group is started if a launcher set its variables.
    Raises UsageError for `mpu` and `mesh_param`, and if accelerate and the process group disagree on the number of ranks.
    """
    if mesh_param is not None:
        raise UsageError("deepspeed.initialize(mesh_param=...): there is no sequence parallelism; leave it out")
    _require_matching_ranks()
    source = config_source(args, config if config is not None else config_params, call="deepspeed.initialize()")
    given = without_ignored_keys(source)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model_parameters)
    complete_saves()  # of an earlier engine, whose checkpoint a resume may load now
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad] if model is not None else []
    frozen = optimizer is None and (not isinstance(given, Mapping) or given.get("optimizer") is None)
    zero = given.get("zero_optimization") if isinstance(given, Mapping) else None
    ignored: list[str] = []
    if isinstance(zero, Mapping) and not zero.get("stage"):  # as in trl's configuration of a reference model
        ignored = [key for key in zero if key.startswith("offload_")]
        given = {**given, "zero_optimization": {key: value for key, value in zero.items() if key not in ignored}}
    engine, *returned = zstore_initialize(
        args=None,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=None if frozen else lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=given,
        frozen=frozen,
        _engine=DeepSpeedEngine,
    )
    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(f"initialize() created a {type(engine).__name__}")
    for parameter in trainable:  # a model may be evaluated first, and an optimizer created from these later
        parameter.requires_grad_(True)
    log_dist(f"DeepSpeed info: version={VERSION}", ranks=[0])
    if ignored:
        text = f"zero_optimization: {', '.join(ignored)} ignored at stage 0, as in DeepSpeed: set stage 1, 2 or 3 to offload"
        log_dist(text, ranks=[0], level=logging.INFO if frozen else logging.WARNING)
    engine.config = raw_config(source)
    return engine, *returned


def _require_matching_ranks() -> None:
    """Raise UsageError if accelerate's number of ranks differs from the process group's: each would train on all data."""
    module = sys.modules.get("accelerate.state")
    state = {} if module is None else module.PartialState._shared_state
    counted = state.get("num_processes")
    uses_deepspeed = str(state.get("distributed_type")).endswith("DEEPSPEED")
    if not uses_deepspeed or not torch_dist.is_initialized() or counted == torch_dist.get_world_size():
        return
    raise UsageError(
        f"there are {torch_dist.get_world_size()} ranks, but accelerate counts {counted}: with DeepSpeed it detects several "
        "ranks on CPUs only on request: TrainingArguments(use_cpu=True), or accelerate.PartialState(cpu=True) before the "
        "Accelerator"
    )


_REMOVED = ".removed"
_saves: dict[str, SaveHandle] = {}
"""The last save in each folder, by absolute path."""
_removals: list[Ticket[None]] = []
_rmtree: Callable[..., Any] = shutil.rmtree


def _watch_save(folder: str, handle: SaveHandle) -> None:
    """Make listings and removals of a save's folder wait for its commit. See [Note: what waits for a commit]."""
    for finished in [path for path, save in _saves.items() if save.done()]:
        del _saves[finished]
    _saves[os.path.abspath(folder)] = handle
    _install_hooks()


@functools.cache
def _install_hooks() -> None:
    sys.addaudithook(_on_audit_event)
    shutil.rmtree = _remove  # type: ignore[assignment]


def complete_saves() -> None:
    """Wait for the running saves and removals of this process."""
    for handle in list(_saves.values()):
        handle.wait_for_end()
    while _removals:
        _removals.pop().wait_for_end()


def _is_own_thread() -> bool:
    return threading.current_thread().name.startswith("zstore")


def _on_audit_event(
    event: str,
    args: tuple[Any, ...],
    listings: frozenset[str] = frozenset({"os.listdir", "os.scandir"}),
    saves: dict[str, SaveHandle] = _saves,
) -> None:
    """Delay the listing of a folder with a running save. Audit hooks run until the end of the process, when the module's
    names are already deleted, so it gets them as defaults."""
    if event not in listings or not saves or isinstance(args[0], int) or _is_own_thread():
        return
    listed = os.path.abspath(os.fsdecode(args[0] or "."))
    for folder, handle in list(saves.items()):
        if _contains(folder, listed):
            handle.wait_for_end()


def _remove(path: Any, *args: Any, **options: Any) -> None:
    """Remove a folder as `shutil.rmtree` does, but remove checkpoints next to a running save only after its commit."""
    saves = {} if isinstance(path, int) or _is_own_thread() else dict(_saves)
    removed = os.path.abspath(os.fsdecode(path)) if saves else ""
    for folder, handle in saves.items():
        if _contains(removed, folder):
            handle.wait_for_end()
        elif (
            os.path.dirname(folder) == os.path.dirname(removed) and Path(removed, "latest").is_file()
        ):  # a checkpoint folder
            _removals.append(run_in_thread(partial(_remove_after, handle, Path(removed)), "zstore-remove"))
            return
    _rmtree(path, *args, **options)


def _contains(folder: str, path: str) -> bool:
    return f"{path}{os.sep}".startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def _remove_after(handle: SaveHandle, folder: Path) -> None:
    try:
        handle.wait()
    except Exception as error:
        _log.warning("%s is not removed: the save of the newer checkpoint failed: %s", folder, error)
        return
    renamed = folder.with_name(f".{folder.name}{_REMOVED}")
    try:
        os.replace(folder, renamed)
    except FileNotFoundError:  # removed twice
        return
    for leftover in folder.parent.glob(f".*{_REMOVED}"):  # including those of killed processes
        _rmtree(leftover, ignore_errors=True)


def _is_peft(model: nn.Module) -> bool:
    """Return whether a model has peft adapters, added by peft's classes or by transformers' own loading."""
    peft: Any = sys.modules.get("peft")
    is_wrapped = peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def _adapter_names(engine: Engine) -> list[str]:
    """Return the state dict names that peft saves for a model's adapters, including frozen ones and buffers (all ranks)."""
    from peft import get_peft_model_state_dict

    local_names: list[str] = []
    with engine.world.agreeing():
        if engine.global_rank == 0:
            entries = state_entries(engine.access)
            # peft returns the tensors that it was given, so a distinct tensor identifies each entry.
            views = {name: torch.empty(0) for name, value in entries.items() if isinstance(value, torch.Tensor)}
            ids = {id(views[name]) for name, value in entries.items() if getattr(value, "requires_grad", False)}
            model: Any = engine.module
            for adapter, config in model.peft_config.items():
                if not config.is_prompt_learning:
                    with warnings.catch_warnings(action="ignore"):  # the save itself warns
                        adapter_state = get_peft_model_state_dict(model, state_dict=views, adapter_name=adapter)
                    ids |= {id(value) for value in adapter_state.values()}
            local_names = [name for name, view in views.items() if id(view) in ids]
    names: list[str] = engine.world.broadcast_object(local_names)
    return names
