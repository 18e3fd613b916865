"""The strategy: Lightning's Trainer drives, the engine trains, saves and loads.

[Note: who does what]
Lightning names the micro-batch that ends a step, since an epoch may end with a short accumulation; it divides losses and
advances the schedules that `configure_optimizers` returns. The engine runs backward, clipping, loss scaling and the update,
and schedules of its config. A checkpoint is one of the engine's: its tag is the name that Lightning gives the file, and its
client state has Lightning's dict (see [Note: Lightning's dict] in `content`).

[Note: between steps]
Lightning may save in the middle of an accumulation, at a validation or when a script asks for it. As there, the checkpoint
is that of the last step: later gradients are not in it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from zstore.engine.api.engine import Engine
from zstore.engine.api.initialize import initialize
from zstore.engine.build.init import Init
from zstore.engine.checkpoint.rng import rng_state
from zstore.engine.runtime.garbage import FrozenObjects
from zstore.errors import CheckpointMismatchError, UsageError

from . import content
from .asking import begin_journal, journal_taken_along, keep_journal
from .files import STATE, LightningCheckpoint, loader_of_folders, remove, whole_weights
from .fitting import (
    batch_size,
    check_device,
    check_predict,
    check_trainer,
    configured,
    hand_on_settings,
    resumable,
    resume_data,
)
from .precision import EnginePrecision
from .settings import check_batch_size, compute_dtype, for_trainer, read_source

_log = logging.getLogger("zstore")

_OPTIONS = (
    "accelerator", "parallel_devices", "cluster_environment", "precision_plugin", "process_group_backend", "timeout",
    "start_method",
)  # fmt: skip
"""Options of Lightning's DDPStrategy that have a meaning here."""
_OFFLOADED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
NAMES: dict[str, dict[str, Any]] = {
    "zstore": {},
    "zstore_stage_1": {"stage": 1},
    "zstore_stage_2": {"stage": 2},
    "zstore_stage_3": {"stage": 3},
    "zstore_stage_3_offload": {"config": _OFFLOADED},
    "zstore_spawn": {"start_method": "spawn"},
    "zstore_fork": {"start_method": "fork"},
}
"""Names under which `Trainer(strategy=...)` finds the strategy, and its arguments."""


class EngineStrategy:
    """A mixin in front of Lightning's `DDPStrategy`, which starts the ranks. See [Note: who does what].

    `config` is a dict, the path of a JSON file or JSON text, in DeepSpeed's dialect; by default the one that the variable
    ZSTORE_CONFIG names, and without that stage 2 (or `stage`) without offload. Its missing keys and "auto" are the Trainer's:
    precision, accumulation, clipping, the batch size of the loader, the number of steps; the optimizer is that of
    `configure_optimizers`. `load_objects` lets a load unpickle the objects that hooks put into a checkpoint, which runs code
    of its author. `options` are those of DDPStrategy that start ranks: `start_method`, `timeout`,
    `process_group_backend`, `cluster_environment`, `accelerator`, `parallel_devices`.

    Raises ConfigError that names every problem of the config, UsageError for an option that has no meaning here. Over 300
    lines because it is all that Lightning asks of a strategy.
    """

    library: str
    """Package that the class is for: "lightning.pytorch" or "pytorch_lightning"."""
    precision_class: type[EnginePrecision]
    accelerator: Any
    cluster_environment: Any
    lightning_module: Any
    is_global_zero: bool
    lr_scheduler_configs: list[Any]
    model: Any
    optimizers: list[Any]
    root_device: torch.device
    world_size: int
    _layer_sync: Any
    _precision_plugin: Any

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        stage: int | None = None,
        load_objects: bool = False,
        **options: Any,
    ) -> None:
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise UsageError(
                f"ZstoreStrategy() has no option {', '.join(unknown)}: what the engine does stands in its config; options of "
                f"DDPStrategy that it takes: {', '.join(_OPTIONS)}"
            )
        self.source = read_source(config, stage)
        method = options.get("start_method", "popen")
        if method != "popen" and self.source.settings.zero_optimization.stage == 3:
            raise UsageError(
                f"start_method {method!r} brings whole weights back to the process that starts the ranks, and at stage 3 there "
                "are none: leave it out, start the script by torchrun, or choose a stage below"
            )
        self._load_objects = load_objects
        self._engine: Engine | None = None
        self._trainable: list[torch.nn.Parameter] = []
        """Parameters whose gradients a frozen engine turned off."""
        self._generators: dict[str, Any] | None = None
        """Those to remove once another is saved."""
        """Random number generators that a load brought back, until training starts."""
        super().__init__(**options)

    # -- Lightning's interface of a strategy ------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """The plugin that runs the engine's backward and step."""
        if self._precision_plugin is None:
            self._precision_plugin = self.precision_class("32-true")
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else self.precision_class.in_place_of(plugin)

    @property
    def checkpoint_io(self) -> Any:
        """Returns weights from ranks that were spawned or forked; the engine saves. Setting it raises UsageError."""
        return import_module(f"{self.library}.plugins").TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise UsageError(
            f"plugin {type(plugin).__name__}: the engine reads and writes checkpoints: leave the plugin out"
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded once there is an engine."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the optimizer's state: the engine does."""
        return False

    @property
    def engine(self) -> Engine:
        """The engine of the module in use. Raises UsageError before `fit`, `validate`, `test` or `predict` set it up."""
        if self._engine is None:
            raise UsageError(
                "there is no engine here: trainer.fit(), validate(), test() and predict() make one, in ranks that were spawned "
                "or forked in those alone"
            )
        return self._engine

    def _run_config(self, trainer: Any) -> dict[str, Any]:
        clip = trainer.gradient_clip_val
        return for_trainer(
            self.source,
            precision=self.precision_plugin.precision,
            accumulation_steps=trainer.accumulate_grad_batches,
            clip_norm=None if clip is None else float(clip),
        )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Do nothing: `model_sharded_context` places the parameters."""
        yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build modules in shards, as `zstore.Init` does; do nothing if the module has an engine."""
        if self._has_engine():
            yield
            return
        with Init(config=self._run_config(self.lightning_module.trainer)):
            yield

    def _has_engine(self) -> bool:
        return self._engine is not None and self._engine.module is self.lightning_module

    def setup(self, trainer: Any) -> None:
        """Make the engine, or go on with the module's engine."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        check_trainer(trainer, module, self._layer_sync)
        check_device(self.root_device)
        if self.world_size == 1:
            # As under strategy="auto": a sampler over ranks would draw other samples, and forget its position.
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._engine is not None and not self._has_engine():
            self.close()
        raw = self._run_config(trainer)
        self.precision_plugin.dtype = compute_dtype(raw)
        if trainer.state.fn.value == "fit":
            self._set_up_training(trainer, module, raw)
        elif self._engine is None:
            self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._engine = initialize(model=module, config=raw, frozen=True)[0]
        self.precision_plugin.clip_norm = self.engine.gradient_clipping()
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # parameters that are gathered within it could not be trained
        self.model = self.engine

    def _set_up_training(self, trainer: Any, module: Any, raw: dict[str, Any]) -> None:
        """Make or renew optimizer and schedules, and the engine around them."""
        if self._engine is not None and self._engine.training_state.config.frozen:
            self._thaw(self._engine)
        trainer.fit_loop.setup_data()
        client, schedules = configured(self.library, self.source, module, raw)
        if self._engine is None:
            settings = self.source.settings
            size = batch_size(trainer)
            if size is not None:
                check_batch_size(self.source, size, trainer.accumulate_grad_batches, self.world_size)
            answers: dict[str, Any] = {"train_micro_batch_size_per_gpu": size or 1}
            if settings.scheduler is not None:
                answers["scheduler.params.total_num_steps"] = max(1, int(trainer.estimated_stepping_batches))
            self._engine = initialize(model=module, config=raw, optimizer=client, auto=answers)[0]
        elif client is not None:
            hand_on_settings(client, self._engine.optimizer)
        begin_journal(self.library, trainer, self._engine)
        self._engine.set_gradient_accumulation_boundary(True)
        self.optimizers = [self._engine.optimizer]
        self.lr_scheduler_configs = schedules

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader with an order of samples that a resume finds again."""
        return resumable(self.library, self.lightning_module.trainer, dataloader)

    def _thaw(self, frozen: Engine) -> None:
        """Take the module back from the engine that evaluated it. Raises UsageError if its weights are not whole."""
        training = frozen.training_state
        if training.hooks is not None or training.config.precision != "fp32":
            raise UsageError(
                "fit() after validate(), test() or predict() of the same module, which rounded or sharded its weights: call "
                "fit() first, with Trainer(num_sanity_val_steps=-1) to validate before the first step, or give fit() a new "
                "module"
            )
        self.close()
        for parameter in self._trainable:
            parameter.requires_grad_(True)

    def on_train_start(self) -> None:
        """Go on with the random numbers of the loaded checkpoint, and with its data."""
        generators, self._generators = self._generators, None
        if generators is not None:
            resume_data(self.library, self.lightning_module.trainer, generators)

    def on_predict_start(self) -> None:
        """Raise UsageError if ranks would gather parameters for different numbers of batches."""
        check_predict(self.engine, self.lightning_module.trainer)

    def model_to_device(self) -> None:
        """Do nothing: the engine moves the model."""

    def teardown(self) -> None:
        """End Lightning's part; the engine stays for a save, a test or another fit, until `close` or the Trainer's end.

        Whole weights are the module's own then. Sharded ones are the engine's: it stays as long as the module.
        """
        module, engine = self.lightning_module, self._engine
        if module is not None and engine is not None and engine.training_state.hooks is not None:
            engine.close_with_model()
        elif module is not None and engine is not None:
            # The engine's finalizer has the module, which must not keep the Trainer that has the engine.
            trainer = module.trainer
            if not isinstance(trainer, weakref.ProxyTypes):  # Lightning tears down a second time after an error
                trainer = weakref.proxy(trainer)
            for each in module.modules():
                if getattr(each, "_trainer", None) is not None:
                    each._trainer = trainer
        FrozenObjects.thaw()  # so that the collector finds a Trainer that is dropped
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def close(self) -> None:
        """Release the engine's memory, threads and run folder; it is done at the end of the process too."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # -- a step -----------------------------------------------------------------------------------------------------

    def engine_backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Accumulate a micro-batch's gradients; Lightning divided the loss. See [Note: who does what]."""
        engine, module = self.engine, self.lightning_module
        automatic = module.automatic_optimization
        if engine.training_state.accumulation.is_new:
            self._follow_accumulation(engine, module.trainer.accumulate_grad_batches)
        last = automatic and not module.trainer.fit_loop._should_accumulate()
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        if automatic and not last:
            engine.step()

    def _follow_accumulation(self, engine: Engine, steps: int) -> None:
        """Take over a callback's changes at the start of an epoch."""
        if steps != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * steps * engine.world_size)

    def engine_step(self) -> None:
        """Update the parameters, if there was a backward since the last step."""
        if not self.engine.training_state.accumulation.is_new:
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the `get_extra_state()` of modules: parameters and buffers are the engine's to save."""
        return {
            f"{name}{'.' if name else ''}_extra_state": module.get_extra_state()
            for name, module in self.lightning_module.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the optimizer's state is the engine's to save."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save the engine's state and Lightning's dict as a checkpoint whose folder is `filepath` (all ranks)."""
        if storage_options is not None:
            raise UsageError("save_checkpoint(storage_options=...): write them into the config: zstore.storage_options")
        place = LightningCheckpoint.of(self.engine.world.broadcast_object(os.fspath(filepath)))
        if "optimizer_states" not in checkpoint:
            self._save_weights(checkpoint, place)
            return
        kept = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
        engine = self.engine
        with engine.world.agreeing():
            state = {STATE: content.encode(kept)} if self.is_global_zero else {}
            if self.is_global_zero:
                place.unlink()
        numbers = _numbers(self.lightning_module.trainer)
        with journal_taken_along(engine, place.stored):  # without gradients: see [Note: between steps]
            engine.save_checkpoint(place.folder, place.name, state, metrics=numbers, overwrite=True)
        with engine.world.agreeing():
            if self.is_global_zero:
                place.finish()

    def _save_weights(self, checkpoint: dict[str, Any], place: LightningCheckpoint) -> None:
        """Write the file that Lightning's own strategies write for `weights_only` (all ranks)."""
        engine = self.engine
        weights = whole_weights(engine)
        with engine.world.agreeing():
            if self.is_global_zero:
                if not os.path.isfile(place.path):  # a file is replaced at once
                    keep_journal(engine, place.stored)
                    remove(place, engine.training_state.config.storage_options)
                content = {**checkpoint, "state_dict": {**weights, **checkpoint["state_dict"]}}
                self.checkpoint_io.save_checkpoint(content, place.path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into the engine, all of it to fit, else the weights alone; return Lightning's dict (all ranks)."""
        place = LightningCheckpoint.of(os.fspath(checkpoint_path))
        fitting = self.lightning_module.trainer.state.fn.value == "fit"
        strict = bool(self.lightning_module.strict_loading)
        load_objects = self._load_objects or weights_only is False
        if not fitting and os.path.isfile(place.path):
            found: dict[str, Any] = self.checkpoint_io.load_checkpoint(place.path, "cpu", not load_objects)
            state = {name: value for name, value in found["state_dict"].items() if not name.endswith("_extra_state")}
            self.engine.load_module_state_dict(state, strict)
            return found
        folder, tag = place.to_load()
        _, state = self.engine.load_checkpoint(folder, tag, load_module_only=not fitting, load_module_strict=strict)
        if fitting:
            # Loaders take up their positions as they are made; their random draws meanwhile are not the run's.
            self.lightning_module.trainer.fit_loop._combined_loader = None
            self._generators = rng_state()
        version = {"pytorch-lightning_version": import_module(self.library).__version__, "state_dict": {}}
        if STATE not in state:
            if fitting:
                raise CheckpointMismatchError(
                    f"{place.path} was not saved by a Trainer, so there are no loops to resume: load its weights with "
                    "module.load_state_dict(zstore.load_state_dict(PATH)) before fit()"
                )
            return version
        found, left_out = content.decode(state[STATE], load_objects=load_objects)
        if left_out and self.is_global_zero:
            _log.warning(
                "%s: left out, since they are pickled: %s. ZstoreStrategy(load_objects=True) loads them, which runs code of "
                "whoever wrote them",
                place.path,
                ", ".join(left_out),
            )
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Hand modules their `get_extra_state()`; the engine loaded the other state."""
        for name, value in checkpoint.get("state_dict", {}).items():
            path, _, last = name.rpartition(".")
            if last == "_extra_state":
                self.lightning_module.get_submodule(path).set_extra_state(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the engine loaded it."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint (rank 0)."""
        if self.is_global_zero:
            place = LightningCheckpoint.of(os.fspath(filepath))
            keep_journal(self.engine, place.stored)
            remove(place, self.engine.training_state.config.storage_options)


def _numbers(trainer: Any) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def register(registry: Any, strategy: Any) -> None:
    """Enter the strategy into Lightning's registry, and let `MODULE.load_from_checkpoint` read the folders that it saves."""
    saving: Any = import_module(f"{strategy.library}.core.saving")
    saving.pl_load = loader_of_folders(saving.pl_load)
    for name, arguments in NAMES.items():
        description = f"zstore's engine ({arguments})" if arguments else "zstore's engine"
        registry.register(name, strategy, description=description, override=True, **arguments)
