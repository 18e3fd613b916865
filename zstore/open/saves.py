"""Checkpoints of a store that are being written, and what waits for them.

[Note: what waits for whom]
A checkpoint has what the arrays held when it was asked for: its pins are queued among the operations on each array. An
operation that takes an array away waits for the checkpoints that were asked for before it, and for no later one, whose pins
wait for it in their turn.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import check_tag_is_free
from ..checkpoint.names import new_save_id
from ..checkpoint.request import SaveRequest, SaveSummary
from ..checkpoint.reuse import KnownFile
from ..checkpoint.save import save_checkpoint
from ..io.pool import run_in_thread
from ..io.queue import Ticket
from ..store import TensorStore
from ..store.snapshot import Snapshot


class Saves:
    """The checkpoints of the arrays of `shards`."""

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards
        self._run = uuid.uuid4().hex
        self._known: Mapping[str, KnownFile] = {}
        self._expected: list[Future[None]] = []
        self._unheard: list[Ticket[SaveSummary]] = []
        self._lock = threading.Lock()

    def expect(self) -> Future[None]:
        """Return what stands for the end of a checkpoint that is asked for now, to be given to `start`."""
        over: Future[None] = Future()
        with self._lock:
            self._expected.append(over)
        return over

    def asked_for(self) -> Callable[[], None]:
        """Return what waits until the checkpoints that were asked for by now have ended."""
        with self._lock:
            expected = list(self._expected)

        def wait() -> None:
            for over in expected:
                over.result()

        return wait

    def start(
        self, over: Future[None], begin: Callable[[], Ticket[SaveSummary]], *, behind: bool
    ) -> Ticket[SaveSummary]:
        """Return the ticket of the checkpoint that `begin` begins, which waits for changes under way, here or `behind` the
        caller. Raises what `begin` does here."""
        try:
            save = run_in_thread(lambda: begin().wait(), "zstore-checkpoint") if behind else begin()
        except BaseException:
            self._end(over)
            raise
        save.when_done(partial(self._end, over))
        with self._lock:
            self._unheard = [one for one in self._unheard if not one.done() or one.error() is not None] + [save]
        return save.then(lambda summary: summary, partial(self._hear, save))

    def _end(self, over: Future[None]) -> None:
        with self._lock:
            self._expected.remove(over)
        over.set_result(None)

    def _hear(self, save: Ticket[SaveSummary]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unheard.remove(save)

    @property
    def unheard(self) -> list[Ticket[SaveSummary]]:
        """Those that are under way, or whose error nobody heard of."""
        with self._lock:
            return list(self._unheard)

    def begin(
        self, place: Path, pinned: Callable[[], Snapshot], *, overwrite: bool, fields: Mapping[str, Any]
    ) -> Ticket[SaveSummary]:
        """Begin to save what `pinned` returns as the checkpoint `place`, and release it in any case."""
        snapshot = pinned()
        try:
            check_tag_is_free(place.parent, place.name, overwrite=overwrite)
        except BaseException:
            snapshot.release()
            raise
        request = SaveRequest(
            resources=self._shards.resources,
            folder=place.parent,
            tag=place.name,
            rank=0,
            world_size=1,
            save_id=new_save_id(),
            run_id=self._run,
            specs={name: pin.local.spec for name, pin in snapshot.pins.items()},
            grids={name: pin.local.grid for name, pin in snapshot.pins.items()},
            pins=snapshot.pins,
            overwrite=overwrite,
            known=self._known,
            disk_folders=self._shards.disk_folders(),
            **fields,
        )
        return save_checkpoint(request).ticket.then(self._note)

    def _note(self, summary: SaveSummary) -> SaveSummary:
        with self._lock:
            self._known = {**self._known, **summary.known}
        return summary
