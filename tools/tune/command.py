"""`zstore tune`: what needs torch is imported when it runs."""

from __future__ import annotations

import sys

from ..options import Json
from ..printing import cell, make_console, make_table, print_json
from .options import TuneOptions

CONTEXT_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}

EPILOG = """
\b
Examples:
  zstore tune --config ds.json --model gpt-small               # for zstore train
  zstore tune --config ds.json --model ./Llama-3.2-1B --nproc 2
  zstore tune --config ds.json --as-deepspeed --model ./Llama-3.2-1B -- train.py --deepspeed ds.json

\b
Exit codes: 0 done, 1 no trial went well, 2 wrong usage.
"""


def tune_command(options: TuneOptions, json: Json = False) -> int:
    """Run the trials and write the best config with the table of trials; 0, or 1 if no trial was ok."""
    from .search import COLUMNS, Search

    search = Search(options, lambda line: print(line, file=sys.stderr, flush=True))
    best = search.run()
    search.write(best)
    if json:
        trials = [dict(zip(COLUMNS, row, strict=True)) for row in search.rows()]
        print_json({"best": None if best is None else best.name, "trials": trials})
    else:
        table = make_table(COLUMNS, (), f"trials by {search.section.metric}, the best first")
        for row in search.rows():
            table.add_row(*map(cell, row))
        make_console().print(table)
    if best is None:
        print(f"zstore: no trial went well; the last one:\n{search.trials[-1].found.problem}", file=sys.stderr)
        return 1
    if not json:
        make_console().print(f"the best is {best.name}\n{search.folder / 'ds_config_optimal.json'}", soft_wrap=True)
    return 0
