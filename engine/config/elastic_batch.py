"""Batch sizes that many world sizes can train with, by DeepSpeed's formula of elasticity 0.1 and 0.2. Pure.

[Note: the elastic batch]
A step's samples stay the same whatever the world size is, so the batch must have many divisors. The bases are each
micro-batch size and the least common multiple of all. A base becomes the largest product of itself and a highly composite
number, one with more divisors than any smaller, that is within the maximum. A world size is valid for a batch if some
micro-batch size, times a whole number of accumulation steps, times the world size is the batch. Of these batches the one
with the most valid world sizes is taken, of equals the larger (or the smaller). Version 0.2 counts in nodes of several
ranks: the maximum is divided by the ranks of a node, and batch and world sizes are multiplied by them; a world size that is
not valid for this batch gets one of its own, the largest multiple within the maximum.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST = 720_720
"""The largest factor, DeepSpeed's."""


@dataclass(frozen=True, kw_only=True)
class ElasticBatch:
    """The samples of a step, and the world sizes that train with them."""

    train_batch_size: int
    valid_world_sizes: tuple[int, ...]
    """Ascending."""


@functools.cache
def highly_composite_numbers() -> tuple[int, ...]:
    """Return the numbers up to 720,720 that have more divisors than any smaller one (https://oeis.org/A002182).

    Such a number is a product of the first primes with exponents that do not grow, so only those are looked at.
    """
    most_divisors, found = 0, []
    for number, divisors in sorted(_products(_MOST, (2, 3, 5, 7, 11, 13, 17), 20)):
        if divisors > most_divisors:
            most_divisors = divisors
            found.append(number)
    return tuple(found)


def _products(limit: int, primes: Sequence[int], exponent: int) -> Iterator[tuple[int, int]]:
    """Yield (product, number of its divisors) of powers of `primes` with exponents that do not grow, up to `limit`."""
    yield 1, 1
    if not primes:
        return
    factor = 1
    for power in range(1, exponent + 1):
        factor *= primes[0]
        if factor > limit:
            return
        for product, divisors in _products(limit // factor, primes[1:], power):
            yield factor * product, (power + 1) * divisors


def elastic_batch(
    micro_batch_sizes: Sequence[int],
    max_train_batch_size: int,
    *,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    ranks_per_node: int = 1,
    prefer_larger: bool = True,
) -> ElasticBatch:
    """Return the batch that most world sizes from `min_world_size` to `max_world_size` (None: any) can train with.

    See [Note: the elastic batch]. If `ranks_per_node` is over 1, world sizes are multiples of it, and a maximum of less than
    a node is none. There may be no valid world size. Raises ValueError if a micro-batch is larger than a step may be.
    """
    most = max_train_batch_size // ranks_per_node
    if max(micro_batch_sizes) > most:
        raise ValueError(
            f"the largest micro-batch is {max(micro_batch_sizes)}, and a step may have {most} samples"
            + (f" on each of {ranks_per_node} ranks of a node" if ranks_per_node > 1 else "")
        )
    largest = most // min(micro_batch_sizes)
    most_nodes = (max_world_size or 0) // ranks_per_node or largest
    nodes = range(max(1, min_world_size // ranks_per_node), 1 + min(largest, most_nodes))
    bases = {base for base in (*micro_batch_sizes, math.lcm(*micro_batch_sizes)) if base <= most}
    candidates = {_scaled(base, most) for base in bases}
    found = [(batch, _valid(batch, micro_batch_sizes, nodes)) for batch in candidates]
    batch, valid = max(found, key=lambda one: (len(one[1]), one[0] if prefer_larger else -one[0]))
    return ElasticBatch(
        train_batch_size=batch * ranks_per_node, valid_world_sizes=tuple(count * ranks_per_node for count in valid)
    )


def batch_of_its_own(
    micro_batch_sizes: Sequence[int], max_train_batch_size: int, world_size: int, *, prefer_larger: bool = True
) -> ElasticBatch:
    """Return the batch of one world size: of the largest multiples of a micro-batch on every rank the largest, or smallest.

    Raises ValueError if it would be empty.
    """
    units = [size * world_size for size in micro_batch_sizes]
    multiples = [max_train_batch_size // unit * unit for unit in units]
    batch = max(multiples) if prefer_larger else min(multiples)
    if not batch:
        raise ValueError(
            f"{max_train_batch_size} samples are less than a micro-batch of {max(micro_batch_sizes)} on each of "
            f"{world_size} ranks"
        )
    return ElasticBatch(train_batch_size=batch, valid_world_sizes=(world_size,))


def elastic_micro_batch(train_batch_size: int, world_size: int, micro_batch_sizes: Sequence[int]) -> int:
    """Return the largest micro-batch of which every rank takes a whole number per step.

    `world_size` is valid for the batch, so that there is one.
    """
    share = train_batch_size // world_size
    return max(size for size in micro_batch_sizes if share % size == 0)


def _scaled(base: int, most: int) -> int:
    """Return the largest product of `base` and a highly composite number up to `most`."""
    numbers = highly_composite_numbers()
    return base * numbers[bisect.bisect_right(numbers, most // base) - 1]


def _valid(batch: int, micro_batch_sizes: Sequence[int], nodes: range) -> list[int]:
    shares = [batch // size for size in micro_batch_sizes if batch % size == 0]
    return [count for count in nodes if any(share % count == 0 for share in shares)]
