"""The section `elasticity`: DeepSpeed's formula, and what a config with it comes to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zstore.as_deepspeed.elasticity import (
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
    elasticity_enabled,
)
from zstore.as_deepspeed.elasticity import compute_elastic_config as as_deepspeed
from zstore.elasticity import ElasticConfig, compute_elastic_config
from zstore.engine.config.config import load_config
from zstore.engine.config.elastic_batch import elastic_batch, elastic_micro_batch, highly_composite_numbers
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError

DOCUMENTED = {
    "enabled": True, "max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
    "max_gpus": 1500, "version": 0.1,
}  # fmt: skip
"""The section of DeepSpeed's own tests, for which they expect a batch of 9792 and 23 numbers of GPUs."""


def config(**section: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3]} | section}


def sizes(raw: dict[str, Any], world_size: int) -> tuple[int, int, int]:
    batch = load_config(raw).resolve(ResolveContext(world_size=world_size)).batch
    return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps


def test_highly_composite_numbers_have_more_divisors_than_any_smaller() -> None:
    counts = [0] * 20_001
    for divisor in range(1, 20_001):
        for multiple in range(divisor, 20_001, divisor):
            counts[multiple] += 1
    expected, most = [], 0
    for number in range(1, 20_001):
        if counts[number] > most:
            expected, most = [*expected, number], counts[number]
    assert [number for number in highly_composite_numbers() if number <= 20_000] == expected
    assert highly_composite_numbers()[-1] == 720_720


def test_the_batch_and_world_sizes_are_those_that_deepspeed_documents() -> None:
    found = compute_elastic_config({"elasticity": DOCUMENTED}, 64)
    assert (found.train_batch_size, len(found.valid_world_sizes)) == (9792, 23)
    assert (found.micro_batch_size, found.accumulation_steps) == (17, 9)
    assert as_deepspeed({"elasticity": DOCUMENTED}, "0.19", world_size=64) == (9792, list(found.valid_world_sizes), 17)
    for count in found.valid_world_sizes:
        assert any(9792 % (count * micro) == 0 for micro in DOCUMENTED["micro_batch_sizes"])


@pytest.mark.parametrize("micro", [(1,), (2, 4, 6), (3, 5), (4, 6, 10)])
@pytest.mark.parametrize("most", [10, 100, 2000])
@pytest.mark.parametrize("larger", [True, False])
def test_the_batch_is_the_candidate_with_most_world_sizes(micro: tuple[int, ...], most: int, larger: bool) -> None:
    """By brute force: bases times every number within the list, the largest of each within the maximum."""
    candidates = set()
    for base in {*micro, math.lcm(*micro)}:
        fitting = [base * number for number in highly_composite_numbers() if base * number <= most]
        candidates |= {max(fitting)} if fitting else set()
    valid = {
        batch: [n for n in range(1, most + 1) if any(batch % (n * size) == 0 for size in micro)] for batch in candidates
    }
    best = max(map(len, valid.values()))
    tied = [batch for batch in candidates if len(valid[batch]) == best]
    expected = max(tied) if larger else min(tied)
    found = elastic_batch(micro, most, prefer_larger=larger)
    assert (found.train_batch_size, list(found.valid_world_sizes)) == (expected, valid[expected])


def test_a_config_takes_its_batch_sizes_from_the_world_size() -> None:
    assert [sizes(config(), world) for world in (1, 2, 3, 4, 6, 12)] == [
        (12, 3, 4), (12, 3, 2), (12, 2, 2), (12, 3, 1), (12, 2, 1), (12, 1, 1),
    ]  # fmt: skip
    smaller = config(prefer_larger_batch=False)
    assert sizes(smaller, 2)[1] == elastic_micro_batch(sizes(smaller, 2)[0], 2, [1, 2, 3], prefer_larger=False)
    assert sizes(config() | {"train_batch_size": "auto"}, 4) == (12, 3, 1)
    ignored = config(ignore_non_elastic_batch_info=True) | {"train_batch_size": 7}
    assert sizes(ignored, 4) == (12, 3, 1)
    assert load_config(ignored).report() == ["train_batch_size: no effect: elasticity gives the batch sizes"]


def test_nodes_are_counted_whole_with_version_2() -> None:
    nodes = config(num_gpus_per_node=2, version=0.2)
    assert compute_elastic_config(nodes).valid_world_sizes == (2, 4, 6, 12)
    assert compute_elastic_config(config(num_gpus_per_node=2, version=0.1)).valid_world_sizes == (1, 2, 3, 4, 6, 12)
    assert compute_elastic_config(config(min_gpus=2, max_gpus=4)).valid_world_sizes == (2, 3, 4)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (config() | {"train_batch_size": 8}, "train_batch_size: elasticity gives the batch sizes; remove the key"),
        (config(micro_batch_sizes=[20]), "elasticity: the largest micro-batch is 20, and a step may have 12 samples"),
        (config(min_gpus=5, max_gpus=5), "elasticity: no world size from 5 to 5 divides"),
        (config(model_parallel_size=2), "there is no model parallelism"),
    ],
)
def test_a_section_that_cannot_be_served_is_an_error(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(raw)
    with pytest.raises(ElasticityConfigError, match=message):
        as_deepspeed(raw)


def test_a_world_size_that_is_not_valid_is_an_error_that_names_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"world size 5 cannot train .* batch of 12; start one of 1, 2, 3, 4, 6, 12 ranks"
    ):
        sizes(config(), 5)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="world size 5"):
        as_deepspeed(config(), world_size=5)
    with pytest.raises(ConfigError, match="got none that is enabled"):
        compute_elastic_config({})
    assert elasticity_enabled(config())
    assert not elasticity_enabled({})
    assert as_deepspeed(config()) == (12, [1, 2, 3, 4, 6, 12])
    assert compute_elastic_config(config()) == ElasticConfig(train_batch_size=12, valid_world_sizes=(1, 2, 3, 4, 6, 12))


def test_autotuning_says_that_tune_acts_on_it() -> None:
    (line,) = load_config({"autotuning": {"enabled": True}}).report()
    assert "zstore tune --config FILE" in line
    assert load_config({"autotuning": {"metric": "latency"}}).report() == []
