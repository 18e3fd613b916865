"""Starts the processes of a training run on this machine, and turns their ends into one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from zstore.errors import ZstoreError

from ..run.job import RunJob

_END_WELL_S = 20.0
"""How long ranks may take to exit by themselves once one failed: they exchange their errors meanwhile."""


def launch(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` in `num_ranks` processes of one group, each with the variables that torchrun sets; return when all
    ended well. None of them outlives this process.

    SIGTERM, SIGUSR1 and SIGHUP go to every rank. Raises SystemExit with code 75 if the ranks saved and stopped because
    of one, with 128 and the signal's number if one ended them, and ZstoreError if a rank failed.
    """
    from ..run.ranks import run_ranks

    ended = run_ranks(RunJob(command=tuple(command), num_ranks=num_ranks, shutdown_timeout_s=_END_WELL_S))
    if not ended.exit_code:
        return
    if ended.stopped:
        raise SystemExit(ended.exit_code)
    if ended.came:
        name = signal.Signals(ended.came[-1]).name
        print(f"zstore: stopped by {name}; committed checkpoints remain valid", file=sys.stderr)
        raise SystemExit(ended.exit_code)
    failed = [name.removeprefix("rank ") for name in ended.failed]
    where = f"ranks {', '.join(failed)}" if failed[1:] else f"rank {failed[0]}"
    if ended.was_killed and ended.about_kill:
        raise ZstoreError(f"training failed: SIGKILL ended {ended.first or where}; {ended.about_kill}")
    raise ZstoreError(f"training failed on {where}; see the error above")
