"""Takes tensors that autograd saves off the device behind the forward, and brings them back ahead of the backward.

[Note: how activations leave and come back]
Saved-tensor hooks are set around the engine's forward. Tensors saved there go through `pack`: the inputs of checkpointed
blocks, whoever checkpoints them, since torch saves those like any others; and without checkpointing all that the blocks
save. Within a checkpointed block torch has hooks of its own on top, so nothing that is to be computed again comes here.
These stay as they are: parameters and buffers, storages under 64 KiB, tensors that are a small part of a large storage,
subclasses of Tensor, tensors that torch negates or conjugates as they are read, and those that the model saves after its last
block, which the backward needs at once.

A piece is the memory of one storage, as bytes. Views of it are one piece, as it is one allocation: they are made again over
the memory that comes back, so that values, strides and offsets are the same. A thread copies it to its tier; until then it is
in memory, and a backward that needs it takes it from there. At most `_BEHIND_BYTES` are leaving at a time (or one piece):
then the forward waits. When a piece is asked for, those that were saved before it are brought back by another thread, the
latest first, up to `_AHEAD_BYTES` (or one piece). In a backward no other pieces begin to leave: they are needed next. A
piece that nobody needs any more gives its place back, also if a forward or a backward failed: autograd lets go of its
saved tensors. A graph that is retained keeps its pieces in memory once they were brought back.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zstore.errors import UsageError
from zstore.format import ArraySpec, make_grid
from zstore.io import Ticket, Workers
from zstore.io.memory import as_torch
from zstore.store import Store

from ..config.config import Config
from ..runtime.device import Event, StreamContext, Transfers

_WORD_BYTES = 4
"""Bytes of an element of an array on disk; chunks are cut by elements."""
_LEAST_BYTES = 64 * 1024
"""Smaller storages stay: a transfer would cost more than their memory."""
_LEAST_SHARE = 8
"""A tensor that is less than one part in so many of its storage stays: the storage is somebody else's."""
_BEHIND_BYTES = 64 * 1024 * 1024
_AHEAD_BYTES = 64 * 1024 * 1024


@dataclass(kw_only=True)
class ActivationStatistics:
    """Counters of this rank since the engine was made."""

    tier: str
    """Tier of the activations: host or disk."""
    kept_bytes: int = 0
    """Bytes that were taken off the device, or were to be."""
    written_bytes: int = 0
    """Bytes that reached the tier, without those that the backward needed before."""
    read_bytes: int = 0
    """Bytes brought back."""
    resting_bytes: int = 0
    """Bytes on the tier now."""
    resting_peak_bytes: int = 0
    """Peak of these."""


class HostPieces:
    """The tier of host memory, pinned if possible, within the store's budget.

    `make` returns a place for a piece and `free` frees it, called by one thread at a time; `make` raises BudgetError or
    DiskFullError if there is none. `write` copies `source`, uint8 on the device, to a place, and `read` a place to `target`,
    after an event and done on return: each is carried out by a thread of its own.
    """

    name = "host"

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._budget = store.budget
        self._transfers = transfers

    def make(self, nbytes: int) -> torch.Tensor:
        self._budget.require(
            nbytes, 'an activation ("activations": "host")', ', or set zstore.activations to "disk" or "device"'
        )
        memory = self._transfers.streams.empty_host(nbytes, torch.uint8)
        self._budget.take(nbytes)
        return memory

    def write(self, place: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        self._transfers.begin(place, source, after=after).wait()

    def read(self, place: torch.Tensor, target: torch.Tensor, after: Event) -> None:
        self._transfers.begin(target, place, after=after).wait()

    def free(self, place: torch.Tensor) -> None:
        self._budget.release(place.nbytes)


class DiskPieces:
    """The tier of arrays of the store, which writes them with checksums; each is reused for the next piece of its size."""

    name = "disk"

    def __init__(self, store: Store, transfers: Transfers, pool_bytes: int) -> None:
        self._store = store
        self._transfers = transfers
        # Each its own: a read must not wait for the writes behind the forward.
        self._writing = store.make_pool(pool_bytes // 2)
        self._reading = store.make_pool(pool_bytes // 2)
        self._free: dict[int, list[str]] = defaultdict(list)
        """Unused arrays, by their number of words."""
        self._made = 0

    def make(self, nbytes: int) -> str:
        words = -(-nbytes // _WORD_BYTES)
        if self._free[words]:
            return self._free[words].pop()
        spec = ArraySpec(name=f"activation/{self._made}", shape=(words,), dtype="int32")
        self._store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        self._made += 1
        return spec.name

    def write(self, place: str, source: torch.Tensor, after: Event) -> None:
        with closing(self._store.tiles([[place]], "fill", pool=self._writing)) as tiles:
            for tile in tiles:
                part = source[tile.first * _WORD_BYTES : tile.stop * _WORD_BYTES]
                self._copy(as_torch(tile.views[0]).view(torch.uint8)[: part.numel()], part, after)

    def read(self, place: str, target: torch.Tensor, after: Event) -> None:
        with closing(self._store.tiles([[place]], "read", pool=self._reading, ahead=True)) as tiles:
            for tile in tiles:
                part = target[tile.first * _WORD_BYTES : tile.stop * _WORD_BYTES]
                self._copy(part, as_torch(tile.views[0]).view(torch.uint8)[: part.numel()], after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        if self._transfers.link(source, target) is None:
            # One memcpy, without torch's threads, which the computation has.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
        else:
            # The buffer is given back when the next tile is asked for.
            self._transfers.begin(target, source, after=after).wait()

    def free(self, place: str) -> None:
        self._free[self._store.local(place).valid_numel].append(place)


ActivationTier = HostPieces | DiskPieces
Place = Any
"""Of one piece; only the tier that made it knows more."""


class _State(Enum):
    """The place of a piece. See [Note: how activations leave and come back]."""

    LEAVING = "leaving"
    """It is in memory, and to be copied to its tier."""
    AWAY = "away"
    """It is on its tier alone."""
    NEEDED = "needed"
    """It is in memory, or on its way there, until nothing needs it any more."""


class _Piece:
    """The memory of one storage; lives as long as autograd keeps a tensor of it."""

    def __init__(self, number: int, tensor: torch.Tensor, place: Place, gone: deque[tuple[int, Place, int]]) -> None:
        storage = tensor.untyped_storage()
        self.number = number
        self.place = place
        self.nbytes = storage.nbytes()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: torch.Tensor | None = memory.set_(storage, 0, (self.nbytes,), (1,))
        self.device = tensor.device
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        """While this is there, no other storage has the same address."""
        self.version = tensor._version
        self.saved: torch.Tensor | None = tensor.detach()
        """Shares the version of the saved tensor; None once its values are taken."""
        self.was_changed = False
        """Whether the tensor was changed in place before that."""
        self.state = _State.LEAVING
        self.written_bytes = 0
        """Bytes that its tier has."""
        self.coming: Ticket[None] | None = None
        self._gone = gone

    def take_values(self) -> None:
        """Note that the values are taken as they are now."""
        if self.saved is not None:
            self.was_changed = self.saved._version != self.version
            self.saved = None

    def __del__(self) -> None:
        # Runs in any thread that drops the last tensor: only noted here.
        self._gone.append((self.number, self.place, self.written_bytes))


class _Saved(NamedTuple):
    """Kept by autograd in place of a tensor: a view of its piece."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Keeps activations of `model` on `tier`; `parameters` gives the memory that its parameters have now. See [Note: how
    activations leave and come back]."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Callable[[], Iterable[torch.Tensor]],
        tier: ActivationTier,
        transfers: Transfers,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._tier = tier
        self._transfers = transfers
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        """A piece has left, or will not."""
        self._writer = Workers(1, "zstore-activations-out")
        self._reader = Workers(1, "zstore-activations-in")
        self._context: StreamContext = nullcontext
        self._fixed: frozenset[int] = frozenset()
        """Addresses of storages that stay: of parameters and buffers."""
        self._in_blocks = True
        """Whether tensors saved now are a block's, or come before one."""
        self._in_backward = False
        self._by_storage: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()
        self._away: dict[int, weakref.ref[_Piece]] = {}
        """By number, in order: the last was saved last."""
        self._ahead: weakref.WeakSet[_Piece] = weakref.WeakSet()
        """Those that are brought back before they are asked for."""
        self._gone: deque[tuple[int, Place, int]] = deque()
        """Numbers, places and bytes there of pieces that nobody needs any more."""
        self._behind_bytes = 0
        self._made = 0
        self._error: BaseException | None = None
        """Error of a thread, raised by the next call."""
        self._closed = False
        self._counts = ActivationStatistics(tier=tier.name)
        blocks = find_blocks(model)
        self._handles = [block.register_forward_pre_hook(partial(self._enter, True)) for block in blocks]
        self._handles += [block.register_forward_hook(partial(self._enter, False)) for block in blocks[-1:]]
        self.hooks: Any = (self.pack, self.unpack)
        """The saved-tensor hooks."""

    def _enter(self, in_blocks: bool, *_: Any) -> None:
        self._in_blocks = in_blocks

    def stay_out_of_graphs(self) -> None:
        """Take tensors that are saved after the last block too, since compiled code saves when it likes, and keep
        torch.compile from tracing the hooks that are called between its graphs."""
        self._take_all()
        self.hooks = tuple(map(torch.compiler.disable, (self.pack, self.unpack)))

    def _take_all(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._in_blocks = True

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Take the tensors that autograd saves in this block."""
        self._in_blocks, self._in_backward = True, False
        if not torch.is_grad_enabled():
            yield
            return
        fixed = chain(self._parameters(), self._model.buffers())
        self._fixed = frozenset(tensor.untyped_storage()._cdata for tensor in fixed)
        self._context = self._transfers.streams.stream_context()
        token = active_offload.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
                yield
        finally:
            active_offload.reset(token)

    # -- forward ----------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps in place of `tensor`, or `tensor` if it stays (a saved-tensor hook)."""
        if not self._takes(tensor):
            return tensor
        with self._lock:
            address = tensor.untyped_storage()._cdata
            piece = self._by_storage.get(address)
            if piece is None or piece.version != tensor._version:
                piece = self._by_storage[address] = self._begin(tensor)
        return _Saved(piece, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _takes(self, tensor: torch.Tensor) -> bool:
        if not self._in_blocks or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        streams, storage = self._transfers.streams, tensor.untyped_storage()
        if tensor.is_meta or tensor.is_neg() or tensor.is_conj() or storage._cdata in self._fixed:
            return False
        if not streams.device_is_host and streams.is_host(tensor):
            return False
        return _LEAST_BYTES <= storage.nbytes() <= tensor.nbytes * _LEAST_SHARE

    def _begin(self, tensor: torch.Tensor) -> _Piece:
        """Let a storage leave, once there is room behind the forward."""
        nbytes = tensor.untyped_storage().nbytes()
        while self._behind_bytes and self._behind_bytes + nbytes > _BEHIND_BYTES:
            self._ended.wait()
        self._tidy()
        piece = _Piece(self._made, tensor, self._tier.make(nbytes), self._gone)
        self._made += 1
        self._counts.kept_bytes += nbytes
        self._behind_bytes += nbytes
        self._writer.submit(partial(self._write, weakref.ref(piece), nbytes, self._transfers.streams.record()))
        return piece

    def _write(self, known: weakref.ref[_Piece], nbytes: int, after: Event) -> None:
        """Carry one piece to its tier (the writing thread)."""
        try:
            piece, counts = known(), self._counts
            if piece is None or piece.memory is None or piece.state is not _State.LEAVING:
                return
            if self._in_backward or self._closed:
                return
            with self._context():
                self._tier.write(piece.place, piece.memory, after)
            with self._lock:
                piece.take_values()
                piece.written_bytes = nbytes
                counts.written_bytes += nbytes
                counts.resting_bytes += nbytes
                counts.resting_peak_bytes = max(counts.resting_peak_bytes, counts.resting_bytes)
                if piece.state is _State.LEAVING:  # else it was asked for meanwhile
                    piece.state, piece.memory = _State.AWAY, None
                    self._away[piece.number] = known
        except BaseException as error:
            # It is still in memory; the next call raises the error.
            error.add_note("An activation could not be taken off the device.")
            self._error = error
        finally:
            with self._lock:
                self._behind_bytes -= nbytes
                self._ended.notify_all()

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that `pack` was given, with the same values (a saved-tensor hook)."""
        if not isinstance(saved, _Saved):
            return cast("torch.Tensor", saved)
        piece = saved.piece
        if self._closed:
            raise UsageError("a backward after engine.close(): what the forward kept for it is gone")
        with self._lock:
            self._tidy()
            self._in_backward = True
            if piece.state is _State.LEAVING:
                piece.take_values()
                piece.state = _State.NEEDED
            elif piece.state is _State.AWAY:
                self._read(piece)
            self._ahead.discard(piece)
            self._read_ahead(piece)
            coming = piece.coming
        if coming is not None:
            coming.wait()
        if piece.was_changed:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after it was saved, while it was taken off the device: "
                'change the model, as autograd would ask for without offloading, or set zstore.activations to "device"'
            )
        memory = cast("torch.Tensor", piece.memory)
        empty = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _read_ahead(self, after: _Piece) -> None:
        """Begin to bring back the pieces saved before `after`, the latest first."""
        ahead = sum(piece.nbytes for piece in self._ahead)
        chosen: list[_Piece] = []
        for number, known in reversed(self._away.items()):
            piece = known()
            if number >= after.number or piece is None:
                continue
            if ahead and ahead + piece.nbytes > _AHEAD_BYTES:
                break
            ahead += piece.nbytes
            chosen.append(piece)
        for piece in chosen:
            self._ahead.add(piece)
            self._read(piece)

    def _read(self, piece: _Piece) -> None:
        del self._away[piece.number]
        piece.state = _State.NEEDED
        # Allocated here, on the stream of its user.
        target = torch.empty(piece.nbytes, dtype=torch.uint8, device=piece.device)
        after = self._transfers.streams.record()
        piece.coming = self._reader.submit(partial(self._carry_back, weakref.ref(piece), target, after))

    def _carry_back(self, known: weakref.ref[_Piece], target: torch.Tensor, after: Event) -> None:
        """Bring one piece back (the reading thread)."""
        if (piece := known()) is None:
            return
        try:
            with self._context():
                self._tier.read(piece.place, target, after)
        except BaseException as error:
            error.add_note("An activation could not be brought back.")
            raise
        with self._lock:
            piece.memory, piece.coming = target, None
            self._counts.read_bytes += piece.nbytes

    # -- both -------------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Free the places of pieces that nobody needs any more, and raise the error of a thread."""
        self._sweep()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _sweep(self) -> None:
        while self._gone:
            number, place, written_bytes = self._gone.popleft()
            self._away.pop(number, None)
            self._counts.resting_bytes -= written_bytes
            self._tier.free(place)

    def statistics(self) -> ActivationStatistics:
        """Return counters since the start."""
        with self._lock:
            self._sweep()
            return replace(self._counts)

    def close(self) -> None:
        """End the threads; pieces that are away are lost, and the backward of a graph that needs them raises."""
        self._closed = True
        self._take_all()
        self._writer.close()
        self._reader.close()


def make_tier(config: Config, store: Store, transfers: Transfers, pool_bytes: int) -> ActivationTier | None:
    """Return the tier of activations that the config names, with buffers of `pool_bytes` to the disk; None if they stay on the
    device, as those in host memory do if the CPU computes."""
    if config.activations == "disk":
        return DiskPieces(store, transfers, pool_bytes)
    on_host = config.activations == "host" and not transfers.streams.device_is_host
    return HostPieces(store, transfers) if on_host else None


active_offload: ContextVar[ActivationOffload | None] = ContextVar("active_offload", default=None)
"""Takes activations of the forward under way; None: nothing does."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the callable modules with parameters in the outermost ModuleLists of `model`, in module order."""
    return list(dict.fromkeys(_blocks(model, in_list=False)))


def _blocks(module: nn.Module, *, in_list: bool) -> Iterator[nn.Module]:
    is_callable = type(module).forward is not nn.Module.forward
    if in_list and is_callable:
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        # A ModuleDict in a ModuleList is not called either: its children are the blocks.
        yield from _blocks(child, in_list=isinstance(module, nn.ModuleList) or in_list)
