"""The section `elasticity`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .elastic_batch import ElasticBatch, batch_of_its_own, elastic_batch, elastic_micro_batch
from .keys import Section, built, no_effect, refused
from .values import Bool, Count, OneOf, Positive, Words

Sizes = Annotated[tuple[Positive, ...], Words("a list of whole numbers of at least 1")]

Version = Annotated[
    Literal["0.1", "0.2"],
    OneOf(),
    BeforeValidator(lambda value: str(value) if isinstance(value, float) else value),
    Words("0.1 or 0.2"),
]


class ElasticitySection(Section):
    """A batch that many world sizes train with: a run may shrink and grow between restarts, and its steps keep their
    samples. See docs/launch.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Take train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps from this section and the
    world size. A world size that is not valid is an error with version 0.1, and gets a batch of its own with 0.2."""
    max_train_batch_size: Positive | None = built(None)
    """Most samples of a step. The batch is the largest within it, of one of these micro-batches or their least common
    multiple times a highly composite number, that has the most valid world sizes. Needed."""
    micro_batch_sizes: Sizes | None = built(None)
    """Samples that one rank may take through one forward. Needed."""
    min_gpus: Positive = built(1)
    """Fewest ranks that count as valid."""
    max_gpus: Positive = built(10_000)
    """Most ranks that count as valid."""
    version: Version = built("0.2")
    """0.2 counts in nodes of num_gpus_per_node ranks; 0.1 does not read that key. With one rank per node they are the
    same."""
    num_gpus_per_node: Positive = built(1)
    """Ranks of a node, of which valid world sizes are multiples, with version 0.2. A max_gpus of less than a node is no
    limit."""
    prefer_larger_batch: Bool = built(True)
    """Of batches with as many valid world sizes take the larger; false: the smaller. A rank takes the largest
    micro-batch that fits either way."""
    ignore_non_elastic_batch_info: Bool = built(False)
    """Ignore batch sizes in the config beside this section. false: they are an error."""
    min_time: Count = no_effect(0, "it tells a cluster's scheduler how long to wait before it changes a job's size")
    model_parallel_size: Positive = refused(1, "there is no model parallelism; remove the key")

    def batch(self, world_size: int | None = None) -> ElasticBatch:
        """Return the batch and the world sizes that are valid, with version 0.2 and a `world_size` that is not valid the
        batch of that. Raises ValueError if there is none."""
        if self.max_train_batch_size is None or self.micro_batch_sizes is None:
            raise ValueError("max_train_batch_size and micro_batch_sizes are needed")
        found = elastic_batch(
            self.micro_batch_sizes,
            self.max_train_batch_size,
            min_world_size=self.min_gpus,
            max_world_size=self.max_gpus,
            ranks_per_node=self.num_gpus_per_node if self.version == "0.2" else 1,
            prefer_larger=self.prefer_larger_batch,
        )
        if self.version == "0.1" or world_size is None or world_size in found.valid_world_sizes:
            return found
        larger = self.prefer_larger_batch
        return batch_of_its_own(self.micro_batch_sizes, self.max_train_batch_size, world_size, prefer_larger=larger)

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return (train batch, micro-batch, accumulation steps) at a world size. Raises ValueError, which names those
        that are valid, if it is not and the version is 0.1."""
        found = self.batch(world_size)
        if world_size not in found.valid_world_sizes:
            valid = (
                ", ".join(map(str, found.valid_world_sizes)) or f"none from {self.min_gpus} to {self.max_gpus} is valid"
            )
            raise ValueError(
                f"elasticity: world size {world_size} cannot train with its batch of {found.train_batch_size}; world "
                f"sizes that can: {valid}"
            )
        micro = elastic_micro_batch(found.train_batch_size, world_size, self.micro_batch_sizes or ())
        return found.train_batch_size, micro, found.train_batch_size // (micro * world_size)
