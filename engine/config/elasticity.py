"""The section `elasticity`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .elastic_batch import ElasticBatch, elastic_batch, elastic_micro_batch
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
    world size; a world size that is not valid is an error."""
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
    """0.2 counts in nodes of num_gpus_per_node ranks; 0.1 does not read that key. Where a node has one rank they are the
    same."""
    num_gpus_per_node: Positive = built(1)
    """Ranks of a node, of which valid world sizes are multiples, with version 0.2."""
    prefer_larger_batch: Bool = built(True)
    """Of batches with as many valid world sizes take the larger, and of micro-batches that fit; false: the smaller
    batch, with version 0.2 the smaller micro-batch too."""
    ignore_non_elastic_batch_info: Bool = built(False)
    """Let batch sizes stand in the config beside this section, and do not read them. false: they are an error."""
    min_time: Count = no_effect(0, "it tells a cluster's scheduler how long to wait before it changes a job's size")
    """Minutes between changes of the world size."""
    model_parallel_size: Positive = refused(1, "there is no model parallelism; remove the key")
    """Ranks that share a model."""

    def batch(self) -> ElasticBatch:
        """Return the batch and the world sizes that are valid. Raises ValueError where there is none."""
        if self.max_train_batch_size is None or self.micro_batch_sizes is None:
            raise ValueError("max_train_batch_size and micro_batch_sizes are needed")
        return elastic_batch(
            self.micro_batch_sizes,
            self.max_train_batch_size,
            min_world_size=self.min_gpus,
            max_world_size=self.max_gpus,
            ranks_per_node=self.num_gpus_per_node if self.version == "0.2" else 1,
            prefer_larger=self.prefer_larger_batch,
        )

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return (train batch, micro-batch, accumulation steps) at a world size. Raises ValueError, which names those
        that are valid, where it is not."""
        found = self.batch()
        if world_size not in found.valid_world_sizes:
            raise ValueError(
                f"elasticity: world size {world_size} cannot train with its batch of {found.train_batch_size}; start "
                f"one of {', '.join(map(str, found.valid_world_sizes))} ranks"
            )
        larger = self.prefer_larger_batch or self.version == "0.1"
        micro = elastic_micro_batch(
            found.train_batch_size, world_size, self.micro_batch_sizes or (), prefer_larger=larger
        )
        return found.train_batch_size, micro, found.train_batch_size // (micro * world_size)
