"""The section `elasticity`, and its batch size by DeepSpeed's formula for elasticity 0.1 and 0.2.

[Note: the elastic batch]
The number of samples per step does not depend on the world size, so it needs many divisors. Candidates are, for each
micro-batch size and their least common multiple, the largest product with a highly composite number within the maximum. A
world size is valid for a batch that is the product of the world size, a micro-batch size and a number of accumulation steps.
The candidate with the most valid world sizes is chosen; ties are resolved to the larger (or smaller) batch. Version 0.2
counts in nodes of several ranks, and uses the largest multiple within the maximum for a world size that is not valid.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zstore.errors import ConfigError

from ..config.config import load_config, read_config
from ..config.keys import Notice, Section, Status, option
from ..config.sections import BATCH_KEYS
from ..config.values import Bool, Expects, OneOf, Positive

HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160, 25200,
    27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""Numbers with more divisors than any smaller number (https://oeis.org/A002182), up to DeepSpeed's largest factor."""

Sizes = Annotated[
    tuple[Positive, ...], Field(min_length=1), Expects("a list of one or more whole numbers of at least 1")
]


class ElasticityError(ConfigError):
    """Base class of elasticity errors."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, disabled, or invalid."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818 - DeepSpeed's name
    """The world size is not valid for the batch."""


class ElasticitySection(Section):
    """A batch size that many world sizes divide, so that a run can shrink and grow between restarts. See docs/launch.md."""

    switch = "enabled"
    determines_batch = True

    enabled: Bool = option(False)
    """Compute batch size and accumulation steps from this section and the world size. An invalid world size
    raises an error with version 0.1, and gets a different batch size with 0.2."""
    max_train_batch_size: Positive | None = option(None)
    """Maximum samples per step: the batch size up to it that is valid at the most world sizes is used. Required."""
    micro_batch_sizes: Sizes | None = option(None)
    """Allowed samples per forward pass per rank. Required."""
    min_gpus: Positive = option(1)
    """Minimum number of ranks."""
    max_gpus: Positive = option(10_000)
    """Maximum number of ranks."""
    version: Annotated[Literal["0.1", "0.2"], OneOf(), BeforeValidator(str), Expects("0.1 or 0.2")] = option("0.2")
    """With 0.2, world sizes are multiples of num_gpus_per_node ranks; 0.1 ignores that key."""
    num_gpus_per_node: Positive = option(1)
    """Ranks per node, of which valid world sizes are multiples. A max_gpus below it sets no limit."""
    prefer_larger_batch: Bool = option(True)
    """Prefer the larger of two batch sizes with equally many valid world sizes; false: the smaller."""
    ignore_non_elastic_batch_info: Bool = option(False)
    """Ignore the config's batch sizes; false: they raise an error."""

    def batch(self, world_size: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Return the samples per step, and the valid world sizes in ascending order; with version 0.2, a `world_size` that is
        not valid gets its own number of samples. See [Note: the elastic batch]. Raises ValueError if there is no batch size,
        ElasticityIncompatibleWorldSize if there is one for other world sizes only."""
        sizes, maximum = self.micro_batch_sizes, self.max_train_batch_size
        if maximum is None or sizes is None:
            raise ValueError("expected max_train_batch_size and micro_batch_sizes")
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"expected min_gpus of at most max_gpus, got {self.min_gpus} and {self.max_gpus}")
        per_node = self.num_gpus_per_node if self.version == "0.2" else 1
        max_batch, larger = maximum // per_node, self.prefer_larger_batch
        if max(sizes) > max_batch:
            raise ValueError(f"expected max_train_batch_size of at least {max(sizes) * per_node}, got {maximum}")
        largest = max_batch // min(sizes)
        nodes = range(max(1, self.min_gpus // per_node), 1 + min(largest, self.max_gpus // per_node or largest))
        candidates = []
        for base in {base for base in (*sizes, math.lcm(*sizes)) if base <= max_batch}:
            batch = base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, max_batch // base) - 1]
            shares = [batch // size for size in sizes if batch % size == 0]
            valid = tuple(n * per_node for n in nodes if any(share % n == 0 for share in shares))
            candidates.append((batch * per_node, valid))
        batch, valid = max(candidates, key=lambda c: (len(c[1]), c[0] if larger else -c[0]))
        if world_size is None or world_size in valid:
            return batch, valid
        multiples = [maximum // (size * world_size) * size * world_size for size in sizes]
        if self.version == "0.2" and (other_batch := max(multiples) if larger else min(multiples)):
            return other_batch, (world_size,)
        listed = ", ".join(map(str, valid)) or "none"
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: world size {world_size} is not valid for a batch size of {batch}; valid world sizes: {listed}"
        )

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return the sizes, with the largest micro-batch that divides each rank's share."""
        batch, _ = self.batch(world_size)
        share = batch // world_size
        micro = max(size for size in self.micro_batch_sizes or () if share % size == 0)
        return batch, micro, share // micro

    def notices(self, settings: Any) -> Iterator[Notice]:
        for key in (key for key in BATCH_KEYS if getattr(settings, key) not in (None, "auto")):
            if self.ignore_non_elastic_batch_info:
                yield Notice(Status.NO_EFFECT, "elasticity determines the batch sizes", (key,))
            else:
                advice = 'remove the key, or set "ignore_non_elastic_batch_info": true in the section elasticity'
                yield Notice(Status.INVALID, f"elasticity determines the batch sizes; {advice}", (key,))
        missing = [name for name in ("max_train_batch_size", "micro_batch_sizes") if getattr(self, name) is None]
        for name in missing:
            yield Notice(Status.INVALID, "required if elasticity is enabled", (f"elasticity.{name}",))
        try:
            if not missing:
                self.batch()
        except ValueError as error:
            yield Notice(Status.INVALID, str(error), ("elasticity",))


def compute_elastic_config(
    ds_config: Any, target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Return (train batch, valid world sizes), followed, with a world size or `return_microbatch`, by the micro-batch (None
    without a world size): see [Note: the elastic batch]. Only the elasticity section of `ds_config`, a dict or the path of
    a JSON file, is used. Raises ElasticityConfigError if it is invalid or disabled, ElasticityIncompatibleWorldSize if the
    world size is not valid."""
    try:
        raw = read_config(ds_config) if isinstance(ds_config, str | os.PathLike) else ds_config
        section: Any = vars(load_config({"elasticity": raw.get("elasticity")}).settings)["elasticity"]
        if not section.enabled:
            raise ConfigError('expected "elasticity": {"enabled": true, ...}, but it is missing or disabled')
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    world_size = max(world_size, 0)
    batch, valid = section.batch(world_size or None)
    micro = section.sizes_at(world_size)[1] if world_size else None
    return (batch, list(valid), micro) if world_size or return_microbatch else (batch, list(valid))
