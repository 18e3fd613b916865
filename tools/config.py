"""`zstore config`: explains the effect of each key in a config, and checks whether the config is valid."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.errors import ConfigError, format_count

from .options import Json, parse_file
from .printing import cell, make_console, make_table, print_json

if TYPE_CHECKING:
    from zstore.engine.config.config import Config
    from zstore.engine.config.parse import KeyFact

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Configuration, JSON in the DeepSpeed dialect.", parser=parse_file)
]
WorldSize = Annotated[int, typer.Option(help="Number of ranks to resolve batch sizes for.", min=1, metavar="N")]
Hidden = Annotated[
    int | None,
    typer.Option(help='Hidden size of the model, for bucket sizes that are "auto".', min=1, metavar="N"),
]

_ONE_RANK_NOTE = "note: this is for 1 rank; --world-size N checks the configuration for N ranks"


def config_command(file: File, world_size: WorldSize = 1, hidden_size: Hidden = None, json: Json = False) -> int:
    """Print the effect of each key and the values of "auto" and batch sizes; return 0 for a valid config, else 1."""
    from zstore.engine.config.config import load_config, read_config
    from zstore.engine.config.parse import explain

    raw = read_config(file)
    facts, errors = explain(raw)
    problems = list(map(str, errors))
    resolved: dict[str, Any] = {}
    open_keys: list[str] = []
    note = ""
    if not problems:
        try:
            resolved, open_keys = resolve(load_config(raw, name=str(file)), world_size, hidden_size)
        except ConfigError as error:
            problems = [str(error)]
            note = _ONE_RANK_NOTE if world_size == 1 else ""
    if json:
        print_json(
            {
                "file": str(file),
                "sound": not problems,
                "problems": problems,
                "keys": [asdict(fact) for fact in facts],
                "world_size": world_size,
                "resolved": resolved,
                "open": open_keys,
            }
        )
    else:
        _print(file, facts, resolved, open_keys, world_size)
        for problem in problems:
            print(f"problem: {problem}", file=sys.stderr)
        if note:
            print(note, file=sys.stderr)
    return 1 if problems else 0


def resolve(config: Config, world_size: int, hidden_size: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the batch sizes and the values of each "auto" at a world size, by dotted key, and the keys that only the
    training script can provide. Raises ConfigError if sizes conflict."""
    from zstore.engine.config.resolve import ResolveContext, open_keys, placeholder_values
    from zstore.engine.config.sections import BATCH_KEYS

    settings = config.settings
    auto_values = placeholder_values(settings)
    unset = set(auto_values)
    if BATCH_KEYS[1] in unset:
        unset |= {key for key in BATCH_KEYS if getattr(settings, key) in (None, "auto")}
    native = _native_types(config)
    context = ResolveContext(world_size=world_size, hidden_size=hidden_size, native=native, auto_values=auto_values)
    resolved = config.resolve(context)
    values = {key: attrgetter(key)(resolved.settings) for key in (*BATCH_KEYS, *open_keys(settings))}
    values |= {"precision": resolved.precision, "step mode": resolved.step_overlap}
    return {key: value for key, value in values.items() if key not in unset}, sorted(unset)


def _native_types(config: Config) -> frozenset[str]:
    """Return the 16-bit types that this machine's device supports natively, if the config leaves the type open."""
    if "auto" not in (config.settings.bf16.enabled, config.settings.fp16.enabled):
        return frozenset()
    from zstore.engine.plan.run import native_types

    return native_types()


def _print(
    file: Path, facts: list[KeyFact], resolved: Mapping[str, Any], open_keys: list[str], world_size: int
) -> None:
    console = make_console()
    counted = Counter(fact.status for fact in facts)
    tally = ", ".join(f"{number} {status}" for status, number in counted.most_common())
    console.print(f"{file}: {len(facts)} keys{': ' if tally else ''}{tally}", soft_wrap=True)
    table = make_table(("key", "value", "status", "what it does here"))
    for fact in facts:
        sentence, full_stop, _ = fact.text.partition(". ")
        text = sentence + full_stop.strip() if fact.status == "active" else fact.text
        table.add_row(cell(fact.key), cell(fact.value), fact.status, cell(text))
    if facts:
        console.print(table)
    if not resolved:
        return
    console.print(f'with {format_count(world_size, "rank")}, unless the script or its Trainer sets an "auto" key:')
    for key, value in resolved.items():
        console.print(f"  {key} = {'unset' if value is None else value}", soft_wrap=True)
    for key in open_keys:
        console.print(f"  {key}: provided by the training script", soft_wrap=True)
