"""One contender in a process of its own: it builds a GPT-Neo of random weights and takes steps with it.

What it needs comes as JSON on the command line, what it found goes to a file, a line of JSON for each event, so that one
that dies leaves what it reached. The peer may live in another environment: at the top of this file is nothing of zstore.
`bench.children` starts it.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Protocol

from bench.process import (
    Moved,
    Spec,
    device_peak_bytes,
    forget_peak,
    free_port,
    kernel_moved,
    page_cache_bytes,
    peak_bytes,
    serve,
    synchronize,
    versions,
)

# A spec has `contender`, `model` (shape), `config` (JSON dialect), `folder`, `out`, `steps`, `seed`, and may have `device`.


_LONGEST = 1024
"""Tokens of a sequence, at most."""


class Contender(Protocol):
    """What takes steps: the three calls of an iteration, and the bytes that it counted."""

    def __call__(self, **batch: Any) -> Any: ...
    def backward(self, loss: Any) -> Any: ...
    def step(self) -> Any: ...


def run() -> None:
    """Do what the first argument says."""
    serve({name: partial(_limited, contender) for name, contender in CONTENDERS.items()})


def _limited(contender: Callable[..., None], spec: Spec, tell: Callable[..., None]) -> None:
    """Run a contender with no more of the device's memory than `device_memory_bytes` of its spec."""
    if spec.get("device_memory_bytes") and _device(spec) == "cuda":
        import torch

        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(spec["device_memory_bytes"] / whole)
    contender(spec, tell)


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
    model = build_model(spec["model"]).to(_device(spec))
    _take_steps(spec, tell, Plain(model), model, started, kernel_moved)


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


def _fsdp2(spec: Spec, tell: Callable[..., None]) -> None:
    """torch's own way: FSDP2 with parameters and state offloaded to host memory, AdamW there, computing in bf16."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = _device(spec)
    backend, meeting = "nccl" if device == "cuda" else "gloo", f"tcp://127.0.0.1:{free_port()}"
    torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    started = time.perf_counter()
    model = build_model(spec["model"]).float()
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    for block in model.transformer.h:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    class Loop:
        def __call__(self, **batch: Any) -> Any:
            return model(**batch)

        def backward(self, loss: Any) -> None:
            loss.backward()

        def step(self) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    try:
        _take_steps(spec, tell, Loop(), model, started, kernel_moved)
    finally:
        torch.distributed.destroy_process_group()


def _deepspeed(spec: Spec, tell: Callable[..., None]) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if _device(spec) == "cuda" else "gloo", verbose=False)
    started = time.perf_counter()
    model = build_model(spec["model"])  # within its zero.Init the model's own initialisation would be lost
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=spec["config"])
    _take_steps(spec, tell, engine, model, started, kernel_moved)


def _device(spec: Spec) -> str:
    return str(spec.get("device", "cpu"))


CONTENDERS = {"compute": _compute, "zstore": _zstore, "FSDP2": _fsdp2, "deepspeed": _deepspeed}


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
    drawn, fill = (torch.Tensor.normal_, torch.Tensor.uniform_), partialmethod(_fill, torch.randn(2**20).mul_(0.02))
    torch.Tensor.normal_ = torch.Tensor.uniform_ = fill  # type: ignore[method-assign, assignment]
    try:
        with inside or nullcontext():
            return GPTNeoForCausalLM(config)
    finally:
        torch.Tensor.normal_, torch.Tensor.uniform_ = drawn  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def _fill(tensor: Any, values: Any, *_: Any, **__: Any) -> Any:
    """Set a tensor to random values over and over: drawn one by one those of 1.2 B parameters take minutes."""
    flat = tensor.view(-1)
    for piece in flat.split(values.numel()):
        piece.copy_(values[: piece.numel()])
    return tensor


def batch_shape(tokens: int) -> tuple[int, int]:
    """Return how many sequences of how many tokens make up so many: none is longer than 1,024."""
    return max(1, tokens // _LONGEST), min(tokens, _LONGEST)


def _take_steps(
    spec: Spec, tell: Callable[..., None], engine: Contender, model: Any, started: float, moved: Callable[[], Moved]
) -> None:
    import torch

    # Of a partitioned parameter DeepSpeed leaves an empty one, and keeps the number beside it.
    parameters = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())
    tell(
        "built",
        parameters=parameters,
        seconds=time.perf_counter() - started,
        peak_bytes=peak_bytes(),
        device_peak_bytes=device_peak_bytes(),
        versions=versions(),
    )
    apart = forget_peak()
    shape, generator = spec["model"], torch.Generator().manual_seed(spec["seed"])
    for _ in range(spec["steps"]):
        ids = torch.randint(0, shape["vocab"], batch_shape(shape["tokens"]), generator=generator).to(_device(spec))
        synchronize()
        kernel, counted, times = [kernel_moved()], [moved()], [time.perf_counter()]

        def mark(counted: list[Moved] = counted, times: list[float] = times) -> None:
            synchronize()
            times.append(time.perf_counter())
            counted.append(moved())

        loss = engine(input_ids=ids, labels=ids).loss
        mark()
        engine.backward(loss)
        mark()
        engine.step()
        mark()
        kernel.append(kernel_moved())
        tell(
            "step",
            loss=float(loss.detach()),
            times=times,
            moved=counted,
            kernel=kernel,
            peak_bytes=peak_bytes() if apart else None,
        )
    tell(
        "end",
        peak_bytes=peak_bytes() if apart else None,
        device_peak_bytes=device_peak_bytes(),
        page_cache_bytes=page_cache_bytes(Path(spec["folder"])),
    )
