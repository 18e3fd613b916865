"""Caches: values of which the least recently used go first, and single values that are made again when they are old."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key, whose costs (by default 1 each) are `most` at most in sum. Usable from any thread."""

    def __init__(self, most: int, *, cost: Callable[[V], int] = lambda _: 1) -> None:
        self._most = most
        self._cost = cost
        self._sum = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """Return the value of a key, None if it is not cached."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> V:
        """Cache a value, unless it costs too much alone, and return it."""
        with self._lock:
            self.remove(key)
            self._values[key] = value
            self._sum += self._cost(value)
            while self._sum > self._most:
                self._sum -= self._cost(self._values.popitem(last=False)[1])
        return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the cached value, or cache the result of `make`; it is called with the lock held, so it must be quick."""
        with self._lock:
            found = self.get(key)
            return self.put(key, make()) if found is None else found

    def remove(self, key: K) -> None:
        """Remove a value; one that is not cached is not an error."""
        with self._lock:
            if key in self._values:
                self._sum -= self._cost(self._values.pop(key))

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._values.clear()
            self._sum = 0


_QUICK_S, _MOST_AGE_S = 0.1, 10.0
_SHARE = 0.1
"""Of the time that is spent on making a value again, if it is not older than `_MOST_AGE_S` then."""


class Renewed(Generic[V]):
    """A value that is made again when it is old. One that is quick to make is made by who asks; of another the old one is
    returned, and a thread makes it again. Usable from any thread."""

    def __init__(self, make: Callable[[], V], fresh_s: float = 0.0) -> None:
        self._make, self._fresh_s = make, fresh_s
        self._value: V | None = None
        self._took_s = 0.0
        self._old_at_s = -math.inf
        self._num_forgotten = 0
        self._lock = threading.Lock()
        self._renewing = threading.Lock()

    def get(self) -> V:
        """Return the value; raises the errors of making it."""
        value = self._value
        if value is not None and self._took_s > _QUICK_S and self._old_at_s > -math.inf:
            if self._old_at_s < time.monotonic() and self._renewing.acquire(blocking=False):
                threading.Thread(target=self._renew_behind, name="zstore-renew", daemon=True).start()
            return value
        with self._lock:
            return self._renew() if self._old_at_s < time.monotonic() or self._value is None else self._value

    @property
    def fresh(self) -> V | None:
        """The value, None if `get` would make it."""
        return self._value if self._old_at_s >= time.monotonic() else None

    def _renew_behind(self) -> None:
        try:
            with self._lock:
                self._renew()
        finally:
            self._renewing.release()

    def _renew(self) -> V:
        began_s, num_forgotten = time.monotonic(), self._num_forgotten
        self._value = value = self._make()
        now_s = time.monotonic()
        self._took_s = now_s - began_s
        if num_forgotten == self._num_forgotten:
            is_slow = self._took_s > _QUICK_S
            self._old_at_s = now_s + max(self._fresh_s, min(_MOST_AGE_S, self._took_s / _SHARE) if is_slow else 0.0)
        return value

    def forget(self) -> None:
        """Make it again at the next call, which waits for it."""
        self._num_forgotten += 1
        self._old_at_s = -math.inf
