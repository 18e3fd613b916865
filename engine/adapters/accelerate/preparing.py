"""Models, their optimizer and schedule on their way into engines."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.utils import TorchDynamoPlugin, convert_to_fp32
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from zstore.engine.access.generation import in_step
from zstore.engine.api.engine import Engine
from zstore.engine.api.initialize import initialize
from zstore.engine.config.config import load_config
from zstore.engine.params.record import PRECISIONS
from zstore.errors import ConfigError, UsageError
from zstore.io.tensors import cast_floating

from .arguments import (
    ask_for_precision,
    batch_size,
    communication_type,
    compiling,
    is_schedule,
    mismatch_text,
    owns,
    read_source,
    refuse,
    refuse_launchers,
    refuse_placed,
    written,
)
from .optimizer import EngineOptimizer, EngineScheduler

_log = logging.getLogger("zstore")
_holders: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[PreparingAccelerator], list[nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)
"""By model in an engine, the Accelerator that prepared it, and the parameters that an engine without an optimizer froze."""


class PreparingAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The part of `Accelerator` that reads the config, and puts models and the optimizer into engines."""

    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]

    def __init__(self, *args: Any, zstore_config: Any = None, **kwargs: Any) -> None:
        named = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        del named["self"]
        named |= named.pop("kwargs", {})
        refuse(named)
        refuse_launchers("zstore.accelerate.Accelerator")
        asked = named.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        self._asked_precision = str(asked).lower()
        if self._asked_precision not in {"no", "fp16", "bf16"}:
            raise UsageError(f'Accelerator(mixed_precision="{asked}"): expected "no", "fp16" or "bf16"')
        self._compiling = compiling(named)
        self._communication = communication_type(named)
        self.config, self.config_source = self._read_config(zstore_config)
        load_config(self.config, name=self.config_source)
        self.engine: Engine | None = None
        """The engine of the trained model; None until it is prepared."""
        self._frozen: list[Engine] = []
        # Autocast, its scaler and torch.compile would repeat the engine's work.
        # The engine computes on CUDA or on the CPU, whatever other devices there are.
        named.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(**{**named, "mixed_precision": "no", "dynamo_plugin": TorchDynamoPlugin(backend="no")})
        self._check_accumulation()

    def _read_config(self, given: Any) -> tuple[dict[str, Any], str]:
        """Return the config as it was read, completed by this loop's values, and its source."""
        raw, source = read_source(given, "zstore_config")
        ask_for_precision(raw)
        raw.setdefault("gradient_clipping", "auto")
        raw.setdefault("steps_per_print", 0)  # a loop prints its own lines
        self._ask_for_communication(raw, source)
        if self._asked_precision != "no":
            differing = [
                f"{kind}.enabled is {found}, mixed_precision is {self._asked_precision!r}"
                for kind in ("fp16", "bf16")
                if (found := written(raw, f"{kind}.enabled")) not in (None, "auto")
                and bool(found) != (self._asked_precision == kind)
            ]
            if differing:
                raise ConfigError(mismatch_text(source, differing))
        return raw, source

    def _ask_for_communication(self, raw: dict[str, Any], source: str) -> None:
        """Put a communication hook's request into the config. Raises ConfigError if the config says another type."""
        key, wanted = "communication_data_type", self._communication
        if wanted is not None and raw.setdefault(key, wanted) != wanted:
            hook = f"DistributedDataParallelKwargs(comm_hook={wanted!r})"
            raise ConfigError(mismatch_text(source, [f"{key} is {raw[key]!r}, {hook} asks for {wanted!r}"]))

    def _check_accumulation(self) -> None:
        """Raise ConfigError if the config says another accumulation than this loop."""
        key = "gradient_accumulation_steps"
        found, wanted = written(self.config, key), self.gradient_accumulation_steps
        if found not in (None, "auto", wanted):
            raise ConfigError(
                mismatch_text(self.config_source, [f"{key} is {found}, Accelerator({key}=...) is {wanted}"])
            )

    def _precision_answers(self) -> dict[str, Any]:
        return {f"{kind}.enabled": self._asked_precision == kind for kind in ("fp16", "bf16")}

    @property
    def mixed_precision(self) -> str:
        """The precision that the model computes in: "no" (fp32), "fp16" or "bf16"; before `prepare()` the requested one."""
        if self.engine is None:
            return self._asked_precision
        return "no" if (found := self.engine.training_state.config.precision) == "fp32" else found

    # -- preparing --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return the arguments, prepared, in the same order (all ranks).

        A model that comes with its optimizer is trained: both become the engine's. `DummyOptim` and `DummyScheduler` are
        placeholders of the optimizer and schedule in the config. A model without an optimizer is prepared for evaluation.
        Raises UsageError for a second model with an optimizer, and for an optimizer without its model.
        """
        found: dict[int, Any] = {}
        if any(is_schedule(one) for one in args):
            self.leave_schedule_to_loop()
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer | DummyOptim)]
        fresh = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        if fresh:
            found |= self._prepare_training(fresh, args)
        for one in args:
            if id(one) in found or is_schedule(one):
                continue
            if isinstance(one, nn.Module):
                found[id(one)] = self.prepare_model(one)
            elif isinstance(one, EngineOptimizer):
                found[id(one)] = self.prepare_optimizer(one)
            elif isinstance(one, DummyScheduler):
                found[id(one)] = self._config_schedule()
            else:
                found[id(one)] = super().prepare(one)
        for one in args:
            if id(one) not in found:
                found[id(one)] = self.prepare_scheduler(one)
        result = tuple(found[id(one)] for one in args)
        return result if len(result) > 1 else result[0]

    def _prepare_training(self, optimizers: Sequence[Any], args: Sequence[Any]) -> dict[int, Any]:
        """Return the engine and its optimizer by the objects that they replace."""
        models = [one for one in args if isinstance(one, nn.Module) and not isinstance(one, Engine)]
        if len(optimizers) > 1 or (self.engine is not None and models):
            raise UsageError(
                "Accelerator.prepare(): one model is trained, with one optimizer; make an Accelerator for each"
            )
        optimizer = optimizers[0]
        owners = [model for model in models if owns(model, optimizer)]
        if not owners:
            raise UsageError(
                "Accelerator.prepare(optimizer): pass the model whose parameters it updates to the same call, before it was "
                "prepared: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        engine = self._open_engine(owners[0], optimizer, self._answers(optimizer, args))
        wrapper = EngineOptimizer(engine)
        wrapper._is_accelerate_prepared = True
        self._optimizers.append(wrapper)
        return {id(owners[0]): engine, id(optimizer): wrapper}

    def _answers(self, optimizer: Any, args: Sequence[Any]) -> dict[str, Any]:
        """Return the answers to the config's "auto"."""
        loaders = [one for one in args if isinstance(one, torch.utils.data.DataLoader)]
        sizes = [size for one in loaders if (size := batch_size(one)) is not None]
        answers: dict[str, Any] = {
            **self._precision_answers(),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": 0.0,  # until the loop calls clip_grad_norm_()
            # The smallest, as that of a loader for training; sizes are for counts alone, since this loop cuts the batches.
            "train_micro_batch_size_per_gpu": min(sizes, default=1),
        }
        if isinstance(optimizer, DummyOptim):
            answers |= {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}
            answers |= {f"optimizer.params.{name}": value for name, value in optimizer.kwargs.items()}
        for one in args:
            if isinstance(one, DummyScheduler):
                answers["scheduler.params.total_num_steps"] = one.total_num_steps
                answers["scheduler.params.warmup_num_steps"] = one.warmup_num_steps
        return answers

    def _open_engine(self, model: nn.Module, optimizer: Any, answers: Mapping[str, Any]) -> Engine:
        """Return the engine that trains `model` (all ranks)."""
        refuse_placed(model)
        named = isinstance(optimizer, DummyOptim)
        if named and "optimizer" not in self.config:
            raise ConfigError(f'{self.config_source}: DummyOptim stands for the config\'s "optimizer": add the section')
        self.take_over(model)
        gc.collect()  # an unreferenced engine may hold the folder on disk
        engine, *_ = initialize(
            model=model,
            optimizer=None if named else optimizer,
            model_parameters=optimizer.params if named else None,
            config=load_config(self.config, name=self.config_source),
            auto=answers,
        )
        self._check_device(engine)
        _holders[model] = weakref.ref(self), []
        if self._compiling is not None:
            backend, how = self._compiling
            engine.compile(backend, how)
        self.engine = engine
        self._begin_journal(engine)
        return self._added(engine)

    def _begin_journal(self, engine: Engine) -> None:
        """Let the run's journal be in the project's folder, if there is one, from the first step on."""
        engine.journal.note(loop="accelerate")
        settings = self.project_configuration
        if settings.project_dir is not None:
            named = settings.automatic_checkpoint_naming
            engine.checkpoints.note_folder(
                os.path.join(settings.project_dir, "checkpoints") if named else str(settings.project_dir)
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the engine of a model that is not trained: for evaluation, generation, or as a reference (all ranks).

        An engine is returned as it is.
        """
        if isinstance(model, Engine):
            if model not in self._models:
                self._models.append(model)
            return model
        known = self.engine_of(model)
        if known is not None:
            return self.prepare_model(known)
        refuse_placed(model)
        raw = {name: value for name, value in self.config.items() if name not in ("optimizer", "scheduler")}
        answers = {**self._precision_answers(), "train_micro_batch_size_per_gpu": 1}
        trainable = [one for one in model.parameters() if one.requires_grad]
        engine, *_ = initialize(
            model=model, config=load_config(raw, name=self.config_source), auto=answers, frozen=True
        )
        self._check_device(engine)
        self._frozen.append(engine)
        _holders[model] = weakref.ref(self), trainable
        return self._added(engine)

    def engine_of(self, model: nn.Module) -> Engine | None:
        """Return the engine that holds a model, wrapped or not; also another Accelerator's."""
        if isinstance(model, Engine):
            return model
        known = _holders.get(model)
        holder = None if known is None else known[0]()
        engines = () if holder is None else (holder.engine, *holder._frozen)
        return next((one for one in engines if one is not None and one.module is model), None)

    def take_over(self, model: nn.Module) -> None:
        """Take a model out of its engine, with its present values: this Accelerator, or another one, prepared it before
        (all ranks). The optimizer's state is dropped, and a model that was prepared for evaluation can be
        trained again."""
        engine = self.engine_of(model)
        if engine is None:
            return
        reference, trainable = _holders.pop(model)
        if (holder := reference()) is not None:
            holder._forget(engine)
        engine.hand_back(load_config(self.config, name=self.config_source))
        for parameter in trainable:
            parameter.requires_grad_(True)

    def _forget(self, engine: Engine) -> None:
        """Leave an engine to another owner, who closes it."""
        engine.module.__dict__.pop("generate", None)
        if engine is self.engine:
            self.engine = None
            self._optimizers = [one for one in self._optimizers if not isinstance(one, EngineOptimizer)]
        self._frozen = [one for one in self._frozen if one is not engine]
        self._models = [one for one in self._models if one is not engine]

    def _added(self, engine: Engine) -> Engine:
        """Return the engine, noted as a prepared model."""
        engine._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(engine)
        if engine.training_state.config.precision != "fp32":
            # As accelerate's models do under autocast: loops pass fp32, and compute losses in it.
            engine.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            engine.register_forward_hook(lambda engine, args, output: convert_to_fp32(output))
        generate = getattr(engine.module, "generate", None)
        if generate is not None and self.num_processes > 1 and engine.training_state.hooks is not None:
            # Loops generate with the model itself, too, and the ranks gather its parameters together.
            engine.module.generate = in_step(generate)  # type: ignore[assignment]
        return engine

    def _check_device(self, engine: Engine) -> None:
        if engine.world_size != self.num_processes:
            found = engine.world_size
            engine.close()
            raise UsageError(
                f"the engine has {found} ranks, and accelerate {self.num_processes}: start accelerate with torch.distributed, "
                "on a machine without a GPU by cpu=True, or use_cpu=True of TrainingArguments"
            )
        if engine.device.type != self.device.type:
            engine.close()
            raise UsageError(
                f"the engine computes on {engine.device}, and accelerate on {self.device}: leave cpu=True out, or hide the "
                "GPUs with CUDA_VISIBLE_DEVICES="
            )

    def leave_schedule_to_loop(self) -> None:
        """Drop the schedule in the config: the loop has its own. Raises ConfigError if an engine has it already."""
        if self.engine is not None and self.engine.lr_scheduler is not None:
            raise ConfigError(
                f'{self.config_source}: the engine advances the config\'s "scheduler" already: remove the section, or pass '
                "the loop's schedule to the same prepare() as the model"
            )
        if self.config.pop("scheduler", None) is not None:
            _log.warning('%s: "scheduler" has no effect: the loop\'s own schedule is used', self.config_source)

    def _config_schedule(self) -> EngineScheduler:
        if self.engine is None or self.engine.lr_scheduler is None:
            raise ConfigError(
                f'{self.config_source}: DummyScheduler stands for the config\'s "scheduler": add the section, and pass model '
                "and optimizer to the same prepare()"
            )
        return EngineScheduler(self.engine)


def _cast_inputs(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    dtype = PRECISIONS[engine.training_state.config.precision]
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)
