"""Permutations of numbers that take no memory: keyed, and the same on every machine."""

from __future__ import annotations

import hashlib

_ROUNDS = 4


class Permutation:
    """A bijection of [0, `size`) by a key: a Feistel network over the next power of four, walked until it is within."""

    def __init__(self, size: int, *key: object) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._key = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()

    def __getitem__(self, number: int) -> int:
        while True:
            number = self._once(number)
            if number < self._size:
                return number

    def _once(self, number: int) -> int:
        left, right = number >> self._half, number & ((1 << self._half) - 1)
        for turn in range(_ROUNDS):
            text = b"%d %d" % (turn, right)
            mixed = int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & ((1 << self._half) - 1))
        return left << self._half | right
