"""`zstore run`: starts a script's ranks on this machine, or on several over ssh."""

from __future__ import annotations

import os

from .plan import RunOptions, make_jobs
from .ranks import count_gpus, run_ranks

CONTEXT_SETTINGS = {
    # Arguments after the script are the script's.
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}

EPILOG = """
\b
Examples:
  zstore run train.py --lr 1e-4                      # a rank for each GPU of this machine, or one rank
  zstore run --nproc 2 train.py                      # two ranks
  zstore run --include localhost:0,2 train.py        # on two GPUs
  zstore run --hostfile hosts train.py               # all machines of a hostfile, over ssh
  zstore run --hostfile hosts --exclude b:3 train.py
  zstore run --as-deepspeed train.py --deepspeed_config ds.json      # a script that imports deepspeed

\b
Exit codes: 0 all ranks ended well, 75 they saved and stopped because of a signal, 128 + N a
signal ended them, 2 wrong usage, else that of the rank, or the machine, that failed first.
"""


def run_command(options: RunOptions) -> int:
    """Run the script as `options` say; return the exit code of the run."""
    jobs = make_jobs(options, os.environ, _count_gpus)
    if jobs[0].ssh:
        from .machines import run_machines

        ended = run_machines(jobs)
    else:
        ended = run_ranks(jobs[0])
    ended.say()
    return ended.exit_code


def _count_gpus() -> int:
    """Those of the machine: slots replace CUDA_VISIBLE_DEVICES."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        return count_gpus()
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
