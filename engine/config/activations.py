"""The section `activation_checkpointing`."""

from .keys import Section, built, not_built
from .values import Bool, Positive

NOT_PARTITIONED = (
    "there is no model parallelism, so each rank keeps the inputs of its blocks whole; cpu_checkpointing takes them off the "
    "device"
)


class ActivationCheckpointingSection(Section):
    """How blocks that the model computes again in the backward keep their inputs; see docs/activations.md. The model,
    `zstore.checkpointing.checkpoint` or `zstore.gradient_checkpointing` chooses these blocks."""

    partition_activations: Bool = not_built(False, NOT_PARTITIONED)
    cpu_checkpointing: Bool = built(False)
    """Keep activations in host memory: the same as "zstore": {"activations": "host"}, which is used if both are set."""
    contiguous_memory_optimization: Bool = not_built(False, NOT_PARTITIONED)
    number_checkpoints: Positive | None = not_built(None, NOT_PARTITIONED)
    synchronize_checkpoint_boundary: Bool = built(False)
    """Wait for the device before and after each block of `zstore.checkpointing.checkpoint`, in both directions. On a CPU
    there is nothing to wait for."""
    profile: Bool = built(False)
    """Time the forward and the recomputation of these blocks: in `engine.statistics().activations`, with the device waited
    for, and in a line beside those of progress."""
