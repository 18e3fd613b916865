"""The state of an offloaded optimizer: its records and arrays, and how they are exposed and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zstore.engine.optim.kernel import FusedAdam, Scalars, SlotArray, TorchKernel
from zstore.engine.optim.state import OptimizerState
from zstore.engine.plan.plan import Places
from zstore.errors import BudgetError, UsageError
from zstore.format import model_array, optimizer_array
from zstore.io.memory import as_torch

from .stored_tensor import LocalRecord, StoredTensor, local_part, make_local_record

MASTER = "master"
"""Name of a 16-bit parameter's fp32 master in its state."""
_MASTER_SLOT = SlotArray(MASTER)
Tier = Literal["host", "disk"]
OffloadedKernel = FusedAdam | TorchKernel


class LocalState:
    """Records, arrays and scalars of the parameters that are trained."""

    def __init__(self, arrays: OptimizerState, tier: Tier) -> None:
        self.arrays = arrays
        self.records: dict[torch.Tensor, LocalRecord] = {}
        """The state by parameter, in order."""
        self._tier = tier
        self.kernels: list[OffloadedKernel] = []
        """One per parameter group."""
        arrays.kernels = self.kernels
        self._names: set[str] = set()

    def replace_kernels(self, kernels: list[OffloadedKernel]) -> None:
        """Replace the groups' kernels after loading their settings. Raises UsageError if the settings need other state."""
        for number, (previous, kernel) in enumerate(zip(self.kernels, kernels, strict=True)):
            if previous.slots != kernel.slots:
                raise UsageError(
                    f"parameter group {number} keeps {', '.join(previous.slots) or 'nothing'}, but with the loaded settings it "
                    f"would keep {', '.join(kernel.slots) or 'nothing'}: create the optimizer with the saved settings"
                )
        self.kernels[:] = kernels
        self.arrays.plans.clear()

    def remove_group(self, number: int) -> None:
        """Remove the last parameter group, and free its parameters' state."""
        for parameter, record in list(self.records.items()):
            if record.group == number:
                for array in self.arrays.array_names.pop(record):
                    self.arrays.store.remove(array)
                del self.records[parameter], self.arrays.scalars[record]
                self._names.discard(record.name)
        del self.kernels[number:]

    def add(self, parameter: torch.Tensor, group: int, name: str | None) -> LocalRecord:
        """Create the state of a parameter, on disk if there is a path and the budget is exhausted. Raises BudgetError if the
        state does not fit."""
        number = len(self.records)
        name = name or f"parameter-{number}"
        if name in self._names:
            name = f"{name}-{number}"
        record = make_local_record(name, parameter, group=group)
        store = self.arrays.store
        element_bytes = 4 * (len(self.arrays.slots_of(record)) + (record.dtype != torch.float32))
        nbytes, free = element_bytes * record.owned_numel, store.budget.free_bytes
        spills = store.options.run_path is not None and free is not None and nbytes > free
        places = Places(state="disk" if spills else self._tier, parameter="device", gradient="device")
        try:
            self.arrays.add(record, record.full, places, owns_fp32=True)
        except BudgetError as error:
            error.add_note(
                f'The state of {record.name!r} does not fit: raise host_budget_bytes, or pass a path: device="nvme" keeps all '
                'state on disk, device="cpu" only what exceeds the budget.'
            )
            raise
        self.records[parameter] = record
        self._names.add(name)
        return record

    def track_changes(self, records: Iterable[LocalRecord]) -> None:
        """Rebind parameters whose memory was replaced, and update masters of parameters that other code has changed."""
        for record in records:
            local = local_part(record.parameter)
            if local.numel() and local.data_ptr() != record.address:
                self._rebind(record, local)
            elif not self.arrays.is_master(record) and local._version != record.version:
                self._reconcile(record)

    def _rebind(self, record: LocalRecord, local: torch.Tensor) -> None:
        if local.shape != record.local_shape or local.dtype != record.dtype or local.device != record.full.device:
            raise UsageError(
                f"parameter {record.name!r} was {record.dtype} {list(record.local_shape)} on {record.full.device} and is "
                f"{local.dtype} {list(local.shape)} on {local.device}: create the optimizer after the model is cast, moved or "
                "sharded"
            )
        if not local.is_contiguous():
            raise UsageError(f"parameter {record.name!r} now has memory of another layout: make it contiguous again")
        record.full, record.address = local.data.view(-1), local.data_ptr()
        self.arrays.plans.clear()  # they reference the previous memory
        if self.arrays.is_master(record):
            store, name = self.arrays.store, model_array(record.name)
            store.remove(name)
            spec, memory = record.spec("model", record.dtype), record.full
            store.create(spec, grid=record.state_grid, shard=record.state_shard, tier="device", memory=memory)
        else:
            self._reconcile(record)

    def _reconcile(self, record: LocalRecord) -> None:
        """Set the master to the parameter's value where it does not round to it, since other code has changed it."""
        self.arrays.follow_parameters([record] if record.owned_numel else [])
        record.note_version()

    def state_entry(self, record: LocalRecord) -> dict[str, Any]:
        """Return a parameter's state as torch's class has it, plus the master of a 16-bit parameter."""
        values = self.kernels[record.group or 0].present(self.arrays.scalars[record])
        values |= {slot.name: self._with_layout(record, slot) for slot in self.arrays.slots_of(record)}
        if not self.arrays.is_master(record):
            values[MASTER] = self._with_layout(record, _MASTER_SLOT)
        return values

    def _with_layout(self, record: LocalRecord, slot: SlotArray) -> torch.Tensor:
        """Return an array with one value per element as a tensor with the parameter's layout."""
        stored = self._stored(record, slot)
        parameter: torch.Tensor = record.parameter
        if not isinstance(parameter, DTensor):
            return stored
        meta = TensorMeta(shape=parameter.shape, stride=parameter.stride(), dtype=stored.dtype)
        spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
        # `from_local` would copy the values to the mesh's device.
        make: Any = DTensor
        tensor: torch.Tensor = make(stored, spec, requires_grad=False)
        return tensor

    def _stored(self, record: LocalRecord, slot: SlotArray) -> StoredTensor:
        """Return this rank's part of an array as a stored tensor."""
        name = model_array(record.name) if slot is _MASTER_SLOT else optimizer_array(slot.name, record.name)
        return StoredTensor(name, record, self.arrays)

    def load(self, record: LocalRecord, state_entry: Mapping[str, Any]) -> None:
        """Replace a parameter's state with `state_entry`, from this class or torch's; reset it if that has no state.

        Raises UsageError if shapes differ.
        """
        kernel, slots = self.kernels[record.group or 0], self.arrays.slots_of(record)
        if not state_entry or any(state_entry.get(slot.entry) is None for slot in slots):
            self.reset(record)
            return
        for slot in slots:
            self._put(record, slot, state_entry[slot.entry])
        self.arrays.scalars[record] = _scalars(kernel, state_entry)
        if not self.arrays.is_master(record):
            if MASTER in state_entry:
                self._put(record, _MASTER_SLOT, state_entry[MASTER])
            record.version = -1  # the parameter may have changed

    def _put(self, record: LocalRecord, slot: SlotArray, value: Any) -> None:
        target, description = self._stored(record, slot), f"{slot.name} of {record.name}"
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise UsageError(f"state {description!r}: expected a floating-point tensor, got {type(value).__name__}")
        local = self._local_value(record, description, value)
        if isinstance(local, StoredTensor):
            if local.state is self.arrays and local.array == target.array:
                return  # loaded in place
            local = local.read()
        target.write(local)

    def _local_value(self, record: LocalRecord, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a value that is a full tensor or distributed over the parameter's mesh."""
        parameter: torch.Tensor = record.parameter
        if value.shape != parameter.shape:
            raise UsageError(
                f"state {name!r}: expected shape {list(parameter.shape)}, got {list(value.shape)}: it is from another model"
            )
        if isinstance(parameter, DTensor):
            if not isinstance(value, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            elif value.placements != parameter.placements:
                value = value.redistribute(parameter.device_mesh, parameter.placements)
        return local_part(value)

    def reset(self, record: LocalRecord) -> None:
        """Reset a parameter's state to its initial state."""
        kernel = self.kernels[record.group or 0]
        slots = self.arrays.slots_of(record) if record.owned_numel else ()
        groups = [[optimizer_array(slot.name, record.name)] for slot in slots]
        with self.arrays.open_pass(groups, "fill") as tiles:
            for tile in tiles:
                as_torch(tile.views[0]).zero_()
        self.arrays.scalars[record] = kernel.initial()


def _scalars(kernel: OffloadedKernel, state_entry: Mapping[str, Any]) -> Scalars:
    names = list(kernel.present(kernel.initial()))
    missing = [name for name in names if name not in state_entry]
    if missing:
        raise UsageError(f"the loaded state has no {missing[0]!r}: it is from another optimizer class")
    scalars = {name: float(state_entry[name]) for name in names}
    if not isinstance(kernel, TorchKernel):
        return scalars
    if scalars.get("step") == 0.0:
        return kernel.initial()
    return scalars | {"updates": scalars.get("step", 1.0)}


class StateView(Mapping[torch.Tensor, Any]):
    """`optimizer.state`: the current state of each parameter that is trained. Setting an entry loads it."""

    def __init__(self, state: LocalState) -> None:
        self._state = state

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        record = self._state.records.get(parameter)
        return {} if record is None else self._state.state_entry(record)  # like the defaultdict it replaces

    def __setitem__(self, parameter: torch.Tensor, state_entry: Mapping[str, Any]) -> None:
        if parameter not in self._state.records:
            raise KeyError("this optimizer does not update the parameter")
        self._state.load(self._state.records[parameter], state_entry)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._state.records

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(list(self._state.records))

    def __len__(self) -> int:
        return len(self._state.records)
