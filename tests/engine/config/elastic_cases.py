"""Sections `elasticity` by a seeded draw, each with a world size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def elastic_cases() -> Iterator[tuple[dict[str, Any], int]]:
    """Yield 1,500 sections, of both versions, and a world size for each."""
    draw = random.Random(23)
    for _ in range(1500):
        per_node = draw.choice([1, 1, 2, 4, 8])
        fewest = draw.choice([1, 1, 2, 7, 32])
        section = {
            "enabled": True,
            "version": draw.choice([0.1, 0.2]),
            "micro_batch_sizes": draw.choices(range(1, 25), k=draw.randrange(1, 5)),
            "max_train_batch_size": draw.choice([24, 100, 777, 2000, 10_000]),
            "min_gpus": fewest,
            "max_gpus": fewest * draw.choice([1, 3, 8, 100]),
            "num_gpus_per_node": per_node,
            "prefer_larger_batch": draw.random() < 0.5,
        }
        yield section, draw.choice([1, 2, 3, 4, 6, 7, 8, 16, 24, 32, 64, 100])
