"""Keeps the model's parameters and the engine's state of them together after `initialize`.

[Note: what would part them]
The engine updates the memory that it gave each parameter, of the type and on the device that the config asks for. Were a
parameter given other memory, the updates would go on in the old one and the model would never see them. So:

- Conversions of `nn.Module` (`to`, `half`, `float`, `cuda`, `to_empty`, `share_memory`, ...) all go through `_apply`, which
  each module of the model has as an attribute of its own while the engine is open. A conversion that changes nothing passes;
  any other is refused before it begins.
- Anything that bypasses it (`parameter.data = ...`, `module.weight = nn.Parameter(...)`, a module that was added, a frozen
  parameter that is to be trained) is found at the next forward or step, by addresses and identities: a few hundred
  nanoseconds for each parameter.

[Note: changed in place]
A script may write to parameters between steps (`clamp_`, `nn.init`, `copy_` under `no_grad`). Their version counters tell,
at the next forward, step, save or call that reads the state. A resident parameter has the values that were written; its
master, if that is another array, takes them over. A sharded one, which a forward changed, has them in memory that is gone
by then: that is refused. A write through `.data` changes no counter. The memory of a parameter that is its own
master keeps it; elsewhere the next update would overwrite it. So each step notes the first values of one parameter, in
turn, and the next one refuses to begin if they have changed, and are not the master's. Only the step checks, since a script
may swap weights through `.data` for an evaluation, and back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, cycle
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError, listed

from ..params.record import ParameterRecord, Residency
from ..training.training import Training
from .full_tensors import RankArray

_log = logging.getLogger("zstore")

Convert = Callable[[torch.Tensor], torch.Tensor]

_MOST_PROBE_DIMS = 5
_SAMPLE_NUMEL = 1024
_NAMED = 5
"""Parameters that an error names."""


class ParameterGuard:
    """Watches the parameters of one run. See [Note: what would part them]. `take_over` lets the masters of resident
    parameters follow writes to these."""

    def __init__(
        self,
        roots: dict[str, nn.Module | None],
        training: Training,
        take_over: Callable[[Sequence[ParameterRecord]], None],
    ) -> None:
        model, records = training.model, training.state.records
        self._roots = roots
        self._pending = training.pending
        self._take_over = take_over
        self._model = model
        self._records = {record.parameter: record for record in records}
        trains = any(record.group is not None for record in records)  # else nothing would be missed
        self._laid_out = [
            (one, one.parameter, one.dtype, trains and one.group is None and not one.parameter.requires_grad)
            for one in records
        ]
        """Each parameter with its type, and whether it was frozen."""
        self._counting = [(record, record.parameter) for record in records if not record.parameter.is_inference()]
        """Those that have a version counter."""
        for record, _ in self._counting:
            record.note_version()
        self._later: dict[nn.Parameter, str] = {}
        """Frozen parameters that were added later, which the user was told of, and their names."""
        self._tables: list[dict[str, Any]] = []
        self._entries: list[Any] = []
        self._note_structure()
        self._shadows = [_Shadow(module, self._check_conversion) for module in model.modules()]

    def remove(self) -> None:
        """Stop watching; a second call does nothing."""
        for noted in (self._laid_out, self._counting, self._later, self._tables, self._entries):
            noted.clear()
        while self._shadows:
            self._shadows.pop().remove()

    # -- conversions ------------------------------------------------------------------------------------------------

    def _check_conversion(self, module: nn.Module, convert: Convert) -> None:
        """Raise UsageError if `convert` would change a parameter of `module`. Values are not touched: it is tried on
        small tensors of the same kinds."""
        tried: set[tuple[torch.dtype, torch.device, int]] = set()
        for name, parameter in module.named_parameters():
            kind = parameter.dtype, parameter.device, parameter.dim()
            if parameter not in self._records or kind in tried:
                continue
            tried.add(kind)
            dtype, device, dims = kind
            probe = torch.zeros((2,) * min(dims, _MOST_PROBE_DIMS), dtype=dtype, device=device)
            address, strides = probe.data_ptr(), probe.stride()
            with torch.no_grad():
                made = convert(probe)
            if (made.dtype, made.device) != (dtype, device):
                change = f"is {_kind(parameter)} and would become {_kind(made)}"
                raise UsageError(f"{self._refusal(module)}: parameter {name!r} {change}. {_ADVICE}")
            if (made.data_ptr(), made.stride()) != (address, strides):
                raise UsageError(f"{self._refusal(module)}: parameter {name!r} would move to other memory. {_ADVICE}")

    def _refusal(self, module: nn.Module) -> str:
        which = "the model" if module is self._model else f"a {type(module).__name__} of the model"
        return f"{which} cannot be converted after initialize()"

    # -- changes that bypass them -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise UsageError if a parameter is no longer the one that the engine trains; replaced memory is put back.

        Without gradients, frozen parameters may be thawed, as adapters are that serve as a reference.
        """
        trains = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():  # a fifth of the time for released ones
            for record, parameter, dtype, frozen in self._laid_out:
                moved = parameter.data_ptr() != record.address or parameter.dtype is not dtype
                if moved or (frozen and trains and parameter.requires_grad):
                    self._refuse(record)
        self.check_values()
        for parameter, name in self._later.items():
            if trains and parameter.requires_grad:
                raise UsageError(_added(name))
        entries = self._listed()
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._check_structure()

    def check_values(self) -> None:
        """Take over values written to parameters in place. Raises UsageError, and forgets them, if the parameters are
        sharded. See [Note: changed in place]."""
        with torch._C.DisableTorchFunctionSubclass():
            written = [record for record, parameter in self._counting if parameter._version != record.version]
        if not written:
            return
        if self._pending.is_in_backward:
            raise UsageError(
                'parameters changed in place between backward() and step(), but with "step_overlap": "backward" '
                "they are being updated then: change them after step()"
            )
        whole = self._pending.wait() is None  # else the state is torn, and its next use raises
        self._take_over([record for record in written if whole and record.residency is Residency.RESIDENT])
        for record in written:
            record.note_version()
        sharded = [record for record in written if record.residency is not Residency.RESIDENT]
        for record in sharded:
            record.point_back()
        if sharded:
            raise UsageError(
                f"parameter {listed([repr(record.name) for record in sharded], _NAMED)} changed in place, but is sharded or "
                "offloaded: the values were written to memory that is not kept. Write them within `with "
                "zstore.gather(parameter, modifier_rank=0):`, or call engine.set_full_parameter(name, values)"
            )

    def _refuse(self, record: ParameterRecord) -> None:
        parameter = record.parameter
        if parameter.data_ptr() == record.address and parameter.dtype is record.dtype:
            raise UsageError(
                f"parameter {record.name!r} was frozen at initialize() and has requires_grad=True now, but there is no "
                "optimizer state for it, so it would never change: make it trainable before initialize(), where it may be "
                "frozen again and thawed later, or set requires_grad=False"
            )
        found = _kind(parameter)
        record.point_back()
        raise UsageError(
            f"parameter {record.name!r} got other memory after initialize() ({found}; the engine trains it as "
            f"{_kind(parameter)}), which no step would change. The engine's values are back in place. To change "
            "values, call engine.set_full_parameter(name, values), or use `with zstore.gather(parameter, "
            f"modifier_rank=0):`. {_ADVICE}"
        )

    def _note_structure(self) -> None:
        """Record the present parameters and modules."""
        modules = [module for root in self._roots.values() if root is not None for module in root.modules()]
        self._tables = [self._roots, *(table for m in modules for table in (m._parameters, m._modules))]
        self._entries = self._listed()

    def _listed(self) -> list[Any]:
        """Return all parameters and modules in the tables, without reading any as an attribute of its module."""
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def _check_structure(self) -> None:
        """Raise UsageError if there is a parameter to train that the engine does not know."""
        added = {
            parameter: name
            for root in self._roots.values()
            if root is not None
            for name, parameter in root.named_parameters()
            if parameter not in self._records and parameter not in self._later
        }
        for parameter, name in added.items():
            if parameter.requires_grad:
                raise UsageError(_added(name))
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            _log.warning(
                "parameter %r%s: added to the model after initialize(): checkpoints have it whole, as rank 0 has it",
                next(iter(added.values())),
                more,
            )
            self._later |= added
        self._note_structure()


class ValueSample:
    """The first values of one of `records`, which have masters apart from them, as `master` returns them. See [Note: changed
    in place]."""

    def __init__(self, records: Sequence[ParameterRecord], master: Callable[[ParameterRecord], RankArray]) -> None:
        self._turns = cycle(records)
        self._master = master
        self._noted: tuple[ParameterRecord, torch.Tensor] | None = None

    def note(self) -> None:
        """Note the values of the next parameter (after a step)."""
        record = next(self._turns, None)
        if record is not None:
            self._noted = record, record.owned()[:_SAMPLE_NUMEL].clone()

    def check(self) -> None:
        """Raise UsageError if the noted values changed and the master did not (before a step)."""
        noted, self._noted = self._noted, None
        if noted is None or same_bits(now := noted[0].owned()[:_SAMPLE_NUMEL], noted[1]):
            return
        record = noted[0]
        if not same_bits(now, self._master(record).begin(0, now.numel())().to(now.device, now.dtype)):
            raise UsageError(
                f"parameter {record.name!r} was changed through .data, which its fp32 master does not follow: this step would "
                "undo it. Write `with torch.no_grad(): parameter.clamp_(...)` without .data, or call "
                "engine.set_full_parameter(name, values)"
            )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one type have the same bits."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


_ADVICE = (
    'Choose the type in the config ("bf16", "fp16") or convert the model before initialize(); for other software, write '
    "engine.save_16bit_model(folder, dtype=...) or take engine.module_state_dict(). After engine.close() the model may be "
    "converted"
)


def _added(name: str) -> str:
    return (
        f"parameter {name!r} was added to the model, or put in the place of another, after initialize(): no step would change "
        "it. Complete the model before initialize(); to change the values of a parameter, call "
        "engine.set_full_parameter(name, values)"
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


class _Shadow:
    """A module's `_apply` while the engine is open. Copies and pickles of the module have the usual one."""

    def __init__(self, module: nn.Module, check: Callable[[nn.Module, Convert], None]) -> None:
        self._module = weakref.ref(module)
        self._check = check
        self._own = module.__dict__.get("_apply")
        module.__dict__["_apply"] = self

    def __call__(self, fn: Convert, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert the module with `fn`, which changes none of its parameters, or raise UsageError."""
        module = self._living()
        self._check(module, fn)
        usual = self._own or MethodType(type(module)._apply, module)
        with torch._C.DisableTorchFunctionSubclass():  # which lets released parameters be as they are
            result: nn.Module = usual(fn, *args, **kwargs)
        return result

    def _living(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise UsageError("the module is gone")
        return module

    def remove(self) -> None:
        """Restore the module's usual method."""
        module = self._module()
        if module is not None and module.__dict__.get("_apply") is self:
            del module.__dict__["_apply"]
            if self._own is not None:
                module.__dict__["_apply"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._living())]
        return MethodType(type(copied)._apply, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._living(), "_apply")
