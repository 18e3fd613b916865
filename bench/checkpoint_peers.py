"""What others do to save and load training state, each in a process of its own: `bench.checkpoint` starts them.

A peer may live in another environment: nothing of zstore is imported here. Each is told the shapes of the state (`arrays`)
and makes tensors of them, or, as DeepSpeed, builds the model and trains a step. What a peer writes counts as saved when
it is on disk.
"""

import contextlib
import importlib
import io
import os
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.process import (
    Spec,
    Tell,
    drop_page_cache,
    free_port,
    make_durable,
    measured,
    resident_bytes,
    serve,
    versions,
)

Tensors = dict[str, Any]
"""Names and tensors of torch."""


def run() -> None:
    """Do what the first argument says."""
    serve(CONTENDERS)


class Peer(ABC):
    """Saves tensors in a folder and loads them again."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def save(self, tensors: Tensors, folder: Path) -> Callable[[], None] | None:
        """Save; where this returns before all is written, return what waits for that."""

    @abstractmethod
    def load(self, tensors: Tensors, folder: Path) -> Tensors:
        """Return what was saved: tensors like `tensors`, which must not be changed."""


class TorchSave(Peer):
    """`torch.save` of one dict in one file."""

    def save(self, tensors: Tensors, folder: Path) -> None:
        import torch

        torch.save(tensors, folder / "state.pt")

    def load(self, tensors: Tensors, folder: Path) -> Tensors:
        import torch

        loaded: Tensors = torch.load(folder / "state.pt", weights_only=True)
        return loaded


class Safetensors(Peer):
    """safetensors, one file."""

    def save(self, tensors: Tensors, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(tensors, folder / "state.safetensors")

    def load(self, tensors: Tensors, folder: Path) -> Tensors:
        from safetensors.torch import load_file

        # Views of a mapped file: read when they are copied.
        device = next(iter(tensors.values())).device.type
        loaded = load_file(folder / "state.safetensors", device=device)
        return {name: tensor.clone() for name, tensor in loaded.items()}


class Dcp(Peer):
    """torch.distributed.checkpoint with `threads` writers, `asynchronous` behind training."""

    def save(self, tensors: Tensors, folder: Path) -> Callable[[], None] | None:
        dcp = _dcp()
        writer = dcp.FileSystemWriter(folder, thread_count=self.spec["threads"])
        if not self.spec["asynchronous"]:
            dcp.save(tensors, storage_writer=writer, no_dist=True)
            return None
        future: Any = dcp.async_save(tensors, storage_writer=writer, no_dist=True)
        wait: Callable[[], None] = future.result
        return wait

    def load(self, tensors: Tensors, folder: Path) -> Tensors:
        import torch

        dcp = _dcp()
        loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return loaded


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


class Tensorstore(Peer):
    """tensorstore's zarr3 driver with direct I/O: an array for each tensor, chunks of about 8 MiB, no checksums."""

    def _open(self, folder: Path, name: str, tensor: Any = None) -> Any:
        import tensorstore as ts

        store = {"driver": "file", "path": str(folder / name), "file_io_mode": {"mode": "direct"}}
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store, "recheck_cached_data": False}
        if tensor is None:
            return ts.open(spec, open=True)
        row = max(1, tensor.numel() // tensor.shape[0] * tensor.element_size())
        chunk = [max(1, min(tensor.shape[0], 2**23 // row)), *tensor.shape[1:]]
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        spec["metadata"] = {"shape": list(tensor.shape), "data_type": "float32", "chunk_grid": grid}
        return ts.open(spec, create=True)

    def save(self, tensors: Tensors, folder: Path) -> None:
        opened = [(self._open(folder, name, tensor), tensor) for name, tensor in tensors.items()]
        writes = [store.result().write(tensor.numpy()) for store, tensor in opened]
        for write in writes:
            write.result()

    def load(self, tensors: Tensors, folder: Path) -> Tensors:
        import torch

        opened = {name: self._open(folder, name) for name in tensors}
        reads = {name: store.result().read() for name, store in opened.items()}
        return {name: torch.from_numpy(read.result()) for name, read in reads.items()}


def _tensors(spec: Spec, tell: Tell) -> None:
    """Save and load tensors by the peer that is asked for."""
    import torch

    peer = _TENSOR_PEERS[spec["peer"]](spec)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape, device=spec["device"]) for name, shape in spec["arrays"].items()}
    if spec.get("asynchronous"):  # copies to host memory first, and saves from there
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}")
    folder = Path(spec["folder"])
    with tempfile.TemporaryDirectory() as name:  # so that what it imports at its first use does not count
        few = {"few": torch.zeros(16, 16, device=spec["device"])}
        if (rest := peer.save(few, Path(name))) is not None:
            rest()
        peer.load(few, Path(name))

    def save() -> float | None:
        """Return the seconds until training could go on; None where that is once all is on disk."""
        started = time.perf_counter()
        rest = peer.save(tensors, folder)
        stall_s = time.perf_counter() - started
        if rest is not None:
            rest()
        make_durable(folder)
        return None if rest is None else stall_s

    stall_s, figures = measured(save)
    tell("save", **figures, stall_s=figures["seconds"] if stall_s is None else stall_s)
    drop_page_cache(folder)
    loaded, figures = measured(lambda: peer.load(tensors, folder))
    name = max(tensors, key=lambda each: tensors[each].numel())
    if not torch.equal(loaded[name], tensors[name]):
        raise RuntimeError(f"{name} came back with other values")
    tell("load", **figures)
    tell("end", versions=versions())


_TENSOR_PEERS: dict[str, Callable[[Spec], Peer]] = {
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": Dcp,
    "tensorstore": Tensorstore,
}


def _deepspeed(spec: Spec, tell: Tell) -> None:
    """Train a step with ZeRO-3 and its state in memory, save, load."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    import deepspeed
    import torch

    from bench.contenders import build_model

    deepspeed.init_distributed(dist_backend="nccl" if spec["device"] == "cuda" else "gloo", verbose=False)
    model = build_model(spec["model"])
    config = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        # torch's own optimizer: DeepSpeed's is compiled at its first use, which takes minutes.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.randint(0, spec["model"]["vocab"], (1, spec["model"]["tokens"])).to(spec["device"])
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    folder = Path(spec["folder"])

    def save() -> None:
        engine.save_checkpoint(str(folder), tag="step")
        make_durable(folder)

    _, figures = measured(save)
    tell("save", **figures, stall_s=figures["seconds"])
    drop_page_cache(folder)
    _, figures = measured(lambda: engine.load_checkpoint(str(folder), tag="step"))
    tell("load", **figures)
    tell("end", versions=versions())


def _zero_to_fp32(spec: Spec, tell: Tell) -> None:
    """Consolidate what DeepSpeed saved, by its own tool; to pickles, for its safetensors refuse tied parameters."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    out = Path(spec["out_folder"])

    def consolidate() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            convert_zero_checkpoint_to_fp32_state_dict(spec["folder"], str(out), safe_serialization=False, tag="step")
        make_durable(out)

    _convert(spec, tell, consolidate)


def _ds_to_universal(spec: Spec, tell: Tell) -> None:
    """Make of what DeepSpeed saved a checkpoint for other world sizes, by its own tool."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    out = Path(spec["out_folder"])
    options = Namespace(
        input_folder=str(Path(spec["folder"]) / "step"),
        output_folder=str(out),
        num_extract_workers=2,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )

    def convert() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            main(options)
        make_durable(out)

    _convert(spec, tell, convert)


def _convert(spec: Spec, tell: Tell, work: Callable[[], None]) -> None:
    drop_page_cache(Path(spec["folder"]))
    before = resident_bytes()
    _, figures = measured(work)
    helpers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    tell("convert", **figures, before_bytes=before, largest_helper_bytes=helpers)
    tell("end", versions=versions())


CONTENDERS = {
    "tensors": _tensors,
    "deepspeed": _deepspeed,
    "zero_to_fp32": _zero_to_fp32,
    "ds_to_universal": _ds_to_universal,
}
"""What a process may be asked for, by `contender`."""
