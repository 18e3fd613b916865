"""`from_pretrained`: loads a model from a Hugging Face folder, directly from the files into shards.

[Note: the skeleton]
The model's class builds it as usual, but each parameter moves to the meta device when it is registered in a module, before it
is initialized: nothing large is in memory. Buffers are built for real, since many are in no file (such as frequencies of rotary
embeddings). Then each parameter is replaced by one in the store, or in memory if it is small, and filled from the file: every
rank reads only its own rows.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from zstore.errors import CheckpointMismatchError, ConfigError, UsageError, listed
from zstore.format import FLOAT8
from zstore.interop.huggingface import StoredWeight, WeightsReader
from zstore.io import UserPath, return_free_memory, user_path
from zstore.io.memory import as_numpy, torch_dtype
from zstore.ranks.world import World

from ..config.config import load_config
from ..params.record import named_parameters
from ..runtime.process import init_distributed, show_messages
from .builder import Builder
from .init import require_no_open_block
from .model import stored_buffers
from .store import builder_for

_TRIM_BYTES = 64 * 1024 * 1024
_MAX_LISTED = 8
"""The most keys of each kind that an error message lists."""
_IGNORED_KEY = r"rotary_emb\.inv_freq"
"""In older files; models now compute it. transformers ignores it too."""
_UNTRAINABLE = ("complex64", *FLOAT8)


def from_pretrained(cls: Any, folder: UserPath, *, config: Any = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a model with the weights of a Hugging Face folder, in eval mode, for `zstore.initialize` (all ranks).

    `cls` is a transformers class (`LlamaForCausalLM`, `AutoModelForCausalLM`), which is built from the folder's
    `config.json`, or a function without arguments that builds the model. `config` is the config of `initialize`: large
    parameters go directly to its tier for them, as with `zstore.Init`, and only this rank's rows are read. Without one,
    several ranks shard them in host memory, and a single rank keeps them whole. `dtype` is the parameters' floating-point
    dtype, by default each tensor's dtype in its file.

    Memory: the small parameters, the buffers, and one tensor at a time. Until the model is passed to `initialize`, a large
    parameter reads as NaN outside of `zstore.gather`.

    Raises CheckpointMismatchError, which lists missing keys, unexpected keys and different shapes, as transformers does; and
    the errors of reading and of opening a store. Pickled weights (`.bin`) are refused.
    """
    require_no_open_block("from_pretrained()")
    show_messages()
    init_distributed()
    world = World.current()
    loaded = None if config is None else load_config(config)
    path = user_path(folder)
    with world.agreeing():
        reader = WeightsReader(path)
    with world.agreeing():
        with _parameters_on_meta():
            model = _build(cls, reader.folder, dtype)
        found = match_weights(model, reader)
    loader = _WeightLoader(reader, dtype, builder_for(loaded, world)[0])
    with world.agreeing():
        loader.fill(model, found)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or threading.get_ident() != thread:
            return None
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _build(cls: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    options = {} if dtype is None else {"dtype": dtype}
    if callable(getattr(cls, "from_config", None)) or callable(getattr(cls, "_from_config", None)):
        from transformers import AutoConfig, GenerationConfig

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers finds no model in {folder}: {error}") from error
        # Automatic classes have `from_config`, model classes `_from_config`.
        build = cls.from_config if callable(getattr(cls, "from_config", None)) else cls._from_config
        model = build(config, **options)
        if (folder / "generation_config.json").is_file() and getattr(model, "generation_config", None) is not None:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        model = cls()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"from_pretrained() expects a transformers class or a function that builds a torch.nn.Module, got {cls!r}, "
            f"which returned a {type(model).__name__}"
        )
    return model


def match_weights(model: nn.Module, reader: WeightsReader) -> dict[str, StoredWeight]:
    """Return the tensor in the files for each parameter and stored buffer, by its first name in the model.

    Raises CheckpointMismatchError if names or shapes differ.
    """
    expected = {name: (aliases, parameter.shape) for name, aliases, parameter in named_parameters(model)}
    parameters = set(expected)
    expected |= {name: ((), buffer.shape) for name, buffer in stored_buffers(model)}
    names = {key for name, (aliases, _) in expected.items() for key in (name, *aliases)}
    stored = _with_prefix(reader.weights, names, getattr(model, "base_model_prefix", ""))
    found: dict[str, StoredWeight] = {}
    missing, mismatched = [], []
    for name, (aliases, shape) in expected.items():
        weight = next((stored[key] for key in (name, *aliases) if key in stored), None)
        if weight is not None and weight.shape == tuple(shape):
            found[name] = weight
        elif weight is not None:
            mismatched.append(f"{name} (file: {list(weight.shape)}, model: {list(shape)})")
        elif name in parameters or not _matches(name, getattr(model, "_keys_to_ignore_on_load_missing", None)):
            missing.append(name)
    known = names | {name for name, _ in model.named_buffers()}
    ignored = [_IGNORED_KEY, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unexpected = [name for name in stored if name not in known and not _matches(name, ignored)]
    if bad := next((w for name, w in found.items() if name in parameters and w.dtype in _UNTRAINABLE), None):
        raise UsageError(
            f"{bad.name!r} in {bad.path} is {bad.dtype}, which cannot be trained: convert the model to bfloat16"
        )
    if missing or unexpected or mismatched:
        raise CheckpointMismatchError(_mismatch_text(model, reader.folder, missing, unexpected, mismatched))
    return found


def _with_prefix(stored: Mapping[str, StoredWeight], names: Iterable[str], base: str) -> dict[str, StoredWeight]:
    """Return `stored` under the model's names: a base model's files lack the prefix that a model with a head has, and the
    other way round."""
    prefix = f"{base}."
    in_model, in_files = (any(name.startswith(prefix) for name in keys) for keys in (names, stored))
    if not base or in_model == in_files:
        return dict(stored)
    known = set(names)
    if in_files:
        return {key.removeprefix(prefix): weight for key, weight in stored.items()}
    return {prefix + key if prefix + key in known else key: weight for key, weight in stored.items()}


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _mismatch_text(
    model: nn.Module, folder: Path, missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str]
) -> str:
    kinds = {
        "missing in the files": missing,
        "unexpected in the files": unexpected,
        "with a different shape": mismatched,
    }
    lines = [f"the weights in {folder} are not those of a {type(model).__name__}:"]
    for kind, keys in kinds.items():
        if keys:
            lines.append(f"  {len(keys)} {kind}: {listed(keys, _MAX_LISTED)}")
    lines.append(
        "Pass the class that the folder was saved from. If transformers converts the layout of the weights while loading, "
        "load through it in shards: `with zstore.Init(config=config): model = cls.from_pretrained(folder)`"
    )
    return "\n".join(lines)


@dataclass(frozen=True)
class _WeightLoader:
    """Loads values into a skeleton: large ones into the store of `builder`, if there is one, others into memory."""

    reader: WeightsReader
    dtype: torch.dtype | None
    builder: Builder | None

    def fill(self, model: nn.Module, found: Mapping[str, StoredWeight]) -> None:
        """Load the values of every parameter and stored buffer."""
        moved_bytes = 0
        for name, aliases, parameter in list(named_parameters(model)):
            paths = (full_name.rpartition(".") for full_name in (name, *aliases))
            owners = [(model.get_submodule(path), attribute) for path, _, attribute in paths]
            filled = self._load_parameter(parameter, found[name], owners[0])
            for module, attribute in owners:
                setattr(module, attribute, filled)
            moved_bytes += filled.nbytes
            if moved_bytes >= _TRIM_BYTES:
                moved_bytes = 0
                return_free_memory()
        self._load_buffers(model, found)
        if self.builder is not None:
            self.builder.guard.watch(self.builder)

    def _load_parameter(self, meta: nn.Parameter, weight: StoredWeight, owner: tuple[nn.Module, str]) -> nn.Parameter:
        """Return a parameter with the values of `weight`, in the store or in memory."""
        dtype = torch_dtype(weight.dtype)
        if self.dtype is not None and dtype.is_floating_point:
            dtype = self.dtype
        if not dtype.is_floating_point and meta.requires_grad:
            raise CheckpointMismatchError(
                f"{weight.name!r} in {weight.path} has dtype {weight.dtype}, but must be trained: from_pretrained() does "
                "not read quantized weights"
            )
        is_stored = self.builder is not None and meta.numel() >= self.builder.threshold_numel
        memory = torch.empty(1, dtype=dtype).expand(meta.shape) if is_stored else torch.empty(meta.shape, dtype=dtype)
        parameter = nn.Parameter(memory, requires_grad=meta.requires_grad)
        parameter.__dict__.update(meta.__dict__)
        if self.builder is not None and is_stored:
            module, attribute = owner
            label = f"{attribute!r} of a {type(module).__name__}"
            self.builder.register_stored(parameter, module, label, lambda first, out: self._read(weight, first, out))
        else:
            self._read(weight, 0, parameter.data.view(-1))
        return parameter

    def _read(self, weight: StoredWeight, first: int, out: torch.Tensor) -> None:
        """Fill `out`, 1-D on the CPU, with flat elements of `weight` from `first` on, cast to its dtype."""
        stored = torch_dtype(weight.dtype)
        target = out if out.dtype == stored else torch.empty(out.numel(), dtype=stored)
        if target.numel():
            self.reader.read_into(weight, first, as_numpy(target))
        if target is not out:
            out.copy_(target)

    def _load_buffers(self, model: nn.Module, found: Mapping[str, StoredWeight]) -> None:
        stored = dict(stored_buffers(model))
        for name, buffer in model.named_buffers():
            weight = found.get(name) if name in stored else None
            if weight is not None and not buffer.is_meta:
                values = torch.empty(weight.shape, dtype=torch_dtype(weight.dtype))
                self._read(weight, 0, values.view(-1))
                buffer.copy_(values)
            elif buffer.is_meta:
                raise UsageError(
                    f"buffer {name!r} of a {type(model).__name__} has no values: it is computed from a parameter, or on the "
                    "meta device. Build the model within zstore.Init() instead, and load the weights there"
                )
