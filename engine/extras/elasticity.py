"""The section `elasticity`, and its batch by DeepSpeed's formula of elasticity 0.1 and 0.2.

[Note: the elastic batch]
The samples of a step do not depend on the world size, so the batch needs many divisors. Candidates are, for each
micro-batch size and their least common multiple, the largest product with a highly composite number within the maximum. A
world size is valid for a batch that is a product of it, a micro-batch size and a whole number of accumulation steps. The
candidate with the most valid world sizes is chosen, of equals the larger (or the smaller). Version 0.2 counts in nodes of
several ranks, and for a world size that is not valid uses the largest multiple within the maximum.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zstore.errors import ConfigError

from ..config.config import load_config, read_config
from ..config.keys import Notice, Section, Status, built
from ..config.sections import BATCH_KEYS
from ..config.values import Bool, Expects, OneOf, Positive

HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160, 25200,
    27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""The numbers with more divisors than any smaller one (https://oeis.org/A002182), up to DeepSpeed's largest factor."""

Sizes = Annotated[
    tuple[Positive, ...], Field(min_length=1), Expects("a list of one or more whole numbers of at least 1")
]


class ElasticityError(ConfigError):
    """Base of the errors of elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, not enabled, or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818 - DeepSpeed's name
    """The world size cannot train with the batch."""


class ElasticitySection(Section):
    """A batch that many world sizes can train with, so that a run may shrink and grow between restarts. See docs/launch.md."""

    switch = "enabled"
    gives_batch = True

    enabled: Bool = built(False)
    """Compute batch size and accumulation steps from this section and the world size. A world size that is not valid is an
    error with version 0.1, and gets another batch with 0.2."""
    max_train_batch_size: Positive | None = built(None)
    """Maximum samples of a step: the batch within it with the most valid world sizes is used. Required."""
    micro_batch_sizes: Sizes | None = built(None)
    """Possible samples of one forward on one rank. Required."""
    min_gpus: Positive = built(1)
    """Minimum number of ranks."""
    max_gpus: Positive = built(10_000)
    """Maximum number of ranks."""
    version: Annotated[Literal["0.1", "0.2"], OneOf(), BeforeValidator(str), Expects("0.1 or 0.2")] = built("0.2")
    """0.2 counts in nodes of num_gpus_per_node ranks; 0.1 ignores that key."""
    num_gpus_per_node: Positive = built(1)
    """Ranks of a node: valid world sizes are multiples. A max_gpus of less than a node is no limit."""
    prefer_larger_batch: Bool = built(True)
    """Among batches with equally many valid world sizes use the larger; false: the smaller."""
    ignore_non_elastic_batch_info: Bool = built(False)
    """Ignore the config's batch sizes; false: they are an error."""

    def batch(self, world_size: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Return the samples of a step, and the valid world sizes, ascending; with version 0.2, for a `world_size` that is
        not valid, the samples for it. See [Note: the elastic batch]. Raises ValueError if there is no batch,
        ElasticityIncompatibleWorldSize if there is one for other world sizes."""
        sizes, maximum = self.micro_batch_sizes, self.max_train_batch_size
        if maximum is None or sizes is None:
            raise ValueError("expected max_train_batch_size and micro_batch_sizes")
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"expected min_gpus of at most max_gpus, got {self.min_gpus} and {self.max_gpus}")
        per_node = self.num_gpus_per_node if self.version == "0.2" else 1
        most, larger = maximum // per_node, self.prefer_larger_batch
        if max(sizes) > most:
            raise ValueError(f"expected max_train_batch_size of at least {max(sizes) * per_node}, got {maximum}")
        largest = most // min(sizes)
        nodes = range(max(1, self.min_gpus // per_node), 1 + min(largest, self.max_gpus // per_node or largest))
        found = []
        for base in {base for base in (*sizes, math.lcm(*sizes)) if base <= most}:
            batch = base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, most // base) - 1]
            shares = [batch // size for size in sizes if batch % size == 0]
            valid = tuple(n * per_node for n in nodes if any(share % n == 0 for share in shares))
            found.append((batch * per_node, valid))
        batch, valid = max(found, key=lambda one: (len(one[1]), one[0] if larger else -one[0]))
        if world_size is None or world_size in valid:
            return batch, valid
        multiples = [maximum // (size * world_size) * size * world_size for size in sizes]
        if self.version == "0.2" and (own := max(multiples) if larger else min(multiples)):
            return own, (world_size,)
        listed = ", ".join(map(str, valid)) or "none"
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: world size {world_size} cannot train with a batch of {batch}; world sizes that can: {listed}"
        )

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return the sizes, with the largest micro-batch of which every rank takes a whole number."""
        batch, _ = self.batch(world_size)
        share = batch // world_size
        micro = max(size for size in self.micro_batch_sizes or () if share % size == 0)
        return batch, micro, share // micro

    def notices(self, settings: Any) -> Iterator[Notice]:
        for key in (key for key in BATCH_KEYS if getattr(settings, key) not in (None, "auto")):
            if self.ignore_non_elastic_batch_info:
                yield Notice(Status.NO_EFFECT, "elasticity gives the batch sizes", (key,))
            else:
                write = 'remove the key, or write "ignore_non_elastic_batch_info": true into the section elasticity'
                yield Notice(Status.WRONG, f"elasticity gives the batch sizes; {write}", (key,))
        missing = [name for name in ("max_train_batch_size", "micro_batch_sizes") if getattr(self, name) is None]
        for name in missing:
            yield Notice(Status.WRONG, "needed if elasticity is enabled, got none", (f"elasticity.{name}",))
        try:
            if not missing:
                self.batch()
        except ValueError as error:
            yield Notice(Status.WRONG, str(error), ("elasticity",))


def compute_elastic_config(
    ds_config: Any, target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Return (train batch, valid world sizes), with a world size or `return_microbatch` followed by the micro-batch (None
    without a world size): see [Note: the elastic batch]. Only the section of `ds_config`, a dict or the path of a JSON
    file, counts. Raises ElasticityConfigError if it is wrong or disabled, ElasticityIncompatibleWorldSize if the world
    size cannot train."""
    try:
        raw = read_config(ds_config) if isinstance(ds_config, str | os.PathLike) else ds_config
        section: Any = vars(load_config({"elasticity": raw.get("elasticity")}).settings)["elasticity"]
        if not section.enabled:
            raise ConfigError('expected "elasticity": {"enabled": true, ...}, got none that is enabled')
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    world_size = max(world_size, 0)
    batch, valid = section.batch(world_size or None)
    micro = section.sizes_at(world_size)[1] if world_size else None
    return (batch, list(valid), micro) if world_size or return_microbatch else (batch, list(valid))
