"""The engine without offload against a plain PyTorch loop (one process), FSDP2 and DDP (two): seconds of whole steps.

One GPT (29 M parameters by default), one batch, the same arithmetic: in fp32 the others are the model and
`torch.optim.AdamW(fused=True)`; in bf16 they keep fp32 masters, take the gradients' norm, clip and cast back, as the
engine does. FSDP2 shards each block and the root, and gathers anew for the backward at stage 3. A pair is a step of each,
in turn in one process, so that noise meets both; who is first changes from pair to pair. A ratio is the median over pairs
of the engine's seconds to the other's, by the clock and by the processor time of all threads.

    python -m bench.overhead [--pairs 20] [--processes 1 2] [--precisions fp32 bf16] [--stages 0 1 2 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zstore
from bench.machine import machine
from zstore.testing.ranks import run_ranks
from zstore.tools.models import Gpt, GptConfig

_LR = 1e-4
_CLIP = 1.0
_WARM_UP = 3
_GOALS = {("plain", stage): 1.02 for stage in range(4)} | {("FSDP2", 3): 1.03}

Step = Callable[[torch.Tensor], torch.Tensor]
"""Trains on token ids [batch, tokens] and returns the loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="measured pairs, after three that are not")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=[0, 1, 2, 3])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences a process and step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model, the machine and one row for each run of pairs; print each row as it comes."""
    names = ("hidden", "layers", "vocab", "batch", "tokens")
    shape = {name: int(getattr(options, name)) for name in names}
    with torch.device("meta"):
        parameters = sum(p.numel() for p in _build(shape).parameters())
    print(
        f"GPT of {parameters / 1e6:.1f} M parameters (hidden {options.hidden}, {options.layers} layers, vocabulary "
        f"{options.vocab}), {options.batch} x {options.tokens} tokens a process; medians of {options.pairs} pairs"
    )
    rows: list[dict[str, Any]] = []
    for processes in options.processes:
        for precision in options.precisions:
            for stage in options.stages:
                arguments = (stage, precision, shape, options.pairs)
                run = run_ranks(_pairs_of_rank, processes, *arguments, timeout_s=3600) if processes > 1 else None
                rows.append(_pairs(0, 1, *arguments) if run is None else _slowest(run))
                print(_line(rows[-1]), flush=True)
    return {"model": {**shape, "parameters": parameters}, "machine": machine(Path.cwd()), "rows": rows}


def _line(row: dict[str, Any]) -> str:
    goal = f"goal {row['goal']:.2f}" if row["goal"] else "no goal"
    return (
        f"{row['processes']} x {row['threads']} threads {row['precision']} stage {row['stage']}: engine "
        f"{row['engine_s']:.3f} s, {row['other']} {row['other_s']:.3f} s; ratio {row['ratio']:.3f} ({goal}), "
        f"of processor time {row['cpu_ratio']:.3f}"
    )


# -- pairs ------------------------------------------------------------------------------------------------------------


def _pairs_of_rank(rank: int, stage: int, precision: str, shape: dict[str, int], pairs: int) -> dict[str, Any]:
    return _pairs(rank, torch_dist.get_world_size(), stage, precision, shape, pairs)


def _pairs(rank: int, world_size: int, stage: int, precision: str, shape: dict[str, int], pairs: int) -> dict[str, Any]:
    """Return the figures of one stage against its counterpart, on this rank (all ranks)."""
    other = "plain" if world_size == 1 else "DDP" if stage < 2 else "FSDP2"
    others = {"plain": _plain_step, "DDP": _ddp_step, "FSDP2": _fsdp_step}
    generator = torch.Generator().manual_seed(rank)
    engine = _engine(stage, precision, shape, world_size)
    with engine:
        steps: list[tuple[int, Step]] = [(0, _engine_step(engine)), (1, others[other](stage, precision, shape))]
        times: list[list[list[float]]] = []
        losses = [0.0, 0.0]
        for number in range(_WARM_UP + pairs):
            ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["tokens"]), generator=generator)
            pair: list[list[float]] = [[], []]
            for which, step in steps if number % 2 else reversed(steps):
                *pair[which], losses[which] = _timed(step, ids)
            if number >= _WARM_UP:
                times.append(pair)
    return {
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "stage": stage,
        "other": other,
        "goal": _GOALS.get((other, stage)),
        "engine_s": statistics.median(mine[0] for mine, _ in times),
        "other_s": statistics.median(theirs[0] for _, theirs in times),
        "ratio": statistics.median(mine[0] / theirs[0] for mine, theirs in times),
        "cpu_ratio": statistics.median(mine[1] / theirs[1] for mine, theirs in times),
        "engine_loss": losses[0],
        "other_loss": losses[1],
        "pairs_s": [[mine[0], theirs[0]] for mine, theirs in times],
    }


def _slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the rank that fares worst; steps begin and end together, so that they differ little."""
    return max(ranks, key=lambda row: float(row["ratio"]))


def _timed(step: Step, ids: torch.Tensor) -> tuple[float, float, float]:
    """Return seconds and processor seconds of a step, all ranks beginning and ending together, and its loss."""
    _meet()
    started, cpu = time.perf_counter(), time.process_time()
    loss = step(ids)
    spent = time.process_time() - cpu
    _meet()
    return time.perf_counter() - started, spent, float(loss.detach())


def _meet() -> None:
    if torch_dist.is_initialized():
        torch_dist.barrier()


# -- contestants ------------------------------------------------------------------------------------------------------


def _build(shape: dict[str, int]) -> Gpt:
    torch.manual_seed(0)
    return Gpt(
        GptConfig(
            hidden=shape["hidden"],
            num_layers=shape["layers"],
            num_heads=max(1, shape["hidden"] // 64),
            vocab_size=shape["vocab"],
            max_positions=shape["tokens"],
        )
    )


def _engine(stage: int, precision: str, shape: dict[str, int], world_size: int) -> zstore.engine.Engine:
    bf16 = precision == "bf16"
    config = {
        "train_batch_size": shape["batch"] * world_size,
        "train_micro_batch_size_per_gpu": shape["batch"],
        "gradient_clipping": _CLIP if bf16 else 0.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zstore.initialize(model=_build(shape), config=config)
    return engine


def _engine_step(engine: zstore.engine.Engine) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine.backward(engine(ids, labels=ids))
        engine.step()
        return loss

    return step


def _plain_step(stage: int, precision: str, shape: dict[str, int]) -> Step:
    return _step_of(_build(shape), precision)


def _ddp_step(stage: int, precision: str, shape: dict[str, int]) -> Step:
    model = _build(shape)
    return _step_of(model, precision, lambda: DistributedDataParallel(model))


def _step_of(model: nn.Module, precision: str, wrap: Callable[[], nn.Module] | None = None) -> Step:
    """Return a step of the plain loop; in bf16 with fp32 masters, clipping and a cast back."""
    masters: list[nn.Parameter] = []
    if precision == "bf16":
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model.bfloat16()
    parameters = list(model.parameters())
    called = model if wrap is None else wrap()
    optimizer = torch.optim.AdamW(masters or parameters, lr=_LR, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(ids, labels=ids)
        loss.backward()  # type: ignore[no-untyped-call]
        if masters:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            nn.utils.clip_grad_norm_(masters, _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_([*parameters], [*masters])
        return loss

    return step


def _fsdp_step(stage: int, precision: str, shape: dict[str, int]) -> Step:
    """Return a step of FSDP2; at stage 2 parameters stay gathered between forward and backward."""
    bf16 = precision == "bf16"
    model = _build(shape)
    mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids, labels=ids)
        loss.backward()  # type: ignore[no-untyped-call]
        if bf16:
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main()
