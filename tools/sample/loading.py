"""A checkpoint's weights into a model in host memory: the model is built in the type asked for, and filled as it is read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from zstore.checkpoint import ArraySource
from zstore.errors import CheckpointMismatchError, ConfigError
from zstore.format import Array
from zstore.tensors import as_numpy, dtype_name
from zstore.weights.cast import cast_into
from zstore.weights.from_checkpoint import list_weights, put_weights

from .models import SHIPPED, Gpt, from_transformers

_NAMED = 3
"""Weights that an error names."""


def shipped_of(source: ArraySource, dtype: torch.dtype) -> Gpt:
    """Return the shipped model, without values, that a checkpoint's weights are of. Raises ConfigError where there is none."""
    shapes = {name.removeprefix("model/"): array.spec.shape for name, array in source.arrays.items()}
    words, positions = shapes.get("transformer.wte.weight", ()), shapes.get("transformer.wpe.weight", ())
    blocks = {found[1] for name in shapes if (found := re.match(r"transformer\.h\.(\d+)\.", name))}
    for config in SHIPPED.values():
        if words == (config.vocab_size, config.hidden) and len(blocks) == config.num_layers and len(positions) == 2:
            with torch.device("meta"):
                model = Gpt(replace(config, max_positions=positions[0]))
            model.to(dtype).to_empty(device="cpu")
            model.lm_head.weight = model.transformer.wte.weight
            return model
    raise ConfigError(
        f"{source.location} is of none of {', '.join(SHIPPED)}, and no config.json lies beside it: give --model FOLDER, "
        "with the model's config.json and tokenizer"
    )


def transformers_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return a causal language model of the config in `folder`, with values that mean nothing (extra `hf`)."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {folder}: expected a folder with a config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"{path} needs transformers, which is not installed: pip install 'zstore[hf]'") from error
    with from_transformers(path):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def fill(model: nn.Module, source: ArraySource) -> None:
    """Read the checkpoint's parameters and buffers into the model's, cast to their types; values that fp16 cannot hold
    become its largest. Raises CheckpointMismatchError where one has what the other lacks, or in another shape."""
    weights = list_weights(source, None)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    _require_same(model, tensors, {weight.name: weight.shape for weight in weights}, source.location)
    targets = {weight.array: tensors[weight.name].detach() for weight in weights}
    views = {name: (as_numpy(tensor).reshape(-1), dtype_name(tensor.dtype)) for name, tensor in targets.items()}

    def put(array: str, first: int, values: Array) -> None:
        view, dtype = views[array]
        cast_into(values, view[first : first + values.size], dtype, "clamp")

    put_weights(source, [replace(weight, dtype=views[weight.array][1]) for weight in weights], put)


def _require_same(
    model: nn.Module, tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], location: str
) -> None:
    unknown = [name for name in shapes if name not in tensors]
    wrong = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    held = {id(tensors[name]) for name in shapes if name in tensors}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    for what, names in (("has no place for", unknown), ("has another shape of", wrong), ("also needs", missing)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise CheckpointMismatchError(
                f"{location}: the model {what} {', '.join(names[:_NAMED])}{more}: give the --model FOLDER that the run trained"
            )
