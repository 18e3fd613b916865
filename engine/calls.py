"""What a training script may ask of the run's state: the engine's calls that reach whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zstore.errors import UsageError
from zstore.ranks.world import World
from zstore.weights.layout import MAX_FILE_BYTES

from .access.access import Access
from .access.export import ExportOptions, save_weights
from .access.module_state import CustomLoad, load_module_state, module_state_dict, without_prefix
from .runtime.distributed import phase


class StateCalls:
    """The part of the engine that reads and changes state by name.

    All of these are collectives: every rank calls them with the same names, in the same order. `name` is a parameter's in
    the model, as in `model.named_parameters()`; of tied parameters any name will do. A wrong one is a UsageError, on every
    rank, that names the nearest.
    """

    access: Access

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.access.training.world

    @phase("access")
    def get_full_parameter(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a parameter in the best precision there is: a copy on the CPU, in its shape (all ranks).

        That is the fp32 master; of a parameter that is not trained, itself. None on other ranks with `rank0_only`.
        """
        return self.access.parameter(name, rank0_only=rank0_only)

    @phase("access")
    def get_optimizer_state(self, name: str, slot: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return what the optimizer keeps of a parameter, as "exp_avg": a copy on the CPU, fp32 (all ranks).

        In the parameter's shape; a scalar, as "step", without extents. None on other ranks with `rank0_only`. Raises
        UsageError for a slot that the optimizer does not keep.
        """
        return self.access.optimizer_state(name, slot, rank0_only=rank0_only)

    @phase("access")
    def get_gradient(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a parameter's gradient, as the step under way has it so far: a copy on the CPU, fp32 (all ranks).

        It is the mean over ranks, summed over the micro-batches since the last step, without the loss scale, before
        clipping. None after `step()`, for a parameter that no backward reached or that is not trained, and on other ranks
        with `rank0_only`.
        """
        return self.access.gradient(name, rank0_only=rank0_only)

    @phase("access")
    def set_full_parameter(self, name: str, values: Any) -> None:
        """Replace a parameter by rank 0's `values`: its fp32 master takes them as they are, the parameter rounded.

        `values` is anything that torch.as_tensor takes, of the parameter's shape; other ranks may pass None (all ranks).
        Raises UsageError for another shape, and within a forward or backward.
        """
        self.access.set_parameter(name, values)

    @phase("access")
    def set_optimizer_state(self, name: str, slot: str, values: Any) -> None:
        """Replace what the optimizer keeps of a parameter by rank 0's `values`; see `get_optimizer_state` (all ranks).

        Other ranks may pass None.
        """
        self.access.set_optimizer_state(name, slot, values)

    @phase("access")
    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        filename: str | None = None,
        dtype: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> list[Path]:
        """Write parameters and buffers as safetensors into `save_dir`, and return the files (all ranks; rank 0 writes).

        Numbered files of at most `max_file_bytes` of weights, with an index, where one does not hold them; named after
        `save_filename` (or `filename`), by default as `from_pretrained` finds them. For a name that ends with .bin or .pt, as
        "pytorch_model.bin", the file is called after it, ends with .safetensors, and a line in the log says so. A
        transformers model's config is written beside them. Floating values are rounded from the fp32 masters to `dtype`
        ("bf16", "fp16", "fp32"; by default what the model computes in). Tied weights are written once.
        `exclude_frozen_parameters` leaves those out. Memory: a few tens of MiB on every rank, whatever the model's size.

        The files have their names when they are whole and durable. Raises CheckpointExistsError where `save_dir` has
        weights of that name, CheckpointError for values that fp16 cannot hold, DiskFullError.
        """
        options = ExportOptions(
            filename=filename if save_filename is None else save_filename,
            dtype=dtype,
            max_file_bytes=max_file_bytes,
            without_frozen=exclude_frozen_parameters,
        )
        return save_weights(self.access, Path(save_dir), options)

    def save_fp16_model(self, save_dir: str | Path, save_filename: str | None = None) -> list[Path]:
        """Do as `save_16bit_model`, whose older name it is."""
        return self.save_16bit_model(save_dir, save_filename)

    @phase("access")
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict (all ranks); without parameters that are not trained if `exclude_frozen_parameters`.

        Where parameters are sharded (stage 3): copies on the CPU with whole values on rank 0, which need memory for the
        whole model there, and an empty dict on other ranks. Else the model's own `state_dict()`, on every rank.
        """
        return module_state_dict(self.access, exclude_frozen=exclude_frozen_parameters)

    @phase("access")
    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load rank 0's `state_dict` into the model, at every stage; other ranks may pass {} (all ranks).

        The fp32 masters take the values as they are, parameters and buffers rounded; the optimizer's state stays. Without
        `strict`, what only one of both has is left out. `custom_load_fn(src=state_dict, dst=model)` is called on rank 0
        instead, with whole parameters to write to. `fetch_z3_params` is not needed: parameters are gathered where they are
        sharded. Raises UsageError, before anything is changed, that lists what does not fit.
        """
        self.access.require_no_block("engine.load_module_state_dict()")
        load_module_state(self.access, without_prefix(state_dict), strict=strict, custom=custom_load_fn)

    @phase("access")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict as `load_module_state_dict` does, and return its missing and unexpected keys (all ranks).

        Raises UsageError for `assign`, which would give the parameters other memory.
        """
        if assign:
            raise UsageError(
                "engine.load_state_dict(assign=True) would give parameters memory that no step changes: leave it out"
            )
        self.access.require_no_block("engine.load_state_dict()")
        return load_module_state(self.access, without_prefix(state_dict), strict=strict)
