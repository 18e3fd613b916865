"""One contender in a process of its own: it builds a GPT-Neo of random weights and takes steps with it.

What it needs comes as JSON on the command line, what it found goes to a file, a line of JSON for each event, so that one
that dies leaves what it reached. The peer may live in another environment: at the top of this file is nothing of zstore.
`bench.children` starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

Spec = dict[str, Any]
"""`contender`, `model` (shape), `config` (JSON dialect), `folder`, `out`, `steps`, `seed`."""

Moved = tuple[int, int]
"""Bytes read from and written to disk so far."""


class Contender(Protocol):
    """What takes steps: the three calls of an iteration, and the bytes that it counted."""

    def __call__(self, **batch: Any) -> Any: ...
    def backward(self, loss: Any) -> Any: ...
    def step(self) -> Any: ...


def run() -> None:
    """Do what the first argument says."""
    spec: Spec = json.loads(sys.argv[1])
    with Path(spec["out"]).open("a", encoding="utf-8") as out:

        def tell(event: str, **facts: Any) -> None:
            out.write(json.dumps({"event": event, **facts}) + "\n")
            out.flush()

        _CONTENDERS[spec["contender"]](spec, tell)


# -- contenders -------------------------------------------------------------------------------------------------------


def _compute(spec: Spec, tell: Callable[..., None]) -> None:
    """Forward and backward in memory; the gradients are dropped, there is no optimizer."""

    class Plain:
        def __init__(self, model: Any) -> None:
            self._model = model

        def __call__(self, **batch: Any) -> Any:
            return self._model(**batch)

        def backward(self, loss: Any) -> None:
            loss.backward()

        def step(self) -> None:
            self._model.zero_grad(set_to_none=True)

    started = time.perf_counter()
    model = build_model(spec["model"])
    _take_steps(spec, tell, Plain(model), model, started, _kernel_moved)


def _zstore(spec: Spec, tell: Callable[..., None]) -> None:
    import zstore

    started = time.perf_counter()
    model = build_model(spec["model"], zstore.Init(config=spec["config"]))
    engine, *_ = zstore.initialize(model=model, config=spec["config"])

    def moved() -> Moved:
        store = engine.statistics().store
        return store.disk_read_bytes, store.disk_write_bytes

    with engine:
        _take_steps(spec, tell, engine, model, started, moved)


def _deepspeed(spec: Spec, tell: Callable[..., None]) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    started = time.perf_counter()
    model = build_model(spec["model"])  # within its zero.Init the model's own initialisation would be lost
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=spec["config"])
    _take_steps(spec, tell, engine, model, started, _kernel_moved)


_CONTENDERS = {"compute": _compute, "zstore": _zstore, "deepspeed": _deepspeed}


def build_model(shape: dict[str, int], inside: AbstractContextManager[Any] | None = None) -> Any:
    """Return a bf16 GPT-Neo of random weights of this shape, built within `inside`."""
    import torch
    from transformers import GPTNeoConfig, GPTNeoForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = GPTNeoConfig(
        hidden_size=shape["hidden"],
        intermediate_size=4 * shape["hidden"],
        num_layers=shape["layers"],
        num_heads=shape["heads"],
        attention_types=[[["global", "local"], shape["layers"] // 2]],
        vocab_size=shape["vocab"],
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # built in fp32 it would take twice the memory
    try:
        if inside is None:
            return GPTNeoForCausalLM(config)
        with inside:
            return GPTNeoForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def _take_steps(
    spec: Spec, tell: Callable[..., None], engine: Contender, model: Any, started: float, moved: Callable[[], Moved]
) -> None:
    import torch

    # Of a partitioned parameter DeepSpeed leaves an empty one, and keeps the number beside it.
    parameters = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())
    tell(
        "built", parameters=parameters, seconds=time.perf_counter() - started, peak_bytes=_peak(), versions=_versions()
    )
    apart = _forget_peak()
    shape, generator = spec["model"], torch.Generator().manual_seed(spec["seed"])
    for _ in range(spec["steps"]):
        ids = torch.randint(0, shape["vocab"], (1, shape["tokens"]), generator=generator)
        kernel, counted, times = [_kernel_moved()], [moved()], [time.perf_counter()]

        def mark(counted: list[Moved] = counted, times: list[float] = times) -> None:
            times.append(time.perf_counter())
            counted.append(moved())

        loss = engine(input_ids=ids, labels=ids).loss
        mark()
        engine.backward(loss)
        mark()
        engine.step()
        mark()
        kernel.append(_kernel_moved())
        tell("step", loss=float(loss), times=times, moved=counted, kernel=kernel, peak_bytes=_peak() if apart else None)
    tell("end", peak_bytes=_peak() if apart else None, page_cache_bytes=page_cache_bytes(Path(spec["folder"])))


# -- the process ------------------------------------------------------------------------------------------------------


def _peak() -> int:
    """Return the most bytes that this process had resident since it began or since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> bool:
    """Begin the peak anew; false where the kernel does not let a process."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def _kernel_moved() -> Moved:
    """Return what the kernel moved between this process and drives; (0, 0) where it does not count."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    counters = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counters["read_bytes"], counters["write_bytes"]


def page_cache_bytes(folder: Path) -> int | None:
    """Return the bytes that files below `folder` have in the page cache; None where the kernel does not tell
    (before Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, pages = os.sysconf("SC_PAGE_SIZE"), 0
    whole, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            if libc.syscall(_CACHESTAT, fd, whole, counts, 0) != 0:
                return None
        finally:
            os.close(fd)
        pages += counts[0]
    return pages * page


_CACHESTAT = 451
"""Number of the system call, the same on every architecture."""


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "deepspeed"):
        if package in sys.modules:
            found[package] = version(package)
    if "zstore" in sys.modules:
        found["zstore"] = str(sys.modules["zstore"].__version__)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
