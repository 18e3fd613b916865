"""Lightning's Trainer on zstore: Lightning's DeepSpeedStrategy, with `import deepspeed` resolving to zstore, on CPUs too.

[Note: differences from DeepSpeedStrategy]
Ranks compute on GPUs or CPUs. Lightning decides which micro-batch ends a step and divides the loss, so that short
accumulations at the end of an epoch match DDP. The Trainer's own state is stored in the checkpoint as one array, written by
`torch.save` and read as Lightning reads a `.ckpt`. The engine that trained a module also evaluates it.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

from zstore.engine.checkpoint.record import join_tensors
from zstore.engine.runtime.process import FrozenObjects
from zstore.errors import CheckpointError, CheckpointMismatchError, UsageError
from zstore.open.checkpoint import open_checkpoint

_STATE_KEY = "lightning"
"""Key of Lightning's dict in the client state."""


class ZstoreStrategy(DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's DeepSpeedStrategy on zstore's engine, on CPUs and GPUs, with the same arguments.

    `config` is a dict or the path of a JSON file in DeepSpeed's dialect; without it, `stage`, `offload_optimizer` and other
    arguments define one. The Trainer fills in keys that are "auto". `load_objects` lets a load unpickle objects that hooks
    added to a checkpoint, which can run arbitrary code. See [Note: differences from DeepSpeedStrategy].
    """

    config: dict[str, Any]

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        load_objects: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config=dict(config) if isinstance(config, Mapping) else config, **options)
        for key, value in list(self.config.items()):
            if value == "auto" or (isinstance(value, Mapping) and value.get("enabled") == "auto"):
                del self.config[key]
        self.config.setdefault("zero_allow_untested_optimizer", True)  # Lightning reads it for evaluation
        self._engine: Any = None
        self._load_objects = load_objects

    def setup_environment(self) -> None:
        """Set up the device and the ranks, without Lightning's requirement of CUDA."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Start the process group."""
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning counts micro-batches, not the engine."""
        return False

    def setup(self, trainer: Any) -> None:
        """Create the engine; evaluation reuses the engine that trained the module."""
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in loops:
            loop.inference_mode = False  # parameters gathered in inference mode could not be trained
        super().setup(trainer)

    def _initialize_deepspeed_train(self, model: Any) -> None:
        optimizer, schedule = (None, None) if "optimizer" in self.config else self._init_optimizers()
        if schedule is not None:
            self.config.pop("scheduler", None)  # as in DeepSpeed
        self.model, optimizer_wrapper = self._setup_model_and_optimizer(model, optimizer)
        self._set_deepspeed_activation_checkpointing()
        self._engine, self.optimizers = self.model, [optimizer_wrapper]
        self.lr_scheduler_configs = [] if schedule is None else [schedule]  # Lightning advances it

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        if self._engine is not None and self._engine.module is model:
            self.model = self._engine
        else:
            super()._initialize_deepspeed_inference(model)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Accumulate the gradients of a micro-batch, whose loss Lightning has divided."""
        module = self.lightning_module
        is_last = module.automatic_optimization and not module.trainer.fit_loop._should_accumulate()
        self.model.set_gradient_accumulation_boundary(is_last)
        loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        if module.automatic_optimization and not is_last:
            self.model.step()
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, and the engine's step at the accumulation boundary."""
        if not self.lightning_module.automatic_optimization:
            self.model.set_gradient_accumulation_boundary(True)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dict, since the engine saves the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the engine's state and Lightning's dict to the folder `filepath` (all ranks)."""
        values = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        super().save_checkpoint({_STATE_KEY: _pack(values)}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the engine (only the weights, except in `fit`); return Lightning's dict (all ranks)."""
        if self.load_full_weights and self.zero_stage_3:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        module = self.lightning_module
        _, state = self.model.load_checkpoint(
            checkpoint_path,
            load_module_only=module.trainer.state.fn != "fit",
            load_module_strict=bool(module.strict_loading),
        )
        # Lightning does not pass `weights_only`.
        return _unpack(state, checkpoint_path, self._load_objects or weights_only is False)

    def teardown(self) -> None:
        """Tear down Lightning's part; the engine stays open for a save or a test."""
        # The engine references the module: weaken the module's reference to the Trainer, so that dropping it frees the engine.
        FrozenObjects.unfreeze()
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is not None and not isinstance(trainer, weakref.ProxyTypes):
            self.lightning_module.trainer = weakref.proxy(trainer)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _pack(values: Mapping[str, Any]) -> torch.Tensor:
    """Return Lightning's dict serialized to bytes. Raises UsageError if it cannot be pickled."""
    file = io.BytesIO()
    try:
        torch.save(dict(values), file)
    except Exception as error:
        raise UsageError(
            f"values that on_save_checkpoint() or callbacks add to the checkpoint cannot be stored: {error}"
        ) from error
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpack(state: Mapping[str, Any], path: Any, trusted: bool) -> dict[str, Any]:
    """Return Lightning's dict. Raises CheckpointMismatchError if the checkpoint was not saved by a Trainer."""
    if _STATE_KEY not in state:
        raise CheckpointMismatchError(
            f"{path} was not saved by a Trainer, so it has no loop state to resume: load its weights with "
            "module.load_state_dict(zstore.load_state_dict(PATH)) before fit()"
        )
    file = io.BytesIO(state[_STATE_KEY].numpy().tobytes())
    try:
        values: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} has objects that are not plain data: ZstoreStrategy(load_objects=True), or weights_only=False in "
            f"load_from_checkpoint(), unpickles them, which can run arbitrary code ({error})"
        ) from error
    return values


def _extend_to_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """Extend Lightning's function that loads a `.ckpt` so that it also loads folders of `ZstoreStrategy`."""

    @wraps(load)
    def load_file_or_folder(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not (isinstance(path, str | os.PathLike) and Path(path).is_dir()):
            return load(path, map_location=map_location, weights_only=weights_only)
        with open_checkpoint(path) as checkpoint:
            state = join_tensors(checkpoint.state.get("client_state", {}), lambda name: checkpoint[name][...])
            weights = checkpoint.load_state_dict()
        return {**_unpack(state, path, weights_only is False), "state_dict": weights}

    return load_file_or_folder


saving.pl_load = _extend_to_folders(saving.pl_load)
for _name in StrategyRegistry.available_strategies():
    if StrategyRegistry[_name]["strategy"] is DeepSpeedStrategy:
        StrategyRegistry[_name]["strategy"] = ZstoreStrategy  # also for "deepspeed_stage_3" and the others
