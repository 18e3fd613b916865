"""Operations of one thread that are not shared among torch's threads."""

import threading
from collections.abc import Iterator

import pytest
import torch

from zstore.engine.threads import one_thread


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
