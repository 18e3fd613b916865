"""Messages to other services about what happens to runs: a POST of JSON for each event, with retries.

[Note: webhooks]
A thread compares the list of runs, every few seconds, with what it was before, so nobody has to have a page open. What was
so already when the service began is not told. Each URL has a thread of its own, which sends messages in order; one that is
not taken is sent again for some 10 minutes, and then left out, with a warning. The field `text` is what chats show that take
such messages (Slack, Mattermost); the signature is made as that of GitHub's webhooks is.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import urllib3

from .._version import __version__
from ..io.closing import start_threads
from ..sizes import format_bytes
from .models import RunSummary
from .settings import Settings

LOOK_S = 5.0
_LEAST_FREE_SHARE = 0.05
_MOST_WAITING = 1000
_RETRIES = urllib3.Retry(
    total=10,
    backoff_factor=1.0,
    backoff_max=120.0,
    redirect=0,
    status_forcelist=[408, 429, 500, 502, 503, 504],
    allowed_methods=None,
)
_log = logging.getLogger("zstore.serve")


@dataclass(frozen=True, kw_only=True)
class Message:
    """The body of a request. `run` and `step` are null if the event is not about one."""

    event: str
    """not_finite, failed, killed, lost, done, save_failed, stalled, going_on or little_room."""
    text: str
    at: float
    run: str | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run at a look."""

    state: str = "unknown"
    step: int | None = None
    not_finite_step: int | None = None
    failed_save: str | None = None
    is_stalled: bool = False

    @classmethod
    def of(cls, run: RunSummary, at: float, stalled_s: float) -> Seen:
        """Return a run as it is at the time `at`; it stalls if no line came for `stalled_s` although its process is there."""
        silent = run.state == "training" and run.updated_at is not None and at - run.updated_at > stalled_s
        return cls(
            state=run.state,
            step=run.step,
            not_finite_step=run.not_finite_step,
            failed_save=run.failed_save,
            is_stalled=silent,
        )


def events_of(before: Seen, now: Seen, error: str | None) -> Iterator[tuple[str, str]]:
    """Yield the events between two looks at a run, each with what a person reads; `error` is that of a run that failed."""
    # Of steps that are not finite one after another the first is told.
    is_new = now.not_finite_step is not None and now.not_finite_step != before.not_finite_step
    if is_new and (before.not_finite_step is None or before.not_finite_step != before.step):
        yield "not_finite", "numbers are NaN or infinite"
    if now.failed_save is not None and now.failed_save != before.failed_save:
        yield "save_failed", f"a save failed: {now.failed_save}"
    if now.is_stalled != before.is_stalled:
        yield ("stalled", "no step for long") if now.is_stalled else ("going_on", "it goes on, or ended")
    ends = {
        "failed": f"failed: {error}",
        "killed": "its process is gone",
        "lost": "nothing came for long",
        "done": "done",
    }
    if now.state != before.state and now.state in ends:
        yield now.state, ends[now.state]


class Webhooks:
    """Looks at runs and at the room of `folders`, and tells the URLs in the settings. Closed by `close`."""

    def __init__(
        self,
        settings: Settings,
        runs: Callable[[], Sequence[RunSummary]],
        folders: Sequence[Path],
        retries: urllib3.Retry = _RETRIES,
    ) -> None:
        self._settings, self._runs, self._folders = settings, runs, folders
        self._http = urllib3.PoolManager(retries=retries, timeout=10.0)
        self._seen: dict[str, Seen] | None = None
        self._full: set[Path] = set()
        self._closed = threading.Event()
        self._waiting = {url: queue.Queue[bytes](_MOST_WAITING) for url in settings.webhooks}
        for url in self._waiting:
            start_threads(1, partial(self._send, url), "zstore-webhook")

    def start(self) -> None:
        """Look every few seconds from now on, in a thread."""
        if self._waiting:
            start_threads(1, self._watch, "zstore-webhooks")

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self.look(time.time())
            except Exception as error:  # a folder that cannot be read now may be again later
                _log.warning("webhooks: the runs cannot be listed: %s", error)
            self._closed.wait(LOOK_S)

    def look(self, at: float) -> None:
        """Compare runs and folders with the last look, and queue what happened; the first look tells nothing of runs."""
        seen: dict[str, Seen] = {}
        for run in self._runs():
            now = seen[run.name] = Seen.of(run, at, self._settings.stalled_s)
            events = () if self._seen is None else events_of(self._seen.get(run.name, Seen()), now, run.error)
            for event, text in events:
                step = run.not_finite_step if event == "not_finite" else run.step
                place = run.name if step is None else f"{run.name}, step {step}"
                self._tell(Message(event=event, text=f"{place}: {text}", at=at, run=run.name, step=step))
        self._seen = seen
        for folder in self._folders:
            usage = shutil.disk_usage(folder)
            if usage.free >= _LEAST_FREE_SHARE * usage.total:
                self._full.discard(folder)
            elif folder not in self._full:
                self._full.add(folder)
                text = f"{folder}: {format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
                self._tell(Message(event="little_room", text=text, at=at))

    def _tell(self, message: Message) -> None:
        body = json.dumps(asdict(message)).encode()
        for url, waiting in self._waiting.items():
            try:
                waiting.put_nowait(body)
            except queue.Full:
                _log.warning("webhooks: left out for %s, which takes none: %s", _host(url), message.text)

    def _send(self, url: str) -> None:
        while body := self._waiting[url].get():
            headers = {"Content-Type": "application/json", "User-Agent": f"zstore/{__version__}"}
            if (secret := self._settings.webhook_secret) is not None:
                digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
                headers["X-Zstore-Signature-256"] = f"sha256={digest}"
            try:
                answer = self._http.request("POST", url, body=body, headers=headers)
                problem = "" if answer.status < 300 else f"status {answer.status}"
            except urllib3.exceptions.HTTPError as error:
                problem = str(error)
            if problem:
                _log.warning("webhooks: not taken by %s: %s", _host(url), problem.replace(url, _host(url)))

    def close(self) -> None:
        """Look no more; what waits is sent as long as the process runs."""
        self._closed.set()
        for waiting in self._waiting.values():
            with contextlib.suppress(queue.Full):
                waiting.put_nowait(b"")


def _host(url: str) -> str:
    """Return the host of a URL, whose path may be a secret."""
    return urllib3.util.parse_url(url).host or "?"
