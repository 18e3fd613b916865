"""The section `activation_checkpointing`."""

from .keys import Section, no_effect, not_built
from .values import Bool, Positive

_BLOCKS = "there is no deepspeed.checkpointing; wrap the model's blocks in torch.utils.checkpoint"
_PROFILER = "nothing is profiled; use torch.profiler"


class ActivationCheckpointingSection(Section):
    """DeepSpeed's own activation checkpointing, which a model calls; here a model uses torch's."""

    partition_activations: Bool = no_effect(False, "there is no model parallelism")
    """Share activations among model-parallel ranks."""
    cpu_checkpointing: Bool = not_built(
        False, f"{_BLOCKS}, within torch.autograd.graph.save_on_cpu() to keep them in host memory"
    )
    """Keep activations in host memory."""
    contiguous_memory_optimization: Bool = not_built(False, _BLOCKS)
    """Copy activations into one buffer."""
    number_checkpoints: Positive | None = not_built(None, _BLOCKS)
    """Checkpoints that the buffer has room for."""
    synchronize_checkpoint_boundary: Bool = not_built(False, _BLOCKS)
    """Wait for the device at each checkpoint."""
    profile: Bool = not_built(False, _PROFILER)
    """Time each checkpoint."""
