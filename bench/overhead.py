"""The engine without offload against a plain PyTorch loop (one process), FSDP2 and DDP (two): seconds of whole steps.

One GPT (29 M parameters by default), one batch, the same arithmetic: in fp32 the others are the model and
`torch.optim.AdamW(fused=True)`; in bf16 they keep fp32 masters, take the gradients' norm, clip and cast back, as the
engine does. FSDP2 shards each block and the root, and gathers anew for the backward at stage 3; beside stages 1 and 2
what it gathered for the forward stays there (`reshard_after_forward=False`, once SHARD_GRAD_OP). A pair is a step of each,
in turn in one process, so that noise meets both; who is first changes from pair to pair. A ratio is the median over pairs
of the engine's seconds to the other's, by the clock and by the processor time of all threads, with its quartiles.

Where there is a CUDA device one process computes there, and the clock is stopped once it is done; `--others` sets it beside
FSDP2 and DeepSpeed, where that is installed, on a group of one rank. Several processes are of the CPU.

`--others compiled` sets the engine beside itself with its units compiled by inductor, where parameters come and go: at
stage 3 with `--offload-param`. Then the ratio is what compiling gains.

    python -m bench.overhead [--pairs 20] [--processes 1 2] [--precisions fp32 bf16] [--stages 0 1 2 3] [--json FILE]
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zstore
from bench.links import least_phases, link_rates
from bench.machine import bench_parser, choose_device, machine, write_figures
from bench.plain import plain_step
from bench.process import synchronize
from zstore.engine import Engine
from zstore.testing.ranks import run_ranks
from zstore.tools.sample import Gpt, GptConfig

_LR = 1e-4
_CLIP = 1.0
_WARM_UP = 3
_GOALS = (
    {("plain", stage): 1.02 for stage in range(4)} | {("DDP", 0): 1.03} | {("FSDP2", stage): 1.0 for stage in (1, 2, 3)}
)

_Shape = dict[str, int]

Step = Callable[[torch.Tensor], torch.Tensor]
"""Trains on token ids [batch, tokens] and returns the loss."""


def main() -> None:
    parser = bench_parser(__doc__, path=False, device=True)
    parser.add_argument("--pairs", type=int, default=20, help="measured pairs, after three warm-up pairs")
    parser.add_argument(
        "--others",
        nargs="+",
        default=["plain"],
        choices=["plain", "FSDP2", "DeepSpeed", "compiled"],
        help="what one process is compared with; FSDP2 and compiled at stage 3 only",
    )
    parser.add_argument(
        "--offload-param", default="none", choices=["none", "cpu"], help="where the engine's parameters rest"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=[0, 1, 2, 3])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences per process and step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    options = parser.parse_args()
    options.device = choose_device(options.device)
    measure(options)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model, the machine and one row for each run of pairs; print each row as it comes."""
    names = ("hidden", "layers", "vocab", "batch", "tokens")
    shape: _Shape = {name: int(getattr(options, name)) for name in names}
    with torch.device("meta"):
        parameters = sum(p.numel() for p in _build(shape).parameters())
    print(
        f"gpt of {parameters / 1e6:.1f} M parameters (hidden {options.hidden}, {options.layers} layers, "
        f"vocabulary {options.vocab}), {options.batch} x {options.tokens} tokens a process; medians of {options.pairs} pairs"
    )
    rates = link_rates(2**28)
    figures: dict[str, Any] = {
        "model": {**shape, "parameters": parameters},
        "machine": machine(Path.cwd()),
        "device": options.device,
        "rows": [],
    }
    for pairing in _pairings(options, shape):
        if pairing.processes > 1:
            ranks = run_ranks(_pairs, pairing.processes, pairing, timeout_s=3600)
            # Steps begin and end together: they differ little.
            row = max(ranks, key=lambda found: float(found["ratio"]))
        elif pairing.other in {"plain", "compiled"}:
            row = _pairs(0, pairing)
        else:
            with _group_of_one(pairing.device):
                row = _pairs(0, pairing)
        least = least_phases(rates, parameters, shape["batch"] * shape["tokens"], pairing.precision)
        row["least_s"] = pairing.processes * (least["forward"] + least["backward"]) + least["update"]
        figures["rows"].append(row)
        print(describe(row), flush=True)
        write_figures(options.json, figures)  # after each, so that a run that is cut off keeps what it has
    return figures


@dataclass(frozen=True, kw_only=True)
class _Pairing:
    """What is set beside what."""

    processes: int
    precision: str
    stage: int
    other: str
    shape: _Shape
    pairs: int
    device: str
    offload_param: str


def _pairings(options: argparse.Namespace, shape: _Shape) -> Iterator[_Pairing]:
    for processes, precision, stage in itertools.product(options.processes, options.precisions, options.stages):
        alone = [other for other in options.others if other not in {"FSDP2", "compiled"} or stage == 3]
        for other in alone if processes == 1 else ["DDP" if stage == 0 else "FSDP2"]:
            yield _Pairing(
                processes=processes,
                precision=precision,
                stage=stage,
                other=other,
                shape=shape,
                pairs=options.pairs,
                device=options.device if processes == 1 else "cpu",  # several talk over gloo
                offload_param=options.offload_param,
            )


@contextmanager
def _group_of_one(device: str) -> Iterator[None]:
    """Start torch.distributed with this process alone, for the length of a `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        torch_dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        try:
            yield
        finally:
            torch_dist.destroy_process_group()


def describe(row: dict[str, Any]) -> str:
    """Return a row for a person to read."""
    goal = f"goal {row['goal']:.2f}" if row["goal"] else "no goal"
    allowed = f" where the machine allows {row['least_s']:.4f}" if "least_s" in row else ""
    return (
        f"{row['processes']} x {row['threads']} threads {row['precision']} stage {row['stage']}: engine "
        f"{row['engine_s']:.4f} s{allowed}, {row['other']} {row['other_s']:.4f} s; ratio "
        f"{_text(row['ratio'], row['quartiles'])} ({goal}), of processor time {_text(row['cpu_ratio'], row['cpu_quartiles'])}"
    )


def _text(ratio: float, quartiles: Sequence[float]) -> str:
    return f"{ratio:.3f} [{quartiles[0]:.3f}, {quartiles[1]:.3f}]"


def _quartiles(ratios: Sequence[float]) -> list[float]:
    """Return what a quarter of the ratios is at most, and what three quarters are."""
    if len(ratios) < 2:
        return [ratios[0], ratios[0]]
    first, _, third = statistics.quantiles(ratios, method="inclusive")
    return [first, third]


def _pairs(rank: int, pairing: _Pairing) -> dict[str, Any]:
    """Return the figures of one stage against its counterpart, on this rank (all ranks)."""
    others = {"plain": _plain_step, "DDP": _ddp_step, "FSDP2": _fsdp_step, "DeepSpeed": _deepspeed_step}
    stage, precision, shape, device = pairing.stage, pairing.precision, pairing.shape, pairing.device
    generator = torch.Generator().manual_seed(rank)
    with ExitStack() as engines:
        engine = engines.enter_context(_engine(pairing))
        if pairing.other == "compiled":
            compiled = engines.enter_context(_engine(pairing))
            compiled.compile()
            other = _engine_step(compiled)
        else:
            other = others[pairing.other](stage, precision, shape, device)
        steps: list[tuple[int, Step]] = [(0, _engine_step(engine)), (1, other)]
        times: list[list[list[float]]] = []
        losses = [0.0, 0.0]
        for number in range(_WARM_UP + pairing.pairs):
            ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["tokens"]), generator=generator).to(device)
            pair: list[list[float]] = [[], []]
            for which, step in steps if number % 2 else reversed(steps):
                *pair[which], losses[which] = _timed(step, ids)
            if number >= _WARM_UP:
                times.append(pair)
    ratios = [[mine[by] / theirs[by] for mine, theirs in times] for by in (0, 1)]
    return {
        "processes": pairing.processes,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "stage": stage,
        "other": pairing.other,
        "goal": _GOALS.get((pairing.other, stage)),
        "engine_s": statistics.median(mine[0] for mine, _ in times),
        "other_s": statistics.median(theirs[0] for _, theirs in times),
        "ratio": statistics.median(ratios[0]),
        "quartiles": _quartiles(ratios[0]),
        "cpu_ratio": statistics.median(ratios[1]),
        "cpu_quartiles": _quartiles(ratios[1]),
        "engine_loss": losses[0],
        "other_loss": losses[1],
        "pairs_s": [[mine[0], theirs[0]] for mine, theirs in times],
        "pairs_cpu_s": [[mine[1], theirs[1]] for mine, theirs in times],
    }


def _timed(step: Step, ids: torch.Tensor) -> tuple[float, float, float]:
    """Return seconds and processor seconds of a step, all ranks beginning and ending together, and its loss."""
    _meet()
    started, cpu = time.perf_counter(), time.process_time()
    loss = step(ids)
    synchronize()
    spent = time.process_time() - cpu
    _meet()
    return time.perf_counter() - started, spent, float(loss.detach())


def _meet() -> None:
    synchronize()
    if torch_dist.is_initialized():
        torch_dist.barrier()


def _build(shape: _Shape) -> nn.Module:
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


def _engine(pairing: _Pairing) -> Engine:
    bf16, shape = pairing.precision == "bf16", pairing.shape
    zero: dict[str, Any] = {"stage": pairing.stage}
    if pairing.offload_param != "none":
        zero["offload_param"] = {"device": pairing.offload_param}
    config = {
        "train_batch_size": shape["batch"] * pairing.processes,
        "train_micro_batch_size_per_gpu": shape["batch"],
        "gradient_clipping": _CLIP if bf16 else 0.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "zero_optimization": zero,
    }
    engine, *_ = zstore.initialize(model=_build(shape), config=config)
    return engine


def _engine_step(engine: Engine) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine.backward(engine(ids, labels=ids))
        engine.step()
        return loss

    return step


def _plain_step(stage: int, precision: str, shape: _Shape, device: str) -> Step:
    return plain_step(_build(shape).to(device), precision, lr=_LR, clip=_CLIP)


def _ddp_step(stage: int, precision: str, shape: _Shape, device: str) -> Step:
    model = _build(shape).to(device)
    return plain_step(model, precision, lr=_LR, clip=_CLIP, wrap=lambda: DistributedDataParallel(model))


def _fsdp_step(stage: int, precision: str, shape: _Shape, device: str) -> Step:
    """Return a step of FSDP2; below stage 3 parameters stay gathered between forward and backward."""
    bf16 = precision == "bf16"
    model = _build(shape).to(device)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    mesh = init_device_mesh(device, (torch_dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for block in blocks:
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


def _deepspeed_step(stage: int, precision: str, shape: _Shape, device: str) -> Step:
    """Return a step of DeepSpeed with torch's own fused AdamW."""
    import deepspeed

    bf16 = precision == "bf16"
    model = _build(shape)
    config = {
        "train_micro_batch_size_per_gpu": shape["batch"],
        "gradient_clipping": _CLIP if bf16 else 0.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if bf16:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model.to(device), optimizer=optimizer, config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(ids, labels=ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    main()
