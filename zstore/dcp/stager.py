"""The stager for `torch.distributed.checkpoint.async_save`: a copy of the state dict that training does not change."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from .resting import pinned


class Stager(AsyncStager):
    """Copies state dicts to the CPU's memory.

    With `shared_memory` into memory that the process of `AsyncCheckpointerType.PROCESS` reads in place, pinned if the
    machine has an accelerator; it is kept for the next save, which must come after the last one ended. With
    `in_background` `async_save` returns an `AsyncSaveResponse`, and a thread makes the copy if there is an accelerator: wait
    for its `staging_completion` before saved tensors change, buffers included. Close it after the last save.
    """

    _synchronize_after_execute = False

    def __init__(self, *, shared_memory: bool = False, in_background: bool = False) -> None:
        self._shared_memory = shared_memory
        self._kept: Any = None
        self._last: Future[dict[str, Any]] | None = None
        self._in_background = in_background
        self._executor: ThreadPoolExecutor | None = None
        self._stream: Any = None
        if in_background and torch.accelerator.is_available():
            self._executor = ThreadPoolExecutor(1, "zstore-stager")
            self._stream = torch.Stream()

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Return the copy, or a future of it with `in_background`."""
        # Tensors in a store are pinned now, in any mode.
        pins: dict[tuple[Any, ...], Any] = {}
        with torch.no_grad():
            state_dict = _take_out(state_dict, (), pins)
        if self._executor is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            self._last = self._executor.submit(lambda: _put_back(self._copy_beside(state_dict), pins))
            return self._last
        copy = _put_back(self._copy(state_dict), pins)
        if not self._in_background:
            return copy
        # Memory to memory: a thread would only take time from training.
        done: Future[dict[str, Any]] = Future()
        done.set_result(copy)
        return done

    def _copy_beside(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        with self._stream:
            return self._copy(state_dict)

    def _copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        stager = self._kept or _make_stager(shared_memory=self._shared_memory)
        if self._shared_memory:
            self._kept = stager
        return stager.stage(state_dict)  # type: ignore[no-any-return]

    def synchronize_staging(self) -> None:
        """Wait until the last copy that `stage` began is made."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Release the memory; a second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
        kept, self._kept, self._last = self._kept, None, None
        if kept is not None:
            kept.close()


def _take_out(value: Any, path: tuple[Any, ...], pins: dict[tuple[Any, ...], Any]) -> Any:
    """Return the state dict without tensors in a store, whose pinned versions `pins` gets by their paths."""
    if isinstance(value, dict):
        return {key: _take_out(each, (*path, key), pins) for key, each in value.items()}
    if isinstance(value, list):
        return [_take_out(each, (*path, number), pins) for number, each in enumerate(value)]
    if (found := pinned(value)) is None:
        return value
    pins[path] = found
    return None


def _put_back(state_dict: dict[str, Any], pins: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    for path, value in pins.items():
        place: Any = state_dict
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    return state_dict


def _make_stager(*, shared_memory: bool) -> Any:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=shared_memory and torch.accelerator.is_available(),
            use_shared_memory=shared_memory,
            # `Stager` has a thread and a stream of its own, which waits for the step's computation.
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
