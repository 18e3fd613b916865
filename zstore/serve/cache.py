"""A bounded cache, of which the least recently used values go first."""

from __future__ import annotations

import threading
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
