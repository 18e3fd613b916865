"""Operations of one thread that are not shared among torch's threads."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zstore
from zstore.engine.device import one_thread


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_only_the_calling_thread_works_alone_and_only_within() -> None:
    inside: list[int] = []
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        with one_thread():
            inside.append(torch.get_num_threads())
            entered.set()
            left.wait(60)
        inside.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    assert torch.get_num_threads() == 2  # here
    left.set()
    thread.join(60)
    assert inside == [1, 2]


def test_nothing_changes_where_it_is_not_wanted() -> None:
    with one_thread(False):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_update_from_disk_leaves_the_threads_of_all_others(overlap: str, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
        "zstore": {"step_overlap": overlap},
        "steps_per_print": 0,
    }
    seen: list[int] = []
    engine, *_ = zstore.initialize(model=nn.Linear(256, 256), config=config)
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 256)).sum())
            engine.step()
        engine.training_state.pending.complete()
        assert engine.statistics().store.disk_write_bytes > 0
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(60)
    assert (seen, torch.get_num_threads()) == ([2], 2)
