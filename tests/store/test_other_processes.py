"""Stores and open checkpoints in the processes of a DataLoader: forked ones, and spawned ones, which get them pickled."""

import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import zstore.dcp
from tests.checkpoint.checkpoints import save_arrays
from zstore import Store, open_checkpoint, open_store
from zstore.errors import CheckpointError, UsageError
from zstore.format import ArraySpec, make_grid
from zstore.store import StoreOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

ROWS, WIDTH = 64, 3_000
VALUES = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
LIMIT_S = 100


class Rows(Dataset[torch.Tensor]):
    """Samples by a function of their number, which goes to the workers."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.as_tensor(self.read(number))


def loaded(read: Callable[[int], Any], context: str) -> torch.Tensor:
    """All rows, read by two workers of a DataLoader; a worker that hangs is an error after `LIMIT_S`."""
    loader = DataLoader(Rows(read), batch_size=8, num_workers=2, multiprocessing_context=context, timeout=LIMIT_S)
    return torch.cat(list(loader))


def in_child(task: Callable[[], object]) -> str:
    """What `task` raises in a forked child, or "" if it ends well; the child is killed after `LIMIT_S`."""
    seen, told = os.pipe()
    child = os.fork()
    if child == 0:
        threading.Timer(LIMIT_S, os._exit, [9]).start()
        text = ""
        try:
            task()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(told, text.encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(seen, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return text


class OfOpen:
    def __init__(self, opened: Any) -> None:
        self.array, self.opened = opened["model/w"], opened
        self.reader = zstore.dcp.Reader(opened.location)
        self.reader.read_metadata()  # opened here

    def __call__(self, number: int) -> Any:
        state = {"model": {"w": torch.zeros(ROWS, WIDTH)}}
        torch.distributed.checkpoint.load(state, storage_reader=self.reader, no_dist=True)
        return np.stack(
            [self.array[number], self.opened.load_state_dict("w")["w"][number], state["model"]["w"][number]]
        )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_arrays(tmp_path / "run", {"model/w": VALUES.numpy()}, world_size=2, step=1)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_an_open_checkpoint(context: str, saved: Path) -> None:
    with open_checkpoint(saved.parent) as opened:
        assert np.array_equal(opened["model/w"][3:5], VALUES[3:5])  # its threads and files are in use
        found = loaded(OfOpen(opened), context).reshape(ROWS, 3, WIDTH)
        assert all(torch.equal(found[:, way], VALUES) for way in range(3))
        assert np.array_equal(opened["model/w"][:], VALUES)  # it still serves this process


def test_a_copy_is_of_the_same_save(saved: Path) -> None:
    save_arrays(saved.parent, {"model/w": 2 * VALUES.numpy()}, world_size=1, step=2)
    with open_checkpoint(saved) as opened:
        data = pickle.dumps(opened)
        with pickle.loads(data) as copy:  # the newest is another one by now
            assert copy.tag == "step-00000001"
            assert np.array_equal(copy["model/w"][:], VALUES)
        save_arrays(saved.parent, {"model/w": VALUES.numpy()}, world_size=1, step=1, overwrite=True)
        with pytest.raises(CheckpointError, match="was replaced by another save since it was opened"):
            pickle.loads(data)
    with pytest.raises(UsageError, match="was closed"):
        pickle.dumps(opened)


def test_a_child_that_ends_leaves_the_parents_checkpoint_open(saved: Path) -> None:
    with open_checkpoint(saved) as opened:
        array = opened["model/w"]
        assert in_child(lambda: (opened.close(), gc.collect())) == ""
        assert np.array_equal(array[:], VALUES)


OPERATIONS: dict[str, Callable[[Store, Path], object]] = {
    "put": lambda store, _: store.put("other", VALUES).wait(),
    "get": lambda store, _: store.get("w").wait(),
    "update": lambda store, _: store.update("w", VALUES).wait(),
    "delete": lambda store, _: store.delete("w").wait(),
    "move": lambda store, _: store.move("w", tier="host").wait(),
    "stream": lambda store, _: list(store.stream()),
    "flush": lambda store, _: store.flush().wait(),
    "tier_of": lambda store, _: store.tier_of("w").wait(),
    "spec": lambda store, _: store.spec("w"),
    "checkpoint": lambda store, place: store.checkpoint(place / "ck" / "one").wait(),
    "load": lambda store, place: store.load(place / "ck").wait(),
}


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_store_in_a_forked_child_says_so_at_once_and_cannot_be_pickled(on_disk: bool, tmp_path: Path) -> None:
    with open_store(tmp_path / "store" if on_disk else None) as store:
        store.put("w", VALUES).wait()
        for operation, call in OPERATIONS.items():
            told = in_child(lambda call=call: call(store, tmp_path))  # type: ignore[misc]
            assert told.startswith("UsageError: the store was opened by the process"), operation
            assert "open it in this process, in a DataLoader's worker by `worker_init_fn`" in told
        assert torch.equal(store.get("w").wait(), VALUES)
        ticket = store.put("w", VALUES)
        told = in_child(ticket.wait)
        assert told.startswith("UsageError: the operation belongs to a store that was opened by the process")
        with pytest.raises(UsageError, match="belongs to the process that opened it and cannot be pickled"):
            pickle.dumps(store)


@pytest.mark.parametrize("end", ["close", "with", "collect"])
def test_the_end_of_a_store_in_a_child_removes_nothing_of_the_parent(end: str, tmp_path: Path) -> None:
    holder = [open_store(tmp_path)]

    def ends() -> None:
        if end == "close":
            holder[0].close()
        elif end == "with":
            with holder[0]:
                pass
        holder.clear()
        gc.collect()

    with holder[0] as store:
        store.put("w", VALUES).wait()
        del store
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert in_child(ends) == ""
        assert {path for path in tmp_path.rglob("*") if path.is_file()} == files
        assert torch.equal(holder[0].get("w").wait(), VALUES)


def test_a_worker_opens_a_store_of_its_own(tmp_path: Path) -> None:
    own: list[Store] = []

    def read(number: int) -> Any:
        if not own:
            own.append(open_store(tmp_path / f"{os.getpid()}"))
            own[0].put("w", VALUES).wait()
        return own[0].get("w").wait()[number]

    with open_store(tmp_path / "parent") as store:
        store.put("w", VALUES).wait()
        assert torch.equal(loaded(read, "fork"), VALUES)


def test_a_child_forked_while_others_work_does_not_hang(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put("w", VALUES).wait()
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                store.update("w", VALUES).wait()
                store.get("w").wait()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                assert "was forked from" in in_child(lambda: store.get("w").wait())
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def test_a_tensor_store_in_a_forked_child_says_so(tmp_path: Path) -> None:
    spec = ArraySpec(name="w", shape=(ROWS, WIDTH), dtype="float32")
    with Store(StoreOptions(run_path=tmp_path)) as store:
        store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        store.write("w", VALUES.reshape(-1)).wait()
        for operation in (lambda: store.read("w").wait(), lambda: store.write("w", VALUES.reshape(-1)), store.snapshot):
            assert "the store was opened by the process that this one was forked from" in in_child(operation)
        assert in_child(store.close) == ""
        assert np.array_equal(store.read("w").wait(), VALUES.reshape(-1))
