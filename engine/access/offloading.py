"""`engine.offload_states()`: moves states of a run to another tier between two steps, and back, bit-identical.

[Note: offloaded states]
optim_states              the optimizer's slots
hp_params                 fp32 masters
lp_params                 the model's parameters, on any tier
lp_grads,                 the gradient buffers, which are unused between two steps: they are freed, and the next backward
contiguous_grad_buffer    allocates them again
Arrays of the store move to the tier and back. A parameter's own buffer is copied to an array of the store and freed; the
parameter stays released until it is reloaded. State that is already on that tier or a lower one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from zstore.errors import UsageError
from zstore.format import ArraySpec, make_grid, model_array
from zstore.io import return_free_memory
from zstore.io.memory import as_torch, dtype_name
from zstore.store import TierName

from ..params.record import ParameterRecord, Residency, view_of_one_nan

if TYPE_CHECKING:
    from ..training.training import Training
    from .access import Access

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names of the states that can be offloaded. See [Note: offloaded states]."""
_TIERS: dict[str, TierName] = {"cpu": "pinned", "nvme": "disk"}
_DEPTH = {"device": 0, "host": 1, "pinned": 1, "disk": 2}


class OffloadedStates:
    """The offloaded states of a run. See [Note: offloaded states]."""

    def __init__(self, training: Training, access: Access) -> None:
        self._training = training
        self._access = access
        self._offloaded = training.offloaded_states
        self._original_tiers: dict[str, TierName] = {}
        """Moved arrays and their original tiers."""
        self._stored_copies: dict[ParameterRecord, str] = {}
        """Parameters whose buffers were freed, and the arrays with copies of their values."""

    @torch.inference_mode(False)  # later steps write to these tensors
    def offload(self, include: Iterable[Any] | None, device: Any) -> None:
        """Move the states `include`, by default all, to a tier (all ranks). After an error, everything is moved back."""
        call = "engine.offload_states()"
        names = _state_names(include)
        tier = self._tier_of(device)
        self._access.require_no_open_gather(call)

        def check() -> None:
            if not self._training.accumulation.is_new:
                raise UsageError(f"{call} in the middle of a step: call it after the step() that ends an accumulation")
            if (stepper := self._training.update.stepper) is not None and stepper.keeps_state:
                raise UsageError(
                    f"{call}: {stepper.name} steps whole tensors, whose state cannot be moved: use an element-wise optimizer"
                )

        self._access.prepare(call, check, changes=True, moves=True)
        if self._access.units is not None:
            self._access.units.invalidate()
        try:
            with self._training.world.agreeing():
                self._move(names, tier)
        except BaseException:
            self.reload()
            raise
        return_free_memory()
        if self._training.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tier_of(self, device: Any) -> TierName:
        name = getattr(device, "value", device)
        if name not in _TIERS:
            raise UsageError(f'engine.offload_states(device={device!r}): expected "cpu" or "nvme"')
        if name == "nvme" and not self._training.state.store.options.all_paths:
            raise UsageError(
                'engine.offload_states(device="nvme"): the config names no drive; set an "nvme_path" with device "nvme" '
                'in offload_optimizer or offload_param, or use device="cpu"'
            )
        return _TIERS[name]

    def _move(self, names: set[str], tier: TierName) -> None:
        training, state = self._training, self._training.state
        self._offloaded |= names
        state.plans.clear()  # plans reference buffers
        for record in state.records:
            if "lp_params" in names and record.is_in_place:
                record.use_in_place(None)
            for array in state.all_arrays(record):
                if (group := self._group_of(record, array)) in names:
                    self._move_array(array, tier, is_fetched=group == "lp_params")
            if "lp_params" in names and record.stored_array is None:
                self._offload_buffer(record, tier)
        if names & {"lp_grads", "contiguous_grad_buffer"}:
            training.gradients.free()

    def _group_of(self, record: ParameterRecord, array: str) -> str | None:
        """Return the state to which an array of a parameter belongs; None if the array is the parameter's own buffer."""
        if array == record.stored_array:
            return "lp_params"
        if array.startswith("optimizer/"):
            return "optim_states"
        return "hp_params" if record.group is not None and not self._training.state.is_master(record) else None

    def _move_array(self, name: str, tier: TierName, *, is_fetched: bool = False) -> None:
        store = self._training.state.store
        current = store.tier(name).name
        if _DEPTH[current] < _DEPTH[tier]:
            store.relocate(name, tier, self._copy)
            self._original_tiers.setdefault(name, "pinned" if is_fetched and current == "host" else current)

    def _copy(self, target: Any, source: Any) -> None:
        self._training.state.transfers.copy_into(as_torch(target), as_torch(source))

    def _offload_buffer(self, record: ParameterRecord, tier: TierName) -> None:
        """Copy a parameter's buffer to the store and free it."""
        name = f"offloaded/{record.name}"
        if record in self._stored_copies:
            self._move_array(name, tier)
            return
        store, values = self._training.state.store, _own_buffer(record)
        if not values.numel():
            return
        spec = ArraySpec(name=name, shape=(values.numel(),), dtype=dtype_name(values.dtype))
        store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier=tier)
        try:
            self._for_each_tile(name, "fill", lambda view, part: self._copy(view, values[part]))
        except BaseException:
            store.remove(name)
            raise
        self._stored_copies[record] = name
        self._training.state.transfers.synchronize()
        if self._group_of(record, model_array(record.name)) is None:
            store.change_memory(model_array(record.name), None)
        # Anything that still references the buffer, such as a graph or a numpy array, keeps it alive.
        record.use_placeholder()
        freed = view_of_one_nan(values.shape, values.dtype, values.device)
        if record.shard is None:
            record.full = freed
        else:
            record.shard = freed

    def _restore(self, record: ParameterRecord) -> None:
        name, store = self._stored_copies.pop(record), self._training.state.store
        self._original_tiers.pop(name, None)
        if record.shard is None:
            record.full = record.new_full()
            record.use_full()
            record.residency = Residency.RESIDENT
        else:
            record.shard = record.full.new_zeros(record.state_grid.shard_numel)[: record.owned_numel]
        values = _own_buffer(record)
        self._for_each_tile(name, "read", lambda view, part: self._copy(values[part], view))
        store.remove(name)
        if self._group_of(record, model_array(record.name)) is None:
            store.change_memory(model_array(record.name), record.owned())

    def _for_each_tile(self, name: str, mode: Any, use: Callable[[Any, slice], None]) -> None:
        with self._training.state.open_pass([[name]], mode) as tiles:
            for tile in tiles:
                use(tile.views[0], slice(tile.first, tile.stop))

    @torch.inference_mode(False)
    def reload(self) -> None:
        """Move everything back (all ranks)."""
        store = self._training.state.store
        with self._training.world.agreeing():
            for record in list(self._stored_copies):
                self._restore(record)
            for name, tier in list(self._original_tiers.items()):
                store.relocate(name, tier, self._copy)
                del self._original_tiers[name]
            for record in self._training.state.records:
                self._training.state.use_in_place(record)
            self._offloaded.clear()


def _state_names(include: Iterable[Any] | None) -> set[str]:
    """Return the names of the requested states. Raises UsageError for an unknown state."""
    names = [getattr(item, "value", item) for item in (STATES if include is None else include)]
    for name in names:
        if name not in STATES:
            raise UsageError(
                f"engine.offload_states(include=...): expected names from {', '.join(STATES)}, got {name!r}"
            )
    return set(names)


def _own_buffer(record: ParameterRecord) -> torch.Tensor:
    """Return the parameter's own buffer, 1-D: its rows, or all values if it is resident."""
    return record.full if record.shard is None else record.shard
