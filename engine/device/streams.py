"""Streams, events and pinned memory: what is between the host and the device that computes, and nothing else is.

[Note: the hand-over]
A device works behind the host, in the order of a stream. Copies that something else need not stand still for go over
streams of their own, one each way, beside the computation. So each says what it comes after, and whoever uses what it
brought, or uses its source for something else, waits for it:
mark     a point in what was asked of the device so far: a copy reads and writes device memory after it.
copy     begun after a mark, and itself one. Until it is waited for nobody touches target or source, or frees them.
wait     the host stands still until the mark is reached: what was copied is there, for the device too, and the source
         may be used anew.
Threads that ask for work on the device do so on the stream of whoever made them, so that its order is theirs.

There is one lane for each kind of device. That of a CPU has nothing to do: its memory is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Mark = Any
"""A point in the work of a device; only the lane that made it knows more."""
Within = Callable[[], AbstractContextManager[None]]


class Lane(Protocol):
    """The way between host and device. See [Note: the hand-over]. Every method may be called from any thread."""

    device_is_host: bool
    """Whether the device computes in the host's memory: then nothing crosses."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in the host's memory."""

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for `numel` elements, 1-D, pinned where that can be."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy across, cast on the host's side, in the order of this thread's stream; done on return."""

    def mark(self) -> Mark:
        """Return the end of what this thread asked of the device so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        """Begin to copy across, of one type, beside the computation; return the mark of its end."""

    def wait(self, mark: Mark) -> None:
        """Return when the mark is reached."""

    def is_reached(self, mark: Mark) -> bool:
        """Return whether `wait` would not wait."""

    def within(self) -> Within:
        """Return what a thread that works for the caller enters: its device and its stream."""


class HostLane:
    """Of a device that is the host: nothing crosses, and nothing is late."""

    device_is_host = True

    def is_host(self, tensor: torch.Tensor) -> bool:
        """See Lane."""
        return True

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See Lane."""
        return torch.empty(numel, dtype=dtype)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Lane."""
        target.copy_(source)

    def mark(self) -> Mark:
        """See Lane."""
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        """See Lane."""
        target.copy_(source)

    def wait(self, mark: Mark) -> None:
        """See Lane."""

    def is_reached(self, mark: Mark) -> bool:
        """See Lane."""
        return True

    def within(self) -> Within:
        """See Lane."""
        return nullcontext


class CudaLane:
    """Of a CUDA device: a stream each way beside the one that computes."""

    device_is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Events are made, and streams looked up, on the present device of a thread.
        torch.cuda.set_device(device)
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def is_host(self, tensor: torch.Tensor) -> bool:
        """See Lane."""
        return tensor.device.type == "cpu"

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See Lane."""
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned: copies wait, and are right
            return torch.empty(numel, dtype=dtype)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Lane."""
        target.copy_(source)

    def mark(self) -> Mark:
        """See Lane."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        """See Lane."""
        stream = self._down if self.is_host(target) else self._up
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """See Lane."""
        mark.synchronize()

    def is_reached(self, mark: Mark) -> bool:
        """See Lane."""
        return bool(mark.query())

    def within(self) -> Within:
        """See Lane."""
        stream = torch.cuda.current_stream(self._device)

        @contextmanager
        def enter() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(stream))
                yield

        return enter


def lane_for(device: torch.device) -> Lane:
    """Return the lane between the host and `device`, and make it this thread's present device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
