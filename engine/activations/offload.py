"""Takes tensors that autograd saves off the device behind the forward, and brings them back ahead of the backward.

[Note: how activations leave and come back]
Saved-tensor hooks are set around the engine's forward. Tensors saved there go through `pack`: the inputs of checkpointed
blocks, whoever checkpoints them, since torch saves those like any others; and without checkpointing all that the blocks
save. Within a checkpointed block torch has hooks of its own on top, so nothing that is to be computed again comes here.
These stay as they are: parameters and buffers, storages under 64 KiB, tensors that are a small part of a large storage,
subclasses of Tensor, and tensors that the model saves after its last block, which the backward needs at once.

A piece is the memory of one storage. Views of it are one piece, as it is one allocation: they are made again over the
memory that comes back, so that values, strides and offsets are the same.

leaving   a thread copies it to its tier; until then it is in memory, and a backward that needs it takes it from there.
          At most `_BEHIND_BYTES` are leaving at a time (or one piece): then the forward waits.
away      it is on its tier alone.
coming    a thread reads it back; when a piece is asked for, those that were saved before it are begun, the latest first,
          up to `_AHEAD_BYTES` (or one piece).
here      it is in memory until nothing needs it any more, or the backward ends.

When the first piece is asked for, pieces that have not begun to leave stay: they are needed next. A piece that nobody needs
any more gives its place back, also if a forward or a backward failed: autograd lets go of its saved tensors.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError
from zstore.io import Ticket, Workers

from ..runtime.device import Event, StreamContext, Transfers
from .blocks import find_blocks
from .statistics import ActivationStatistics
from .tiers import ActivationTier, Place

LEAST_BYTES = 64 * 1024
"""Smaller storages stay: a transfer would cost more than their memory."""
_LEAST_SHARE = 8
"""A tensor that is less than one part in so many of its storage stays: the storage is somebody else's."""
_BEHIND_BYTES = 64 * 1024 * 1024
_AHEAD_BYTES = 64 * 1024 * 1024


class _State(Enum):
    """The place of a piece. See [Note: how activations leave and come back]."""

    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"
    HERE = "here"


class _Piece:
    """The memory of one storage; lives as long as autograd keeps a tensor of it."""

    def __init__(self, number: int, tensor: torch.Tensor, place: Place, gone: deque[_Remains]) -> None:
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
        self.watched: torch.Tensor | None = tensor.detach()
        """Shares the version of the saved tensor."""
        self.state = _State.LEAVING
        self.begun = False
        """Whether the copy to its tier has begun."""
        self.rests = False
        """Whether the tier has its values."""
        self.is_ahead = False
        """Whether it counts as brought ahead of use."""
        self.coming: Ticket[None] | None = None
        self.was_changed = False
        self._gone = gone

    def __del__(self) -> None:
        # Runs in any thread that drops the last tensor: only noted here.
        self._gone.append(_Remains(self.number, self.place, self.nbytes, self.rests, self.is_ahead))


@dataclass(frozen=True)
class _Remains:
    """The parts of a piece to give back."""

    number: int
    place: Place
    nbytes: int
    rests: bool
    is_ahead: bool


@dataclass(frozen=True, eq=False)
class _Saved:
    """Kept by autograd in place of a tensor."""

    piece: _Piece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    negative: bool
    conjugate: bool
    """Whether torch negates or conjugates what the memory has."""

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the memory of its piece."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        values = empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        values = values.conj() if self.conjugate else values
        return torch._neg_view(values) if self.negative else values


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
        self._context: StreamContext | None = None
        self._fixed: frozenset[int] = frozenset()
        """Addresses of storages that stay: of parameters and buffers."""
        self._in_blocks = True
        """Whether tensors saved now are a block's, or come before one."""
        self._by_storage: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[_Piece]] = deque()
        self._away: dict[int, weakref.ref[_Piece]] = {}
        """By number, in order: the last was saved last."""
        self._here: dict[int, weakref.ref[_Piece]] = {}
        """Those that were brought back."""
        self._gone: deque[_Remains] = deque()
        self._behind_bytes = 0
        self._ahead_bytes = 0
        self._made = 0
        self._error: BaseException | None = None
        """Error of a thread, raised by the next call."""
        self._closed = False
        self._counts = ActivationStatistics(tier=tier.name)
        self._handles = self._watch(find_blocks(model))
        self.hooks: Any = (self.pack, self.unpack)
        """The saved-tensor hooks."""

    def _watch(self, blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
        def enter(module: nn.Module, args: Any) -> None:
            self._in_blocks = True

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._in_blocks = False

        handles = [block.register_forward_pre_hook(enter) for block in blocks]
        return handles + ([blocks[-1].register_forward_hook(leave)] if blocks else [])

    def stay_out_of_graphs(self) -> None:
        """Take tensors that are saved after the last block too, since compiled code saves when it likes, and keep
        torch.compile from tracing the hooks that are called between its graphs."""
        self._take_all()
        self.hooks = tuple(map(torch.compiler.disable, (self.pack, self.unpack)))

    def _take_all(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._in_blocks = True

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Take the tensors that autograd saves in this block."""
        self._in_blocks = True
        if not torch.is_grad_enabled():
            yield
            return
        fixed = chain(self._parameters(), self._model.buffers())
        self._fixed = frozenset(tensor.untyped_storage()._cdata for tensor in fixed)
        if self._context is None:
            self._context = self._transfers.streams.stream_context()
        token = _active.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
                yield
        finally:
            _active.reset(token)

    # -- forward ----------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps in place of `tensor`, or `tensor` if it stays (a saved-tensor hook)."""
        if not self._takes(tensor):
            return tensor
        with self._lock:
            self._raise_error()
            self._sweep()
            address = tensor.untyped_storage()._cdata
            piece = self._by_storage.get(address)
            if piece is None or piece.version != tensor._version or piece.storage.expired():  # type: ignore[no-untyped-call]
                piece = self._begin(tensor)
                self._by_storage[address] = piece
        bits = {"negative": tensor.is_neg(), "conjugate": tensor.is_conj()}
        return _Saved(piece, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), **bits)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if not self._in_blocks or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        streams = self._transfers.streams
        if not streams.device_is_host and streams.is_host(tensor):
            return False
        storage = tensor.untyped_storage()
        if not LEAST_BYTES <= storage.nbytes() <= tensor.nbytes * _LEAST_SHARE:
            return False
        return storage._cdata not in self._fixed and not tensor.is_meta

    def _begin(self, tensor: torch.Tensor) -> _Piece:
        """Let a storage leave, once there is room behind the forward."""
        nbytes = tensor.untyped_storage().nbytes()
        started = time.perf_counter()
        while self._behind_bytes and self._behind_bytes + nbytes > _BEHIND_BYTES:
            self._ended.wait()
        self._counts.write_wait_s += time.perf_counter() - started
        self._raise_error()
        piece = _Piece(self._made, tensor, self._tier.make(nbytes), self._gone)
        self._made += 1
        self._counts.kept += 1
        self._counts.kept_bytes += nbytes
        self._behind_bytes += nbytes
        known = weakref.ref(piece)
        self._leaving.append(known)
        self._writer.submit(partial(self._write, known, nbytes, self._transfers.streams.record()))
        return piece

    def _write(self, known: weakref.ref[_Piece], nbytes: int, after: Event) -> None:
        """Carry one piece to its tier (the writing thread)."""
        try:
            piece, source = self._start_write(known)
            if piece is not None and source is not None and self._context is not None:
                with self._context():
                    self._tier.write(piece.place, source, after)
                self._finish_write(piece)
        except BaseException as error:
            # It is still in memory; the next call raises the error.
            error.add_note("An activation could not be taken off the device.")
            self._error = error
        finally:
            with self._lock:
                self._behind_bytes -= nbytes
                self._ended.notify_all()

    def _start_write(self, known: weakref.ref[_Piece]) -> tuple[_Piece | None, torch.Tensor | None]:
        with self._lock:
            if self._leaving and self._leaving[0] is known:
                self._leaving.popleft()
            piece = known()
            if piece is None or piece.state is not _State.LEAVING or self._closed:
                return None, None
            piece.begun = True
            return piece, piece.memory

    def _finish_write(self, piece: _Piece) -> None:
        with self._lock:
            if piece.watched is not None:
                piece.was_changed = piece.watched._version != piece.version
            piece.rests = True
            piece.watched = None
            self._counts.written_bytes += piece.nbytes
            self._counts.rests(piece.nbytes)
            if piece.state is _State.LEAVING:
                piece.state, piece.memory = _State.AWAY, None
                self._away[piece.number] = weakref.ref(piece)

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that `pack` was given, with the same values (a saved-tensor hook)."""
        if not isinstance(saved, _Saved):
            tensor: torch.Tensor = saved
            return tensor
        piece = saved.piece
        if self._closed:
            raise UsageError("a backward after engine.close(): what the forward kept for it is gone")
        with self._lock:
            self._raise_error()
            self._sweep()
            self._keep_leaving()
            self._ask_for(piece)
            self._read_ahead(piece)
            coming = piece.coming
        if coming is not None:
            started = time.perf_counter()
            coming.wait()
            self._counts.read_wait_s += time.perf_counter() - started
        memory = piece.memory
        if memory is None:
            raise RuntimeError("an activation is neither in memory nor on its way there")
        if piece.was_changed:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after it was saved, while it was taken off the device: "
                'change the model, as autograd would ask for without offloading, or set zstore.activations to "device"'
            )
        return saved.view(memory)

    def _keep_leaving(self) -> None:
        """Keep pieces in memory that have not begun to leave."""
        for known in self._leaving:
            piece = known()
            if piece is not None and piece.state is _State.LEAVING and not piece.begun:
                piece.state = _State.HERE
        self._leaving.clear()

    def _ask_for(self, piece: _Piece) -> None:
        """Let a piece be in memory, or on its way there."""
        if piece.watched is not None:  # in memory since the forward
            self._counts.used_in_place += 1
            piece.was_changed = piece.watched._version != piece.version
            piece.watched = None
            piece.state = _State.HERE
        elif piece.state is _State.AWAY:
            self._read(piece)
        elif piece.is_ahead:
            piece.is_ahead = False
            self._ahead_bytes -= piece.nbytes
            self._counts.read_ahead += 1

    def _read_ahead(self, after: _Piece) -> None:
        """Begin to bring back the pieces saved before `after`, the latest first."""
        chosen: list[_Piece] = []
        for number in reversed(self._away):
            piece = self._away[number]()
            if number >= after.number or piece is None:
                continue
            if self._ahead_bytes and self._ahead_bytes + piece.nbytes > _AHEAD_BYTES:
                break
            piece.is_ahead = True
            self._ahead_bytes += piece.nbytes
            chosen.append(piece)
        for piece in chosen:
            self._read(piece)

    def _read(self, piece: _Piece) -> None:
        del self._away[piece.number]
        piece.state = _State.COMING
        # Allocated here, on the stream of its user.
        target = torch.empty(piece.nbytes, dtype=torch.uint8, device=piece.device)
        after = self._transfers.streams.record()
        piece.coming = self._reader.submit(partial(self._carry_back, weakref.ref(piece), target, after))
        self._here[piece.number] = weakref.ref(piece)

    def _carry_back(self, known: weakref.ref[_Piece], target: torch.Tensor, after: Event) -> None:
        """Bring one piece back (the reading thread)."""
        piece = known()
        if piece is None or self._context is None:
            return
        try:
            with self._context():
                self._tier.read(piece.place, target, after)
        except BaseException as error:
            error.add_note("An activation could not be brought back.")
            raise
        with self._lock:
            piece.memory, piece.coming, piece.state = target, None, _State.HERE
            self._counts.read_bytes += piece.nbytes

    def end_backward(self) -> None:
        """Let go of pieces that were brought back and are still kept by a graph: they are read again if it has another
        backward."""
        with self._lock:
            self._sweep()
            coming = [(known, piece.coming) for known in self._here.values() if (piece := known()) is not None]
        for _, ticket in coming:
            if ticket is not None:
                ticket.error()
        with self._lock:
            for known, _ in coming:
                piece = known()
                if piece is None:
                    continue
                if piece.is_ahead:
                    piece.is_ahead = False
                    self._ahead_bytes -= piece.nbytes
                piece.state, piece.memory, piece.coming = _State.AWAY, None, None
                self._away[piece.number] = known
            self._here.clear()
            self._away = dict(sorted(self._away.items()))

    # -- both -------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Free the places of pieces that nobody needs any more."""
        while self._gone:
            remains = self._gone.popleft()
            self._away.pop(remains.number, None)
            self._here.pop(remains.number, None)
            self._ahead_bytes -= remains.nbytes if remains.is_ahead else 0
            self._counts.rests(-remains.nbytes if remains.rests else 0)
            self._tier.free(remains.place)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

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


_active: ContextVar[ActivationOffload | None] = ContextVar("active_offload", default=None)


def active_offload() -> ActivationOffload | None:
    """Return the offload that takes activations of the forward under way; None: there is none."""
    return _active.get()
