"""The section `elasticity`: DeepSpeed's formula, and what a config with it comes to."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zstore.elasticity import ElasticityConfigError, ElasticityIncompatibleWorldSize, compute_elastic_config
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras.elasticity import HIGHLY_COMPOSITE
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
    assert [number for number in HIGHLY_COMPOSITE if number <= 20_000] == expected
    assert HIGHLY_COMPOSITE[-1] == 720_720


def test_the_batch_and_world_sizes_are_those_that_deepspeed_documents() -> None:
    batch, valid, micro = compute_elastic_config({"elasticity": DOCUMENTED}, "0.19", world_size=64)
    assert (batch, len(valid), micro) == (9792, 23, 17)
    for count in valid:
        assert any(9792 % (count * micro) == 0 for micro in DOCUMENTED["micro_batch_sizes"])


def test_a_config_takes_its_batch_sizes_from_the_world_size() -> None:
    assert [sizes(config(), world) for world in (1, 2, 3, 4, 6, 12)] == [
        (12, 3, 4), (12, 3, 2), (12, 2, 2), (12, 3, 1), (12, 2, 1), (12, 1, 1),
    ]  # fmt: skip
    assert sizes(config() | {"train_batch_size": "auto"}, 4) == (12, 3, 1)
    ignored = config(ignore_non_elastic_batch_info=True) | {"train_batch_size": 7}
    assert sizes(ignored, 4) == (12, 3, 1)
    assert load_config(ignored).report() == ["train_batch_size: no effect: elasticity determines the batch sizes"]


def test_nodes_are_counted_whole_with_version_2() -> None:
    nodes = config(num_gpus_per_node=2, version=0.2)
    assert compute_elastic_config(nodes)[1] == [2, 4, 6, 12]
    assert compute_elastic_config(config(num_gpus_per_node=2, version=0.1))[1] == [1, 2, 3, 4, 6, 12]
    assert compute_elastic_config(nodes, world_size=-1) == compute_elastic_config(nodes)
    assert compute_elastic_config(config(min_gpus=2, max_gpus=4), return_microbatch=True)[1:] == ([2, 3, 4], None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (config() | {"train_batch_size": 8}, "train_batch_size: elasticity determines the batch sizes; remove the key"),
        (config(micro_batch_sizes=[20]), "elasticity: expected max_train_batch_size of at least 20, got 12"),
        (config(min_gpus=6, max_gpus=5), "min_gpus of at most max_gpus, got 6 and 5"),
        (config(micro_batch_sizes=[]), r"(?s)^(?!.*needed).*sizes: expected a list of one or more whole numbers"),
        (config(model_parallel_size=2), "there is no model parallelism"),
    ],
)
def test_a_section_that_cannot_be_served_is_an_error(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(raw)
    if "train_batch_size" not in raw:  # DeepSpeed's function looks at the section alone.
        with pytest.raises(ElasticityConfigError, match=message):
            compute_elastic_config(raw)


def elastic_cases() -> Iterator[tuple[dict[str, Any], int]]:
    """Yield 1,500 sections by a seeded draw, of both versions, and a world size for each."""
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


def test_the_answers_are_those_of_deepspeed() -> None:
    """tests/data/elasticity.json has what DeepSpeed's elasticity.py returned for each case: the batch, how many world sizes are
    valid, their sum, and the micro-batch; null: it refused; false: it ended in a TypeError of its own. It is that of 0.19.0,
    which leaves out bases above the greatest batch as commit c5601db does, before it was removed in 0.19.8. A batch of 0 is
    refused here."""
    auto_values = json.loads((Path(__file__).parents[2] / "data/elasticity.json").read_text())
    wrong = []
    for (section, world_size), theirs in zip(elastic_cases(), auto_values, strict=True):
        ours: list[int] | None
        try:
            batch, valid, micro = compute_elastic_config({"elasticity": section}, world_size=world_size)
            ours = [batch, len(valid), sum(valid), micro]
        except ConfigError:
            ours = None
        expected = None if theirs and theirs[0] == 0 else theirs
        if theirs is not False and ours != expected:
            wrong.append((section, world_size, theirs, ours))
    assert not wrong


def test_an_invalid_world_size_has_its_own_batch_or_names_the_valid_ones(tmp_path: Path) -> None:
    assert sizes(config(), 5) == (10, 2, 1)
    assert compute_elastic_config(config() | {"train_batch_size": 8}, world_size=5) == (10, [5], 2)
    with pytest.raises(ConfigError, match="world size 13 is not valid for a batch size of 12"):
        sizes(config(), 13)
    first = config(version=0.1)
    message = r"world size 5 is not valid .* batch size of 12; valid world sizes: 1, 2, 3, 4, 6, 12"
    with pytest.raises(ConfigError, match=message):
        sizes(first, 5)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=message):
        compute_elastic_config(first, world_size=5)
    with pytest.raises(ConfigError, match="valid world sizes: none"):
        sizes(config(version=0.1, min_gpus=5, max_gpus=5), 5)
    with pytest.raises(ConfigError, match="but it is missing or disabled"):
        compute_elastic_config({})
    assert compute_elastic_config(config()) == (12, [1, 2, 3, 4, 6, 12])
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    assert compute_elastic_config(path) == (12, [1, 2, 3, 4, 6, 12])
