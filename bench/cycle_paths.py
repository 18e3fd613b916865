"""What `bench.cycles` looks into: paths over training state, each in a process of its own that marks when it is in them."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.process import Spec, Tell, drop_page_cache, kernel_moved, make_durable, serve, versions


def run() -> None:
    """Do what the first argument says."""
    serve(PATHS)


# -- counters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the kernel counted of this process and its children so far."""

    seconds: float
    user_s: float
    system_s: float
    runnable_s: float
    """Time in which threads that still live could run, and had no core."""
    page_faults: int
    voluntary_switches: int
    """Times that a thread waited: for a drive, a lock, or another thread."""
    involuntary_switches: int
    read_bytes: int
    written_bytes: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{each.name: getattr(self, each.name) - getattr(other, each.name) for each in fields(self)})

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


def count() -> Counters:
    """Return the counters now."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    read, written = kernel_moved()
    return Counters(
        seconds=time.monotonic(),
        user_s=sum(each.ru_utime for each in used),
        system_s=sum(each.ru_stime for each in used),
        runnable_s=_runnable_s(),
        page_faults=sum(each.ru_minflt + each.ru_majflt for each in used),
        voluntary_switches=sum(each.ru_nvcsw for each in used),
        involuntary_switches=sum(each.ru_nivcsw for each in used),
        read_bytes=read,
        written_bytes=written,
    )


def _runnable_s() -> float:
    """Return the time that threads waited for a core; 0 where the kernel does not count it."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="utf-8").split()[1])
        except (OSError, IndexError):  # the thread ended meanwhile, or the file is empty
            continue
    return total / 1e9


class Watch:
    """Sums what was counted within `with watch.on():`, and keeps when that was."""

    def __init__(self) -> None:
        self.total: Counters | None = None
        self.windows: list[tuple[float, float]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count what is done within."""
        gc.collect()
        before = count()
        yield
        after = count()
        self.windows.append((before.seconds, after.seconds))
        self.total = after - before if self.total is None else self.total + (after - before)

    def tell(self, tell: Tell) -> None:
        """Tell of it: event `path`."""
        if self.total is None:
            raise RuntimeError("nothing was watched")
        lock = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        counted = asdict(self.total) | {"times": len(self.windows)}
        tell("path", windows=self.windows, interpreter_at=lock, versions=versions(), counted=counted)


# -- paths ------------------------------------------------------------------------------------------------------------


def _step(spec: Spec, tell: Tell) -> None:
    """Optimizer steps, the state on disk."""
    engine, batches = _engine(spec, {"stage": 2, "offload_optimizer": _nvme(spec)})
    watch = Watch()
    with engine:
        for number in range(spec["warm_up"] + spec["times"]):
            ids = next(batches)
            engine.backward(engine(ids, labels=ids))
            if number < spec["warm_up"]:
                engine.step()
                continue
            with watch.on():
                engine.step()
        watch.tell(tell)


def _forward_backward(spec: Spec, tell: Tell) -> None:
    """Forward and backward, parameters and state on disk."""
    zero = {"stage": 3, "offload_optimizer": _nvme(spec), "offload_param": _nvme(spec)}
    engine, batches = _engine(spec, zero)
    watch = Watch()
    with engine:
        for number in range(spec["warm_up"] + spec["times"]):
            ids = next(batches)
            if number < spec["warm_up"]:
                engine.backward(engine(ids, labels=ids))
            else:
                with watch.on():
                    engine.backward(engine(ids, labels=ids))
            engine.step()
        watch.tell(tell)


def _save(spec: Spec, tell: Tell) -> None:
    """Saves of state in memory, until all is on disk; each array changes between two. The last is left in `saved`."""
    engine, batches = _in_memory(spec)
    watch, folder = Watch(), Path(spec["saved"])
    with engine:
        for number in range(1 + spec["times"]):
            _train(engine, batches)
            place = folder if number == spec["times"] else folder.with_name(f"{folder.name}-{number}")
            if number:
                with watch.on():
                    engine.save_checkpoint(str(place), wait=True)
            else:
                engine.save_checkpoint(str(place), wait=True)
            if place != folder:
                _empty(place)
        watch.tell(tell)


def _load(spec: Spec, tell: Tell) -> None:
    """Loads into memory that is there."""
    engine, batches = _in_memory(spec)
    watch, folder = Watch(), Path(spec["saved"])
    with engine:
        _train(engine, batches)
        for _ in range(spec["times"]):
            drop_page_cache(folder)
            with watch.on():
                engine.load_checkpoint(str(folder))
        watch.tell(tell)


def _command(spec: Spec, tell: Tell) -> None:
    """A `zstore` command on what was saved; the first time, which imports what it needs, does not count."""
    from zstore.tools.cli import app

    name, *options = spec["arguments"]
    watch, out = Watch(), Path(spec["folder"]) / "out"
    make_durable(Path(spec["saved"]))
    for number in range(1 + spec["times"]):
        to = [] if name == "verify" else [str(out / str(number))]
        out.mkdir(exist_ok=True)
        drop_page_cache(Path(spec["saved"]))
        with watch.on() if number else nullcontext():
            app([name, spec["saved"], *to, *options], standalone_mode=False)
        _empty(out)
    watch.tell(tell)


PATHS = {"step": _step, "forward": _forward_backward, "save": _save, "load": _load, "command": _command}
"""What a process may be asked for, by `contender`."""


# -- parts ------------------------------------------------------------------------------------------------------------


def _engine(spec: Spec, zero: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    """Return an engine, and batches for it."""
    import torch

    import zstore
    from zstore.tools.sample.models import build_model

    config = {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "zstore": {"step_overlap": "none"},
    }
    torch.manual_seed(0)
    engine, *_ = zstore.initialize(model=build_model(spec["model"], spec["tokens"]), config=config)

    def batches() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, 256, (1, spec["tokens"]), generator=generator)

    return engine, batches()


def _in_memory(spec: Spec) -> tuple[Any, Iterator[Any]]:
    return _engine(spec, {"stage": 3, "offload_optimizer": {"device": "cpu"}})


def _nvme(spec: Spec) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": spec["folder"]}


def _train(engine: Any, batches: Iterator[Any]) -> None:
    ids = next(batches)
    engine.backward(engine(ids, labels=ids))
    engine.step()


def _empty(folder: Path) -> None:
    """Give back the disk of the files below `folder`, and leave them: a file system without a journal makes files slowly
    while it minds those that were removed a moment ago."""
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]:
        path.chmod(0o600)
        os.truncate(path, 0)
