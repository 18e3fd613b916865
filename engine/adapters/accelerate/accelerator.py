"""`Accelerator`: a loop written for Accelerate, with the model in an engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

from zstore.engine.api.engine import Engine
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.weights.layout import MAX_FILE_BYTES

from .optimizer import EngineScheduler
from .preparing import PreparingAccelerator

_OPTIMIZER_FILE = f"{accelerate.utils.OPTIMIZER_NAME}.bin"
"""File of accelerate's own `save_state` that this one does not write."""
_TAG = "state"
"""Tag of the checkpoint in a folder of `save_state`."""


class Accelerator(PreparingAccelerator):
    """Accelerate's `Accelerator`, whose `prepare()` puts the model and its optimizer into a zstore engine.

    `zstore_config` is a config in DeepSpeed's dialect: a dict, a path or JSON text; by default the variable ZSTORE_CONFIG
    names it. `mixed_precision` and the accumulation fill in the config's "auto". All other arguments are
    accelerate's. One model is trained; models that are prepared without an optimizer are for evaluation.

    Raises UsageError and ConfigError for arguments that zstore does not serve, or that contradict the config.
    """

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
        """Clip each element of the gradients, if they are whole on the rank. Raises UsageError if they are not."""
        self._trained()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _trained(self) -> Engine:
        if self.engine is None:
            raise UsageError("pass the model and its optimizer to accelerator.prepare() first")
        return self.engine

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Raise UsageError if there are more ranks: every rank takes part in every forward."""
        if self.num_processes > 1:
            raise UsageError("join_uneven_inputs(): ranks need as many batches as each other: keep even_batches=True")
        yield

    # -- the loop's own collectives, which fail on every rank as the engine's do ------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, one after the other (all ranks)."""
        with self._collective("gather"):
            return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean over the ranks (all ranks)."""
        with self._collective("reduce"):
            return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors padded to the longest of any rank (all ranks)."""
        with self._collective("pad_across_processes"):
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here (all ranks)."""
        with self._collective("wait_for_everyone"):
            super().wait_for_everyone()

    def _collective(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.engine is None else self.engine.world.around(name)

    # -- the model --------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model itself; of an engine, its original model."""
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped.module if isinstance(unwrapped, Engine) else unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict (all ranks): with sharded parameters on rank 0, and an empty one on others.

        Rank 0 needs memory for the whole model; `save_model` does not.
        """
        engine = self.engine_of(model)
        if engine is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return state
        with engine.world.calling("access", meeting="accelerator.get_state_dict()"):
            return engine.module_state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = MAX_FILE_BYTES,
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors, in place of present ones (all ranks; rank 0 writes).

        Raises UsageError without `safe_serialization`.
        """
        engine = self.engine_of(model)
        if engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise UsageError("save_model(safe_serialization=False): weights are written as safetensors alone")
        with engine.world.calling("save", meeting="accelerator.save_model()"):
            engine.save_16bit_model(Path(save_directory), max_file_bytes=_bytes(max_shard_size), overwrite=True)

    # -- saving and loading -----------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save everything into `output_dir`, in place of an earlier save: model and optimizer as the checkpoint `state`
        of zstore, the rest as accelerate does (all ranks). Return the folder. `kwargs` go to `Engine.save_checkpoint`."""
        if self.engine is None:
            return str(super().save_state(output_dir, safe_serialization, **kwargs))

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights.clear()
            self._trained().checkpoints.note_folder(_above_numbered(folder))
            self._trained().save_checkpoint(folder, **{"tag": _TAG, "overwrite": True, **kwargs})

        together = self.engine.world.calling("save", meeting="accelerator.save_state()")
        with together, self._hidden(), _last(self._save_model_state_pre_hook, save):
            return str(super().save_state(output_dir, safe_serialization))

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a folder of `save_state`, also at another world size (all ranks). `kwargs` go to `Engine.load_checkpoint`."""
        if self.engine is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return

        def load(models: list[nn.Module], folder: str) -> None:
            models.clear()
            engine, place = self._trained(), Path(folder)
            if "tag" not in kwargs and (place / _OPTIMIZER_FILE).exists() and not (place / _TAG).exists():
                raise CheckpointMismatchError(
                    f"{folder} was saved by accelerate without zstore, which cannot go on from it: load its weights into the "
                    "model before prepare(), and train from the start"
                )
            engine.set_gradient_accumulation_boundary(True)  # this loop's batch sizes are its own
            engine.load_checkpoint(folder, **kwargs)

        together = self.engine.world.calling("load", meeting="accelerator.load_state()")
        with together, self._hidden(), _last(self._load_model_state_pre_hook, load):
            super().load_state(input_dir, load_kwargs)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide weights and the optimizer's state, which the engine saves, from accelerate."""
        optimizers, self._optimizers = self._optimizers, []
        schedulers = self._schedulers
        self._schedulers = [one for one in schedulers if not isinstance(one, EngineScheduler)]
        self.get_state_dict = lambda model, unwrap=True: {}  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.get_state_dict
            self._optimizers, self._schedulers = optimizers, schedulers

    # -- the end ----------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Close the engines, and forget all prepared objects; return as many None as `objects`."""
        self.close_engines()
        return super().free_memory(*objects)

    def close_engines(self) -> None:
        """Close the engines: the models can be used no more if their parameters were sharded."""
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


def _above_numbered(folder: str) -> str:
    """Return the folder above one that ends with a number, as "step_100", of which a loop makes many; else the folder."""
    path = os.path.abspath(folder)
    return os.path.dirname(path) if path[-1:].isdigit() else path


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
