"""What zstore.dcp.Writer does not write again: shards that did not change, and what rests in files of a store."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import zstore.dcp
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import UsageError
from zstore.format.arrays import ArraySpec
from zstore.format.partition import grid_of_rows, make_grid
from zstore.optim import Offloaded
from zstore.store import StoreOptions, TensorStore
from zstore.testing.ranks import run_ranks

alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def save(state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=zstore.dcp.Writer(path, **options), planner=planner, no_dist=True)


def written(path: Path) -> set[str]:
    """The arrays of a checkpoint that share no file with another."""
    with open_checkpoint(path) as reader:
        assert verify_checkpoint(reader) == []
        return {name for name, array in reader.arrays.items() if os.stat(path / array.shard_file(0)).st_nlink == 1}


def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(600.0).reshape(100, 6) + i for i in range(10)}


@alone
def test_a_save_writes_only_what_changed(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": weights(), "raw": b"as it was"}
    save(state, tmp_path / "a")
    state["model"]["w3"][99, 5] += 1
    state["model"]["w4"] = state["model"]["w4"].to(torch.bfloat16)
    save(state, tmp_path / "b")
    assert written(tmp_path / "b") == {"model/w3", "model/w4"}
    save(state, tmp_path / "c", link_unchanged=False)
    assert len(written(tmp_path / "c")) == 11
    # From the one that is replaced, too; and what is linked stays when the others go.
    save(state, tmp_path / "c", overwrite=True)
    with open_checkpoint(tmp_path / "c") as reader:
        assert verify_checkpoint(reader) == []
        assert reader.manifest(0).shards[0].linked
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}, "raw": None}
    dcp.load(target, storage_reader=zstore.dcp.Reader(tmp_path / "c"), no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in state["model"].items())


@alone
def test_a_damaged_file_is_written_again_and_not_linked(tmp_path: Path) -> None:
    save({"model": weights()}, tmp_path / "a")
    with open_checkpoint(tmp_path / "a") as reader:
        path = reader.file_of("model/w0", 0)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    save({"model": weights()}, tmp_path / "b")
    assert written(tmp_path / "b") == {"model/w0"}


@alone
def test_values_of_the_same_checksum_are_not_taken_for_the_same(tmp_path: Path) -> None:
    # crc32c is linear: this adds a multiple of its polynomial, x**32 + ... + 1, which no checksum sees.
    first = torch.zeros(4096, dtype=torch.uint8)
    other = first.clone()
    bits = int("1" + format(0x1EDC6F41, "032b"), 2)
    for at in range(33):
        if bits >> (32 - at) & 1:
            other[8 + at // 8] |= 1 << at % 8
    save({"model": {"w": first}}, tmp_path / "a")
    save({"model": {"w": other}}, tmp_path / "b")
    with open_checkpoint(tmp_path / "a") as before, open_checkpoint(tmp_path / "b") as after:
        assert before.shard_crcs("model/w", 0) == after.shard_crcs("model/w", 0)
        assert after.read_array("model/w").tobytes() == other.numpy().tobytes()


@alone
def test_cached_plans(tmp_path: Path) -> None:
    state = {"model": weights(), "step": 1}
    for number in range(3):
        state["model"]["w0"] += 1
        state["step"] = number
        save(state, tmp_path / f"step-{number}", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        with open_checkpoint(tmp_path / f"step-{number}") as reader:
            assert verify_checkpoint(reader) == []
            assert reader.read_array("model/w0")[0, 0] == number + 1
            assert [["step"], number] in reader.record.state["dcp"]["values"]
    state["model"]["more"] = torch.ones(3)
    save(state, tmp_path / "step-3", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    with open_checkpoint(tmp_path / "step-3") as reader:
        assert "model/more" in reader.arrays
    # Plans are compared by torch without their types.
    state["model"]["more"] = torch.ones(3, dtype=torch.int32)
    with pytest.raises(BaseException, match=r"'model.more': the plan has 3 elements of float32 .* torch.int32"):
        save(state, tmp_path / "step-4", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))


# -- what rests in a store --------------------------------------------------------------------------------------------


class OnDisk(torch.Tensor):
    """A tensor that rests in a TensorStore's disk tier."""

    store: TensorStore
    array: str

    @staticmethod
    def of(store: TensorStore, array: str, values: torch.Tensor, shape: Any, cut: tuple[Any, int]) -> OnDisk:
        store.create(ArraySpec(name=array, shape=shape, dtype="float32"), grid=cut[0], shard=cut[1], tier="disk")
        tensor = OnDisk.made(store, array, values.shape)
        tensor.copy_(values)
        return tensor

    @staticmethod
    def made(store: TensorStore, array: str, shape: Any) -> OnDisk:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        tensor: OnDisk = make(OnDisk, shape, dtype=torch.float32)
        tensor.store, tensor.array = store, array
        return tensor

    def pin_shard(self) -> Any:
        return self.store.snapshot([self.array]).pins[self.array]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, values = args
            target.store.write(target.array, values.reshape(-1)).wait()
            return target
        aten: Any = torch.ops.aten
        if func is aten.is_pinned.default:
            return False
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return OnDisk.made(args[0].store, args[0].array, args[0].shape)
        raise AssertionError(f"{func} computes with what is on disk")


ROWS, COLS = 128, 400


def save_resting(rank: int, folder: str) -> bool:
    """Rows and what one rank has, which are linked, and columns, which no shard file can be."""
    values = torch.arange(ROWS * COLS, dtype=torch.float32).reshape(ROWS, COLS)
    rows = values[rank * ROWS // 2 :][: ROWS // 2]
    columns = values[:, rank * COLS // 2 :][:, : COLS // 2].contiguous()
    mesh = init_device_mesh("cpu", (2,))

    def sharded(local: torch.Tensor, dim: int) -> DTensor:
        meta = TensorMeta(shape=values.shape, stride=values.stride(), dtype=values.dtype)
        return DTensor(local, DTensorSpec(mesh, (Shard(dim),), tensor_meta=meta), requires_grad=False)

    with TensorStore(StoreOptions(run_path=Path(folder)), rank=rank) as store:
        parts = {"w": rows, "v": columns, "u": values}
        cuts = {
            "w": (grid_of_rows((ROWS, COLS), ROWS // 2), rank),
            "v": (make_grid((ROWS, COLS // 2), 1), 0),
            "u": (make_grid((ROWS, COLS), 1), 0),
        }
        shapes = {"w": (ROWS, COLS), "v": (ROWS, COLS // 2), "u": (ROWS, COLS)}
        resting = [OnDisk.of(store, f"exp_avg/{n}", each, shapes[n], cuts[n]) for n, each in parts.items()]
        on_disk = {"w": sharded(resting[0], 0), "v": sharded(resting[1], 1), "u": resting[2]}
        optim = {name: {"exp_avg": value} for name, value in on_disk.items()}
        state = {"optim": {"state": optim}, "model": {"w": distribute_tensor(values, mesh, [Shard(0)])}}
        dcp.save(state, storage_writer=zstore.dcp.Writer(f"{folder}/out/step-1"))
        # Behind training: what was staged is what is saved, whatever is written meanwhile.
        group = torch.distributed.new_group(backend="gloo")
        stager = zstore.dcp.Stager()
        future: Any = dcp.async_save(
            state, storage_writer=zstore.dcp.Writer(f"{folder}/out/step-2"), process_group=group, async_stager=stager
        )
        for tensor, each in zip(resting, parts.values(), strict=True):
            tensor.copy_(-each)
        future.result(60)
        dcp.save(state, storage_writer=zstore.dcp.Writer(f"{folder}/out/step-3"))
        dcp.load(state, storage_reader=zstore.dcp.Reader(f"{folder}/out/step-1"))
        for number in range(3):
            # Uneven rows, and plans that neither rank sends again.
            uneven = {"model": {"w": distribute_tensor(values[:77] * number, mesh, [Shard(0)])}}
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(uneven, storage_writer=zstore.dcp.Writer(f"{folder}/cached/{number}"), planner=planner)
        assert "leave out async_checkpointer_type" in pickle_of(stager.stage(state))
        return all(
            np.array_equal(store.read(tensor.array).wait().reshape(-1), each.reshape(-1).numpy())
            for tensor, each in zip(resting, parts.values(), strict=True)
        )


def pickle_of(state: Any) -> str:
    try:
        pickle.dumps(state)
    except UsageError as error:
        return str(error)
    return "pickled"


def test_what_rests_on_disk_is_linked(tmp_path: Path) -> None:
    assert run_ranks(save_resting, 2, str(tmp_path)) == [True] * 2
    values = np.arange(ROWS * COLS, dtype=np.float32).reshape(ROWS, COLS)
    for number in range(3):
        with open_checkpoint(tmp_path / "cached" / str(number)) as reader:
            assert verify_checkpoint(reader) == []
            assert np.array_equal(reader.read_array("model/w"), values[:77] * number)
    for step, sign in ((1, 1), (2, 1), (3, -1)):
        with open_checkpoint(tmp_path / "out" / f"step-{step}") as reader:
            assert verify_checkpoint(reader) == []
            for name in "wvu":
                assert np.array_equal(reader.read_array(f"optimizer/exp_avg/{name}"), sign * values)
            linked = {each.array: each.linked for rank in range(2) for each in reader.manifest(rank).shards}
            rest = {"optimizer/exp_avg/w": True, "optimizer/exp_avg/u": True}
            assert linked == {"optimizer/exp_avg/v": step == 2, "model/w": step > 1, **rest}


@alone
@pytest.mark.timeout(60)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_who_holds_what_was_staged_goes_on_training(device: str, tmp_path: Path) -> None:
    """State in memory too: all of it with cpu, the bias's with nvme."""
    models = [torch.nn.Linear(256, 256) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    torchs = torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True)
    with Offloaded(torch.optim.AdamW, models[0].parameters(), lr=1e-2, device=device, path=tmp_path) as ours:

        def step(number: int) -> None:
            given = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
            for model, optimizer in zip(models, (ours, torchs), strict=True):
                optimizer.zero_grad()
                model(given).square().mean().backward()
                optimizer.step()

        step(0)
        staged = zstore.dcp.Stager().stage({"optim": ours.state_dict()})
        wanted = copy.deepcopy(torchs.state_dict()["state"])
        for number in (1, 2):
            step(number)
        save(staged, tmp_path / "out")
        found = {
            number: {name: torch.ones_like(value) for name, value in state.items()} for number, state in wanted.items()
        }
        dcp.load({"optim": {"state": found}}, storage_reader=zstore.dcp.Reader(tmp_path / "out"), no_dist=True)
        for number, state in wanted.items():
            assert all(torch.equal(found[number][name], value) for name, value in state.items()), (number, state.keys())
        assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True))
