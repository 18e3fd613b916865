"""Checks a model and prepares it for training: device, dtypes, the same values on every rank; and lists what a checkpoint
stores of it besides the parameters."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from zstore.checkpoint import CheckpointReader
from zstore.errors import CheckpointMismatchError, UsageError, listed
from zstore.format import buffer_array, model_array
from zstore.io import Files
from zstore.io.memory import dtype_name, plain_memory
from zstore.ranks.world import World
from zstore.weights.files import MAX_FILE_BYTES, plan_files
from zstore.weights.from_checkpoint import DTYPES, Companions, list_weights, write_weights

from ..config.config import Config
from ..params.sharding import mark_leaves, modules_of_classes
from ..runtime.process import warn_once

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def check_model(model: nn.Module, world: World, *, gathers: bool) -> None:
    """Raise UsageError for a model that cannot be trained or, with `gathers`, whose parameters cannot be gathered, and if the
    ranks' models differ (all ranks)."""
    world.raise_on_all_ranks(_model_error(model, gathers))
    own = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    digests = world.all_gather_object(hashlib.sha256(json.dumps(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank0_parameters = world.broadcast_object(own)
    first = next((f"{a}, on rank 0 {b}" for a, b in zip(own, rank0_parameters, strict=False) if a != b), "their number")
    ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    raise UsageError(
        f"ranks {ranks} have a different model from rank 0; parameters differ, on rank {world.rank} first: "
        f"{'none' if own == rank0_parameters else first}. Build the same model on every rank"
    )


def require_shapes(model: nn.Module) -> None:
    """Raise UsageError if a parameter has no shape yet."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {name!r} has no shape before the first batch, like nn.LazyLinear's: call the model with a batch, "
                "on every rank, before initialize()"
            )


def _model_error(model: nn.Module, gathers: bool) -> UsageError | None:
    """Return the error for the model on this rank, if any."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return UsageError(
                f"parameter {name!r} is on the meta device and has no values: create the model on a real device"
            )
        if parameter.is_complex():
            return UsageError(
                f"parameter {name!r} is {parameter.dtype}, but masters and checkpoints store real numbers: use its "
                "view_as_real() as the parameter, and view_as_complex() in forward"
            )
        if parameter.dtype in _FLOAT8:
            return UsageError(
                f"parameter {name!r} is {parameter.dtype}, which the engine neither trains nor stores: cast it to bfloat16, or "
                "register it as a buffer, which is not changed"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer.is_nested or buffer.is_quantized or buffer.layout != torch.strided:
            kind = "on the meta device" if buffer.is_meta else f"{buffer.dtype}, {buffer.layout}"
            return UsageError(
                f"buffer {name!r} is {kind}, but only dense tensors can be shared and saved: register its parts (as indices "
                "and values, or int_repr() and scale), or create it in forward"
            )
    for name, buffer in stored_buffers(model):
        try:
            dtype_name(buffer.dtype)
        except UsageError as error:
            return UsageError(
                f"buffer {name!r}: {error}. Cast it, or exclude it: register_buffer(..., persistent=False)"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return UsageError(f"module {name!r} is scripted and supports no hooks: pass it unscripted")
        # Attributes that torch.compile(module) and module.compile() set.
        if gathers and (module._compiled_call_impl is not None or "_orig_mod" in module._modules):
            return UsageError(
                f"module {name!r} is compiled, but with sharded or offloaded parameters units compile within their gather: "
                "pass the model uncompiled, or torch.compile(model) as a whole, and call engine.compile() after initialize()"
            )
    return None


def place_buffers(model: nn.Module, world: World, dtype: torch.dtype | None) -> None:
    """Move the model's buffers to their device, use rank 0's values, and cast floating-point ones to `dtype` (all ranks).

    If `dtype` is None, they keep their dtypes: frequencies of rotary embeddings and running statistics lose too much in 16
    bits. Buffers that several modules share stay shared; expanded buffers get their own storage.
    """
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer not in placed:
                moved = plain_memory(buffer.to(world.device))
                broadcast_bytes(world, moved)
                placed[buffer] = moved.to(dtype) if dtype and moved.is_floating_point() else moved
            setattr(module, name, placed[buffer])


def broadcast_bytes(world: World, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's values of a contiguous tensor of any dtype: backends support few dtypes (all ranks)."""
    if tensor.numel():
        world.broadcast(tensor.view(-1).view(torch.uint8))


def cast_for_running_statistics(model: nn.Module) -> None:
    """Make modules with running statistics in fp32 work with 16-bit parameters.

    torch's batch_norm accepts everything in one dtype or, as under autocast, 16-bit inputs with everything else in fp32: in
    such a module's forward the parameters are cast to the dtype of the statistics.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None and "forward" not in vars(module):
            module.forward = partial(_forward_cast, module, module.forward)


def _forward_cast(module: _NormBase, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    own, statistics = dict(module._parameters), module.running_mean
    if statistics is not None:
        cast = {name: None if p is None else p.to(statistics.dtype) for name, p in own.items()}
        module._parameters.update(cast)  # type: ignore[arg-type]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(own)


def own_memory(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values`, contiguous, in an unshared storage, cast to `dtype` if they are floating-point."""
    cast = (values.to(dtype) if values.is_floating_point() else values).resolve_neg()
    storage = cast.untyped_storage()
    is_sole_user = cast.is_contiguous() and storage.nbytes() == cast.nbytes and storage.resizable()
    # A slice of a mapped file or of a larger tensor cannot be released separately.
    return cast if is_sole_user and not storage.is_shared() else cast.clone(memory_format=torch.contiguous_format)


def save_config(model: nn.Module, folder: Path) -> None:
    """Write the config of a transformers model next to its weights, for `from_pretrained`."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if config is not None and callable(getattr(config, "save_pretrained", None)):
            if name == "config" and not getattr(config, "architectures", None):
                config = copy.deepcopy(config)
                config.architectures = [type(model).__name__]
            config.save_pretrained(folder)


def companion_files(model: nn.Module, config: Config) -> Callable[[CheckpointReader], list[str]] | None:
    """Return a function that adds the model's config, and if configured its weights in the compute dtype, to a checkpoint (rank
    0); None if there is neither."""
    adds_weights = config.zero.stage3_gather_16bit_weights_on_model_save

    def write(reader: CheckpointReader) -> list[str]:
        messages: list[str] = []
        if adds_weights:
            try:
                layouts = plan_files(list_weights(reader, DTYPES[config.precision]), MAX_FILE_BYTES)
            except CheckpointMismatchError as error:  # an unsupported name must not make a checkpoint fail
                messages.append(f"the checkpoint has no safetensors files: {error}")
            else:
                infinite = write_weights(reader, layouts, reader.path, overflow="inf", advance=lambda _: None)
                overflow_text = f"values do not fit {config.precision}: infinite in the weights"
                messages += [f"{tensor.name}: {tensor.count} {overflow_text}" for tensor in infinite]
        return messages + _save_companions(model, reader.path)

    has_config = callable(getattr(getattr(model, "config", None), "save_pretrained", None))
    return write if adds_weights or has_config else None


def _save_companions(model: nn.Module, folder: Path) -> list[str]:
    """Write the model's config, and copy the tokenizer from the folder that the model was loaded from, durably; return a
    warning for each failure."""
    before = set(folder.iterdir())
    messages: list[str] = []
    try:
        save_config(model, folder)
    except Exception as error:  # the user's values must not make a checkpoint fail
        messages.append(f"the model's config could not be written to the checkpoint: {error}")
    loaded_from = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "-"))
    files, companions = Files(), Companions()
    companions.add_named(loaded_from)
    for path in set(folder.iterdir()) - before:
        companions.files.pop(path.name, None)  # the model's own is newer
        if path.is_file():
            files.sync_file(path)
    try:
        companions.copy_into_checkpoint(folder, files)
    except OSError as error:
        companions.skipped.append(str(error))
    if companions.skipped:
        messages.append(f"files of {loaded_from} that are not in the checkpoint: {', '.join(companions.skipped)}")
    return messages


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (fully qualified name, buffer) once for each buffer in the model's state dict."""
    seen: set[torch.Tensor] = set()
    for path, module in model.named_modules():
        non_persistent = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent and buffer not in seen:
                seen.add(buffer)
                yield (f"{path}.{name}" if path else name), buffer


def unsharded_tensors(model: nn.Module, known: Iterable[nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (array, tensor) for unsharded tensors: buffers, and parameters not in `known`, which are frozen and were added
    after `initialize`."""
    for name, buffer in stored_buffers(model):
        yield buffer_array(name), buffer
    sharded = set(known)
    for name, parameter in model.named_parameters():
        if parameter not in sharded:
            yield model_array(name), parameter.detach()


def warn_of_float64(model: nn.Module, config: Config) -> None:
    """Warn of float64 parameters, which the engine casts."""
    doubles = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    if doubles:
        warn_once(
            "%s: float64 parameters are cast to %s, the config's dtype: %s",
            config.source,
            config.precision,
            listed(doubles, 5),
        )


def mark_leaves_of(config: Config, model: nn.Module) -> None:
    """Mark the modules that `leaf_module` names, and warn of names that match no module."""
    section = config.zero.leaf_module
    by_class = {name: modules_of_classes(model, [name]) for name in section.classes}
    by_name = {name: [m for path, m in model.named_modules() if path == name] for name in section.names}
    by_suffix = {end: [m for path, m in model.named_modules() if path.endswith(end)] for end in section.name_suffixes}
    mark_leaves(m for found in (by_class, by_name, by_suffix) for modules in found.values() for m in modules)
    requested = {**(by_class if "classes" in section.model_fields_set else {}), **by_name, **by_suffix}
    missing = [name for name, modules in requested.items() if not modules]
    if missing:
        warn_once("%s: zero_optimization.leaf_module: the model has no module %s", config.source, ", ".join(missing))
