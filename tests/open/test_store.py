"""The store by itself: what is put comes back, in any order of calls, for tasks and threads, and for other programs."""

import asyncio
import contextlib
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

import zstore
from tests import warm
from tests.open.api import LARGE, shown, table, values
from tests.pages import blocks
from tests.waiting import until
from zstore.errors import BudgetError, CheckpointExistsError, UsageError
from zstore.format import zarr_dtypes  # noqa: F401 - lets zarr read bfloat16
from zstore.io import Pool, run_in_thread
from zstore.store import Store, StoreOptions
from zstore.store.arrays import ArrayOrder
from zstore.testing.faults import GatedFiles


def test_torch_and_numpy_come_back_as_what_they_were(store: Store) -> None:
    given = {
        "a/torch": torch.randn(LARGE).requires_grad_(),
        "a/torch.moving": torch.randn(LARGE),
        "a/bf16": torch.randn(300, 200).to(torch.bfloat16).t(),
        "a/numpy": values(LARGE, np.int16),
        "a/half": values((3,), ml_dtypes.bfloat16),
        "a/bool": torch.tensor([True, False]),
        "a/scalar": torch.tensor(3.5),
        "a/number": 7,
        "none": np.empty((0, 3), np.uint8),
        "alone": values((1,), np.float64),
    }
    for name, value in given.items():
        store.put(name, value)
    store.move("a/torch", tier="host")
    assert store.names() == list(given)
    for name, value in given.items():
        found = store.get(name).wait()
        assert type(found) is (torch.Tensor if isinstance(value, torch.Tensor) else np.ndarray)
        assert tuple(found.shape) == np.shape(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(found, value)
        else:
            assert found.tobytes() == np.asarray(value).tobytes()
    assert {store.tier_of(name).wait() for name in given} == {"disk", "host"}


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("optimizer/m/w", "optimizer/m"), ("a", "a/b/c")])
def test_a_name_that_is_in_another_is_refused(names: tuple[str, str], store: Store, tmp_path: Path) -> None:
    first, second = names
    store.put("a.b", 1)  # no group
    store.put(first, np.arange(3))
    with pytest.raises(UsageError, match=f"{second!r} cannot be stored together with {first!r}: .*rename one of them"):
        store.put(second, np.arange(4))
    store.put(first, np.arange(5))
    path = store.checkpoint(tmp_path / "ckpt" / "t").wait().path
    assert zarr.open_array(path / first)[:].tolist() == [0, 1, 2, 3, 4]
    store.delete(first).wait()
    store.put(second, np.arange(4)).wait()
    with pytest.raises(UsageError, match="belongs to the format"):
        store.put("manifest/w", 1)


def test_rows_out_and_indices(store: Store) -> None:
    whole = torch.randn(LARGE)
    store.put("a/w", whole)
    assert torch.equal(store.get("a/w", rows=slice(10, 20)).wait(), whole[10:20])
    assert torch.equal(store.get("a/w", rows=slice(-5, None)).wait(), whole[-5:])
    assert store.get("a/w", rows=slice(20, 10)).wait().shape == (0, 100, 2)
    out = torch.zeros(3, 100, 2)
    assert store.get("a/w", rows=slice(1, 4), out=out).wait() is out
    assert torch.equal(out, whole[1:4])
    into = np.empty(LARGE, np.float32)
    assert store.get("a/w", out=into).wait() is into
    assert (into == whole.numpy()).all()
    store.update("a/w", whole[:2] + 1, rows=slice(4, 6))
    assert torch.equal(store.get("a/w", rows=slice(4, 6)).wait(), whole[:2] + 1)


class Sharded(torch.Tensor):
    def to_local(self) -> torch.Tensor:
        return torch.zeros(1)


def test_what_cannot_be_is_refused_at_once(store: Store) -> None:
    store.put("a/w", values(LARGE))
    with pytest.raises(KeyError, match=r"no array 'a/x'; it has 1, for example \['a/w'\]"):
        store.get("a/x")
    with pytest.raises(UsageError, match="as a slice without a step"):
        store.get("a/w", rows=slice(0, 10, 2))
    with pytest.raises(UsageError, match="expected contiguous, writable float32 of shape"):
        store.get("a/w", out=np.empty(LARGE, np.float64))
    with pytest.raises(UsageError, match="expected float32 of shape"):
        store.update("a/w", values((3,)))
    for name, value, words in (
        ("a/c", np.zeros(3, np.complex128), "cannot be stored"),
        ("a/d", torch.zeros(3).as_subclass(Sharded), "got a DTensor: `zstore.dcp.Writer` saves those of all ranks"),
        ("a/e", torch.zeros(3, device="meta"), "'a/e': expected dense values, got torch.strided on meta"),
        ("a/f", torch.zeros(3).to_sparse(), "'a/f': expected dense values, got torch.sparse_coo on cpu"),
        ("/a", np.zeros(3), "expected `group/name`"),
    ):
        with pytest.raises(UsageError, match=words):
            store.put(name, value)
    with pytest.raises(UsageError, match="2 names for the dimensions"):
        store.put("a/d", np.zeros(3), dims=("x", "y"))
    with zstore.open_store() as other:
        other.put("a/w", 7)
        with pytest.raises(UsageError, match="no disk tier"):
            other.put("a/w", values(LARGE), tier="disk").wait()
        assert other.get("a/w").wait() == 7
    store.close()
    with pytest.raises(UsageError, match="the store is closed"):
        store.put("a/w", values(LARGE))


@settings(max_examples=25, deadline=None)
@given(
    shape=array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9),
    dtype=st.sampled_from([np.bool_, np.int8, np.uint32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32]),
    many=st.sampled_from([1, 1, 5, 400]),
)
@example(shape=(0, 9, 9, 9), dtype=np.bool_, many=400)  # no row, of a length that needs several chunks
def test_others_see_shapes_and_names(shape: tuple[int, ...], dtype: Any, many: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("kept")
    shape = (shape[0], *shape[1:-1], shape[-1] * many) if len(shape) > 1 else shape
    dims = [f"d{i}" for i in range(len(shape))]
    value = values(shape, dtype)
    with zstore.open_store() as store:
        store.put("g/x", value, dims=dims)
        store.checkpoint(folder / "one").wait()
    read = zarr.open_group(folder / "one", mode="r")["g/x"]
    assert isinstance(read, zarr.Array)
    assert read.shape == shape
    assert np.asarray(read[...]).tobytes() == value.tobytes()
    assert list(read.metadata.to_dict().get("dimension_names") or ()) == dims
    kvstore = {"driver": "file", "path": str(folder / "one" / "g" / "x")}
    other = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    assert other.shape == shape
    assert other.read().result().tobytes() == value.tobytes()
    with zstore.open_checkpoint(folder / "one") as checkpoint:
        assert checkpoint.verify() == []
        assert checkpoint["g/x"].shape == shape
        assert checkpoint["g/x"].numpy().tobytes() == value.tobytes()


def test_a_long_row_has_no_padding_rows(tmp_path: Path) -> None:
    value = np.arange(139841).reshape(1, -1)  # odd: sixteen rows would be the smallest aligned shard
    with zstore.open_store(tmp_path / "run", host_budget_bytes=10e6) as store:
        store.put("g/x", value).wait()
        store.checkpoint(tmp_path / "one").wait()
        store.load(tmp_path / "one").wait()
        assert (store.get("g/x").wait() == value).all()
    with zstore.open_checkpoint(tmp_path / "one") as checkpoint:
        assert checkpoint.verify() == []
        assert (checkpoint["g/x"].numpy() == value).all()


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    with zstore.open_store(tmp_path, host_budget_bytes=4e6) as store:
        pool_bytes = store.statistics().pool_bytes
        assert 1e6 < pool_bytes < 3e6
        for i in range(8):
            store.put(f"b.{i}/w", values((1000, 400), seed=i)).wait()
        with pytest.raises(BudgetError):
            store.put("large/w", values((2000, 1000)), tier="host").wait()
        for _, value in store.stream(prefetch=9):
            np.add(value, 1, out=value)
            assert store.budget.used_bytes <= 4e6
        assert store.statistics().pool_bytes == pool_bytes
        assert store.budget.used_bytes == pool_bytes
        assert (store.get("b.3/w").wait() == values((1000, 400), seed=3) + 1).all()
    for budget in (0, "1GB", float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a number of bytes as host_budget_bytes, got"):
            zstore.open_store(host_budget_bytes=budget)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_collector")
def test_a_pass_frees_its_memory_without_the_cyclic_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[weakref.ref[Any]] = []
    make_pool = Store.make_pool

    def recorded(store: Store, nbytes: int) -> Pool:
        pool = make_pool(store, nbytes)
        slabs.append(weakref.ref(pool._slab.base))
        return pool

    monkeypatch.setattr(Store, "make_pool", recorded)
    with zstore.open_store(tmp_path) as store:
        for i in range(4):
            store.put(f"a/{i}", torch.zeros(LARGE)).wait()
        for _, value in store.stream():
            value.add_(1)
        del value
        until(lambda: all(slab() is None for slab in slabs), "the pass keeps its memory")
        assert slabs


@pytest.mark.usefixtures("no_collector")
def test_a_failed_put_frees_its_value_without_the_cyclic_collector(tmp_path: Path) -> None:
    async def fail(store: Store, value: Any) -> None:
        with pytest.raises(BudgetError):
            await store.put("large/w", value, tier="host")

    with zstore.open_store(tmp_path, host_budget_bytes=4e6) as store:
        values = [np.zeros((2000, 1000), np.float32) for _ in range(2)]
        refs = [weakref.ref(value) for value in values]
        asyncio.run(fail(store, values.pop()))
        with pytest.raises(BudgetError):
            store.put("large/w", values.pop(), tier="host").wait()
        until(lambda: all(ref() is None for ref in refs), "the ticket keeps its value")


def test_messages_and_results_are_readable(tmp_path: Path) -> None:
    with zstore.open_store(tmp_path / "run", host_budget_bytes=4e6) as store:
        store.put("a/w", torch.zeros(2000, 500))
        with pytest.raises(BudgetError, match=r"array 'a/w' needs .* or keep the data on disk \(`tier=\"disk\"`"):
            store.move("a/w", tier="host").wait()
        with pytest.raises(UsageError, match=r"of shape \(1, 500\), got float32 of \(1, 1\)"):
            store.update("a/w", torch.zeros(1, 1), rows=slice(0, 1))
        with pytest.raises(UsageError, match="mode='write': expected 'update' or 'read'"):
            store.stream(mode="write")  # type: ignore[arg-type]
        assert "crcs" not in repr(store.checkpoint(tmp_path / "saved").wait())


def test_several_tasks_await_the_same_store(tmp_path: Path) -> None:
    async def work(store: Store, number: int) -> None:
        for turn in range(5):
            store.put(f"t.{number}/w", torch.full(LARGE, float(turn)))
            value = await store.get(f"t.{number}/w")
            assert value.eq(turn).all()
            async for _, found in store.stream([f"t.{number}/w"]):
                found.add_(number)
            assert (await store.get(f"t.{number}/w")).eq(turn + number).all()

    async def main() -> None:
        async with zstore.open_store(tmp_path / "run") as store:
            await asyncio.gather(*(work(store, number) for number in range(6)))
            await store.flush()
            done = await store.checkpoint(tmp_path / "ckpt" / "one", extra={"loss": 1.0})
            assert (done.num_files, done.num_linked) == (6, 6)
            with pytest.raises(CheckpointExistsError):
                await store.checkpoint(tmp_path / "ckpt" / "one")

    asyncio.run(main())
    with zstore.open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.state["extra"] == {"loss": 1.0}
        assert all((checkpoint[f"t.{number}/w"].numpy() == 4 + number).all() for number in range(6))


def test_a_loop_that_is_left_stores_its_value_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with zstore.open_store(tmp_path) as store:
            for i in range(3):
                store.put(f"b.{i}/w", torch.zeros(LARGE))
            async for name, value in store.stream(["b.0/w", "b.1/w"]):
                value.fill_(1)
                if name == "b.1/w":
                    break
            assert (await store.get("b.1/w")).eq(1).all()
            with contextlib.suppress(ZeroDivisionError):
                async for _, value in store.stream(["b.2/w"]):
                    value.fill_(2)
                    raise ZeroDivisionError
            store.update("b.2/w", torch.ones(1, 100, 2), rows=slice(0, 1))
            assert (await store.get("b.2/w")).sum() == 299 * 200 * 2 + 200
            assert (await store.get("b.0/w")).eq(1).all()

    asyncio.run(main())


def test_a_change_that_takes_an_array_away_waits_for_earlier_checkpoints_alone(tmp_path: Path) -> None:
    async def main(files: GatedFiles) -> None:
        async with Store(StoreOptions(run_path=tmp_path / "run"), files=files) as store:
            store.put("a/w", np.zeros((300, 100), np.float32), tier="host")
            store.put("a/x", np.zeros((300, 100), np.float32), tier="host")
            store.put("b/w", np.zeros((300, 100), np.float32))
            first = store.checkpoint(tmp_path / "ckpt" / "first", names=["a/w", "a/x"])
            files.arrived(1)
            store.put("b/w", np.ones(70_000, np.int16))
            store.move("b/w", tier="host")
            assert store.delete("b/w").wait_for_end(30)  # it is not in the checkpoint
            moved = store.move("a/x", tier="disk")
            replaced = store.put("a/w", np.ones(70_000, np.int16))
            second = store.checkpoint(tmp_path / "ckpt" / "second")
            removed = store.delete("a/x")
            assert not any(ticket.done() for ticket in (first, moved, replaced, second, removed))
            files.open_gate()
            for ticket in (second, removed, replaced, moved, first):
                await asyncio.wait_for(asyncio.wrap_future(ticket.future), 60)

    tmp_path.joinpath("run").mkdir()
    files = GatedFiles("write", pattern="*/ckpt/*")
    with files.holding():
        asyncio.run(main(files))
    for tag, expected in (
        ("first", {"a/w": (300, 100), "a/x": (300, 100)}),
        ("second", {"a/w": (70_000,), "a/x": (300, 100)}),
    ):
        with zstore.open_checkpoint(tmp_path / "ckpt", tag) as checkpoint:
            assert {name: values.shape for name, values in checkpoint.items()} == expected


def test_without_threads_calls_are_carried_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstore.io.closing._try_start", lambda _: False)  # as at the end of the interpreter
    with zstore.open_store(tmp_path) as store:
        store.put("a", np.zeros(LARGE))
        store.put("a", np.ones(LARGE, np.int16))
        assert store.get("a").wait().all()


def test_a_change_comes_after_those_that_somebody_waits_for() -> None:
    order, gate, found = ArrayOrder(), threading.Event(), list[bool]()
    order.submit("a", lambda: found.append(gate.wait(30)), changes=True)
    waiting = run_in_thread(lambda: order.wait(["a"]), "waiting")
    assert not waiting.wait_for_end(0.1)
    last = order.submit("a", lambda: found.append(False), changes=True)
    assert not last.wait_for_end(0.1)
    gate.set()
    last.wait()
    assert found == [True, False]
    order.close()


def test_a_call_that_close_overtakes_says_that_the_store_is_closed(tmp_path: Path) -> None:
    for call in (Store.flush, lambda store: store.load(tmp_path)):
        store = zstore.open_store(tmp_path)
        store.flush().wait()
        store._check_open = store.close  # type: ignore[method-assign]
        with pytest.raises(UsageError, match="the store is closed"):
            call(store)


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    path = EXAMPLES / "tensor_store.py"
    (shown,) = blocks("docs/store.md")
    assert shown == path.read_text()
    assert len([line for line in shown.splitlines() if line]) <= 20
    ran = warm.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "(128, 1024) 3.5\n{'loss': 1.0} 8 262144.0\n", ran.stderr


def test_the_table_of_the_page_is_made_of_docstrings() -> None:
    assert shown() == table(), "run `python -m tests.open.api`"
