"""The update of step mode `backward`: what the backward finishes, the updater's thread changes."""

from __future__ import annotations

import math
import threading

from .parameters import ParameterRecord
from .unit_gradients import UnitGradients
from .update import Update
from .updater import Updater


class WithinBackward:
    """One step's update, begun before its gradients exist. The backward's thread tells it of each final gradient."""

    def __init__(self, gradients: UnitGradients) -> None:
        self._gradients = gradients
        self._changed = threading.Condition()
        self._final: dict[ParameterRecord, None] = {}
        self._is_over = False
        self._admitted = False
        self._update: Update | None = None
        gradients.on_final = self._note_final

    def start(self, updater: Updater, update: Update) -> None:
        """Start `update`, which takes each record when its gradient is final."""
        self._update = update
        updater.start(update, self._admit)

    def _note_final(self, record: ParameterRecord) -> None:
        squares = self._gradients.squares(record)
        # What is not finite is not used; `step()` finds it in the norm, on every rank.
        if squares is not None and not math.isfinite(squares):
            return
        with self._changed:
            self._final[record] = None
            self._changed.notify_all()

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: record in self._final or self._is_over)
            admitted = record in self._final
            self._admitted |= admitted
            return admitted

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._gradients.forget_listener()

    def finish(self, updater: Updater) -> None:
        """Return when every final gradient was used (after the backward)."""
        self._end()
        updater.complete()
        if self._update is not None:
            self._update.note_scalars(list(self._final))

    def give_up(self, updater: Updater) -> bool:
        """Stop after what was begun; return whether anything was changed."""
        with self._changed:
            self._final.clear()
        self._end()
        updater.forget()
        return self._admitted
