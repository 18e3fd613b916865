"""Saving and loading through torch.distributed.checkpoint: FSDP2, and FSDP2 with tensor parallelism, 4 ranks to 2."""

import errno
import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zstore.dcp
from tests.tools.commands import here
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.dcp.save import Save
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.io.files import Flush
from zstore.open.sources import open_source
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

TIMEOUT_S = 120


class Block(nn.Module):
    """Two layers that tensor parallelism cuts by columns and by rows, and odd ones that it leaves."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.up = nn.Linear(24, width)
        self.down = nn.Linear(width, 24)
        self.norm = nn.LayerNorm(24)
        self.odd = nn.Linear(24, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5).reshape(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.norm(x + self.down(torch.relu(self.up(x))))) * self.scale


def width_of(kind: str) -> int:
    return 42 if kind == "uneven" else 40


def build(kind: str, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    width = width_of(kind)
    model = nn.Sequential(Block(width), nn.Linear(7, 24), Block(width))
    if kind in ("tp", "uneven"):
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in (model[0], model[2]):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = mesh["dp"]
    elif kind == "hsdp":
        data = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        data = init_device_mesh("cpu", (world_size,))
    for part in (*model, model):
        fully_shard(part, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=1)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(5, 24)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor().tolist()
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(each) for each in state] if isinstance(state, list) else state


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": states, "progress": {"step": 2, "seen": (3, 4.5), "loader": b"\x00raw"}}


KINDS = {"fsdp": False, "tp": True, "uneven": False, "hsdp": True}
"""How a model is sharded -> whether its optimizer's state dict is flattened."""


def save(rank: int, folder: str) -> Any:
    saved = {}
    for kind, flat in KINDS.items():
        model, optimizer = build(kind, 4)
        state = state_of(model, optimizer, flat=flat)
        saved[kind] = whole(state)
        dcp.save(state, checkpoint_id=f"{folder}/theirs/{kind}")
        # Behind training, and in front of it.
        writer = zstore.dcp.Writer(f"{folder}/{kind}/step-2")
        if kind == "fsdp":
            # A group of its own: DCP talks while the model does.
            group = torch.distributed.new_group(backend="gloo")
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
            train(model, optimizer)
            future.result(TIMEOUT_S)  # type: ignore[union-attr]
        else:
            dcp.save(state, storage_writer=writer)
    save_sharded(folder)
    fail_and_go_on(folder)
    return saved


def load(rank: int, folder: str) -> Any:
    # By the same layout, and from tensor parallelism to none.
    return [load_one(f"{folder}/{kind}/step-2", KINDS[kind], like) for kind, like in LOADS]


LOADS = [("fsdp", "fsdp"), ("tp", "tp"), ("tp", "fsdp"), ("uneven", "uneven"), ("hsdp", "hsdp"), ("hsdp", "fsdp")]


def load_one(path: str, flat: bool, like: str) -> Any:
    model, optimizer = build(like, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state_of(model, optimizer, flat=flat)
    state["progress"] = {"step": 0, "seen": None, "loader": None}
    dcp.load(state, storage_reader=zstore.dcp.Reader(path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )
    again = state_of(model, optimizer, flat=flat)
    return whole({**again, "progress": state["progress"]})


def save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.arange(21.0).reshape(7, 3)
    state = {
        "rows": distribute_tensor(weight, mesh, [Shard(0), Replicate()]),
        "columns": distribute_tensor(weight, mesh, [Replicate(), Shard(1)]),
        "both": distribute_tensor(weight, mesh, [Shard(0), Shard(1)]),
        "same": distribute_tensor(weight, mesh, [Replicate(), Replicate()]),
        "plain": weight.to(torch.bfloat16),
        "deep": distribute_tensor(torch.arange(120.0).reshape(4, 5, 6), mesh, [Shard(1), Shard(0)]),
        "none": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0), Replicate()]),
        "scalar": torch.tensor(2.5),
    }
    dcp.save({"model": state}, storage_writer=zstore.dcp.Writer(f"{folder}/sharded/first", step=9))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()])
    with pytest.raises(BaseException, match=r"[Pp]artial"):
        dcp.save({"w": partial}, storage_writer=zstore.dcp.Writer(f"{folder}/refused"))
    uneven = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Shard(0)], shape=torch.Size([7]), stride=(1,))
    with pytest.raises(BaseException, match=r"'w'|key:w"):
        dcp.save({"w": uneven}, storage_writer=zstore.dcp.Writer(f"{folder}/refused"))


class Failing(dcp.DefaultSavePlanner):
    """Loses a tensor on rank 1 when it is to be written."""

    def resolve_data(self, write_item: Any) -> Any:
        if torch.distributed.get_rank() == 1 and write_item.tensor_data is not None:
            raise OSError("the memory is gone")
        return super().resolve_data(write_item)


def fail_and_go_on(folder: str) -> None:
    """One rank cannot write its part, of tensors that pass between ranks: all hear of it, and the next save is whole."""
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(torch.arange(4000.0).reshape(500, 8), mesh, [Shard(1)])}
    writer = zstore.dcp.Writer(f"{folder}/failed/a")
    with pytest.raises(BaseException, match="the memory is gone"):
        dcp.save(state, storage_writer=writer, planner=Failing())
    assert not Path(f"{folder}/failed/a").exists()
    dcp.save(state, storage_writer=writer, checkpoint_id=f"{folder}/failed/b")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("dcp")
    results = run_ranks(save, 4, str(folder), timeout_s=TIMEOUT_S)
    assert results == [results[0]] * 4
    return folder, results[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_four_ranks_saved_is_a_checkpoint(kind: str, saved: tuple[Path, Any]) -> None:
    folder, state = saved[0] / kind, saved[1][kind]
    path = folder / "step-2"
    with open_checkpoint(folder) as reader:
        assert (reader.path, reader.record.step, reader.record.world_size) == (path, 2, 4)
        assert verify_checkpoint(reader) == []
        model = {name.partition("/")[2]: reader.read_array(name) for name in reader.arrays if name.startswith("model/")}
        assert {name: value.tolist() for name, value in model.items()} == state["model"]
        assert reader.read_array("optimizer/exp_avg/0.up.weight").shape == (width_of(kind), 24)
        kept = reader.record.state["dcp"]
        assert [["progress", "step"], 2] in kept["values"]
        assert set(kept["opaque"].values()) == {"bytes"}
    assert not list(path.glob("**/pieces")), "what passed between ranks is gone"
    assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "step-2"]


def test_two_ranks_load_what_four_saved(saved: tuple[Path, Any]) -> None:
    folder, states = saved
    loaded = run_ranks(load, 2, str(folder), timeout_s=TIMEOUT_S)
    for rank in range(2):
        for (kind, _), found in zip(LOADS, loaded[rank], strict=True):
            assert found == states[kind]


def test_a_rank_that_fails_leaves_no_checkpoint_and_nothing_else(saved: tuple[Path, Any]) -> None:
    folder = saved[0] / "failed"
    assert sorted(entry.name for entry in folder.iterdir()) == ["b", "latest"]
    with open_checkpoint(folder) as reader:
        assert verify_checkpoint(reader) == []
        assert reader.read_array("model/w").reshape(-1).tolist() == list(range(4000))


@pytest.mark.parametrize("kind", KINDS)
def test_what_dcp_itself_wrote_is_converted(kind: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    theirs, state = saved[0] / "theirs" / kind, saved[1][kind]
    assert here("convert", theirs, tmp_path / "ours", "--world-size", "3")[0] == 0
    with (
        open_source(theirs) as source,
        open_checkpoint(tmp_path / "ours") as reader,
        open_checkpoint(saved[0] / kind) as own,
    ):
        assert verify_checkpoint(reader) == []
        assert reader.arrays.keys() == source.arrays.keys() == own.arrays.keys()
        for name in own.arrays:
            assert reader.read_array(name).tobytes() == own.read_array(name).tobytes()
        assert reader.record.state == own.record.state
        assert (reader.record.tag, reader.record.world_size) == (kind, 3)
        assert all(reader.read_array(f"model/{name}").tolist() == value for name, value in state["model"].items())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_commands_work_on_what_dcp_wrote(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = saved[0] / "sharded"
    out, three = tmp_path / "out", tmp_path / "three"
    commands = (
        f"inspect {folder}",
        f"verify {folder}",
        f"consolidate {folder} {out} --dtype fp32",
        f"reshard {folder} {three} --world-size 3",
    )
    assert [here(*line.split())[0] for line in commands] == [0] * 4
    assert not (saved[0] / "refused").exists()
    weight = torch.arange(21.0).reshape(7, 3)
    weights = load_file(tmp_path / "out/model.safetensors")
    expected = dict.fromkeys(["rows", "columns", "both", "same", "plain"], weight)
    expected |= {"deep": torch.arange(120.0).reshape(4, 5, 6), "scalar": torch.tensor(2.5), "none": torch.empty(0, 4)}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # A checkpoint that was resharded still loads through DCP.
    target = {"model": {"columns": torch.zeros(7, 3), "plain": torch.zeros(7, 3)}}
    load_alone(target, tmp_path / "three/first", allow_partial_load=True)
    assert torch.equal(target["model"]["columns"], weight)
    assert torch.equal(target["model"]["plain"], weight), "bf16 is loaded into fp32 as it is"


def save_alone(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=zstore.dcp.Writer(path, **options), no_dist=True)


def load_alone(
    state: dict[str, Any], path: Path, *, allow_partial_load: bool = False, planner: Any = None, **options: Any
) -> None:
    planner = planner or dcp.DefaultLoadPlanner(allow_partial_load=allow_partial_load)
    dcp.load(state, storage_reader=zstore.dcp.Reader(path, **options), planner=planner, no_dist=True)


alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@alone
def test_an_engine_takes_the_weights(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))

    weights = build().state_dict()
    save_alone(
        {"model": dict(weights), "optim": {"state": {"0.weight": {"exp_avg": torch.ones(5, 6)}}}}, tmp_path / "a"
    )
    dcp.save({"model": dict(weights)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "steps_per_print": 0}
    for folder in (tmp_path, tmp_path / "theirs"):
        with zstore.initialize(model=build(), config=config)[0] as engine:
            with pytest.raises(CheckpointMismatchError, match="pass load_module_only=True"):
                engine.load_checkpoint(str(folder), load_module_strict=False)
            engine.load_checkpoint(str(folder), load_module_only=True)
            for name, weight in weights.items():
                assert torch.equal(engine.get_full_parameter(name), weight)


class Odd:
    """A class that only a pickle can bring back."""

    ran: ClassVar[list[str]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        Odd.ran.append("ran")
        self.__dict__.update(state)


@alone
def test_pickles_are_kept_but_not_handed_to_dcp_unless_trusted(tmp_path: Path) -> None:
    odd = Odd()
    odd.value = 4  # type: ignore[attr-defined]
    save_alone({"odd": odd, "w": torch.ones(3)}, tmp_path / "a")
    Odd.ran.clear()
    target: dict[str, Any] = {"odd": None, "w": torch.zeros(3)}
    with pytest.raises(BaseException, match=r"'odd' .* is a pickle.*trust_pickles=True"):
        load_alone(target, tmp_path / "a")
    load_alone({"w": torch.zeros(3)}, tmp_path / "a")
    assert Odd.ran == []
    load_alone(target, tmp_path / "a", trust_pickles=True)
    assert target["odd"].value == 4


@alone
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    for state, words in (
        ({"w": torch.zeros(2, dtype=torch.complex128)}, "'w': data type 'complex128' cannot be stored"),
        ({"w": torch.zeros(2, dtype=torch.float8_e8m0fnu)}, "float8_e8m0fnu"),
    ):
        with pytest.raises(BaseException, match=words):
            save_alone(state, tmp_path / "a")
    with pytest.raises(BaseException, match="use_collectives"):
        dcp.save(
            {"w": torch.zeros(2)}, storage_writer=zstore.dcp.Writer(tmp_path / "a"), no_dist=True, use_collectives=False
        )
    with pytest.raises(UsageError, match=r"bucket/a: DCP saves to a folder that all ranks share.*zstore reshard"):
        zstore.dcp.Writer("fails://bucket/a")
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_overlap_as_much_as_they_leave_out_are_refused(tmp_path: Path) -> None:
    """DCP's own planner refuses them; another one may not."""

    def plan(*offsets: int) -> SavePlan:
        pieces = [
            TensorWriteData(
                ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 4])), TensorProperties(), torch.Size([6, 4])
            )
            for at in offsets
        ]
        return SavePlan([WriteItem(MetadataIndex("w"), WriteItemType.SHARD, tensor_data=piece) for piece in pieces])

    Save(tmp_path / "a", 0, [plan(0), plan(2, 4)])
    with pytest.raises(UsageError, match=r"'w' has 24 elements, but the ranks have 24, or some twice"):
        Save(tmp_path / "a", 0, [plan(0), plan(2, 2)])


@alone
def test_a_checkpoint_is_replaced_only_where_asked(tmp_path: Path) -> None:
    save_alone({"w": torch.zeros(3)}, tmp_path / "a")
    with pytest.raises(BaseException, match="Checkpoint already exists: 'a' is committed"):
        save_alone({"w": torch.ones(3)}, tmp_path / "a")
    target = {"w": torch.full((3,), 5.0)}
    load_alone(target, tmp_path / "a")
    assert torch.equal(target["w"], torch.zeros(3))
    save_alone({"w": torch.ones(3)}, tmp_path / "a", overwrite=True)
    load_alone(target, tmp_path / "a")
    assert torch.equal(target["w"], torch.ones(3))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "latest"]


@alone
def test_a_writer_serves_many_saves_and_names_that_need_encoding(tmp_path: Path) -> None:
    writer = zstore.dcp.Writer(tmp_path / "step 1")
    dcp.save({"w": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert [info.tag for info in tags(tmp_path)] == ["step 1", "step-2"]
    target = {"w": torch.ones(3)}
    load_alone(target, tmp_path / "step 1")
    assert torch.equal(target["w"], torch.zeros(3))
    reader = zstore.dcp.Reader(tmp_path / "step 1")
    dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert torch.equal(target["w"], torch.ones(3))


@alone
def test_one_flush_makes_a_small_save_durable_before_it_has_its_name(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.max_dirty_bytes = 2**60
    if (flush := Flush.of(files, tmp_path)) is None:
        pytest.skip("no file system of Linux's that one flush is known to make durable")
    flush.close()
    state = {"model": {f"w{i}": torch.full((30, 7), float(i)) for i in range(40)}}
    dcp.save(state, storage_writer=zstore.dcp.Writer(tmp_path / "a", _files=files), no_dist=True)
    at = files.operations.index("syncfs")
    assert files.operations.count("syncfs") == 1
    assert files.operations[at + 1 : at + 4] == ["rename", "rename", "sync_folder"]
    assert not {"write", "write_small", "fsync"} & set(files.operations[at + 1 :])
    assert not {"fsync", "sync_folder"} & set(files.operations[:at])
    found = {"model": {name: torch.zeros_like(each) for name, each in state["model"].items()}}
    dcp.load(found, storage_reader=zstore.dcp.Reader(tmp_path / "a"), no_dist=True)
    assert all(torch.equal(found["model"][name], each) for name, each in state["model"].items())
    # What the drive lost is reported by the flush: then there is no checkpoint, and the one before counts.
    files.inject(Fault(kind="syncfs", error_number=errno.EIO))
    with pytest.raises(BaseException, match="cannot make the file system durable"):
        dcp.save(state, storage_writer=zstore.dcp.Writer(tmp_path / "b", _files=files), no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


@alone
def test_dcp_loads_from_a_url(tmp_path: Path) -> None:
    save_alone({"w": torch.arange(5000.0), "step": 3}, tmp_path / "run/a")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "run"), "/dcp/run", recursive=True)
    target = {"w": torch.zeros(5000), "step": 0}
    dcp.load(target, storage_reader=zstore.dcp.Reader("memory://dcp/run"), no_dist=True)
    files.rm("/dcp", recursive=True)
    assert target["step"] == 3
    assert torch.equal(target["w"], torch.arange(5000.0))


@alone
@pytest.mark.usefixtures("no_collector")
def test_async_save_writes_the_values_of_its_beginning_and_its_errors_surface(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        state = {"w": torch.zeros(1000)}
        future = dcp.async_save(state, storage_writer=zstore.dcp.Writer(tmp_path / "ckpt/a"))
        state["w"].fill_(1)
        future.result(60)  # type: ignore[union-attr]
        target = {"w": torch.ones(1000)}
        dcp.load(target, storage_reader=zstore.dcp.Reader(tmp_path / "ckpt/a"))
        assert torch.equal(target["w"], torch.zeros(1000))
        failing = dcp.async_save(state, storage_writer=zstore.dcp.Writer(tmp_path / "ckpt/a"))
        with pytest.raises(BaseException, match="'a' is committed"):
            failing.result(60)  # type: ignore[union-attr]
        (files := FaultyFiles()).inject(Fault(kind="write", times=None, error_number=errno.ENOSPC))
        writer = zstore.dcp.Writer(tmp_path / "full/b", _files=files)
        full = dcp.async_save({"w": torch.ones(500_000)}, storage_writer=writer)
        with pytest.raises(BaseException, match="No space left"):
            full.result(60)  # type: ignore[union-attr]
        until(lambda: not os.listdir(tmp_path / "full"), "the folder of the failed save stays while its future is held")
    finally:
        torch.distributed.destroy_process_group()


@alone
def test_plans_that_planners_cache_are_refused(tmp_path: Path) -> None:
    def save(path: Path) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.ones(3)}, storage_writer=zstore.dcp.Writer(path), planner=planner, no_dist=True)

    save(tmp_path / "step-0")
    with pytest.raises(BaseException, match="leave out enable_plan_caching=True"):
        save(tmp_path / "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0"]
