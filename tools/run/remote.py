"""Program on each machine of a run, started by ssh: runs the machine's ranks as its launcher says on stdin."""

from __future__ import annotations

import os
import sys

from zstore.errors import UsageError, ZstoreError

from .ending import leave
from .job import Control


def main() -> int:
    """Return the exit code of the ranks."""
    # The ranks' stdin is empty: this process's input is not for them.
    control = Control(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        job = control.job()
    except EOFError:
        return 1
    try:
        from .ranks import run_ranks

        ended = run_ranks(job, control)
    except (ZstoreError, OSError) as error:
        print(f"zstore: {job.machine}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    ended.say(job.machine)
    return ended.exit_code


if __name__ == "__main__":
    leave(main())
