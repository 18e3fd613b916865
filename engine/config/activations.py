"""The section `activation_checkpointing`."""

from .keys import Section, built
from .values import Bool, Positive


class ActivationCheckpointingSection(Section):
    """How blocks that the model computes again in the backward keep their inputs; see docs/activations.md. Which blocks
    these are is said by the model, by `zstore.checkpointing.checkpoint`, or by `zstore.gradient_checkpointing`."""

    partition_activations: Bool = built(False)
    """Keep on each rank of a model-parallel group its share of a block's inputs, and all-gather them before the block is
    computed again. Acts on blocks of `zstore.checkpointing.checkpoint` once `configure` was given the group; without one
    a rank keeps its inputs whole."""
    cpu_checkpointing: Bool = built(False)
    """Keep activations in host memory: the same as "zstore": {"activations": "host"}, which is used where both are set."""
    contiguous_memory_optimization: Bool = built(False)
    """Keep the shares of `partition_activations` in one buffer of `number_checkpoints` places for each size, against
    fragmented device memory. Needs both keys."""
    number_checkpoints: Positive | None = built(None)
    """Blocks that those buffers have places for; further ones get memory of their own."""
    synchronize_checkpoint_boundary: Bool = built(False)
    """Wait for the device before and after each block of `zstore.checkpointing.checkpoint`, in both directions. Without
    a device of its own memory there is nothing to wait for."""
    profile: Bool = built(False)
    """Time the forward and the recomputation of these blocks: in `engine.statistics().activations`, with the device waited
    for, and in a line beside those of progress."""
