"""Checkpoints made of plain numpy arrays: ranks without processes, through the real stores and the real save.

Saves use no collectives, so the ranks of a world may be threads of one process.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from zstore.checkpoint.layout import new_save_id, step_tag
from zstore.checkpoint.part import SaveRequest, SaveSummary
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.save import SaveHandle, save_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.format.arrays import ArraySpec, Grid, grid_in_checkpoint, make_grid
from zstore.io.files import Files
from zstore.ranks.board import Board
from zstore.remote.bucket import PATIENT, Retries
from zstore.remote.service import UploadPlace
from zstore.remote.upload import save_to_url
from zstore.store import Store, StoreOptions, TierName

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """The stores of all ranks, holding the shards of `arrays`."""

    arrays: Mapping[str, Array]
    small: Mapping[str, Array]
    """Arrays that rank 0 stores whole."""
    specs: Mapping[str, ArraySpec]
    grids: Mapping[str, Grid]
    stores: Sequence[Store]

    def fill(self) -> None:
        for rank, store in enumerate(self.stores):
            for name, array in self.arrays.items():
                grid = self.grids[name]
                first = rank * grid.shard_numel
                part = np.ascontiguousarray(array).reshape(-1)[first : first + grid.shard_valid_numel(rank)]
                if part.size:
                    store.write(name, part).wait()

    def request(self, folder: Path, rank: int, save_id: str, *, step: int = 1, **options: Any) -> SaveRequest:
        """Return rank `rank`'s request to save into `folder`; `options` are further fields of it.

        With `few_files` rank 0 stores small arrays whole, as an engine's saves do.
        """
        store = self.stores[rank]
        fields: dict[str, Any] = {"tag": step_tag(step), "small": self.small, "rank_state": {"rank": rank}} | options
        grids = self.grids
        if fields.pop("few_files", False):
            specs = self.specs
            grids = {n: grid_in_checkpoint(specs[n].stored_shape, specs[n].itemsize, grid) for n, grid in grids.items()}
            fields["pieces"] = {name: grid for name, grid in self.grids.items() if grids[name] != grid}
        fields |= {"resources": store.resources, "pins": store.snapshot().pins, "specs": self.specs, "grids": grids}
        world_size = len(self.stores)
        return SaveRequest(folder=folder, step=step, rank=rank, world_size=world_size, save_id=save_id, **fields)

    def begin_save(self, folder: Path, *, step: int = 1, **options: Any) -> list[SaveHandle]:
        save_id = new_save_id()
        handles: list[SaveHandle] = []
        try:
            for rank in range(len(self.stores)):
                handles.append(save_checkpoint(self.request(folder, rank, save_id, step=step, **options)))  # noqa: PERF401
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    def save(self, folder: Path, *, step: int = 1, **options: Any) -> list[SaveSummary]:
        """Save on every rank; raises the first rank's error once all ended."""
        return wait_all(self.begin_save(folder, step=step, **options))


def begin_upload(
    world: World, local: Path, url: str, options: Mapping[str, Any], *, retries: Retries = PATIENT, **fields: Any
) -> list[SaveHandle]:
    """Begin to save to a URL by way of the folder `local`, each rank with a thread of its own."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    save_id, board, place = new_save_id(), Board(HashStore()), UploadPlace(url, options)
    fields = {"run_id": "run", "timeout_s": 60.0, **fields}
    requests = [world.request(local, rank, save_id, **fields) for rank in range(len(world.stores))]
    return [save_to_url(request, place, board, retries=retries) for request in requests]


def wait_all(handles: Sequence[SaveHandle]) -> list[SaveSummary]:
    """Return what each rank did; raises the error of the lowest rank that has one, once all ended."""
    summaries: list[SaveSummary] = []
    errors: list[BaseException] = []
    for handle in handles:
        try:
            summaries.append(handle.wait(200))
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return summaries


def describe(
    arrays: Mapping[str, Array], aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> dict[str, ArraySpec]:
    """Return the specs of numpy arrays; `aliases` are further names of their tensors, by array."""
    return {
        name: ArraySpec(name=name, shape=tuple(array.shape), dtype=array.dtype.name, aliases=aliases.get(name, ()))
        for name, array in arrays.items()
    }


@contextlib.contextmanager
def open_world(
    arrays: Mapping[str, Array],
    *,
    world_size: int = 1,
    tier: TierName = "host",
    run_path: Path | None = None,
    small: Mapping[str, Array] | None = None,
    files: Sequence[Files] | None = None,
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Iterator[World]:
    """Open a store for each rank that holds its shards of `arrays`; `files` has one double for each rank."""
    specs = describe(arrays, aliases) | describe(small or {})
    grids = {name: make_grid(specs[name].stored_shape, world_size) for name in arrays}
    budget = (32 << 20) + 2 * sum(array.nbytes for array in arrays.values())
    options = StoreOptions(run_path=run_path, host_budget_bytes=budget, num_threads=2)
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(Store(options, rank=rank, files=files[rank] if files else None))
            for rank in range(world_size)
        ]
        for rank, store in enumerate(stores):
            for name in arrays:
                store.create(specs[name], grid=grids[name], shard=rank, tier=tier)
        world = World(arrays=arrays, small=small or {}, specs=specs, grids=grids, stores=stores)
        world.fill()
        yield world


def save_arrays(folder: Path, arrays: Mapping[str, Array], *, world_size: int = 1, **options: Any) -> Path:
    opened = {key: options.pop(key) for key in ("small", "aliases") if key in options}
    with open_world(arrays, world_size=world_size, **opened) as world:
        return world.save(folder, **options)[0].path


def arrays_of_kinds() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "model/h.0.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "model/h.0.bias": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/odd name/ü%": np.arange(5, dtype=np.int64),
        "model/experts": rng.standard_normal((3, 400, 50)).astype(np.float16),
        "model/long.rows": rng.standard_normal((3, 400_000)).astype(ml_dtypes.bfloat16),
        "model/none": np.zeros((0, 5), np.float16),
        "model/thin": np.zeros((5, 0), np.float32),
        "model/scalar": np.array(3.5),
        "optimizer/exp_avg/h.0.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "buffer/flags": rng.random(40) < 0.5,
        "buffer/bytes": rng.integers(0, 256, 100).astype(np.uint8),
    }


def arrays_of_model() -> dict[str, Array]:
    """Return arrays of a model with layers, an optimizer and buffers: weights of all types, some larger than a file may be."""
    rng = np.random.default_rng(0)
    return {
        "model/h.2.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "model/h.10.weight": rng.standard_normal((1000, 300)).astype(ml_dtypes.bfloat16),
        "model/h.2.bias": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/experts": rng.standard_normal((3, 40, 50)).astype(np.float16),
        "model/long.rows": rng.standard_normal((3, 900_000)).astype(np.float32),
        "model/none": np.zeros((0, 5), np.float32),
        "model/scalar": np.array(3.5, np.float32),
        "model/double": rng.standard_normal((7, 5)),
        "optimizer/exp_avg/h.2.weight": rng.standard_normal((1000, 300)).astype(np.float32),
        "buffer/steps": np.array(2**40 + 1, np.int64),
        "buffer/mask": rng.random((5, 5)) < 0.5,
        "buffer/mean": rng.standard_normal(33).astype(np.float32),
    }


def check_weights(found: Mapping[str, Any], arrays: Mapping[str, Array], dtype: Any) -> None:
    """Weights are those of the arrays, cast by torch to `dtype` where it is one, and buffers what they are."""
    import torch

    from zstore.io.memory import as_torch

    expected = {name: as_torch(array) for name, array in arrays.items() if name.startswith(("model/", "buffer/"))}
    assert set(found) == {name.partition("/")[2] for name in expected}
    for array, tensor in expected.items():
        group, _, name = array.partition("/")
        wanted = tensor.to(dtype) if dtype and group == "model" and tensor.is_floating_point() else tensor
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found[name], wanted), name


def as_bytes(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def values(folder: Path, tag: str | None = None) -> dict[str, bytes]:
    """The bytes of every array of a checkpoint that has no fault."""
    with open_checkpoint(folder, tag) as opened:
        assert verify_checkpoint(opened) == []
        return {name: opened.read_array(name).tobytes() for name in opened.arrays}


def leavings(folder: Path) -> list[str]:
    """What a save that was killed or given up would leave behind."""
    return sorted(p.name for p in folder.iterdir() if any(k in p.name for k in (".tmp-", ".old-", ".lock-")))
