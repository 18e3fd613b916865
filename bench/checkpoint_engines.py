"""Engines that save and load training state, each in a process of its own: `bench.checkpoint` starts them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

import zstore
from bench import bare_checkpoint
from bench.bare_checkpoint import files_of
from bench.contenders import build_model
from bench.process import Spec, Tell, disk_bytes, drop_page_cache, measured, serve, versions
from zstore.checkpoint.lookahead import read_into
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import VerifyFault, verify_checkpoint
from zstore.engine import Engine
from zstore.format.arrays import round_up
from zstore.io.memory import make_slab
from zstore.testing.ranks import run_ranks

_PAGE_BYTES = 4096


def run() -> None:
    """Do what the first argument says."""
    serve(CONTENDERS)


def _engine(spec: Spec, tell: Tell) -> None:
    """Train a step, save with `wait=False`, load; the state is where the config says."""
    folder = Path(spec["folder"])
    with _trained(spec, steps=1) as engine:
        before = disk_bytes(Path(spec["drive"]))

        def save() -> float:
            ticket = engine.save_checkpoint(str(folder), wait=False)
            ticket.wait()
            return ticket.stall_s

        stall_s, figures = measured(save)
        summary_bytes = disk_bytes(folder)
        taken = disk_bytes(Path(spec["drive"])) - before
        tell("save", **figures, stall_s=stall_s, new_blocks_percent=100 * taken / summary_bytes)
        engine.wait_for_checkpoint()
        # In turn with the plain program: what the drive can do changes from one second to the next.
        with _bare_program(spec, folder, tell) as beside:
            beside("save")
            if spec["load"]:
                drop_page_cache(folder)
                _, figures = measured(lambda: engine.load_checkpoint(str(folder)))
                tell("load", **figures)
            beside("load")
            if "bare" in spec:
                drop_page_cache(folder)
                faults, figures = measured(lambda: _verify(folder))
                tell("verify", **figures, error=str(faults) if faults else None)
                beside("load")
    tell("end", versions=versions())


def _verify(folder: Path) -> list[VerifyFault]:
    with open_checkpoint(folder) as reader:
        return verify_checkpoint(reader)


@contextmanager
def _bare_program(spec: Spec, folder: Path, tell: Tell) -> Iterator[Callable[[str], None]]:
    """Yield what has the plain program save or load the checkpoint in `folder`, in the new folder `spec["bare"]`."""
    if "bare" not in spec:
        yield lambda what: None
        return
    place = Path(spec["bare"])
    with open_checkpoint(folder) as reader:
        sizes = {name: array.spec.nbytes for name, array in reader.arrays.items()}
        ends = np.cumsum([round_up(size, _PAGE_BYTES) for size in sizes.values()]).tolist()
        slab = make_slab(ends[-1])
        memories = {
            name: slab[start : start + size] for (name, size), start in zip(sizes.items(), [0, *ends[:-1]], strict=True)
        }
        read_into(reader, [((name, 0, reader.array(name).spec.numel), memory) for name, memory in memories.items()])
        files = files_of(reader, memories)

    def beside(what: str) -> None:
        if what == "save":
            _, figures = measured(lambda: bare_checkpoint.save(files, place))
        else:
            drop_page_cache(place)
            _, figures = measured(lambda: bare_checkpoint.load(files, place))
        tell(f"bare {what}", **figures)

    yield beside


def _ranks(spec: Spec, tell: Tell) -> None:
    """Load by engines of another world size, a process for each rank, all at once."""
    drop_page_cache(Path(spec["folder"]))
    found = run_ranks(_load_on_rank, spec["ranks"], spec, timeout_s=1800)
    slowest = max(found, key=lambda each: float(each["seconds"]))
    sums = {name: sum(each[name] for each in found) for name in ("read_bytes", "written_bytes", "cpu_s")}
    tell("load", **{**slowest, **sums})
    tell("end", versions=versions())


def _load_on_rank(rank: int, spec: Spec) -> dict[str, Any]:
    with _trained(spec, steps=1) as engine:  # its memory is there, as in a run that loads
        torch_dist.barrier()
        _, figures = measured(lambda: engine.load_checkpoint(spec["folder"]))
        return figures


@contextmanager
def _trained(spec: Spec, *, steps: int) -> Iterator[Engine]:
    """Yield an engine of the model after so many steps; each array has values then, none is all zeros."""
    config, shape = spec["config"], spec["model"]
    model = build_model(shape, zstore.Init(config=config))
    engine, *_ = zstore.initialize(model=model, config=config)
    with engine:
        for _ in range(steps):
            ids = torch.randint(0, shape["vocab"], (spec["samples"], shape["tokens"])).to(engine.device)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        yield engine


CONTENDERS = {"engine": _engine, "ranks": _ranks}
"""What a process may be asked for, by `contender`."""
