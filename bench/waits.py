"""How often the host waits for the device in a step of training, by where the state rests and by the step mode.

torch's own debug mode of synchronizations names each; a profiler's trace of one iteration of each mode goes to `--trace`.

    python -m bench.waits [--model gpt-small] [--tokens 256] [--path FOLDER] [--trace FILE.zip] [--json FILE]
"""

import argparse
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import zstore
from bench.limits import disk_limit
from bench.links import least_phases, least_seconds, link_rates
from bench.machine import bench_parser, choose_device, machine, write_figures
from bench.process import synchronize
from zstore.tools.sample import BUILT_IN_MODELS, build_model

_ROOT = Path(__file__).resolve().parent.parent
_WARM_UP, _STEPS = 3, 4
MODES = {
    "on the device": ("none", "none", "none"),
    "host": ("cpu", "cpu", "none"),
    "host, backward": ("cpu", "cpu", "backward"),
    "host, forward": ("cpu", "cpu", "forward"),
    "disk": ("nvme", "nvme", "none"),
    "disk, backward": ("nvme", "nvme", "backward"),
    "disk, forward": ("nvme", "nvme", "forward"),
}


def main() -> None:
    parser = bench_parser(__doc__, device=True)
    parser.add_argument("--model", default="gpt-small", choices=BUILT_IN_MODELS)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--trace", type=Path, help="archive for the traces of the profiler")
    options = parser.parse_args()
    options.device = choose_device(options.device)
    rows = []
    options.rates = link_rates(2**28)
    if options.trace:
        options.trace.unlink(missing_ok=True)
    for mode in MODES:
        with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
            rows.append(measure(options, mode, Path(name)))
        print(describe(rows[-1]), flush=True)
        figures = {"machine": machine(options.path), "model": options.model, "tokens": options.tokens, "rows": rows}
        write_figures(options.json, figures)  # after each, for a run of all takes long


def describe(row: dict[str, Any]) -> str:
    """Return a mode's figures for a person to read."""
    most = "; ".join(f"{count} at {place}" for place, count in list(row["waits"].items())[:8])
    allowed = f" where the machine allows {1000 * row['least_s']:.1f}" if "least_s" in row else ""
    waits = f"{sum(row['waits'].values())} waits a step of {row['tensors']} tensors"
    return f"{row['mode']}: iteration {1000 * row['iteration_s']:.1f} ms{allowed}, {waits}: {most}"


def measure(options: argparse.Namespace, mode: str, folder: Path) -> dict[str, Any]:
    """Return the waits of one step, by the line that asked for them, and the seconds of an iteration."""
    optimizer, parameters, overlap = MODES[mode]
    torch.manual_seed(0)
    model = build_model(options.model, options.tokens)
    zero: dict[str, Any] = {"stage": 3}
    for key, tier in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if tier != "none":
            zero[key] = {"device": tier, "nvme_path": str(folder), "pin_memory": options.device == "cuda"}
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0 if overlap == "backward" else 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "zstore": {"step_overlap": overlap, "journal": False},
        "steps_per_print": 10**9,
    }
    ids = torch.randint(0, 256, (1, options.tokens)).to(options.device)

    def iterate() -> None:
        engine.backward(engine(input_ids=ids, labels=ids))
        engine.step()

    engine, *_ = zstore.initialize(model=model, config=config)
    with engine:
        for _ in range(_WARM_UP):
            iterate()
        synchronize()
        before, started = engine.statistics().store, time.perf_counter()
        for _ in range(_STEPS):
            iterate()
        synchronize()
        iteration_s = (time.perf_counter() - started) / _STEPS
        after = engine.statistics().store
        with waits_counted(options.device) as waits:
            iterate()
        if options.trace:
            _trace(iterate, folder, options.trace, mode.replace(", ", "-").replace(" ", "-"))
    moved = after.disk_read_bytes + after.disk_write_bytes - before.disk_read_bytes - before.disk_write_bytes
    return {
        "mode": mode,
        "iteration_s": iteration_s,
        "least_s": _least_s(options, mode, sum(p.numel() for p in model.parameters()), moved / _STEPS, folder),
        "tensors": sum(1 for _ in model.parameters()),
        "waits": dict(waits.most_common()),
    }


def _least_s(options: argparse.Namespace, mode: str, parameters: int, disk_bytes: float, folder: Path) -> float:
    """Return the least seconds of an iteration: of products, links, the update's memory, or the drive."""
    optimizer, _, overlap = MODES[mode]
    phases = least_phases(options.rates, parameters, options.tokens)
    if optimizer == "none":
        return sum(phases.values())
    compute_s = phases["forward"] + phases["backward"]
    least_s = least_seconds(options.rates, parameters, compute_s, overlaps=overlap != "none")
    return max(least_s, disk_bytes / disk_limit(folder, "mixed", 2**28)) if disk_bytes else least_s


@contextmanager
def waits_counted(device: str) -> Iterator[Counter[str]]:
    """Count the operations that make the host wait for the device, by the line of ours that they come from."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[_place()] += 1

    event_wait = torch.cuda.Event.synchronize

    def waited(event: Any) -> None:
        if not event.query():
            found[f"{_place()} (an event)"] += 1
        event_wait(event)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.Event.synchronize = waited  # type: ignore[method-assign, assignment]
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.Event.synchronize = event_wait  # type: ignore[method-assign]
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """Return the line of ours, and who called that, from which this was called."""
    frames = [
        frame for frame in traceback.extract_stack() if str(_ROOT) in frame.filename and "bench" not in frame.filename
    ]
    names = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)]
    return " < ".join(names[:2]) or "elsewhere"


def _trace(iterate: Any, folder: Path, archive: Path, name: str) -> None:
    """Add a trace of one iteration to an archive."""
    with torch.profiler.profile() as profile:
        iterate()
        synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        file.write(folder / "trace.json", f"{name}.json")


if __name__ == "__main__":
    main()
