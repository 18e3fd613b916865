"""Updates that run behind the training loop, on one thread, and waits for them.

[Note: step modes]
none      `step()` takes the norm and updates everything before it returns.
backward  An update begins with the last backward of a step and changes each parameter once its gradient is final;
          `step()` waits for the others. Nothing can be undone: so it is for runs without clipping and loss scaling,
          and a gradient that is not finite leaves a state that must be loaded again.
forward   `step()` takes the norm and fixes the step's settings: skipped or not, learning rates, step counts. Resident
          parameters, which a plain read reaches, are updated in it; all others behind it, in order, while the loop
          goes on. Gathering a parameter waits for its update, in evaluation too. The next backward waits for the
          remaining ones, and so does every call that reads the state. A save takes each array as its update is done.
All give the same bits. An error is raised, with the number of its step, in every call that waits for the update, and the
state is torn from then on. Possible failures and their consequences are in docs/design/0005-step.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from pathlib import Path

from zstore.errors import UsageError
from zstore.format import Bytes, Grid
from zstore.io import IoResources, Priority, ShardSummary, Ticket, Workers
from zstore.store import PinnedShard, TensorStore

from ..params.record import ParameterRecord
from ..runtime.device import StreamContext, Transfers
from .update import Update

Admit = Callable[[ParameterRecord, bool], bool]
"""Asked, with the record and whether to wait for it, before its state is touched."""


class StepMode(Enum):
    """When the update runs. See [Note: step modes]."""

    NONE = "none"
    """In `step()`."""
    BACKWARD = "backward"
    """In the backward, as gradients arrive."""
    FORWARD = "forward"
    """Behind `step()`, before the next forward needs it."""


class Updater:
    """Runs one update at a time on a thread of its own. Safe to use from several threads."""

    def __init__(self, store: TensorStore, transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers
        self._workers: Workers | None = None
        self._changed = threading.Condition()
        self._pending: dict[ParameterRecord, list[LatePin]] = {}
        """Records whose update is not done, and the pins that wait for it."""
        self._held_back: set[ParameterRecord] = set()
        """Those of them that may be read meanwhile, since their update was not admitted yet."""
        self.error: BaseException | None = None
        """The error that ended an update early."""
        self._running: Ticket[None] | None = None

    def start(self, update: Update, admit: Admit | None = None, over: Callable[[], None] = lambda: None) -> None:
        """Run `update` behind the caller; `admit` as in `Update.run`. A record that is not admitted stays unchanged.

        `over` is called from the thread when the update ended, with success or an error.
        """
        self.join_or_raise()
        if self._workers is None:
            # As a daemon thread: the interpreter would wait for another before it closes engines that were left open, whose
            # update may wait for a backward that never comes.
            self._workers = Workers(1, "zstore-update")
        with self._changed:
            self._pending = {record: [] for record in update.records if record.owned_numel}
            self._held_back = set() if admit is None else set(self._pending)
        self._running = self._workers.submit(
            partial(self._run, update, admit, over, self._transfers.streams.stream_context())
        )

    def _run(self, update: Update, admit: Admit | None, over: Callable[[], None], context: StreamContext) -> None:
        def admitted(record: ParameterRecord, wait: bool) -> bool:
            if admit is None or not admit(record, wait):
                return admit is None
            with self._changed:
                self._held_back.discard(record)
            return True

        error: BaseException | None = None
        try:
            with context():
                update.run(admit=admitted, done=self._done)
        except BaseException as raised:
            raised.add_note(f"This happened in the update of step {update.settings.step}, which was applied in part.")
            error = raised
        with self._changed:
            # At once with the error: from here on nothing is pinned.
            self.error = error
            left, self._pending = self._pending, {}
            self._changed.notify_all()
        for pins in left.values():
            for pin in pins:
                pin.resolve(self._store, error)
        over()

    def _done(self, record: ParameterRecord) -> None:
        with self._changed:
            if self._pending.get(record):
                self._transfers.synchronize()
            for pin in self._pending.pop(record, []):
                pin.resolve(self._store, None)
            self._changed.notify_all()

    @property
    def is_behind(self) -> bool:
        """Whether `wait_for` may have to wait, or to raise."""
        return bool(self._pending) or self.error is not None

    def wait_for(self, records: Iterable[ParameterRecord]) -> None:
        """Return when none of `records` waits for its update; raise the error that ended the update.

        Before an update in the backward is admitted, the backward may still read the parameters that it will change.
        """
        if not self.is_behind:
            return
        with self._changed:
            wanted = set(records) - self._held_back
            if not wanted.isdisjoint(self._pending):
                self._changed.wait_for(lambda: wanted.isdisjoint(self._pending))
            if self.error is not None:
                raise self.error

    def join(self) -> BaseException | None:
        """Wait until no update is under way; return the error that ended the last one early, or None."""
        if self._running is not None:
            # May be interrupted: the update goes on, and the next call waits again.
            self._running.wait_for_end()
            self._running = None
        return self.error

    def join_or_raise(self) -> None:
        """Do as `join`, and raise the error."""
        error = self.join()
        if error is not None:
            raise error

    def pin(self, record: ParameterRecord, names: Sequence[str]) -> dict[str, PinnedShard]:
        """Return pins of arrays of `record`: of the present version, or of the one that its update will make.

        Raises UsageError if an update failed.
        """
        with self._changed:
            if self.error is not None:
                raise UsageError(
                    "an update failed, so that the state is a mixture of two steps: load a checkpoint before saving one"
                ) from self.error
            waiting = self._pending.get(record)
            if waiting is None:
                return dict(self._store.snapshot(names).pins)
            late = {name: LatePin(self._store, name) for name in names}
            waiting += late.values()
            return dict(late)

    def reset(self) -> None:
        """Do as `join`, and forget the error: the state is replaced."""
        self.join()
        self.error = None

    def close(self) -> None:
        """Complete the work under way and end the thread."""
        self.reset()
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class LatePin:
    """A pin of the version that an update under way will make. See `PinnedShard`."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self._name = name
        self.local = store.local(name)
        self.tier = store.tier_of(name)
        self.has_file = self.tier == "disk" and not store.shares_file(name)
        self.version: int | None = None
        self._found: Future[PinnedShard] = Future()
        self._lock = threading.Lock()

    def resolve(self, store: TensorStore, error: BaseException | None) -> None:
        """Pin the present version, or carry the error that kept it from being made (the updater's call)."""
        with self._lock:
            if self._found.done():  # released before
                return
            try:
                if error is not None:
                    raise error
                self._found.set_result(store.snapshot([self._name]).pins[self._name])
            except BaseException as raised:
                self._found.set_exception(raised)

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Wait for the update, then do as `PinnedShard.copy_into`. Raises UsageError if the update failed."""
        self._made().copy_into(out, grid, shard)

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Wait for the update, then do as `PinnedShard.checksums`. Raises UsageError if the update failed."""
        return self._made().checksums(res, grid, shard)

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Wait for the update, then do as `PinnedShard.publish`. Raises UsageError if the update failed."""
        return self._made().publish(res, path, grid, shard, priority)

    def _made(self) -> PinnedShard:
        error = self._found.exception()
        if error is not None:
            raise UsageError(
                f"array {self._name!r}: its update failed, so there is nothing to save: {error}"
            ) from error
        return self._found.result()

    def release(self) -> None:
        with self._lock:
            if not self._found.done():
                self._found.set_exception(UsageError(f"array {self._name!r}: the pin was released"))
            if self._found.exception() is None:
                self._found.result().release()
