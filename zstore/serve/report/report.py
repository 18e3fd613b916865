"""A report: the page's views of one run as one file, with the API's answers inside. Knows no web server.

[Note: content of a report]
Answers of the API by their paths, as `assets/data.js` asks for them. Those without which a view is empty come first, then the
arrays of the newest checkpoints and how neighbours differ, then statistics of values. Answers that would make the file larger
than its limit are left out; a line at the top of the page names them, and those that nobody asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel

from ..._version import __version__
from ...errors import CheckpointNotFoundError, UsageError, ZstoreError
from ...remote.url import is_url
from ...sizes import format_bytes
from ..models import ArrayEntry, ArrayList, Difference, JobList, RunList, ServiceInfo, json_of
from ..runs import Run
from ..settings import Root, Settings
from ..views.arrays import array_statistics, list_arrays
from ..views.difference import compare
from ..views.library import Library
from ..views.run import checkpoint_detail, fresh_history, list_checkpoints, run_detail, run_placement, run_steps
from .bundle import Inside, answer_bytes, api_path, one_file, read_assets

MAX_BYTES = 20 * 10**6
NUM_ARRAYS = 50
NUM_CHECKPOINTS = 5
"""The newest, whose arrays a report lists."""
MOST_READ_BYTES = 2**30
"""Bytes of arrays' values, for statistics."""
NUM_POINTS = 2000

M = TypeVar("M", bound=BaseModel)
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a report's size."""

    max_bytes: int = MAX_BYTES
    """Most bytes of the file."""
    num_arrays: int = NUM_ARRAYS
    """Arrays of the newest checkpoint, the largest, that statistics are made of."""


@dataclass
class Answers:
    """Answers of the API by their paths, of at most `most_bytes` together, and the names of those that were left out."""

    most_bytes: int
    found: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    left_out: list[str] = field(default_factory=list)

    def add(self, path: str, answer: BaseModel) -> bool:
        """Take in an answer; False if it is too large for the remaining room."""
        text = json_of(answer)
        num_bytes = answer_bytes(path, text)
        if self.num_bytes + num_bytes > self.most_bytes:
            return False
        self.found[path] = text
        self.num_bytes += num_bytes
        return True

    def add_newest(self, path: str, answer: M, name: str, what: str) -> None:
        """Take in an answer with as much of the end of its list `name` as fits into half of the remaining room."""
        whole: list[Any] = getattr(answer, name)
        kept = whole
        while answer_bytes(path, json_of(answer)) * 2 > self.most_bytes - self.num_bytes and kept:
            kept = kept[-(len(kept) // 2) :] if len(kept) > 1 else []
            answer = answer.model_copy(update={name: kept})
        if len(kept) < len(whole):
            self.left_out.append(f"{len(whole) - len(kept):,} of {len(whole):,} {what}")
        self.require(path, answer)

    def require(self, path: str, answer: BaseModel) -> None:
        """Take in an answer. Raises UsageError if it is too large for the remaining room."""
        if not self.add(path, answer):
            raise UsageError(f"{path} does not fit into a report of that size: give a larger --max-size")


class Report:
    """The report of one run, while it is made. Methods block on file systems."""

    def __init__(self, library: Library, run: Run, limits: Limits) -> None:
        """Collect all answers but those about arrays' values. Raises UsageError if the limit is too small for it."""
        self.run = run
        self._library = library
        self._limits = limits
        self._assets = read_assets()
        self._page = self._assets["index.html"].decode()
        page_bytes = len(self._with({}, "x" * _NOTE_BYTES).encode())
        if page_bytes >= limits.max_bytes:
            raise UsageError(
                f"--max-size: the page itself takes {format_bytes(page_bytes)}, got {format_bytes(limits.max_bytes)}"
            )
        self._answers = Answers(limits.max_bytes - page_bytes)
        self.most_arrays = 0
        """Arrays of the checkpoint that has most."""
        self._add_run()
        self._checkpoints = self._add_checkpoints()
        self._chosen, self._changed = self._add_arrays()

    @property
    def read_bytes(self) -> int:
        """Most bytes of arrays' values that `text` reads."""
        sizes = {array.name: array.nbytes for array in self._chosen}
        return sum(sizes.values()) + 2 * sum(sizes[name] for name in self._changed)

    @property
    def plan_text(self) -> str:
        """The work of `text`, for people."""
        return f"statistics of {len(self._chosen)} arrays, reading {format_bytes(self.read_bytes)}"

    @property
    def left_out(self) -> Sequence[str]:
        """Answers that the report lacks."""
        return self._answers.left_out

    def text(self, advance: Advance) -> str:
        """Return the report as HTML; `advance` is called with bytes of values as they are read."""
        self._add_values(advance)
        made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        note = f"Report of {self.run.name}, made {made} by zstore {__version__}."
        left_out = "; ".join(self.left_out)
        return self._with(self._answers.found, f"{note} Not in this file: {left_out}." if left_out else note)

    def _with(self, data: dict[str, str], note: str) -> str:
        title = f"{self.run.name} · zstore report"
        # Names of files may have bytes that are not text.
        title, note = (text.encode("utf-8", "replace").decode() for text in (title, note[:_NOTE_BYTES]))
        return one_file(self._page, self._assets, Inside(data=data, title=title, note=note))

    def _path(self, *segments: str, **query: str) -> str:
        return api_path("runs", self.run.name, *segments, **query)

    def _add_run(self) -> None:
        answers, library, run = self._answers, self._library, self.run
        fresh_history(library, run, is_whole=True)
        detail = run_detail(library, run, limit=100)
        answers.require(api_path(), ServiceInfo(version=__version__, allows_actions=False, authorized=False))
        answers.require(api_path("runs"), RunList(runs=[detail.summary], num_runs=1))
        answers.require(api_path("jobs"), JobList(jobs=[]))
        answers.add_newest(self._path(), detail, "sessions", "sessions")
        answers.require(self._path("steps"), run_steps(library, run, points=NUM_POINTS))
        placement = run_placement(library, run)
        ordered = sorted(placement.arrays, key=lambda array: array.nbytes)
        placement = placement.model_copy(update={"arrays": ordered})
        answers.add_newest(self._path("placement"), placement, "arrays", "smaller arrays of the memory view")

    def _add_checkpoints(self) -> list[str]:
        """Add the list of checkpoints; return the newest, the oldest of them first."""
        answer = list_checkpoints(self._library, self.run)
        self._answers.add_newest(self._path("checkpoints"), answer, "checkpoints", "older checkpoints")
        newest = [entry.checkpoint for entry in answer.checkpoints[-NUM_CHECKPOINTS:]]
        if (older := len(answer.checkpoints) - len(newest)) > 0:
            self._answers.left_out.append(f"the arrays of {older:,} older checkpoints")
        return newest

    def _add_arrays(self) -> tuple[list[ArrayEntry], list[str]]:
        """Add the arrays of checkpoints, and how neighbours differ, the newest first.

        Returns the arrays of the newest for statistics, and the names of those that differ in its neighbour.
        """
        chosen: list[ArrayEntry] = []
        changed: set[str] = set()
        for number, checkpoint in enumerate(reversed(self._checkpoints)):
            arrays = self._arrays_of(checkpoint)
            if number == 0 and arrays is not None:
                chosen = self._choose(arrays)
        differences = [self._difference(*pair) for pair in reversed([*pairwise(self._checkpoints)])]
        if differences and (newest := differences[0]) is not None:
            changed = {one.name for one in newest.arrays if one.status in ("values", "unknown")}
        return chosen, [array.name for array in chosen if array.name in changed]

    def _arrays_of(self, checkpoint: str) -> ArrayList | None:
        arrays: ArrayList | None = None
        with self._trying(f"the arrays of {checkpoint}") as adding:
            detail = checkpoint_detail(self._library, self.run, checkpoint)
            arrays = list_arrays(self._library, self.run, checkpoint)
            self.most_arrays = max(self.most_arrays, len(arrays.arrays))
            adding(self._path("checkpoints", checkpoint), detail)
            adding(self._path("checkpoints", checkpoint, "arrays"), arrays)
        return arrays

    def _difference(self, before: str, after: str) -> Difference | None:
        difference: Difference | None = None
        with self._trying(f"the difference of {before} and {after}") as adding:
            difference = compare(self._library, self.run, before, after)
            adding(self._path("diff", before=before, after=after), difference)
        return difference

    def _choose(self, arrays: ArrayList) -> list[ArrayEntry]:
        """Return the largest arrays, as many as the limits say."""
        chosen: list[ArrayEntry] = []
        for array in sorted(arrays.arrays, key=lambda array: -array.nbytes):
            read_bytes = sum(one.nbytes for one in chosen) + array.nbytes
            if len(chosen) < self._limits.num_arrays and read_bytes <= MOST_READ_BYTES:
                chosen.append(array)
        if (others := len(arrays.arrays) - len(chosen)) > 0:
            self._answers.left_out.append(f"statistics of {others:,} of {len(arrays.arrays):,} arrays")
        return chosen

    def _add_values(self, advance: Advance) -> None:
        """Add statistics of the chosen arrays, and how their values differ from those of the checkpoint before."""
        library, run, newest = self._library, self.run, self._checkpoints[-1:]
        for array in self._chosen:
            with self._trying(f"statistics of {array.name}") as adding:
                found = array_statistics(library, run, newest[0], array.name, advance)
                adding(self._path("checkpoints", newest[0], "stats", array=array.name), found)
        for name in self._changed:
            before, after = self._checkpoints[-2:]
            with self._trying(f"the difference of {name} by its values") as adding:
                compared = compare(library, run, before, after, name, advance)
                adding(self._path("diff", before=before, after=after, array=name), compared)

    @contextmanager
    def _trying(self, what: str) -> Iterator[Callable[[str, BaseModel], None]]:
        """Yield a function that adds an answer; note answers that are too large, or cannot be read, as left out."""
        fits = True

        def add(path: str, answer: BaseModel) -> None:
            nonlocal fits
            fits = self._answers.add(path, answer) and fits

        try:
            yield add
        except (ZstoreError, OSError) as error:
            self._answers.left_out.append(f"{what} ({error})")
        else:
            if not fits:
                self._answers.left_out.append(f"{what} (too large)")


_NOTE_BYTES = 4000


@contextmanager
def open_run(location: str, storage_options: dict[str, Any], memory_bytes: int) -> Iterator[tuple[Library, Run]]:
    """Yield the one run at a path or URL, and the library that holds it.

    Raises CheckpointNotFoundError if there is no run, UsageError if there are several.
    """
    root = Root.parse(location)
    if is_url(root.location):
        root = replace(root, name=unquote(root.name))
    settings = Settings(roots=(root,), storage_options=storage_options, memory_bytes=memory_bytes)
    with closing(Library(settings)) as library:
        found = list(library.runs.all().values())
        if not found:
            raise CheckpointNotFoundError(
                f"{root.location} has no run: expected a folder of checkpoints, or one with a journal, which training writes "
                "there; of a checkpoint's own folder name the folder above"
            )
        if len(found) > 1 or _plain(found[0].folder.location) != _plain(root.location):
            places = ", ".join(run.folder.location for run in found[:5])
            raise UsageError(f"{root.location} is a folder of runs: name one of them, like {places}")
        yield library, found[0]


def _plain(location: str) -> str:
    """Return a location as it compares with others: of a URL, without percent codes."""
    location = location.rstrip("/")
    return unquote(location) if is_url(location) else location
