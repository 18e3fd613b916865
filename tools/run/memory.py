"""Explains why SIGKILL ended a rank, as the kernel does when memory runs out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from zstore.engine.plan.rungs import ADVICE_VARIABLE
from zstore.io import count_memory_kills, read_host_memory
from zstore.sizes import format_bytes

_GENERAL = "rest optimizer state on a drive (offload_optimizer), or lower the micro-batch"


class MemoryWatch:
    """Collects the kernel's kills during a run, and the advice of ranks. `root`: see `read_host_memory`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = count_memory_kills(root)
        self._folder = tempfile.TemporaryDirectory(prefix="zstore-run-", ignore_cleanup_errors=True)
        self._advice = Path(self._folder.name) / "advice"
        self.environment = {ADVICE_VARIABLE: str(self._advice)}
        """For the ranks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.cleanup()

    def text(self) -> str:
        """Return the explanation to print once SIGKILL ended a rank."""
        now, before = count_memory_kills(self._root), self._before
        kills = None if now is None or before is None else now - before
        if kills == 0:
            return "the kernel has killed nothing for lack of memory meanwhile, so somebody else did"
        memory = read_host_memory(self._root)
        told = [] if kills is None else [f"kernel's kills for lack of memory meanwhile: {kills}"]
        if memory.usable_bytes is not None:
            limited = " by control group" if memory.usable_bytes == memory.limit_bytes else ""
            told.append(f"memory: {format_bytes(memory.usable_bytes)}{limited}")
        what = "as the kernel does when memory runs out" if kills is None else "memory ran out"
        advice = self._advice.read_text(encoding="utf-8") if self._advice.is_file() else _GENERAL
        return f"{what}{' (' + '; '.join(told) + ')' if told else ''}. Next, {advice}; `zstore plan` shows what fits"
