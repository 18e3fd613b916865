"""The optimizer step on disk against the disk: `gpt-base`, AdamW, bf16, its state on the disk tier, one process.

The limit is the bytes that the step moves, over the disk's rate for the same mix of reads and writes, measured in turn with it.

    python -m bench.step [--tier nvme] [--path FOLDER] [--model gpt-base] [--steps 6] [--json FILE]

With `--tier cpu` or `none` the state is in host memory or on the device, and the step is set beside that of a plain loop on the
same device: the gradients' norm, clipping, `torch.optim.AdamW(fused=True)` on fp32 masters, and the cast back. Where there is
a CUDA device it computes there, and the clock is stopped once it is done.
"""

import argparse
import gc
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zstore
from bench.limits import disk_limit, limit_name, new_files_limit
from bench.links import ADAMW, WITHIN, least_phases, link_rates
from bench.machine import bench_parser, choose_device, write_figures
from bench.plain import plain_step
from bench.process import device_peak_bytes, disk_bytes, synchronize
from zstore.engine import Engine
from zstore.tools.sample import build_model


def main() -> None:
    parser = bench_parser(__doc__, device=True, gib=2.0)
    parser.add_argument("--tier", choices=["none", "cpu", "nvme"], default="nvme", help="where the state is stored")
    parser.add_argument("--model", default="gpt-base")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two warm-up steps")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    options.device = choose_device(options.device)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        figures = measure(options, Path(name))
    rates = link_rates(2**28)
    least = least_phases(rates, figures["parameters"], options.tokens)
    figures |= {"forward_least_s": least["forward"], "backward_least_s": least["backward"]}
    if options.tier != "nvme":
        figures["plain_step_s"] = _plain_step_s(options)
        figures["times_plain"] = figures["step_s"] / figures["plain_step_s"]
        on_device = options.tier == "none" and options.device == "cuda"
        # AdamW on fp32 reads and writes 28 bytes a parameter.
        figures["memory_s"] = 28 * figures["parameters"] / rates[WITHIN if on_device else ADAMW]
    print(describe(figures))
    write_figures(options.json, figures)


def describe(figures: dict[str, Any]) -> str:
    """Return the figures for a person to read."""
    compared = f"{figures['step_s']:.4f} s"
    if figures["tier"] == "nvme":
        limit = f"{figures['limit_name']} {figures['limit']:.2f} GB/s"
        compared += f", {figures['rate']:.2f} GB/s; {limit}: {figures['percent']:.1f} % of the limit"
        compared += f", {figures['core_s_per_gb']:.3f} core-seconds a GB"
    else:
        compared += f", {figures['times_plain']:.2f} times a plain loop's {figures['plain_step_s']:.4f} s"
        compared += f"; AdamW alone at the rate of its memory: {figures['memory_s']:.4f} s"
    traffic = (
        f", {figures['bytes_per_parameter']:.2f} bytes of disk traffic a parameter and step"
        if "percent" in figures
        else ""
    )
    durable = f"durable after {_beside(figures, 'save')}, " if "save_s" in figures else ""
    device_peak = figures["device_peak_bytes"]
    peak = "" if device_peak is None else f"\npeak of the device's memory {device_peak / 1e9:.2f} GB"
    return (
        f"{figures['model']}, state: {figures['tier']}, computed on {figures['device']}: {figures['parameters'] / 1e6:.0f} M "
        f"parameters{traffic}\n"
        f"optimizer step {compared} (median of {figures['steps']})\n"
        f"forward {_beside(figures, 'forward')}, backward {_beside(figures, 'backward')}\n"
        f"save (wait=False): stall {figures['save_stall_ms']:.1f} ms, {durable}new disk blocks "
        f"{figures['save_new_blocks_percent']:.2f} % of the checkpoint{peak}"
    )


def _beside(figures: dict[str, Any], what: str) -> str:
    least = figures.get(f"{what}_least_s")
    return f"{figures[f'{what}_s']:.4f} s" + ("" if least is None else f" where the machine allows {least:.4f}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of alternating steps and measurements of the limit."""
    torch.manual_seed(0)
    model = build_model(options.model, options.tokens)
    num_parameters = sum(p.numel() for p in model.parameters())
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, **_offload(options, folder)},
    }
    engine, *_ = zstore.initialize(model=model, config=config)
    rows: list[tuple[float, float, float, int, float]] = []
    cores: list[float] = []
    nbytes = int(options.gib * 2**30)
    limit: Callable[[], float] = (
        partial(disk_limit, folder, "mixed", nbytes) if options.tier == "nvme" else lambda: math.inf
    )
    if options.tier == "nvme":
        disk_limit(folder, "write", nbytes)
    with engine:
        for step in range(options.steps + 2):
            ids = _ids(options, step)
            times = [_now()]
            output = engine(input_ids=ids, labels=ids)
            times.append(_now())
            engine.backward(getattr(output, "loss", output))
            times.append(_now())
            before, core_s = engine.statistics().store, time.process_time()
            engine.step()
            times.append(_now())
            core_s = time.process_time() - core_s
            after = engine.statistics().store
            moved = after.disk_read_bytes + after.disk_write_bytes - before.disk_read_bytes - before.disk_write_bytes
            if step >= 2:
                forward_s, backward_s, step_s = (after - before for before, after in itertools.pairwise(times))
                rows.append((forward_s, backward_s, step_s, moved, limit()))
                cores.append(core_s)
        saved = _save(engine, folder)
    saved["save_least_s"] = saved.pop("save_written_bytes") / new_files_limit(folder, nbytes)
    figures: dict[str, Any] = {
        "model": options.model,
        "steps": options.steps,
        "tier": options.tier,
        "device": options.device,
        "parameters": num_parameters,
        "bytes_per_parameter": rows[-1][3] / num_parameters,
        "forward_s": statistics.median(row[0] for row in rows),
        "backward_s": statistics.median(row[1] for row in rows),
        "step_s": statistics.median(row[2] for row in rows),
        "step_core_s": statistics.median(cores),
        **saved,
        "device_peak_bytes": device_peak_bytes(),
    }
    if options.tier == "nvme":
        figures["limit_name"] = limit_name()
        figures["core_s_per_gb"] = statistics.median(1e9 * c / row[3] for c, row in zip(cores, rows, strict=True))
        figures["rate"] = statistics.median(row[3] / row[2] for row in rows) / 1e9
        figures["limit"] = statistics.median(row[4] for row in rows) / 1e9
        figures["percent"] = statistics.median(100 * row[3] / row[2] / row[4] for row in rows)
    return figures


def _offload(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if options.tier == "none":
        return {}
    offload = {"device": options.tier} | ({"pin_memory": True} if options.device == "cuda" else {})
    return {"offload_optimizer": offload | ({"nvme_path": str(folder)} if options.tier == "nvme" else {})}


def _ids(options: argparse.Namespace, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 256, (1, options.tokens), generator=generator).to(options.device)


def _now() -> float:
    """Return the time once the device is done."""
    synchronize()
    return time.perf_counter()


def _plain_step_s(options: argparse.Namespace) -> float:
    """Return the seconds of a plain loop's optimizer step, the median."""
    torch.manual_seed(0)
    model = build_model(options.model, options.tokens).to(options.device)
    plain = plain_step(model, "bf16", lr=1e-4, clip=1.0)
    seconds: list[float] = []
    for step in range(options.steps + 2):
        ids = _ids(options, step)
        plain.backward(ids)
        started = _now()
        plain.step()
        seconds.append(_now() - started)
    return statistics.median(seconds[2:])


def _save(engine: Engine, folder: Path) -> dict[str, float]:
    """Save behind training; return the stall, the seconds until it is durable, and what was written anew."""
    before = disk_bytes(folder)
    gc.collect()  # a collection of all objects takes longer than the stall, wherever it falls
    started = time.perf_counter()
    handle = engine.save_checkpoint(str(folder / "ckpt"), wait=False)
    summary = handle.wait()
    save_s = time.perf_counter() - started
    total = summary.linked_bytes + summary.written_bytes
    return {
        "save_stall_ms": 1000 * handle.stall_s,
        "save_s": save_s,
        "save_written_bytes": summary.written_bytes,
        "save_new_blocks_percent": 100 * (disk_bytes(folder) - before) / total,
    }


if __name__ == "__main__":
    main()
