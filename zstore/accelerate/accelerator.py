"""`Accelerator`: a loop written for Accelerate, with the model in an engine."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zstore.engine.access.generation import in_step
from zstore.engine.config.config import load_config
from zstore.engine.engine import Engine
from zstore.engine.initialize import initialize
from zstore.errors import ConfigError, UsageError
from zstore.weights.layout import MAX_FILE_BYTES

from .config import ask_for_precision, compiling, mismatch_text, read_source, refuse_launchers, written
from .optimizer import EngineOptimizer, EngineScheduler
from .weights import replace_weights

_REFUSED = {
    "deepspeed_plugin": "pass the DeepSpeed JSON as zstore_config",
    "deepspeed_plugins": "pass the DeepSpeed JSON as zstore_config",
    "fsdp_plugin": "zstore shards the model itself, by zero_optimization.stage of the config",
    "megatron_lm_plugin": "zstore has no tensor or pipeline parallelism",
    "torch_tp_plugin": "zstore has no tensor parallelism",
    "parallelism_config": "zstore is data parallel alone; zero_optimization.stage of the config shards the model",
}
"""Arguments of accelerate's Accelerator, and why each is refused."""


_log = logging.getLogger("zstore")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator`, whose `prepare()` puts the model and its optimizer into a zstore engine.

    `zstore_config` is a config in DeepSpeed's dialect: a dict, a path or JSON text; by default the variable ZSTORE_CONFIG
    names it. `mixed_precision` and the accumulation answer what the config leaves "auto". All other arguments are
    accelerate's. One model is trained; models that are prepared without an optimizer are for evaluation.

    Raises UsageError and ConfigError for arguments that zstore does not serve, or that contradict the config.
    """

    def __init__(self, *args: Any, zstore_config: Any = None, **kwargs: Any) -> None:
        named = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        del named["self"]
        named |= named.pop("kwargs", {})
        _refuse(named)
        refuse_launchers("zstore.accelerate.Accelerator")
        asked = named.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        self._asked_precision = str(asked).lower()
        if self._asked_precision not in {"no", "fp16", "bf16"}:
            raise UsageError(f'Accelerator(mixed_precision="{asked}"): expected "no", "fp16" or "bf16"')
        self.config, self.config_source = self._read_config(zstore_config)
        load_config(self.config, name=self.config_source)
        self.engine: Engine | None = None
        """The engine of the model that is trained; None until it is prepared."""
        self._frozen: list[Engine] = []
        # Autocast and its scaler would do again what the engine does.
        super().__init__(**{**named, "mixed_precision": "no"})

    def _read_config(self, given: Any) -> tuple[dict[str, Any], str]:
        """Return the config as it was read, completed by what it leaves to this loop, and its source."""
        raw, source = read_source(given, "zstore_config")
        ask_for_precision(raw)
        raw.setdefault("steps_per_print", 0)  # a loop prints its own lines
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

    def _precision_answers(self) -> dict[str, Any]:
        return {f"{kind}.enabled": self._asked_precision == kind for kind in ("fp16", "bf16")}

    @property
    def mixed_precision(self) -> str:
        """The precision that the model computes in: "no" (fp32), "fp16" or "bf16"; before `prepare()` the one asked for."""
        if self.engine is None:
            return self._asked_precision
        return "no" if (found := self.engine.training_state.config.precision) == "fp32" else found

    # -- preparing --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return what was passed, prepared, in the same order (all ranks).

        A model that comes with its optimizer is trained: both become the engine's. `DummyOptim` and `DummyScheduler` stand
        for the optimizer and schedule that the config names. A model without an optimizer is prepared for evaluation.
        Raises UsageError for a second model with an optimizer, and for an optimizer without its model.
        """
        found: dict[int, Any] = {}
        if any(_is_schedule(one) for one in args):
            self.leave_schedule_to_loop()
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer | DummyOptim)]
        fresh = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        if fresh:
            found |= self._prepare_training(fresh, args)
        for one in args:
            if id(one) in found or _is_schedule(one):
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
        """Return the engine and its optimizer by what they stand for."""
        models = [one for one in args if isinstance(one, nn.Module) and not isinstance(one, Engine)]
        if len(optimizers) > 1 or (self.engine is not None and models):
            raise UsageError(
                "Accelerator.prepare(): one model is trained, with one optimizer; make an Accelerator for each"
            )
        optimizer = optimizers[0]
        owners = [model for model in models if _owns(model, optimizer)]
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
        """Return the answers to what the config leaves "auto"."""
        loaders = [one for one in args if isinstance(one, torch.utils.data.DataLoader)]
        sizes = [size for one in loaders if (size := _batch_size(one)) is not None]
        answers: dict[str, Any] = {
            **self._precision_answers(),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
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
        _refuse_placed(model)
        named = isinstance(optimizer, DummyOptim)
        if named and "optimizer" not in self.config:
            raise ConfigError(f'{self.config_source}: DummyOptim stands for the config\'s "optimizer": add the section')
        engine, *_ = initialize(
            model=model,
            optimizer=None if named else optimizer,
            model_parameters=optimizer.params if named else None,
            config=load_config(self.config, name=self.config_source),
            auto=answers,
        )
        self._check_device(engine)
        self.engine = engine
        return self._added(engine)

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
        known = [one for one in (self.engine, *self._frozen) if one is not None and one.module is model]
        if known:
            return self.prepare_model(known[0])
        _refuse_placed(model)
        raw = {name: value for name, value in self.config.items() if name not in ("optimizer", "scheduler")}
        answers = {**self._precision_answers(), "train_micro_batch_size_per_gpu": 1}
        engine, *_ = initialize(
            model=model, config=load_config(raw, name=self.config_source), auto=answers, frozen=True
        )
        self._check_device(engine)
        self._frozen.append(engine)
        return self._added(engine)

    def _added(self, engine: Engine) -> Engine:
        """Return the engine, noted as a prepared model."""
        engine._is_accelerate_prepared = True
        self._models.append(engine)
        generate = getattr(engine.module, "generate", None)
        if generate is not None and self.num_processes > 1 and engine.training_state.hooks is not None:
            # Loops generate with the model itself, too, and the ranks gather its parameters together.
            engine.module.generate = in_step(generate)
        return engine

    def _check_device(self, engine: Engine) -> None:
        if engine.device.type != self.device.type:
            engine.close()
            raise UsageError(
                f"the engine computes on {engine.device}, and accelerate on {self.device}: leave cpu=True out, or hide the "
                "GPUs with CUDA_VISIBLE_DEVICES="
            )

    def leave_schedule_to_loop(self) -> None:
        """Drop the schedule that the config names: the loop has its own. Raises ConfigError where an engine has it already."""
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

    # -- the loop ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`, divided by the accumulation steps."""
        engine = self._trained()
        boundary = bool(self.sync_gradients)
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)
        if not boundary:
            engine.step()  # ends the micro-batch

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Return the norm of the gradients over all parameters and ranks, and clip them to `max_norm` in the next step.

        `parameters` are those of the model, all of them. Raises UsageError for another norm than 2.
        """
        if float(norm_type) != 2.0:
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type}): gradients are clipped by their 2-norm")
        return torch.tensor(self._trained().clip_grad_norm_(float(max_norm)), device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise UsageError: gradients are clipped by their norm alone."""
        raise UsageError("clip_grad_value_(): gradients are clipped by their norm: use clip_grad_norm_()")

    def _trained(self) -> Engine:
        if self.engine is None:
            raise UsageError("pass the model and its optimizer to accelerator.prepare() first")
        return self.engine

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Raise UsageError where there are more ranks: every rank takes part in every forward."""
        if self.num_processes > 1:
            raise UsageError("join_uneven_inputs(): ranks need as many batches as each other: keep even_batches=True")
        yield

    # -- the model --------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model itself; of an engine, the one that it was made of."""
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped.module if isinstance(unwrapped, Engine) else unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict (all ranks): where parameters are sharded on rank 0, and an empty one on others.

        Rank 0 needs memory for the whole model; `save_model` does not.
        """
        engine = self._engine_of(model)
        if engine is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return state
        return engine.module_state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = MAX_FILE_BYTES,
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors, in place of those that are there (all ranks; rank 0 writes).

        Raises UsageError without `safe_serialization`.
        """
        engine = self._engine_of(model)
        if engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise UsageError("save_model(safe_serialization=False): weights are written as safetensors alone")
        replace_weights(engine, Path(save_directory), _bytes(max_shard_size))

    def _engine_of(self, model: nn.Module) -> Engine | None:
        """Return the engine that holds a model, wrapped or not."""
        if isinstance(model, Engine):
            return model
        engines = [one for one in (self.engine, *self._frozen) if one is not None]
        return next((one for one in engines if one.module is model), None)

    # -- saving and loading -----------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save everything into `output_dir`: model and optimizer as a checkpoint of zstore under `step-` and the step, the
        rest as accelerate does (all ranks). Return the folder. `kwargs` go to `Engine.save_checkpoint`."""
        if self.engine is None:
            return str(super().save_state(output_dir, safe_serialization, **kwargs))

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights.clear()
            self._trained().save_checkpoint(folder, **{"overwrite": True, **kwargs})

        with self._hidden(), _last(self._save_model_state_pre_hook, save):
            return str(super().save_state(output_dir, safe_serialization))

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what `save_state` saved, also at another world size (all ranks). `kwargs` go to `Engine.load_checkpoint`."""
        if self.engine is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return

        def load(models: list[nn.Module], folder: str) -> None:
            models.clear()
            engine = self._trained()
            engine.set_gradient_accumulation_boundary(True)  # this loop's batch sizes are its own
            engine.load_checkpoint(folder, **kwargs)

        with self._hidden(), _last(self._load_model_state_pre_hook, load):
            super().load_state(input_dir, load_kwargs)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Let accelerate see neither weights nor the optimizer's state, which are the engine's to save."""
        optimizers, self._optimizers = self._optimizers, []
        schedulers = self._schedulers
        self._schedulers = [one for one in schedulers if not isinstance(one, EngineScheduler)]
        self.get_state_dict = lambda model, unwrap=True: {}
        try:
            yield
        finally:
            del self.get_state_dict
            self._optimizers, self._schedulers = optimizers, schedulers

    # -- the end ----------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Close the engines, and forget all that was prepared; return as many None as `objects`."""
        self.close_engines()
        return super().free_memory(*objects)

    def close_engines(self) -> None:
        """Close the engines: the models can be used no more where their parameters were sharded."""
        for engine in (self.engine, *self._frozen):
            if engine is not None:
                engine.module.__dict__.pop("generate", None)
                engine.close()
        self.engine, self._frozen = None, []

    def end_training(self) -> None:
        """Complete a save under way, and end the trackers as accelerate does (all ranks)."""
        if self.engine is not None:
            self.engine.wait_for_checkpoint()
        super().end_training()


def _refuse(named: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that zstore does not serve."""
    for name, why in _REFUSED.items():
        if named.get(name) is not None:
            raise UsageError(f"Accelerator({name}=...): {why}")
    for name in ("dynamo_backend", "dynamo_plugin"):
        asked = named.get(name)
        backend = str(getattr(asked, "backend", asked) or "NO").rpartition(".")[2]
        if backend.upper() != "NO":
            raise UsageError(f"Accelerator({name}=...): {compiling(backend)}")


def _refuse_placed(model: nn.Module) -> None:
    """Raise UsageError for a model that others have placed or sharded."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UsageError(
            "the model is spread over devices by device_map: load it without, zstore places it; models larger than memory "
            "by zstore.from_pretrained"
        )


def _is_schedule(one: Any) -> bool:
    """Return whether it is a schedule of torch's, that the loop steps."""
    return isinstance(one, LRScheduler | ReduceLROnPlateau)


def _owns(model: nn.Module, optimizer: Any) -> bool:
    """Return whether the optimizer's first parameter is one of the model's."""
    if isinstance(optimizer, DummyOptim):
        # Its parameters may be an iterator, which the engine takes.
        optimizer.params = list(optimizer.params)
        first = next(iter(optimizer.params), None)
        first = next(iter(first["params"]), None) if isinstance(first, Mapping) else first
    else:
        first = next((one for group in optimizer.param_groups for one in group["params"]), None)
    return any(one is first for one in model.parameters())


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a loader's batch on one rank; None where it does not say."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _bytes(size: int | str) -> int:
    """Return a size as accelerate writes it, as "5GB", in bytes."""
    if isinstance(size, int):
        return size
    return int(accelerate.utils.convert_file_size_to_int(size))


@contextlib.contextmanager
def _last(hooks: dict[int, Any], hook: Any) -> Iterator[None]:
    """Have `hook` called after all others for the length of the block."""
    key = -1
    hooks[key] = hook
    try:
        yield
    finally:
        del hooks[key]
