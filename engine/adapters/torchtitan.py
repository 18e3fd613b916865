"""torchtitan's checkpoints in zstore's format: a `CheckpointManager` that a job's config chooses by its `Config`.

    config.checkpoint = zstore.torchtitan.CheckpointManager.Config(enable=True, interval=500, async_mode="async")

Everything else is torchtitan's own: when and what it saves and loads, and under which options. `docs/torchtitan.md`.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from zstore.checkpoint import TagInfo, discard, find_tag, scan
from zstore.dcp import Reader, Stager, Writer
from zstore.errors import CheckpointNotFoundError, ConfigError, UsageError
from zstore.io import Files
from zstore.open.sources import folder_of
from zstore.remote.url import is_url

try:
    from torchtitan.components.checkpointer import MODEL, AsyncMode
    from torchtitan.components.checkpointer import CheckpointManager as _CheckpointManager
    from torchtitan.components.checkpointer.base import purge_thread
    from torchtitan.tools.utils import GarbageCollection
except ImportError as error:
    raise UsageError(
        f"zstore.torchtitan needs torchtitan 0.3 or newer and what it imports, which is not here ({error}): "
        "pip install torchtitan"
    ) from error

__all__ = ["CheckpointManager"]

_STEP = re.compile(r"step-(\d+)")


class CheckpointManager(_CheckpointManager):  # type: ignore[misc]
    """Saves and loads a run of torchtitan in zstore's format; a checkpoint is there whole or not at all.

    Checkpoints that torchtitan's own manager wrote to the folder before are found and loaded as well. With
    `last_save_in_hf` and `initial_load_in_hf` the weights go through torchtitan's `sd_adapter`, as torchtitan does it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and those of zstore's writer and reader."""

        num_threads: int = 4
        """Threads of each rank that write and read."""

        trust_pickles: bool = False
        """Whether pickled entries are loaded, which runs their code. torchtitan's own state has none."""

        def __post_init__(self) -> None:
            _CheckpointManager.Config.__post_init__(self)
            if self.num_threads < 1:
                raise ConfigError(f"checkpoint.num_threads: expected at least 1 thread, got {self.num_threads}")

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        self.stager: Any
        self.purge_thread: threading.Thread | None
        self._num_threads = config.num_threads
        self._trust_pickles = config.trust_pickles
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = Stager(shared_memory=True, in_background=True)
        elif self.async_mode == AsyncMode.ASYNC:
            self.stager = Stager()
        if self.purge_thread is not None:
            # The inherited removal goes file by file, so that half a checkpoint may be found.
            self.purge_queue.put(None)
            self.purge_thread.join()
            self.purge_thread = threading.Thread(target=purge_thread, args=(self.purge_queue, _remove), daemon=True)
            self.purge_thread.start()

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save `state_dict` as the checkpoint `checkpoint_id`; returns the result of torchtitan's own in each mode."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf=True)
        # As torchtitan does: a run that went back to an earlier step writes the later ones again.
        writer = Writer(checkpoint_id, overwrite=True, num_threads=self._num_threads)
        result: Any = None
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        else:
            in_process = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            result = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load into `state_dict`, and into the model, from any checkpoint that zstore reads, or from Hugging Face's."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = Reader(checkpoint_id, num_threads=self._num_threads, trust_pickles=self._trust_pickles)
        load(state_dict, storage_reader=reader)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _wait_for_saving(self) -> None:
        super()._wait_for_saving()
        # The saved state counts only now that it is committed.
        self._purge_stale_checkpoints()

    def _close(self) -> None:
        # Training may end without a last step, if data ran out.
        self.maybe_wait_for_saving()
        super()._close()

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step with a checkpoint to resume from, -1 if there is none."""
        return max(_steps(folder or self.folder), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        """Remove, behind training, committed checkpoints other than the newest `keep_latest_k` (rank 0)."""
        if self._should_purge():
            for step in sorted(_steps(self.folder))[: -self.keep_latest_k]:
                self.purge_queue.put(self._create_checkpoint_id(step))


def _steps(folder: str) -> set[int]:
    """Return the steps of all whole checkpoints in a folder, of zstore's format or of DCP's own.

    Not those of exported weights, from which nothing resumes.
    """
    try:
        names = [info.tag for info in scan(folder_of(folder)).tags]
    except CheckpointNotFoundError:
        return set()
    if not is_url(folder):
        names += [path.parent.name for path in Path(folder).glob("step-*/.metadata")]
    return {int(found[1]) for name in names if (found := _STEP.fullmatch(name))}


def _remove(path: str) -> None:
    """Remove a checkpoint so that at no instant half of it looks like one; a missing one is no error."""
    parent, _, name = path.rpartition("/")
    if is_url(path):
        from zstore.remote.commit import remove_checkpoint

        folder: Any = folder_of(parent)
        info: TagInfo | None = find_tag(folder, name)
        if info is not None:
            remove_checkpoint(folder, info)
    elif os.path.isdir(path):
        discard(Files(), Path(path))
