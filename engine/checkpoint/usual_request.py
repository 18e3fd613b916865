"""How an engine itself carries out requests to a run. See [Note: carrying out a request] in `report.requests`."""

from __future__ import annotations

import signal
from collections.abc import Callable

from zstore.errors import ZstoreError

from ..runtime.signals import StopSignals
from .save import Checkpoints


def save_or_stop(
    action: str, signals: StopSignals, checkpoints: Checkpoints, save: Callable[[str], object]
) -> str | None:
    """Call `save` with the run's folder, or for "stop" do as at a signal (all ranks); return why that could not be, else
    None."""
    if action == "stop":
        if not signals.are_watched:
            return "this loop watches no signals: call engine.watch_signals() or save_on_signal() at its start"
        signals.pretend(signal.SIGTERM)
        return None
    checkpoints.wait()  # the loop learns of that save's errors itself
    if checkpoints.folder is None:
        return "it is not known where this run saves: call engine.note_save_folder(FOLDER) at its start"
    try:
        save(checkpoints.folder)
    except (ZstoreError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None
