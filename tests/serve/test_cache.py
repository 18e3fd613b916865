"""Values that are made again when they are old."""

from __future__ import annotations

import math
import threading

import pytest

from tests.waiting import until
from zstore.serve import cache
from zstore.serve.cache import Renewed


def test_of_a_slow_value_people_get_the_old_one_until_it_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_QUICK_S", -1.0)  # any value is slow,
    monkeypatch.setattr(cache, "_SHARE", math.inf)  # and old at once
    may_go_on = threading.Event()
    may_go_on.set()
    made: list[int] = []

    def make() -> int:
        may_go_on.wait()
        made.append(len(made))
        return made[-1]

    value = Renewed(make)
    assert value.get() == 0
    may_go_on.clear()
    assert [value.get() for _ in range(5)] == [0] * 5
    may_go_on.set()
    until(lambda: value.get() > 0)
    value.forget()
    newest = made[-1]
    assert value.get() > newest  # waits for one that was begun after it was forgotten
    until(lambda: not value._renewing.locked())


def test_a_quick_value_is_made_by_who_asks_once_it_is_old() -> None:
    made: list[int] = []
    fresh = Renewed(lambda: made.append(0) or len(made), fresh_s=1000.0)
    assert [fresh.get(), fresh.get()] == [1, 1]
    fresh.forget()
    assert fresh.get() == 2
    old = Renewed(lambda: made.append(0) or len(made))
    assert [old.get(), old.get()] == [3, 4]
