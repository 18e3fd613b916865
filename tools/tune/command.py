"""`zstore tune`: what needs torch is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path

from ..options import Json
from ..printing import print_json
from .options import TuneOptions

CONTEXT_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}

EPILOG = """
\b
Examples:
  zstore tune --config ds.json --model gpt-small               # for zstore train
  zstore tune --config ds.json --model ./Llama-3.2-1B --nproc 2
  zstore tune --config ds.json -- train.py --deepspeed_config ds.json
  zstore tune --config ds.json --as-deepspeed --params 7e9 --hidden 4096 --layers 32 -- train.py --deepspeed ds.json

\b
An interrupted search goes on where it was. Exit codes: 0 done, 1 no trial went well, 2 wrong usage.
"""


def tune_command(options: TuneOptions, json: Json = False) -> int:
    """Run the trials and write the best config with the table of trials; 0, or 1 where no trial was ok."""
    from .report import document, print_best, print_table, write_results
    from .search import Search
    from .task import make_task

    task = make_task(options)
    if task.plan_job is None:
        print(
            "zstore: the plan is not asked what fits, since the shape of the model is not known: give --model or --params, "
            "--hidden and --layers",
            file=sys.stderr,
        )
    search = Search(task, Path(task.section.exps_dir), lambda line: print(line, file=sys.stderr, flush=True))
    try:
        best = search.run()
    except KeyboardInterrupt:
        print("zstore: stopped; the same command goes on from the trials that are done", file=sys.stderr)
        return 130
    folder = Path(task.section.results_dir)
    write_results(search, best, folder)
    if json:
        print_json(document(search, best))
    else:
        print_table(search)
    if best is None:
        last = search.trials[-1]
        print(f"zstore: no trial went well; the last one:\n{last.runs[0].problem}", file=sys.stderr)
        return 1
    if not json:
        print_best(search, best, folder)
    return 0
