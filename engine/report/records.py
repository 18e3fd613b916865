"""Records that journals of engines and of optimizers share: a run's start, links and memory, warnings, and its end."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zstore._version import __version__
from zstore.io import LinkStatistics
from zstore.journal.names import pid_namespace
from zstore.journal.writer import JournalWriter

from .memory import memory_now

if TYPE_CHECKING:
    from zstore.ranks.world import World
    from zstore.store import StoreStatistics, TensorStore

_log = logging.getLogger("zstore")

_SAMPLE_S = 2.0
_SHARE = 5000
"""Sampling links and memory takes less than one part in so many of the time."""
_SAMPLES = 2000
"""They are sampled at most so often in the time that has passed: journals of long runs stay quick to read."""
_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl", "deepspeed")
"""Packages whose versions are recorded if they are in use."""

VERSION = 1
"""Of the journal's format."""


def start_record(world: World, **values: Any) -> dict[str, Any]:
    """Return the record of a start: `values`, and the facts of the process."""
    return {
        "kind": "start",
        "version": VERSION,
        "world_size": world.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "versions": _versions(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        **values,
    }


def _versions() -> dict[str, str]:
    found = {"zstore": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def uncaught_error() -> BaseException | None:
    """Return the error that nobody caught, if the interpreter ends because of one."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if threading.main_thread().is_alive() else found


def error_text(error: BaseException | None) -> str | None:
    """Return the first 2,000 characters of an error for people."""
    return None if error is None else f"{type(error).__name__}: {error}"[:2000]


class JournalFailure:
    """Says once that the journal cannot be written."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, text: str) -> None:
        """Warn of a failure, if it is the first."""
        if not self._said:
            self._said = True
            _log.warning("the run's journal cannot be written, and lines may be missing; training goes on: %s", text)


class Samples:
    """Samples links and memory now and then: `links` returns the counters of all links, given the store's."""

    def __init__(
        self,
        store: TensorStore,
        device: torch.device,
        links: Callable[[StoreStatistics], Mapping[str, LinkStatistics]],
        step: int,
    ) -> None:
        self._store = store
        self._device = device
        self._links = links
        self._began_s = time.perf_counter()
        self._last: Mapping[str, LinkStatistics] = {}
        self._last_s: float | None = None
        self._last_step = step
        self.next_s = 0.0
        """Time of the next sample, by `time.perf_counter`."""

    def take(self, now_s: float, step: int) -> dict[str, Any]:
        """Return the part of a step's record about links, since the last sample, and memory."""
        statistics = self._store.statistics()
        links = self._links(statistics)
        none = LinkStatistics()
        moved = {name: link.since(self._last.get(name, none)) for name, link in links.items()}
        found = {
            "links": {name: found for name, link in moved.items() if (found := _link_record(link)) is not None},
            "links_s": None if self._last_s is None else now_s - self._last_s,
            "links_steps": max(1, step - self._last_step),
            "memory": memory_now(statistics, self._device),
        }
        took_s = time.perf_counter() - now_s
        self._last, self._last_s, self._last_step = links, now_s, step
        self.next_s = now_s + max(_SAMPLE_S, _SHARE * took_s, (now_s - self._began_s) / _SAMPLES)
        return found

    def begin_anew(self, step: int) -> None:
        """Count from here on."""
        self.take(time.perf_counter(), step)
        self._last_s, self.next_s = None, 0.0


def _link_record(link: LinkStatistics) -> dict[str, Any] | None:
    """Return the record of a link; None if it was not used."""
    stall_s = {cause: round(seconds, 6) for cause, seconds in link.stall_s.items() if seconds > 0}
    if not link.operations and not stall_s:
        return None
    return {"bytes": link.bytes, "busy_s": round(link.busy_s, 6), "stall_s": stall_s}


class Warnings(logging.Filter):
    """Sees the warnings of a logger on their way. Not a handler, with which nothing would be shown any more if nobody
    configured logging."""

    def __init__(self, writer: JournalWriter) -> None:
        super().__init__()
        self._writer = writer

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if record.levelno >= logging.WARNING:
            self.note(record.getMessage(), record.created)
        return True

    def note(self, text: str, at: float) -> None:
        """Record a warning."""
        self._writer.append({"kind": "warning", "at": at, "text": text})
