"""The watch of one rank, whose other rank is played by the test: reports that meet."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as torch_dist

from tests.waiting import until
from zstore.errors import RankError
from zstore.ranks.incident import Activity, RankReport
from zstore.ranks.watch import Watch

ERROR = RankReport(at="forward", entered=0, cause="ValueError: x", details="a traceback")


class Store(torch_dist.Store):
    """A store of this process, which lets something happen before a key is read."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.before: dict[str, Callable[[], None]] = {}
        """By the key's end; each happens once."""
        self.num_readers: int | None = None
        """It goes once so many have read the outcome, with the process of rank 0."""
        self.gone = False

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def add(self, key: str, amount: int) -> int:
        if self.gone:
            raise torch_dist.DistNetworkError("the store is gone")
        count = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(count).encode()
        self.gone = "/read/" in key and count == self.num_readers
        return count

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        for end in [end for end in self.before if key.endswith(end)]:
            self.before.pop(end)()
        return self.values[key]

    def report(self, incident: int, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, if there is one."""
        found = self.values.get(f"zstore/watch/1/report/{incident}/{rank}")
        return None if found is None else json.loads(found)

    def answer(self, incident: int, report: RankReport) -> None:
        """Report as rank 1."""
        self.set(f"zstore/watch/1/report/{incident}/1", json.dumps(asdict(report)))
        self.set(f"zstore/watch/1/read/{incident}", "1")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def watch(store: Store) -> Iterator[Watch]:
    watch = Watch(0, 2, activity=Activity(), store=store, cut=lambda: None, silent_s=None)
    yield watch
    watch.close()


def waits(call: Callable[[], object]) -> threading.Thread:
    """Call it in a thread of its own; return that once it waits for the answer."""
    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: (frame := sys._current_frames().get(thread.ident or 0)) is None or frame.f_code.co_name == "wait")
    return thread


def test_an_error_stays_known_when_a_collective_fails_because_of_it(watch: Watch, store: Store) -> None:
    one = waits(lambda: watch.escaped(ValueError("x")))
    until(lambda: store.report(0, 0) is not None)
    two = waits(lambda: watch.lost(RuntimeError("closed by peer")))
    store.values.pop("zstore/watch/1/alarm/0")
    until(lambda: "zstore/watch/1/alarm/0" in store.values)  # it has reported again
    store.answer(0, RankReport(at="backward", entered=1))
    one.join()
    two.join()
    found = store.report(0, 0)
    assert found is not None
    assert (found["cause"], found["lost"]) == ("ValueError: x", "RuntimeError: closed by peer")


def test_a_report_that_comes_as_another_is_answered_is_told_to_all(watch: Watch, store: Store) -> None:
    errors: list[RankError] = []
    two: list[threading.Thread] = []

    def fails() -> None:
        errors.append(watch.lost(RuntimeError("closed by peer")))

    def one_is_answered() -> None:
        store.before["report/0/1"] = lambda: two.append(waits(fails))
        store.answer(0, ERROR)

    one = waits(lambda: watch.escaped(ValueError("x")))
    one_is_answered()
    until(lambda: bool(two))
    until(lambda: store.report(1, 0) is not None or not two[0].is_alive())
    store.answer(1, ERROR)
    one.join()
    two[0].join()
    found = store.report(1, 0)
    assert found is not None
    assert found["lost"] == "RuntimeError: closed by peer"
    assert "rank 1 in forward: ValueError: x" in str(errors[0])


def test_the_last_to_read_the_outcome_asks_nothing_more_of_a_store_that_goes_with_rank_0(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zstore.ranks.watch._in_rank_0", lambda store: True)
    watch = Watch(1, 2, activity=Activity(), store=store, cut=lambda: None, silent_s=None)
    store.num_readers = 2
    store.set("zstore/watch/1/report/0/0", json.dumps(asdict(replace(ERROR, final=True))))
    store.add("zstore/watch/1/read/0", 1)
    with pytest.raises(RankError, match="rank 0 in forward: ValueError: x"):
        raise watch.lost(RuntimeError("closed by peer"))
    watch.close()
