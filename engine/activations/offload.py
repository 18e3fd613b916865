"""Offloads the tensors that autograd saves in the forward, in the background, and prefetches them in the backward.

[Note: offloaded activations]
Saved-tensor hooks are active in the engine's forward. `pack` receives the inputs of checkpointed blocks and, without
checkpointing, everything that blocks save. Not offloaded are parameters and buffers, storages under 64 KiB, tensors that are a
small part of a large storage, subclasses of Tensor, tensors with a lazy negation or conjugation, and tensors saved after the
last block, which the backward needs first.

A piece is one storage, as bytes; views of it are recreated on the restored storage. A thread writes it to its tier; a
backward that needs it earlier takes it from memory. The forward waits while more than `_MAX_WRITE_BYTES` (or one piece)
would be in flight. When a piece is needed, a second thread prefetches those saved before it, the latest first, up to
`_MAX_PREFETCH_BYTES` (or one piece). No writes start during a backward. A piece's place is freed when autograd drops its
saved tensors, also after a failed forward or backward. A retained graph keeps restored pieces in memory.
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
from zstore.store import ModeName, Store

from ..config.config import Config
from ..runtime.device import Event, StreamContext, Transfers

_WORD_BYTES = 4
"""Bytes of an element of an array on disk."""
_MIN_BYTES = 64 * 1024
"""Smaller storages are not offloaded: a transfer would cost more than it frees."""
_MAX_STORAGE_RATIO = 8
"""Tensors whose storage is larger than this many times their size are not offloaded: other code owns the storage."""
_MAX_WRITE_BYTES = 64 * 1024 * 1024
_MAX_PREFETCH_BYTES = 64 * 1024 * 1024


@dataclass(kw_only=True)
class ActivationStatistics:
    """Counters of this rank since the engine was created."""

    tier: str
    """Tier of the activations: host or disk."""
    kept_bytes: int = 0
    """Bytes selected for offloading."""
    written_bytes: int = 0
    """Bytes written to the tier, except pieces that the backward needed before they were written."""
    read_bytes: int = 0
    """Bytes read back."""
    resting_bytes: int = 0
    """Bytes currently on the tier."""
    resting_peak_bytes: int = 0
    """Peak of `resting_bytes`."""


class HostPieces:
    """The tier of host memory, pinned if possible, within the store's budget.

    `allocate` returns a place for a piece and `free` frees it, one thread at a time; `allocate` raises BudgetError or
    DiskFullError if there is no room. After an event, `write` copies `source`, uint8 on the device, to a place, and `read`
    copies a place to `target`: both block, each in its own thread.
    """

    name = "host"

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._budget = store.budget
        self._transfers = transfers

    def allocate(self, nbytes: int) -> torch.Tensor:
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
    """The disk tier: arrays of the store, written with checksums; an array is reused for the next piece of its size."""

    name = "disk"

    def __init__(self, store: Store, transfers: Transfers, pool_bytes: int) -> None:
        self._store = store
        self._transfers = transfers
        # Separate pools, since a read must not wait for the writes of the forward.
        self._writing = store.make_pool(pool_bytes // 2)
        self._reading = store.make_pool(pool_bytes // 2)
        self._free: dict[int, list[str]] = defaultdict(list)
        """Unused arrays, by size in words."""
        self._count = 0

    def allocate(self, nbytes: int) -> str:
        words = -(-nbytes // _WORD_BYTES)
        if self._free[words]:
            return self._free[words].pop()
        spec = ArraySpec(name=f"activation/{self._count}", shape=(words,), dtype="int32")
        self._store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        self._count += 1
        return spec.name

    def write(self, place: str, source: torch.Tensor, after: Event) -> None:
        self._transfer(place, source, after, reads=False)

    def read(self, place: str, target: torch.Tensor, after: Event) -> None:
        self._transfer(place, target, after, reads=True)

    def _transfer(self, place: str, values: torch.Tensor, after: Event, *, reads: bool) -> None:
        mode: ModeName = "read" if reads else "fill"
        pool = self._reading if reads else self._writing
        with closing(self._store.tiles([[place]], mode, pool=pool, ahead=reads)) as tiles:
            for tile in tiles:
                part = values[tile.first * _WORD_BYTES : tile.stop * _WORD_BYTES]
                stored = as_torch(tile.views[0]).view(torch.uint8)[: part.numel()]
                target, source = (part, stored) if reads else (stored, part)
                if self._transfers.link(source, target) is None:
                    # A memcpy without torch's threads, which the computation uses.
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
                else:  # complete before the next tile, which recycles the buffer
                    self._transfers.begin(target, source, after=after).wait()

    def free(self, place: str) -> None:
        self._free[self._store.local(place).valid_numel].append(place)


ActivationTier = HostPieces | DiskPieces
Place = Any
"""A piece's place on its tier, opaque to other code."""


class _State(Enum):
    """State of a piece. See [Note: offloaded activations]."""

    WRITING = "writing"
    """It is in memory, and is to be written to its tier."""
    OFFLOADED = "offloaded"
    """It is only on its tier."""
    NEEDED = "needed"
    """It is in memory, or being read back, until it is dropped."""


class _Piece:
    """One storage; lives as long as autograd keeps a tensor of it."""

    def __init__(self, index: int, tensor: torch.Tensor, place: Place, dropped: deque[tuple[int, Place, int]]) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        self.place = place
        self.nbytes = storage.nbytes()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: torch.Tensor | None = memory.set_(storage, 0, (self.nbytes,), (1,))
        self.device = tensor.device
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        """While this exists, no other storage has the same address."""
        self.version = tensor._version
        self.saved: torch.Tensor | None = tensor.detach()
        """An alias that shares the saved tensor's version counter; None after `take_values`."""
        self.was_changed = False
        """Whether the tensor was changed in place before its values were taken."""
        self.state = _State.WRITING
        self.written_bytes = 0
        """Bytes on its tier."""
        self.read: Ticket[None] | None = None
        self._dropped = dropped

    def take_values(self) -> None:
        """Record that the values have been copied, or are about to be used."""
        if self.saved is not None:
            self.was_changed = self.saved._version != self.version
            self.saved = None

    def __del__(self) -> None:
        # Runs in any thread that drops the last tensor, so it only records.
        self._dropped.append((self.index, self.place, self.written_bytes))


class _Saved(NamedTuple):
    """What autograd saves in place of a tensor: a view of its piece."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Keeps activations of `model` on `tier`; `parameters` returns its parameters' current tensors. See [Note: offloaded
    activations]."""

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
        self._write_ended = threading.Condition(self._lock)
        """Notified when a write ends."""
        self._writer = Workers(1, "zstore-activations-out")
        self._reader = Workers(1, "zstore-activations-in")
        self._context: StreamContext = nullcontext
        self._resident_addresses: frozenset[int] = frozenset()
        """Addresses of the storages of parameters and buffers, which are not offloaded."""
        self._in_blocks = True
        """Whether tensors saved now are saved by a block, or before the last one."""
        self._in_backward = False
        self._by_storage: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()
        self._offloaded: dict[int, weakref.ref[_Piece]] = {}
        """Pieces by index, in the order in which they were saved."""
        self._prefetched: weakref.WeakSet[_Piece] = weakref.WeakSet()
        """Prefetched pieces that have not been needed yet."""
        self._dropped: deque[tuple[int, Place, int]] = deque()
        """Indices, places and written bytes of dropped pieces."""
        self._writing_bytes = 0
        self._count = 0
        self._error: BaseException | None = None
        """A thread's error, raised by the next call."""
        self._closed = False
        self._counts = ActivationStatistics(tier=tier.name)
        blocks = find_blocks(model)
        self._handles = [block.register_forward_pre_hook(partial(self._set_in_blocks, True)) for block in blocks]
        self._handles += [block.register_forward_hook(partial(self._set_in_blocks, False)) for block in blocks[-1:]]
        self.hooks: Any = (self.pack, self.unpack)
        """The saved-tensor hooks."""

    def _set_in_blocks(self, in_blocks: bool, *_: Any) -> None:
        self._in_blocks = in_blocks

    def stay_out_of_graphs(self) -> None:
        """Also offload tensors saved after the last block, since compiled code may save at any time, and keep torch.compile
        from tracing the hooks between its graphs."""
        self._ignore_blocks()
        self.hooks = tuple(map(torch.compiler.disable, (self.pack, self.unpack)))

    def _ignore_blocks(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._in_blocks = True

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Offload tensors that autograd saves in this block."""
        self._in_blocks, self._in_backward = True, False
        if not torch.is_grad_enabled():
            yield
            return
        fixed = chain(self._parameters(), self._model.buffers())
        self._resident_addresses = frozenset(tensor.untyped_storage()._cdata for tensor in fixed)
        self._context = self._transfers.streams.stream_context()
        token = active_offload.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
                yield
        finally:
            active_offload.reset(token)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves in place of `tensor`, or `tensor` if it is kept (a saved-tensor hook)."""
        if not self._is_offloadable(tensor):
            return tensor
        with self._lock:
            address = tensor.untyped_storage()._cdata
            piece = self._by_storage.get(address)
            if piece is None or piece.version != tensor._version:
                piece = self._by_storage[address] = self._start_write(tensor)
        return _Saved(piece, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        if not self._in_blocks or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        streams, storage = self._transfers.streams, tensor.untyped_storage()
        if tensor.is_meta or tensor.is_neg() or tensor.is_conj() or storage._cdata in self._resident_addresses:
            return False
        if not streams.device_is_host and streams.is_host(tensor):
            return False
        return _MIN_BYTES <= storage.nbytes() <= tensor.nbytes * _MAX_STORAGE_RATIO

    def _start_write(self, tensor: torch.Tensor) -> _Piece:
        """Start to write a storage, after waiting while too many bytes are being written."""
        nbytes = tensor.untyped_storage().nbytes()
        while self._writing_bytes and self._writing_bytes + nbytes > _MAX_WRITE_BYTES:
            self._write_ended.wait()
        self._free_dropped()
        piece = _Piece(self._count, tensor, self._tier.allocate(nbytes), self._dropped)
        self._count += 1
        self._counts.kept_bytes += nbytes
        self._writing_bytes += nbytes
        self._writer.submit(partial(self._write, weakref.ref(piece), nbytes, self._transfers.streams.record()))
        return piece

    def _write(self, piece_ref: weakref.ref[_Piece], nbytes: int, after: Event) -> None:
        """Write one piece to its tier (the writer thread)."""
        try:
            piece, counts = piece_ref(), self._counts
            if piece is None or piece.memory is None or piece.state is not _State.WRITING:
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
                if piece.state is _State.WRITING:  # otherwise the backward already needs it
                    piece.state, piece.memory = _State.OFFLOADED, None
                    self._offloaded[piece.index] = piece_ref
        except BaseException as error:
            # The piece is still in memory; the next call to this object raises the error.
            error.add_note("An activation could not be offloaded.")
            self._error = error
        finally:
            with self._lock:
                self._writing_bytes -= nbytes
                self._write_ended.notify_all()

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor passed to `pack`, with the same values (a saved-tensor hook)."""
        if not isinstance(saved, _Saved):
            return cast("torch.Tensor", saved)
        piece = saved.piece
        if self._closed:
            raise UsageError("a backward was started after engine.close(): the offloaded activations were dropped")
        with self._lock:
            self._free_dropped()
            self._in_backward = True
            if piece.state is _State.WRITING:
                piece.take_values()
                piece.state = _State.NEEDED
            elif piece.state is _State.OFFLOADED:
                self._start_read(piece)
            self._prefetched.discard(piece)
            self._read_ahead(piece)
            read = piece.read
        if read is not None:
            read.wait()
        if piece.was_changed:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after it was saved, while it was being offloaded: "
                'change the model, as autograd would demand without offloading, or set zstore.activations to "device"'
            )
        memory = cast("torch.Tensor", piece.memory)
        empty = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _read_ahead(self, needed: _Piece) -> None:
        """Start to read the pieces saved before `needed`, the latest first."""
        prefetched_bytes = sum(piece.nbytes for piece in self._prefetched)
        chosen: list[_Piece] = []
        for index, piece_ref in reversed(self._offloaded.items()):
            piece = piece_ref()
            if index >= needed.index or piece is None:
                continue
            if prefetched_bytes and prefetched_bytes + piece.nbytes > _MAX_PREFETCH_BYTES:
                break
            prefetched_bytes += piece.nbytes
            chosen.append(piece)
        for piece in chosen:
            self._prefetched.add(piece)
            self._start_read(piece)

    def _start_read(self, piece: _Piece) -> None:
        del self._offloaded[piece.index]
        piece.state = _State.NEEDED
        # Allocated on the stream that will use it.
        target = torch.empty(piece.nbytes, dtype=torch.uint8, device=piece.device)
        after = self._transfers.streams.record()
        piece.read = self._reader.submit(partial(self._read_back, weakref.ref(piece), target, after))

    def _read_back(self, piece_ref: weakref.ref[_Piece], target: torch.Tensor, after: Event) -> None:
        """Read one piece back (the reader thread)."""
        if (piece := piece_ref()) is None:
            return
        try:
            with self._context():
                self._tier.read(piece.place, target, after)
        except BaseException as error:
            error.add_note("An activation could not be read back.")
            raise
        with self._lock:
            piece.memory, piece.read = target, None
            self._counts.read_bytes += piece.nbytes

    def _free_dropped(self) -> None:
        """Free the places of dropped pieces, and raise a thread's error."""
        self._free_places()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _free_places(self) -> None:
        while self._dropped:
            index, place, written_bytes = self._dropped.popleft()
            self._offloaded.pop(index, None)
            self._counts.resting_bytes -= written_bytes
            self._tier.free(place)

    def statistics(self) -> ActivationStatistics:
        """Return the counters since the start."""
        with self._lock:
            self._free_places()
            return replace(self._counts)

    def close(self) -> None:
        """Stop the threads; offloaded pieces are dropped, and a backward that needs them raises an error."""
        self._closed = True
        self._ignore_blocks()
        self._writer.close()
        self._reader.close()


def make_tier(config: Config, store: Store, transfers: Transfers, pool_bytes: int) -> ActivationTier | None:
    """Return the config's tier of offloaded activations, with buffers of `pool_bytes` for the disk; None for host memory if
    the CPU computes the model."""
    if config.activations == "disk":
        return DiskPieces(store, transfers, pool_bytes)
    return None if transfers.streams.device_is_host else HostPieces(store, transfers)


active_offload: ContextVar[ActivationOffload | None] = ContextVar("active_offload", default=None)
"""Offloads the activations of the current forward; None if they are not offloaded."""


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
        # A ModuleDict in a ModuleList is never called: its children are the blocks.
        yield from _blocks(child, in_list=isinstance(module, nn.ModuleList) or in_list)
