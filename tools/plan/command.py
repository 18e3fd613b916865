"""`zstore plan`: makes the plan that its options ask for, and prints it. Torch is imported only when it runs."""

from __future__ import annotations

import sys

from ..options import Json
from ..printing import print_json
from .options import PlanOptions


def plan_command(options: PlanOptions, json: Json = False) -> int:
    """Print the plan on stdout, as JSON or for people; return 1 if no choice fits, or the given config does not, else 0."""
    from .choices import all_choices, ladder, weigh_given
    from .job import make_job
    from .report import document, notes_of, print_plan

    job = make_job(options)
    if job.base is not None:
        from .report import print_given

        return print_given(job, weigh_given(job), ladder(job), json=json)
    choices, rungs = all_choices(job), ladder(job)
    first = next((rung for rung in rungs if rung.fits), None)
    notes = notes_of(job, first)
    if json:
        print_json(document(job, choices, rungs, first, notes))
    else:
        print_plan(job, choices, rungs, first)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if first is None:
        print("zstore: no configuration fits: add memory, disk or ranks, or choose a smaller model", file=sys.stderr)
    return 0 if first is not None else 1
