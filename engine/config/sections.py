"""The smaller sections of a config: precision, I/O, monitors, checkpoints, activations, profiles."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo

from .keys import Section, built
from .values import Auto, Bool, Count, DataType, Name, Number, Positive, Real, Whole, Words, show


def _above_0_if_dynamic(value: float, info: ValidationInfo) -> float:
    """Return `value`, which is not used if fp16 is off or the scale fixed, and then may be anything, as in DeepSpeed."""
    if value <= 0 and info.data.get("enabled") is not False and not info.data.get("loss_scale"):
        raise ValueError(f"expected a number above 0 for a dynamic loss scale, got {show(value)}")
    return value


_OF_DYNAMIC = AfterValidator(_above_0_if_dynamic)


class Fp16Section(Section):
    """fp16 parameters and gradients, fp32 masters, with a scaled loss. Not together with bf16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in fp16. "auto": if the device computes fp16 natively and bf16 is off."""
    loss_scale: Real = built(0.0)
    """Fixed factor of the loss; 0: dynamic, since no fixed one suits a whole run."""
    initial_scale_power: Annotated[Count, Field(le=127)] = built(16)
    """The dynamic scale starts at 2 to this power; too high costs a few skipped steps, too low loses small gradients."""
    loss_scale_window: Annotated[Whole, _OF_DYNAMIC, Words("a whole number of at least 1")] = built(1000)
    """Steps without overflow after which the next such step doubles the scale, as DeepSpeed counts."""
    hysteresis: Positive = built(2)
    """Overflows after which the scale halves; 2 forgives a single one."""
    consecutive_hysteresis: Bool = built(False)
    """Count only overflows in a row."""
    min_loss_scale: Annotated[Number, _OF_DYNAMIC, Words("a number above 0")] = built(1.0)
    """The dynamic scale never falls below this."""
    raise_error_at_min_scale: Bool = built(True)
    """Raise an error at an overflow with the scale at its minimum; false: skip that step too."""
    auto_cast: Bool = built(False)
    """Cast floating tensors among the arguments of engine(...) to fp16, also in lists, tuples and dicts."""


class Bf16Section(Section):
    """bf16 parameters and gradients, fp32 masters. Not together with fp16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in bf16. "auto": if the device computes bf16 natively and fp16 is not on."""
    check_grad_overflow: Bool = built(False)
    """Skip steps whose gradients are not finite; false: such a step is an error that changes nothing."""
    bf16_optimizer_states: Bool = built(False)
    """Keep the optimizer's moments in bf16: the same as `zstore.moments` "bf16"."""


class AioSection(Section):
    """How the I/O threads read and write."""

    renames: ClassVar[Mapping[str, str]] = {"intra_op_parallelism": "thread_count", "num_threads": "thread_count"}

    block_size: Annotated[Positive, Field(multiple_of=4096)] = built(4 << 20)
    """Bytes of one request; longer transfers are cut. 4 MiB reaches the drive's limit with few calls."""
    queue_depth: Positive = built(32)
    """Requests that may wait for a thread; one more blocks the caller."""
    thread_count: Positive = built(8)
    """I/O threads, and so requests in flight; each waits in the kernel, so there may be more than cores."""


class CsvMonitorSection(Section):
    """The metrics of `tensorboard` as CSV files, one for each, named after it: `step,<metric>`; a step is the samples seen.
    A later run appends to them."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Write them."""
    output_path: Name = built("")
    """Folder; a relative path is relative to the working folder at the start."""
    job_name: Name = built("DeepSpeedJobName")
    """Subfolder of that folder, by default DeepSpeed's."""


class TensorboardSection(CsvMonitorSection):
    """Metrics for TensorBoard, from rank 0, by the samples seen: loss, learning rate, loss scale in fp16, gradient
    norm, and the times of forward, backward and step."""

    enabled: Bool = built(False)
    """Write them, in an event file. Needs `pip install 'zstore[tensorboard]'`."""


class WandbSection(Section):
    """The metrics of `tensorboard` for Weights & Biases, against `Train/samples`. A run that the script started is
    used and left open. The environment variable WANDB_MODE=offline keeps them on this machine."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Send them. Needs `pip install 'zstore[wandb]'`."""
    group: Name | None = built(None)
    """Group of runs."""
    team: Name | None = built(None)
    """Team. Unset: the user's own."""
    project: Name = built("deepspeed")
    """Project, by default DeepSpeed's."""


class CheckpointWriterSection(Section):
    """How a save is carried out."""

    decoupled: Bool = built(False)
    """Save behind training: `save_checkpoint` returns once the state is pinned, as with `wait=False`. The next save, a load and
    the end of the program wait for the commit. For loops of libraries, which call `save_checkpoint` without `wait`."""


class CheckpointSection(Section):
    """How checkpoints are written."""

    writer: CheckpointWriterSection = CheckpointWriterSection()


class DataTypesSection(Section):
    """Data types of individual parts."""

    grad_accum_dtype: DataType | None = built(None)
    """Type in which gradients accumulate and wait for the update. Unset or "none": fp32 over more than one micro-batch, since
    a sum in 16 bits loses small gradients; over a single one the type in which they are reduced, which loses nothing."""
    buffer_dtype: DataType | None = built(None)
    """Type of the modules' floating buffers. Unset or "none": they keep the types that the model gave them, so that
    frequencies of rotary embeddings and running statistics stay exact beside 16-bit parameters."""


class ActivationCheckpointingSection(Section):
    """How blocks that the model computes again in the backward keep their inputs; see docs/activations.md. The model,
    `zstore.checkpointing.checkpoint` or `zstore.gradient_checkpointing` chooses these blocks."""

    cpu_checkpointing: Bool = built(False)
    """Keep activations in host memory: the same as "zstore": {"activations": "host"}, which is used if both are set."""


class ThroughputSection(Section):
    """How many samples a second pass."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Add a line of samples a second over all ranks to those of steps_per_print, the mean since the line before. Off, while
    DeepSpeed has it on: the journal has the times of all steps."""


class TimersSection(Section):
    """How time is taken."""

    throughput: ThroughputSection = ThroughputSection()
