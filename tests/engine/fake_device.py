"""A device of its own memory on a machine that has none: what hands memory over to it wrongly shows.

[Note: the fake device]
It stands in for the streams of a CUDA device (`zstore.engine`'s seam to streams and events) and for the CUDA runtime that
registers memory. Its memory is the process's too, so that torch computes there, but whose it is is known: host memory
is what was registered as pinned, what the host tier has, what `empty_host` gave, and what came from those; everything else
is the device's.
- An operation on both raises, as torch does for two devices. Only the streams' copies cross.
- A copy beside the computation is carried out as late as can be: when its end is waited for, and only then is its source
  read. Memory that was used again too early, or read before its values came, has wrong values, or was freed, which raises.
- The computation is as early as can be: so a copy that does not come after what was asked of the device with the memory
  it uses, before it began, raises.
`forgets` names what is left out, to show that a missing one is noticed: the waits for copies "down" to the host or "up"
to the device, or the "event" that a copy comes after.
"""

import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zstore.io.memory import _memory_owner
from zstore.store.tiers import HostTier


class HandOverError(RuntimeError):
    """Memory was handed over between host and device as it must not be."""


@dataclass(eq=False)
class FakeEvent:
    clock: int
    """Operations asked of the device before it."""
    stream: str | None = None
    """The stream of the copy that ends here; None: the computation, which is never late."""
    reached: bool = False


class _Memory:
    """A tensor's memory, which this does not keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._nbytes = tensor.untyped_storage().nbytes()

    def tensor(self) -> torch.Tensor:
        """Return a tensor over the memory. Raises HandOverError where it was freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._nbytes:
            raise HandOverError("the memory of a copy was freed before the copy was waited for")
        dtype, offset, size, stride = self._like
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class FakeDevice:
    """Streams, and a CUDA runtime. See [Note: the fake device]. Operations are watched in a `with` block of it."""

    device_is_host = False

    @property
    def cuda_runtime(self) -> Self:
        return self

    def __init__(self, forgets: Iterable[str] = ()) -> None:
        self._forgets = frozenset(forgets)
        self._pinned: dict[int, int] = {}
        self._shards: dict[int, int] = {}
        self._queues: dict[str, deque[tuple[FakeEvent, list[_Memory], list[_Memory]]]] = {
            "down": deque(),
            "up": deque(),
        }
        self._lock = threading.RLock()
        self._here = threading.local()
        self._modes: list[_Watching] = []
        self.clock = 0
        self.copies = self.copies_now = self.main_waits = 0
        """Copies begun beside the computation, those that were waited for at once, and by the main thread."""
        self.syncs: set[str] = set()
        """Operations on device memory that wait for the device, by the rules of `torch.cuda.set_sync_debug_mode`: each with the
        project's file that asked for it."""
        self.allocations = 0
        """Pieces of host memory that were registered or made."""
        self.pinned_peak_bytes = 0

    def __enter__(self) -> Self:
        former = self._former = HostTier._allocate

        def allocate(tier: HostTier, local: Any) -> Any:
            view = former(tier, local)
            if view.size:
                self._shards[view.ctypes.data] = view.nbytes
                weakref.finalize(_memory_owner(view), self._shards.pop, view.ctypes.data, None).atexit = False
            return view

        HostTier._allocate = allocate  # type: ignore[method-assign]
        mode = _Watching(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.pop().__exit__(*error)  # type: ignore[no-untyped-call]
        HostTier._allocate = self._former  # type: ignore[method-assign]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._pinned[address] = nbytes
        self.allocations += 1
        self.pinned_peak_bytes = max(self.pinned_peak_bytes, self.pinned_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self._pinned[address]
        return 0

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    def is_host(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if getattr(storage, "fake_host", False):
            return True
        address = storage.data_ptr()
        # Copies: memory may be freed while this goes over it.
        known = (*self._pinned.copy().items(), *self._shards.copy().items())
        return any(first <= address < first + nbytes for first, nbytes in known)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory, with NaN in it: nobody may count on what was there."""
        self.allocations += 1
        with self._crossing():
            made = torch.full((numel,), torch.nan if dtype.is_floating_point else 77, dtype=dtype)
        own(made)
        return made

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy across, in the order of the computation."""
        self.copies_now += 1
        with self._crossing():
            target.copy_(source)
        self.touch([target, source], wrote=[target])

    def record(self) -> FakeEvent:
        return FakeEvent(0 if "event" in self._forgets else self.clock)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: FakeEvent) -> FakeEvent:
        """Queue a copy. Raises HandOverError where it may come before the work that it must come after."""
        down = self.is_host(targets[0])
        for target, source in zip(targets, sources, strict=True):
            are_alike = target.dtype == source.dtype and target.shape == source.shape
            if not are_alike or self.is_host(target) != down or self.is_host(source) == down:
                raise HandOverError(f"a copy across is of one type, size and way: {source.dtype} to {target.dtype}")
            used = getattr(
                (source if down else target).untyped_storage(), "fake_written" if down else "fake_touched", 0
            )
            if used > after.clock:
                raise HandOverError(f"a copy may begin before the device's operation {used}, which has the same memory")
        with self._lock:
            self.copies += 1
            event = FakeEvent(self.clock, "down" if down else "up")
            memory = ([_Memory(each) for each in targets], [_Memory(each) for each in sources])
            self._queues[event.stream or ""].append((event, *memory))
            return event

    def wait(self, event: FakeEvent) -> None:
        if event.stream is not None and not event.reached:
            self.main_waits += threading.current_thread() is threading.main_thread()
        self.follow(event)

    def follow(self, event: FakeEvent) -> None:
        """Carry out what is queued up to the event: the computation, which is never late, comes next."""
        if event.stream is None or event.stream in self._forgets:
            return
        with self._lock, self._crossing():
            queue = self._queues[event.stream]
            while queue and not event.reached:
                done, targets, sources = queue.popleft()
                for target, source in zip(targets, sources, strict=True):
                    target.tensor().copy_(source.tensor())
                done.reached = True

    def query(self, event: FakeEvent) -> bool:
        return event.stream is None or event.reached

    def stream_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what a thread enters so that its operations are watched."""
        return lambda: _Watching(self)

    @property
    def num_under_way(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def is_crossing(self) -> bool:
        """Whether this thread's operation is one of the streams'."""
        return bool(getattr(self._here, "crossing", False))

    @contextmanager
    def _crossing(self) -> Iterator[None]:
        before, self._here.crossing = self.is_crossing, True
        try:
            yield
        finally:
            self._here.crossing = before

    def touch(self, used: Iterable[torch.Tensor], wrote: Iterable[torch.Tensor]) -> None:
        with self._lock:
            self.clock += 1
            for tensor in used:
                tensor.untyped_storage().fake_touched = self.clock  # type: ignore[attr-defined]
            for tensor in wrote:
                tensor.untyped_storage().fake_written = self.clock  # type: ignore[attr-defined]
                tensor.untyped_storage().fake_touched = self.clock  # type: ignore[attr-defined]


def own(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().fake_host = True  # type: ignore[attr-defined]


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._device.is_crossing:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # As on CUDA, a single value of the host's may be used on the device.
        wide = [tensor for tensor in tensors if tensor.dim() > 0 and tensor.numel() > 0]
        host = [self._device.is_host(tensor) for tensor in wide]
        if any(host) and not all(host):
            raise HandOverError(f"{func} got tensors of the host and of the device")
        if wide and not any(host) and _waits(func, args):
            asked = [one.filename for one in traceback.extract_stack() if "zstore/engine" in one.filename] or ["a test"]
            self._device.syncs.add(f"{func.overloadpacket.__name__} in {asked[-1].rpartition('/')[2]}")
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(host):
            for output in outputs:
                own(output)
            return result
        written = [*_written(func, args, kwargs), *outputs]
        if not _moves_nothing(func):
            self._device.touch(tensors, written)
        return result


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the host needs values, or their number, to go on."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        return any(one is not None and one.dtype == torch.bool for one in args[1])
    return name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim", "_unique2")


def _moves_nothing(func: Any) -> bool:
    """Return whether the operation makes another tensor over the same memory, and asks nothing of the device."""
    if func.overloadpacket.__name__ in ("set_", "_unsafe_view"):
        return True
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
