"""Detects changes to the model that would desynchronize it from the engine after `initialize`, and guards its state dicts: it
raises an error with advice, instead of letting code read NaN or values that the next step would overwrite.

[Note: what would desynchronize them]
The engine updates the storage that it assigned to each parameter, in the config's dtype and on its device. If a parameter
were given different storage, the model would never see the updates. So:

- Conversions of `nn.Module` (`to`, `half`, `float`, `cuda`, `to_empty`, `share_memory`, ...) all call `_apply`, which is
  wrapped in each module while the engine is open. A conversion that would change a parameter is rejected before it begins.
- Changes that bypass it (`parameter.data = ...`, `module.weight = nn.Parameter(...)`, an added module, an unfrozen parameter)
  are detected at the next forward or step by addresses and identities, in a few hundred nanoseconds per parameter.

[Note: changed in place]
A script may write to parameters between steps (`clamp_`, `nn.init`, `copy_` under `no_grad`). Their version counters reveal
it at the next forward, step, save or read of the state. A resident parameter keeps the written values, and its separate master
is updated from them. Values written to a sharded one have been released by then, so the check raises an error. A write through
`.data` changes no counter, and the next update would overwrite it, except in a parameter that is its own master. So each step
samples the first values of one parameter in turn, and the next step raises an error if they changed and differ from the
master's. Other calls do not check, since a script may swap weights through `.data` for an evaluation, and swap them back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError, listed
from zstore.format import model_array
from zstore.io.memory import as_torch

from ..params.record import ParameterRecord, Residency

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

Convert = Callable[[torch.Tensor], torch.Tensor]

_MAX_PROBE_DIMS = 5
_SAMPLE_NUMEL = 1024
_MAX_NAMED = 5
"""Maximum number of parameters named in an error message."""
_ALTERNATIVES = (
    "call engine.module_state_dict(), engine.save_16bit_model(folder) or engine.save_checkpoint(folder) on all ranks, or "
    "wrap it in `with zstore.gather(model):`"
)


class ParameterGuard:
    """Watches the parameters of one run, in the modules `roots`. See [Note: what would desynchronize them].

    `state_dict()` raises if parameters are sharded, and `load_state_dict()` also if masters would get out of sync.
    """

    open_blocks = 0
    """Open blocks of `zstore.gather`."""
    _is_suspended = False

    def __init__(self, roots: dict[str, nn.Module | None], training: Training) -> None:
        model, records = training.model, training.state.records
        self.running: list[str] = []
        """Engine forwards and backwards currently running."""
        self._roots = roots
        self._update, self._state = training.update, training.state
        self._units = None if training.hooks is None else training.hooks.units
        self._model = model
        self.records = {record.parameter: record for record in records}
        """By parameter."""
        trains_any = any(record.group is not None for record in records)  # otherwise requires_grad does not matter
        self._expected = [
            (r, r.parameter, r.dtype, trains_any and r.group is None and not r.parameter.requires_grad) for r in records
        ]
        """Each parameter, its dtype, and whether it was frozen."""
        self._versioned = [(record, record.parameter) for record in records if not record.parameter.is_inference()]
        """The tensors that have a version counter."""
        for record, _ in self._versioned:
            record.note_version()
        self._late_parameters: dict[nn.Parameter, str] = {}
        """Frozen parameters that were added after `initialize`, already reported to the user, and their names."""
        self._tables: list[dict[str, Any]] = []
        self._entries: list[Any] = []
        self._record_structure()
        self._sampled_in_turn = cycle(self._with_separate_master(records))
        self._sample: tuple[ParameterRecord, torch.Tensor] | None = None
        """The first values of a parameter, sampled by a step."""
        self._wrappers = [_ApplyWrapper(module, self._check_conversion) for module in model.modules()]
        self._emits_empty_tensors = False
        """Whether state dicts have empty tensors for sharded parameters."""
        self._full_tensors: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
            ]

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record that a forward or a backward of the engine is running."""
        self.running.append(name)
        try:
            yield
        finally:
            self.running.pop()

    def remove(self) -> None:
        """Stop watching, and remove the hooks from the modules; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        for table in (self._expected, self._versioned, self._late_parameters, self._tables, self._entries):
            table.clear()
        self._sampled_in_turn, self._sample = cycle(()), None
        while self._wrappers:
            self._wrappers.pop().remove()

    def _check_conversion(self, module: nn.Module, convert: Convert) -> None:
        """Raise UsageError if `convert`, tried on small tensors of the same kinds, would change a parameter of `module`."""
        target = "the model" if module is self._model else f"a {type(module).__name__} of the model"
        refusal = f"{target} cannot be converted after initialize()"
        tried_kinds: set[tuple[torch.dtype, torch.device, int]] = set()
        for name, parameter in module.named_parameters():
            kind = parameter.dtype, parameter.device, parameter.dim()
            if parameter not in self.records or kind in tried_kinds:
                continue
            tried_kinds.add(kind)
            dtype, device, dims = kind
            probe = torch.zeros((2,) * min(dims, _MAX_PROBE_DIMS), dtype=dtype, device=device)
            address, strides = probe.data_ptr(), probe.stride()
            with torch.no_grad():
                converted = convert(probe)
            if (converted.dtype, converted.device) != (dtype, device):
                change = f"is {_describe(parameter)} and would become {_describe(converted)}"
                raise UsageError(f"{refusal}: parameter {name!r} {change}. {_ADVICE}")
            if (converted.data_ptr(), converted.stride()) != (address, strides):
                raise UsageError(f"{refusal}: parameter {name!r} would be reallocated. {_ADVICE}")

    def check(self) -> None:
        """Raise UsageError if a parameter is no longer the one that the engine trains; a replaced storage is restored.

        When gradients are disabled, frozen parameters may require them: a model with adapters may double as a reference model.
        """
        trains = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():  # takes a fifth of the time for released parameters
            for record, parameter, dtype, frozen in self._expected:
                moved = parameter.data_ptr() != record.address or parameter.dtype is not dtype
                if moved or (frozen and trains and parameter.requires_grad):
                    self._raise_changed(record)
        self.check_values()
        for parameter, name in self._late_parameters.items():
            if trains and parameter.requires_grad:
                raise UsageError(_not_trained_text(name))
        entries = self._current_entries()
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._check_structure()

    def check_values(self) -> None:
        """Update masters from values written to parameters in place. If the parameters are sharded, raises UsageError and
        discards the values. See [Note: changed in place]."""
        with torch._C.DisableTorchFunctionSubclass():
            written = [record for record, parameter in self._versioned if parameter._version != record.version]
        if not written:
            return
        if self._update.is_in_backward:
            raise UsageError(
                'parameters changed in place between backward() and step(), but with "step_overlap": "backward" '
                "they are being updated at that point: change them after step()"
            )
        self._update.drain()
        if not self._update.torn:  # torn state raises on its next use anyway
            self._state.follow_parameters(self._with_separate_master(written))
        if self._units is not None:
            self._units.release_idle()
        for record in written:
            record.note_version()
        sharded = [record for record in written if record.residency is not Residency.RESIDENT]
        for record in sharded:
            record.restore()
        if sharded:
            names = listed([repr(record.name) for record in sharded], _MAX_NAMED)
            raise UsageError(
                f"sharded or offloaded parameters were changed in place ({names}): the values were written to "
                "temporary memory and are lost. Write them within `with "
                "zstore.gather(parameter, modifier_rank=0):`, or call engine.set_full_parameter(name, values)"
            )

    def _with_separate_master(self, records: Sequence[ParameterRecord]) -> list[ParameterRecord]:
        """Return the records of resident parameters that have a separate fp32 master."""
        resident = [r for r in records if r.residency is Residency.RESIDENT and r.group is not None and r.owned_numel]
        return [record for record in resident if not self._state.is_master(record)]

    def note_sample(self) -> None:
        """Sample the first values of one parameter with a separate master (after a step). See [Note: changed in place]."""
        record = next(self._sampled_in_turn, None)
        if record is not None:
            self._sample = record, record.owned()[:_SAMPLE_NUMEL].clone()

    def check_sample(self) -> None:
        """Raise UsageError if the sampled values changed and the master did not (before a step)."""
        sample, self._sample = self._sample, None
        if sample is None or same_bits(now := sample[0].owned()[:_SAMPLE_NUMEL], sample[1]):
            return
        name = sample[0].name
        master = as_torch(self._state.store.read(model_array(name), 0, now.numel()).wait())
        if not same_bits(now, master.to(now.device, now.dtype)):
            raise UsageError(
                f"parameter {name!r} was changed through .data, which does not reach its fp32 master: this step would "
                "undo it. Write `with torch.no_grad(): parameter.clamp_(...)` without .data, or call "
                "engine.set_full_parameter(name, values)"
            )

    def _raise_changed(self, record: ParameterRecord) -> None:
        parameter = record.parameter
        if parameter.data_ptr() == record.address and parameter.dtype is record.dtype:
            raise UsageError(
                f"parameter {record.name!r} was frozen at initialize() and has requires_grad=True now, but there is no "
                "optimizer state for it, so it would never be trained: make it trainable before initialize() (after that it "
                "may be frozen and unfrozen), or set requires_grad=False"
            )
        found = _describe(parameter)
        record.restore()
        raise UsageError(
            f"parameter {record.name!r} was given different storage after initialize() ({found}; the engine trains it as "
            f"{_describe(parameter)}), which the optimizer would not update. The engine's values are back in place. To change "
            "values, call engine.set_full_parameter(name, values), or use `with zstore.gather(parameter, "
            f"modifier_rank=0):`. {_ADVICE}"
        )

    def _record_structure(self) -> None:
        """Record the current parameters and modules."""
        modules = [module for root in self._roots.values() if root is not None for module in root.modules()]
        self._tables = [self._roots, *(table for m in modules for table in (m._parameters, m._modules))]
        self._entries = self._current_entries()

    def _current_entries(self) -> list[Any]:
        """Return all parameters and modules in the tables, without reading any as an attribute of its module."""
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def _check_structure(self) -> None:
        """Raise UsageError if there is a trainable parameter that the engine does not know about."""
        added = {
            parameter: name
            for root in self._roots.values()
            if root is not None
            for name, parameter in root.named_parameters()
            if parameter not in self.records and parameter not in self._late_parameters
        }
        for parameter, name in added.items():
            if parameter.requires_grad:
                raise UsageError(_not_trained_text(name))
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            _log.warning(
                "parameter %r%s: added to the model after initialize(): checkpoints store rank 0's full copy",
                next(iter(added.values())),
                more,
            )
            self._late_parameters |= added
        self._record_structure()

    def emit_empty_tensors(self, *, warns: bool) -> None:
        """Represent sharded parameters by empty tensors in state dicts; if `warns`, log this once."""
        self._emits_empty_tensors, self._has_warned = True, not warns
        for module in self._model.modules():
            # A distinct object, because torch sets an attribute on it.
            hook = partial(self._after_state_dict)
            self._handles.append(module.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]

    def emit_full_tensors(self, state: Mapping[str, Any]) -> None:
        """Use the tensors of this state dict of the model in place of empty ones, while they are alive."""
        self._full_tensors.update({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})

    def _records_of(self, module: nn.Module) -> Iterator[tuple[str, ParameterRecord]]:
        for name, parameter in module.named_parameters(recurse=False):
            record = None if self._is_suspended else self.records.get(parameter)
            if record is not None:
                yield name, record

    def _released(self, module: nn.Module) -> list[tuple[str, ParameterRecord]]:
        return [(name, each) for name, each in self._records_of(module) if each.residency is Residency.RELEASED]

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        released = self._released(module)
        if released and not self._emits_empty_tensors:
            raise UsageError(f"state_dict() was called on a model whose parameters are sharded: {_ALTERNATIVES}")
        for _, record in released:
            record.detaches_empty = True

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        is_partial = False
        for name, record in self._released(module):
            record.detaches_empty = False
            tensors = map(self._full_tensors.get, (record.name, *record.aliases))
            full = next((tensor for tensor in tensors if tensor is not None), None)
            is_partial |= full is None
            if full is not None and prefix + name in state:
                state[prefix + name] = full
        if is_partial and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "state_dict() returns sharded parameters as empty tensors, as in DeepSpeed; to get full tensors, %s",
                _ALTERNATIVES,
            )

    def _before_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        loaded = [record for name, record in self._records_of(module) if prefix + name in state]
        separate = (
            [] if self.open_blocks else [r for r in loaded if r.group is not None and not self._state.is_master(r)]
        )
        if separate or any(record.residency is Residency.RELEASED for record in loaded):
            raise UsageError(
                "load_state_dict() was called on a model in training: its values are in shards, or in fp32 masters that "
                "would overwrite them at the next step. Call engine.load_module_state_dict(state) on all ranks, or load "
                "before initialize(), or wrap it in `with zstore.gather(model, modifier_rank=0):`"
            )

    @contextmanager
    def allow_state_dicts(self) -> Iterator[None]:
        """Allow all state dicts within a `with` block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Return no-op hooks for copies and pickles of the model."""
        return _inert_guard, ()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype are bit-identical."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


_ADVICE = (
    'Choose the dtype in the config ("bf16", "fp16") or convert the model before initialize(); to export to other '
    "software, call engine.save_16bit_model(folder, dtype=...) or engine.module_state_dict(). After engine.close() the "
    "model may be converted"
)


def _not_trained_text(name: str) -> str:
    return (
        f"parameter {name!r} was added to the model, or replaced an existing one, after initialize(): it would not be "
        "trained. Complete the model before initialize(); to change the values of a parameter, call "
        "engine.set_full_parameter(name, values)"
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


class _ApplyWrapper:
    """A module's `_apply` while the engine is open. Copies and pickles have the original method."""

    def __init__(self, module: nn.Module, check: Callable[[nn.Module, Convert], None]) -> None:
        self._module = weakref.ref(module)
        self._check = check
        self._original = module.__dict__.get("_apply")
        module.__dict__["_apply"] = self

    def __call__(self, fn: Convert, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert the module with `fn`, or raise UsageError if that would change a parameter."""
        module = self._live_module()
        self._check(module, fn)
        original = self._original or MethodType(type(module)._apply, module)
        with torch._C.DisableTorchFunctionSubclass():  # so that released parameters are not gathered
            result: nn.Module = original(fn, *args, **kwargs)
        return result

    def _live_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise UsageError("the module was deleted")
        return module

    def remove(self) -> None:
        """Restore the module's original method."""
        module = self._module()
        if module is not None and module.__dict__.get("_apply") is self:
            del module.__dict__["_apply"]
            if self._original is not None:
                module.__dict__["_apply"] = self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._live_module())]
        return MethodType(type(copied)._apply, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._live_module(), "_apply")


def _inert_guard() -> ParameterGuard:
    guard = ParameterGuard.__new__(ParameterGuard)
    guard.records = {}
    return guard
