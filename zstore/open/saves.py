"""Checkpoints of a store that are being written, and operations that wait for them.

[Note: who waits for whom]
A checkpoint has the arrays' values when it was asked for: its pins are queued among the operations on each array. An
operation that takes an array away waits for the checkpoints that were asked for before it, and for no later one, whose pins
wait for it in their turn.

[Note: checkpoints of several ranks]
All ranks call `checkpoint`, in the same order. Each begins its part, in one thread for all checkpoints, and the ranks agree
that all could: else each raises and gives its part up. The rest is any save of several ranks: `zstore.checkpoint.save`.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import check_tag_is_free
from ..checkpoint.handle import SaveHandle
from ..checkpoint.names import new_save_id
from ..checkpoint.request import SaveRequest, SaveSummary
from ..checkpoint.retention import Keep
from ..checkpoint.reuse import KnownFile
from ..checkpoint.save import save_checkpoint
from ..io.pool import Workers, run_in_thread
from ..io.queue import Ticket
from ..ranks.agreement import Agreement
from ..store import TensorStore
from ..store.snapshot import Snapshot
from .ranks import Ranks


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of a checkpoint."""

    path: Path
    extra: Mapping[str, Any]
    step: int
    keep: int | None
    overwrite: bool
    by_rows: frozenset[str] = frozenset()
    """Arrays that ranks share by rows: an array of one row would look like one that each rank has all of."""


class Saves:
    """The checkpoints of the arrays of `shards`."""

    def __init__(self, shards: TensorStore, ranks: Ranks) -> None:
        self._shards, self._ranks = shards, ranks
        self._run = uuid.uuid4().hex
        self._turns = Workers(1, "zstore-agree") if ranks.world_size > 1 else None
        """One thread, that agrees with the other ranks."""
        self._agreement: Agreement | None = None
        self._known: Mapping[str, KnownFile] = {}
        self._unheard: list[Ticket[SaveSummary]] = []
        self._lock = threading.Lock()

    def start(self, pinned: Callable[[], Snapshot], options: CheckpointOptions) -> Ticket[SaveSummary]:
        """Return the ticket of a checkpoint, which waits behind the caller for the snapshot that `pinned` returns.

        Called in the order of the changes.
        """
        begin: Callable[[], SaveHandle] = partial(self._begin, pinned, options)
        if self._turns is not None:
            begin = self._turns.submit(partial(self._begin_together, pinned, options)).wait

        def carry_out() -> SaveSummary:
            return begin().ticket.wait()

        save = run_in_thread(carry_out, "zstore-checkpoint")
        with self._lock:
            self._unheard = [one for one in self._unheard if not one.done() or one.error() is not None] + [save]
        return save.then(self._note, partial(self._hear, save))

    def asked_for(self) -> Callable[[], None]:
        """Return a function that waits until the checkpoints asked for by now have ended."""
        under_way = self.unheard

        def wait() -> None:
            for save in under_way:
                save.wait_for_end()

        return wait

    def _begin_together(self, pinned: Callable[[], Snapshot], options: CheckpointOptions) -> SaveHandle:
        """Begin this rank's part of a checkpoint, once all ranks can. See [Note: checkpoints of several ranks]."""
        agreement = self._agreement = self._agreement or self._ranks.agreement()
        try:
            handle = self._begin(pinned, options, agreement)
        except Exception as error:
            agreement.agree(error)
            raise
        try:
            agreement.agree(None)
        except BaseException:
            handle.cancel()
            handle.wait_for_end()
            raise
        return handle

    def close(self) -> None:
        """End the thread that agrees with other ranks."""
        if self._turns is not None:
            self._turns.close()

    def _hear(self, save: Ticket[SaveSummary]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unheard.remove(save)

    @property
    def unheard(self) -> list[Ticket[SaveSummary]]:
        """Checkpoints under way, or whose error was not reported."""
        with self._lock:
            return list(self._unheard)

    def _begin(
        self, pinned: Callable[[], Snapshot], options: CheckpointOptions, agreement: Agreement | None = None
    ) -> SaveHandle:
        """Begin to save the snapshot that `pinned` returns, and release it in any case."""
        snapshot, ranks, place = pinned(), self._ranks, options.path
        try:
            held = {name: ranks.held_as(pin.local) for name, pin in snapshot.pins.items()}
            if ranks.rank == 0:
                check_tag_is_free(place.parent, place.name, overwrite=options.overwrite)
            save_id = new_save_id() if agreement is None else agreement.step_id
            run = self._run if agreement is None else agreement.run_id
        except BaseException:
            snapshot.release()
            raise
        # Rank 0 saves the arrays that every rank has all of.
        pins = {name: pin for name, pin in snapshot.pins.items() if held[name].by_rows or ranks.rank == 0}
        for name in snapshot.pins.keys() - pins.keys():
            snapshot.pins[name].release()
        whole = [
            name for name, one in held.items() if one.spec.shape and not one.by_rows and name not in options.by_rows
        ]
        request = SaveRequest(
            resources=self._shards.resources,
            folder=place.parent,
            tag=place.name,
            rank=ranks.rank,
            world_size=ranks.world_size,
            save_id=save_id,
            run_id=run,
            record={"extra": options.extra, **({"whole": whole} if ranks.world_size > 1 else {})},
            step=options.step,
            specs={name: one.spec for name, one in held.items()},
            grids={name: one.grid_in_checkpoint for name, one in held.items()},
            pieces={name: one.grid for name, one in held.items() if one.grid_in_checkpoint != one.grid},
            pins=pins,
            keep=None if options.keep is None else Keep(last=options.keep),
            overwrite=options.overwrite,
            known=self._known,
            disk_folders=self._shards.disk_folders(),
        )
        return save_checkpoint(request)

    def _note(self, summary: SaveSummary) -> SaveSummary:
        with self._lock:
            self._known = {**self._known, **summary.known}
        return summary
