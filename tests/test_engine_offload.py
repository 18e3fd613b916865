"""Parameters that rest in host memory or on disk: the bits of the plain loop, and no memory of the model's size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tests.test_engine_bits import Case, compare
from zstore.testing.ranks import run_ranks

# (optimizer's tier, parameters' tier, precision, accumulation, clip, bucket, threshold, step mode)
CASES = [
    ("none", "cpu", "bf16", 3, 0.0, 500_000_000, 100, "backward"),
    ("nvme", "nvme", "bf16", 1, 0.25, 500_000_000, 0, "forward"),
    ("cpu", "nvme", "fp32", 1, 0.25, 40_000, 100, "backward"),
    ("nvme", "cpu", "fp16", 3, 0.0, 500_000_000, 1000, "forward"),
    ("nvme", "nvme", "bf16", 3, 0.0, 500_000_000, 100, "backward"),
    ("nvme", "nvme", "fp32", 1, 0.0, 500_000_000, 100, "backward"),
    ("cpu", "cpu", "bf16", 3, 0.25, 40_000, 100, "forward"),
    ("none", "nvme", "fp32", 1, 0.0, 500_000_000, 0, "none"),
]


def _compare(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(str(case), found) for case in cases if (found := compare(Case(**case), rank, world_size))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_equal_the_plain_loop(world_size: int) -> None:
    cases = [
        asdict(Case(3, optimizer, *rest, parameters=parameters, overlap=overlap))
        for optimizer, parameters, *rest, overlap in CASES
    ]
    for failed in run_ranks(_compare, world_size, world_size, cases, timeout_s=120):
        assert failed == []
