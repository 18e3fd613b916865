"""What activations take of memory and time: kept, computed again, and on disk, in a long-sequence run.

A GPT of random weights on random bytes, one process for each row, all training state in memory. **Peak**: the most that the
process has resident in steps after the first, less what it had before that: activations, gradients and buffers.
**Seconds**: the median of these steps. **Moved**: bytes that a step writes; **waited**: how long its forward and backward
waited for the drive. Ratios are to the row that keeps everything. The losses of all rows are the same bits. "host" is not
among them: on a CPU it is where activations are anyway.

    python -m bench.activations [--tokens 4096] [--hidden 384] [--layers 12] [--steps 4] [--rows ROW ...] [--path FOLDER]
                                [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import zstore
from bench.machine import machine
from bench.process import forget_peak, peak_bytes, resident_bytes
from zstore.testing.ranks import run_ranks
from zstore.tools.sample.models import Gpt, GptConfig

_ROWS = {
    "kept": {},
    "on disk": {"activations": "disk"},
    "computed again": {"gradient_checkpointing": True},
    "computed again, inputs on disk": {"gradient_checkpointing": True, "activations": "disk"},
}
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="steps of each row; the first warms up")
    parser.add_argument(
        "--rows", nargs="+", choices=list(_ROWS)[1:], default=list(_ROWS)[1:], help="rows beside the first"
    )
    parser.add_argument("--path", type=Path, help="folder on the drive to be measured; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = measure(options, folder)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the figures; print each row as it comes. Raises RuntimeError where the rows' losses differ."""
    print(machine(Path(folder)))
    shape = (options.tokens, options.hidden, options.layers, options.steps)
    print("{} tokens, width {}, {} layers, {} steps".format(*shape))
    print(
        f"{'activations':32}{'peak MiB':>10}{'ratio':>8}{'s a step':>10}{'ratio':>8}{'MiB moved':>11}{'waited s':>10}"
    )
    rows: dict[str, dict[str, Any]] = {}
    for name in ("kept", *options.rows):
        own = _ROWS[name]
        rows[name] = row = run_ranks(_train, 1, own, shape, folder, timeout_s=600)[0]
        first = rows["kept"]
        row |= {"peak_ratio": row["peak_bytes"] / first["peak_bytes"], "step_ratio": row["step_s"] / first["step_s"]}
        print(
            f"{name:32}{row['peak_bytes'] / _MIB:10.0f}{row['peak_ratio']:8.2f}{row['step_s']:10.2f}{row['step_ratio']:8.2f}"
            f"{row['written_bytes'] / _MIB:11.0f}{row['waited_s']:10.2f}",
            flush=True,
        )
        if row["losses"] != first["losses"]:
            raise RuntimeError(f"{name}: the losses {row['losses']} are not those of the first row, {first['losses']}")
    return {"shape": shape, "rows": rows}


def _train(rank: int, own: dict[str, Any], shape: tuple[int, ...], folder: str) -> dict[str, Any]:
    """Train some steps; return the peak, seconds and bytes of those after the first."""
    tokens, hidden, layers, steps = shape
    torch.manual_seed(0)
    model = Gpt(GptConfig(hidden=hidden, num_layers=layers, num_heads=hidden // 64, max_positions=tokens))
    config = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "zstore": {"journal": False, **own, **({"activations_path": folder} if "activations" in own else {})},
    }
    ids = torch.randint(256, (steps, 1, tokens))
    losses: list[float] = []
    seconds: list[float] = []
    with zstore.initialize(model=model, config=config)[0] as engine:
        before, most = resident_bytes(), 0
        for batch in ids:
            forget_peak()
            started = time.perf_counter()
            loss = engine(batch, labels=batch)
            engine.backward(loss)
            engine.step()
            seconds.append(time.perf_counter() - started)
            if len(seconds) > 1:
                most = max(most, peak_bytes() - before)
            losses.append(loss.item())
            del loss
        counted = engine.statistics().activations
    return {
        "losses": losses,
        "peak_bytes": most,
        "step_s": statistics.median(seconds[1:]),
        "written_bytes": 0 if counted is None else counted.written_bytes // steps,
        "waited_s": 0.0 if counted is None else (counted.write_wait_s + counted.read_wait_s) / steps,
    }


if __name__ == "__main__":
    main()
