"""The command line of `zstore tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from ..options import parse_size


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What the command line says. None: not given."""

    config: Annotated[
        Path,
        typer.Option(help="Configuration to start from; its section autotuning says how.", exists=True, dir_okay=False),
    ]
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS...]",
            help="Script to tune for, started as by `zstore run`; its arguments name the configuration.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf). Trained by "
            "`zstore train`; with a script, for the plan alone (or give the section's model_info)."
        ),
    ] = None
    data: Annotated[Path | None, typer.Option(help="Text for --model, as `zstore train --data`.")] = None
    seq_len: Annotated[int, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = 128
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "--nproc-per-node", help="Ranks of each trial (default: GPUs, or 1).", min=1),
    ] = None
    memory: Annotated[
        int | None, typer.Option(help="Host memory (default: this machine's).", metavar="SIZE", parser=parse_size)
    ] = None
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="Answer `import deepspeed` in the script with zstore.")
    ] = False
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`.")] = False
    trial_timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.", min=1, metavar="S")] = 600.0

    def __post_init__(self) -> None:
        """Refuse what names nothing to run, or two things."""
        if not self.script and self.model is None:
            raise UsageError("say what to tune for: --model M, or a script after --")
        if self.script and self.data is not None:
            raise UsageError("--data goes with --model alone: a script has its own data")
