"""Parameters of models that are being built: in memory while they are in use, otherwise as this rank's rows in a store.

[Note: a released parameter]
Its rows are in the array `building/<number>`, in the dtype in which it was built, and the parameter is a view of one NaN,
like an engine's released parameter (see [Note: the storage of a parameter]). Each has its own NaN, which identifies it. The
previous storage is not changed, so other references to it stay valid.

Any parameter may be released at any time, the least recently used first, since any access within the block of `zstore.Init`
unshards it first. A parameter whose storage has another user, such as a view in a local variable, stays in memory: writing to
the view writes to the parameter.

[Note: ranks that build]
Every rank builds the same values and keeps its rows of them. Each gather names its purpose, and the end of the block compares
a checksum of every parameter: a difference between ranks is an error. (Not earlier, since uninitialized values differ too.)
Reference counts determine which parameters may be released, so Python's garbage collector is off: it would run at different
times on different ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from crc32c import crc32c
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zstore.errors import UsageError
from zstore.format import ArraySpec, make_grid
from zstore.io import return_free_memory
from zstore.io.closing import make_finalizer
from zstore.io.memory import as_bytes, as_torch, dtype_name, plain_memory, torch_dtype
from zstore.ranks.world import World
from zstore.store import LocalShard, Store, TierName

from ..params.record import view_of_one_nan

FillRows = Callable[[int, torch.Tensor], Any]
"""`fill(first, out)` sets `out`, 1-D on the CPU, to a parameter's flat elements from `first` on."""

DEFAULT_LIVE_BYTES = 64 * 1024 * 1024
_TRIM_BYTES = 32 * 1024 * 1024
"""How many bytes to release before freed memory is returned to the system."""


@dataclass(frozen=True, kw_only=True)
class BuildStatistics:
    """Bytes of parameters that are large enough to be sharded."""

    live_bytes: int = 0
    """Parameters in memory."""
    live_peak_bytes: int = 0
    """Maximum of `live_bytes`."""
    stored_bytes: int = 0
    """Rows in the store."""


@dataclass(eq=False)
class BuiltParameter:
    """A large parameter of a model that is being built. See [Note: a released parameter]."""

    number: int
    ref: weakref.ref[nn.Parameter]
    owner: weakref.ref[nn.Module]
    """The module in which it was first registered."""
    label: str
    """Its name and its module's type, for messages."""
    device: torch.device
    """The device on which the parameter was built."""
    rows: LocalShard | None = None
    """This rank's rows in the store, if any; outdated while the parameter is live."""
    placeholder: torch.Tensor | None = None
    """The view of one NaN in place of its values; None while it is live."""
    live_bytes: int = 0
    crc: int = 0
    """Checksum of its values at the last release; with several ranks only."""

    def is_intact(self, parameter: nn.Parameter) -> bool:
        """Return whether a released parameter has not been changed since its release."""
        placeholder = self.placeholder
        return (
            placeholder is not None
            and parameter.data.untyped_storage().data_ptr() == placeholder.untyped_storage().data_ptr()
        )


class BuildingGuard:
    """Makes calls, `state_dict()` and `load_state_dict()` of modules with released parameters fail instead of using NaN."""

    def __init__(self) -> None:
        self._suspended = 0
        self._handles: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()

    def watch(self, builder: Builder) -> None:
        """Hook all modules that have released parameters."""

        def before(module: nn.Module, *_: Any) -> None:
            self._check(module, builder)

        def before_state_dict(module: nn.Module, *_: Any) -> None:
            if not builder.from_rank_0:
                self._check(module, builder)

        for module in builder.owners():
            if module not in self._handles:
                self._handles[module] = [
                    module.register_forward_pre_hook(before),
                    module.register_state_dict_pre_hook(before_state_dict),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
                ]

    def _check(self, module: nn.Module, builder: Builder) -> None:
        for name, parameter in () if self._suspended else module.named_parameters(recurse=False):
            built = builder.find(parameter)
            if built is not None and built.placeholder is not None:
                raise UsageError(
                    f"parameter {name!r} of this {type(module).__name__} was built within zstore.Init, so its values are "
                    "in shards: pass the model to zstore.initialize() first, or read and change it within "
                    "`with zstore.gather(model, modifier_rank=0):` or the same `with init:`"
                )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow everything within the block."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def unwatch(self, model: nn.Module) -> None:
        """Remove the hooks from the modules of `model`."""
        for module in model.modules():
            for handle in self._handles.pop(module, []):
                handle.remove()


class Builder:
    """The parameters that `zstore.Init` and `from_pretrained` release, in one store."""

    def __init__(
        self, store: Store, world: World, *, key: tuple[Any, ...] | None, tier: TierName, threshold_numel: int
    ) -> None:
        self.store = store
        self.world = world
        self.key = key
        """The settings of the store: `initialize` takes over a store whose settings are the same."""
        self.threshold_numel = max(1, threshold_numel)
        """Smaller parameters stay in memory."""
        self._tier = tier
        self._by_id: dict[int, BuiltParameter] = {}
        self._live: OrderedDict[int, BuiltParameter] = OrderedDict()
        self._deleted: deque[BuiltParameter] = deque()
        self._count = 0
        self._freed_bytes = 0
        self._live_bytes = self._live_peak_bytes = 0
        self.failed = False
        """Whether the ranks built different models, or one failed: later collectives would not match."""
        self.from_rank_0 = False
        """Whether ranks may build different values (rank 0's are used), and state dicts may have NaN for released values."""
        self.is_handed_over = False
        """Whether another owner closes the store."""
        self.guard = BuildingGuard()
        self._finalizer = make_finalizer(self, store.close)
        _builders.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the store is neither closed nor handed over."""
        return self._finalizer.alive

    @property
    def is_closed(self) -> bool:
        """Whether the values in the store are lost."""
        return not (self._finalizer.alive or self.is_handed_over)

    def find(self, tensor: torch.Tensor) -> BuiltParameter | None:
        """Return the record of a parameter, None for any other tensor."""
        built = self._by_id.get(id(tensor))
        return built if built is not None and built.ref() is tensor else None

    def register(self, parameter: nn.Parameter, owner: nn.Module, label: str) -> BuiltParameter:
        """Register a parameter whose values are in memory."""
        built = self.find(parameter)
        if built is None:
            built = self._record(parameter, owner, label)
            self._count_live(built, parameter)
        return built

    def _record(self, parameter: nn.Parameter, owner: nn.Module, label: str) -> BuiltParameter:
        self._sweep()
        built = BuiltParameter(self._count, weakref.ref(parameter), weakref.ref(owner), label, parameter.device)
        deleted = self._deleted  # the callback may run at any time; it must not keep the builder alive
        built.ref = weakref.ref(parameter, lambda _: deleted.append(built))
        self._count += 1
        self._by_id[id(parameter)] = built
        return built

    def register_stored(self, parameter: nn.Parameter, owner: nn.Module, label: str, fill: FillRows) -> None:
        """Register a released parameter whose rows `fill` sets, without reading its values."""
        self._fill(self._record(parameter, owner, label), parameter, fill)

    def _count_live(self, built: BuiltParameter, parameter: nn.Parameter) -> None:
        self._live_bytes += parameter.nbytes - built.live_bytes
        self._live_peak_bytes = max(self._live_peak_bytes, self._live_bytes)
        built.live_bytes = parameter.nbytes
        self._live[built.number] = built
        self._live.move_to_end(built.number)

    def _count_released(self, built: BuiltParameter) -> None:
        self._live.pop(built.number, None)
        self._live_bytes -= built.live_bytes
        built.live_bytes = 0

    def _sweep(self) -> None:
        """Remove the rows of parameters that no longer exist."""
        while self._deleted:
            built = self._deleted.popleft()
            self._by_id = {key: other for key, other in self._by_id.items() if other is not built}
            self._count_released(built)
            self._drop_rows(built)

    def make_live(self, built: BuiltParameter, *, overwritten: bool = False) -> None:
        """Make a parameter live before it is read or written; if entirely `overwritten`, it is not read from the store."""
        self._sweep()
        if (parameter := built.ref()) is None:
            return
        if built.placeholder is not None:
            if overwritten:
                spec = _rows_of(built).spec
                parameter.data = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=built.device)
            else:
                parameter.data = self.full_values(built)
            built.placeholder = None
        self._count_live(built, parameter)

    def release_down_to(self, live_bytes: int, keep: set[int] | None = None) -> None:
        """Release parameters, the least recently used first, until the live ones take at most `live_bytes`."""
        self._sweep()
        for built in list(self._live.values()):
            if self._live_bytes <= live_bytes:
                return
            if (p := built.ref()) is not None and built.number not in (keep or ()) and _use_count(p) <= _SOLE_USE_COUNT:
                self.release(built, p)

    def release_all(self) -> None:
        """Release every parameter; views of a parameter no longer share its storage.

        Parameters that share storage stay in memory: the engine rejects them by name.
        """
        self._sweep()
        seen = Counter(p.data_ptr() for built in self._live.values() if (p := built.ref()) is not None)
        for built in list(self._live.values()):
            if (parameter := built.ref()) is not None and seen[parameter.data_ptr()] == 1:
                self.release(built, parameter)

    def release(self, built: BuiltParameter, parameter: nn.Parameter) -> None:
        """Write this rank's rows to the store, and free the values."""
        values = plain_memory(parameter.data).view(-1)
        if self.world.world_size > 1 and self.from_rank_0:
            self.world.broadcast(values)
        elif self.world.world_size > 1:
            built.crc = crc32c(as_bytes(values.cpu()))
        self._fill(built, parameter, lambda first, out: out.copy_(values[first : first + out.numel()]))
        self._freed_bytes += values.nbytes
        if self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            del values
            return_free_memory()

    def set_placeholder(self, built: BuiltParameter, parameter: nn.Parameter) -> None:
        """Make the parameter a view of one NaN; its rows are in the store."""
        built.placeholder = view_of_one_nan(parameter.shape, parameter.dtype, built.device)
        parameter.data = built.placeholder
        self._count_released(built)
        _builder_of[parameter] = self

    def _fill(self, built: BuiltParameter, parameter: nn.Parameter, fill: FillRows) -> None:
        """Set the parameter's rows in the store, and release it."""
        shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
        rows = built.rows
        if rows is None or (rows.spec.shape, rows.spec.dtype) != (shape, dtype):
            self._drop_rows(built)
            spec = ArraySpec(name=f"building/{built.number}", shape=shape, dtype=dtype)
            grid = make_grid(spec.stored_shape, self.world.world_size)
            self.store.create(spec, grid=grid, shard=self.world.rank, tier=self._tier)
            rows = built.rows = self.store.local(spec.name)
            built.device = parameter.device
        with closing(self.store.tiles([[rows.spec.name]], "fill")) as tiles:
            for tile in tiles:
                fill(rows.base + tile.first, as_torch(tile.views[0]))
        self.set_placeholder(built, parameter)

    def _drop_rows(self, built: BuiltParameter) -> None:
        rows, built.rows = built.rows, None
        if rows is not None:
            self.store.remove(rows.spec.name)

    def own_rows(self, built: BuiltParameter) -> torch.Tensor:
        """Return a copy of this rank's rows of a released parameter, 1-D on the CPU."""
        rows = _rows_of(built)
        out = torch.empty(rows.valid_numel, dtype=torch_dtype(rows.spec.dtype))
        self._read_into(rows, out)
        return out

    def _read_into(self, rows: LocalShard, out: torch.Tensor) -> None:
        if self.is_closed:
            raise model_deleted_error()
        # Not `read`, whose ticket keeps its buffer for an unknown time.
        with closing(self.store.tiles([[rows.spec.name]], "read")) as tiles:
            for tile in tiles:
                out[tile.first : tile.stop].copy_(as_torch(tile.views[0]))

    def full_values(self, built: BuiltParameter) -> torch.Tensor:
        """Return the values of a released parameter, on its original device (all ranks)."""
        rows, world = _rows_of(built), self.world
        if world.world_size == 1:
            return self.own_rows(built).view(rows.spec.shape).to(built.device)
        own = torch.zeros(rows.grid.shard_numel, dtype=torch_dtype(rows.spec.dtype))
        error: Exception | None = None
        try:
            self._read_into(rows, own[: rows.valid_numel])
        except Exception as raised:
            error = raised
        self.agree(f"the values of {built.label} (parameter {built.number})", error)
        gathered = torch.empty(rows.grid.shard_numel * world.world_size, dtype=own.dtype, device=world.device)
        world.all_gather(gathered, own.to(world.device))
        # A copy: the collective keeps its buffer for an unknown time.
        return gathered[: rows.spec.numel].view(rows.spec.shape).to(built.device, copy=True)

    def agree_on_values(self, error: BaseException | None) -> None:
        """Raise on all ranks, as `agree` does, unless every rank released the same values (all ranks)."""
        self.agree("the end of the block", error)
        released = [built for built in self._by_id.values() if built.placeholder is not None]
        released.sort(key=lambda built: built.number)
        checksums = self.world.all_gather_object([[built.number, built.crc] for built in released])
        for rank, sums in enumerate(checksums):
            if sums != checksums[0]:
                self.failed = True
                pairs = zip(released, checksums[0], sums, strict=False)
                difference = next((built.label for built, a, b in pairs if a != b), "their number")
                raise UsageError(
                    f"rank {rank} built different values from rank 0's, first {difference}: within zstore.Init every rank "
                    "needs the same seed. Call torch.manual_seed(SEED) with one SEED on all ranks before the block, do what "
                    "differs by rank after it, and initialize every parameter"
                )

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Raise on all ranks unless all are at `what` without an `error` (all ranks). See [Note: ranks that build]."""
        if self.failed:
            raise UsageError("an earlier part of building this model failed on some rank: build the model again")
        try:
            self.world.raise_on_all_ranks(error, f"zstore.Init at {what}")
        except BaseException:
            self.failed = self.world.world_size > 1
            raise

    def owners(self) -> list[nn.Module]:
        """Return the modules that have released parameters."""
        owners = (built.owner() for built in self._by_id.values() if built.placeholder is not None)
        return list(dict.fromkeys(module for module in owners if module is not None))

    def forget(self, built: BuiltParameter, *, keep_rows: bool = False) -> None:
        """Forget a parameter that an engine has taken over; drop its array unless that has been taken over too."""
        if keep_rows:
            built.rows = None
        if (parameter := built.ref()) is not None:
            self._by_id.pop(id(parameter), None)
            _builder_of.pop(parameter, None)  # type: ignore[no-untyped-call]
        self._count_released(built)
        self._drop_rows(built)

    def has_other_parameters(self, parameters: Container[nn.Parameter]) -> bool:
        """Return whether the store has rows of parameters other than these."""
        self._sweep()
        stored = (built.ref() for built in self._by_id.values() if built.rows is not None)
        return any(parameter is not None and parameter not in parameters for parameter in stored)

    def hand_over_store(self) -> Store:
        """Return the store, which the caller must close; arrays of parameters stay until `forget`."""
        self._finalizer.detach()
        self.is_handed_over = True
        return self.store

    def statistics(self) -> BuildStatistics:
        """Return the bytes of the existing parameters."""
        self._sweep()
        stored = sum(built.rows.nbytes for built in self._by_id.values() if built.rows is not None)
        return BuildStatistics(live_bytes=self._live_bytes, live_peak_bytes=self._live_peak_bytes, stored_bytes=stored)

    def close(self) -> None:
        """Close the store, unless it was handed over; the values in it are lost. A second call does nothing."""
        self._finalizer()


open_blocks: list[Any] = []
"""The open block, if any."""
seen_by_init: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters registered within a block, sharded or not: all ranks have the same values. The mapped values are None."""
trained: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that an engine has: no block shards them again. The mapped values are None."""


@contextmanager
def outside_block() -> Iterator[None]:
    """End the open block, if any, which completes its model, and enter it again after this one; close it after an error (all
    ranks)."""
    if not open_blocks:
        yield
        return
    block = open_blocks[-1]
    block.__exit__(None, None, None)
    try:
        yield
    except BaseException:
        block.close()
        raise
    block.__enter__()


def mark_trained(model: nn.Module) -> None:
    """Mark the parameters of `model` as owned by an engine."""
    for parameter in model.parameters():
        trained[parameter] = None


def model_deleted_error() -> UsageError:
    """Return the error for a model whose store was closed."""
    return UsageError("the values of this model were dropped when its zstore.Init was closed: build it again")


def _rows_of(built: BuiltParameter) -> LocalShard:
    if built.rows is None:
        raise UsageError(f"{built.label} is not in the store")
    return built.rows


def _use_count(parameter: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


_SOLE_USE_COUNT = _use_count(nn.Parameter(torch.empty(1)))
"""Use count of a storage that only one parameter uses: one in torch 2.9, two in 2.13."""


_builders: weakref.WeakSet[Builder] = weakref.WeakSet()
_builder_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> the builder that released it, kept alive even after it is closed, when the values are lost."""


def find_open_builder(key: tuple[Any, ...]) -> Builder | None:
    """Return a builder that has an open store with these settings, if any."""
    return next((b for b in _builders if b.key == key and b.is_open and not b.failed), None)


def find_built(tensor: torch.Tensor) -> tuple[Builder, BuiltParameter] | None:
    """Return the builder that released a parameter, and its record; None if the parameter is not released."""
    builder: Builder | None = _builder_of.get(tensor)  # type: ignore[no-untyped-call]
    built = None if builder is None else builder.find(tensor)
    return None if builder is None or built is None or built.placeholder is None else (builder, built)
