"""How a run ended: one exit code and a message, from the codes of ranks or machines and the signals that came."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STOPPED_EXIT_CODE = 75
"""Of ranks that saved and stopped because of a signal; the engine's."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a group of processes."""

    codes: Mapping[str, int]
    """Exit code of each by its name, negative for the signal that ended it."""
    first: str | None = None
    """Name of the first to fail."""
    came: Sequence[int] = ()
    """Signals that were passed on to them, in order."""
    hint: str = "its output above"
    """Where to look for what happened."""
    about_kill: str = ""
    """Explanation for the message if SIGKILL ended the first."""

    @property
    def stopped(self) -> bool:
        """Whether some saved and stopped, and none failed."""
        return STOPPED_EXIT_CODE in self.codes.values() and set(self.codes.values()) <= {0, STOPPED_EXIT_CODE}

    @property
    def failed(self) -> list[str]:
        """Names of those that neither ended well nor stopped."""
        return [name for name, code in self.codes.items() if code not in (0, STOPPED_EXIT_CODE)]

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL, which nobody asked for here, ended the first to fail."""
        return not self.came and bool(self.failed) and self.codes[self.first or self.failed[0]] == -signal.SIGKILL

    @property
    def exit_code(self) -> int:
        """0; 75 if they stopped; 128 and the number of the signal that ended them; or the code of the first to fail."""
        if self.stopped:
            return STOPPED_EXIT_CODE
        if not self.failed:
            # No code at all: they were never started.
            return 0 if self.codes or not self.came else 128 + self.came[-1]
        if self.came:
            return 128 + self.came[-1]
        code = self.codes[self.first or self.failed[0]]
        return 128 - code if code < 0 else code

    def say(self, where: str = "") -> None:
        """Print on stderr why they failed, if they did, with the machine `where`; not if they stopped, since they say so
        themselves."""
        if self.exit_code in (0, STOPPED_EXIT_CODE):
            return
        if self.came:
            print(
                f"zstore: {where and f'{where}: '}stopped by {signal.Signals(self.came[-1]).name}",
                file=sys.stderr,
                flush=True,
            )
            return
        first = self.first or self.failed[0]
        code = self.codes[first]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        order = " first" if self.failed[1:] else ""
        told = self.about_kill if self.was_killed and self.about_kill else f"see {self.hint}"
        print(f"zstore: {first}{where and f' on {where}'} {how}{order}; {told}", file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """End the process. Not by way of the interpreter: a thread of torch's agent may still wait for other machines."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
