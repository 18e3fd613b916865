"""What a run's journal costs: its own time in the training thread and in its thread, against the time of a step.

One GPT on one process, in fp32 at stage 0, a journal beside nothing else. Steps with and without a journal are taken in turn
on two engines, so that noise meets both; but what a journal takes is far below that noise. So as many steps with it follow,
of which the processor time within its calls is counted, and that of its thread, which makes the lines, writes them and looks
for requests.

    python -m bench.journal [--steps 200] [--model gpt-tiny] [--path FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from zstore.engine.api.engine import Engine
from zstore.engine.api.initialize import initialize
from zstore.journal import read
from zstore.tools.sample.models import SHIPPED, Gpt, loss_of

_GOAL_PERCENT = 0.2
_WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny", choices=list(SHIPPED))
    parser.add_argument("--steps", type=int, default=200, help="measured pairs of steps, after three")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--path", type=Path, help="folder that the journal is in, for a while")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = measure(options, Path(folder))
    print(describe(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


class _Counted:
    """Counts the time within some calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            started = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += self._clock() - started

        return counted


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of one model."""
    engines = {name: _engine(options, folder, journal=name == "with") for name in ("without", "with")}
    vocab = SHIPPED[options.model].vocab_size
    ids = torch.randint(0, vocab, (options.batch, options.tokens + 1))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for number in range(_WARM_UP + options.steps):
            for name in list(engines)[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                _step(engines[name], ids)
                seconds[name].append(time.perf_counter() - started)
        inside_s, behind_s = _own_seconds(engines["with"], ids, options.steps)
    finally:
        for engine in engines.values():
            engine.close()
    pairs = list(zip(seconds["with"], seconds["without"], strict=True))[_WARM_UP:]
    step_s = statistics.median(without for _, without in pairs)
    written = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in engines["with"].module.parameters()),
        "machine": machine(Path.cwd()),
        "steps": options.steps,
        "step_s": step_s,
        "ratio_of_pairs": statistics.median(one / other for one, other in pairs),
        "inside_us": 1e6 * inside_s / options.steps,
        "behind_us": 1e6 * behind_s / options.steps,
        "percent": 100 * (inside_s + behind_s) / options.steps / step_s,
        "bytes_per_step": written / len(read(folder)),
    }


def _own_seconds(engine: Engine, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """Take some steps; return the processor seconds of the journal in the training thread, and in its own."""
    inside, behind = _Counted(time.thread_time), _Counted(time.thread_time)
    report, journal, writer = engine.report, engine.journal, engine.journal.writer
    report.step_ended = inside.around(report.step_ended)  # type: ignore[method-assign]
    journal.step_ended = inside.around(journal.step_ended)
    engine.plug_in({})
    writer.flush = behind.around(writer.flush)
    for _ in range(steps):
        _step(engine, ids)
    return inside.seconds, behind.seconds


def _engine(options: argparse.Namespace, folder: Path, *, journal: bool) -> Engine:
    torch.manual_seed(0)
    config = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": options.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 0},
        "steps_per_print": 0,
        "zstore": {"journal": str(folder.absolute()) if journal else False},
    }
    return initialize(model=Gpt(SHIPPED[options.model]), config=config)[0]


def _step(engine: Engine, ids: torch.Tensor) -> None:
    loss = loss_of(engine(ids[:, :-1], labels=ids[:, 1:]))
    engine.backward(loss)
    engine.step()


def describe(figures: dict[str, Any]) -> str:
    """Return the figures in a line."""
    met = "" if figures["percent"] <= _GOAL_PERCENT else f", goal {_GOAL_PERCENT} %"
    return (
        f"{figures['model']}, {figures['parameters'] / 1e6:.1f} M parameters: a step {1e3 * figures['step_s']:.1f} ms; the "
        f"journal {figures['inside_us']:.0f} us in the training thread and {figures['behind_us']:.0f} us in its own, "
        f"{figures['percent']:.3f} % of a step{met}; steps with it {figures['ratio_of_pairs']:.4f} of those without; "
        f"{figures['bytes_per_step']:.0f} bytes a line"
    )


if __name__ == "__main__":
    main()
