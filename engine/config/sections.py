"""The sections of a config but `zero_optimization` and `scheduler`: precision, optimizer, I/O, monitors, checkpoints."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .keys import Section, built, no_effect, not_built, refused
from .optimizer_names import advice_on
from .values import (
    Anything,
    Auto,
    BelowOne,
    Bool,
    Count,
    DataType,
    Name,
    OneOf,
    Position,
    Positive,
    Real,
    Unread,
    Words,
)

_CLIENT = "pass an optimizer that does it to initialize(optimizer=...)"
_OTHER = "it belongs to another optimizer and has no meaning for Adam; remove it"
KERNEL = "there is one update kernel, torch's fused one, on every device"
_FP32 = (
    "masters and moments are kept in fp32, which takes 12 bytes a parameter; zstore.split_master saves nearly 2 of them, and "
    "offload_optimizer takes them off the device"
)
_BLOCKS = "there is no deepspeed.checkpointing; wrap the model's blocks in torch.utils.checkpoint"
_PROFILER = "nothing is profiled; use torch.profiler"
_FLOPS = "no operations are counted; use torch.utils.flop_counter.FlopCounterMode around a step"
_COUNTED = "collectives are not logged; engine.statistics() counts the bytes and the waits of every link"
_IO = "requests are always submitted singly and overlapped, by threads"

Betas = Annotated[tuple[BelowOne, BelowOne], Words("two numbers, each from 0 to below 1")]


class Fp16Section(Section):
    """fp16 parameters and gradients, fp32 masters, with a scaled loss. Not together with bf16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in fp16. "auto": where the device computes fp16 natively and bf16 is off."""
    loss_scale: Real = built(0.0)
    """Fixed factor of the loss; 0: dynamic, since no fixed one suits a whole run."""
    initial_scale_power: Annotated[Count, Field(le=127)] = built(16)
    """The dynamic scale starts at 2 to this power; too high costs a few skipped steps, too low loses small gradients."""
    loss_scale_window: Positive = built(1000)
    """Steps without overflow after which the next such step doubles the scale, as DeepSpeed counts."""
    hysteresis: Positive = built(2)
    """Overflows after which the scale halves; 2 forgives a single one."""
    consecutive_hysteresis: Bool = built(False)
    """Count only overflows in a row."""
    min_loss_scale: Real = built(1.0)
    """The dynamic scale never falls below this."""
    raise_error_at_min_scale: Bool = built(True)
    """Raise an error at an overflow with the scale at its minimum; false: skip that step too."""
    auto_cast: Bool = built(False)
    """Cast floating tensors among the arguments of engine(...) to fp16, also in lists, tuples and dicts."""
    fp16_master_weights_and_grads: Bool = not_built(False, _FP32)
    """Keep masters in fp16."""


class Bf16Section(Section):
    """bf16 parameters and gradients, fp32 masters. Not together with fp16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in bf16. "auto": where the device computes bf16 natively and fp16 is not on."""
    immediate_grad_update: Bool = no_effect(False, "gradients are always accumulated as they arrive")
    """Accumulate a gradient as soon as it exists."""
    check_grad_overflow: Bool = built(False)
    """Skip steps whose gradients are not finite; false: such a step is an error that changes nothing."""
    bf16_master_weights_and_grads: Bool = not_built(False, _FP32)
    """Keep masters in bf16."""
    bf16_optimizer_states: Bool = not_built(False, _FP32)
    """Keep moments in bf16."""


class OptimizerParams(Section):
    """Arguments of Adam and AdamW."""

    lr: Real | Auto = built(1e-3)
    """Learning rate; the default is torch's and DeepSpeed's."""
    betas: Betas | Auto = built((0.9, 0.999))
    """Decay of the two moments, each below 1."""
    eps: Real | Auto = built(1e-8)
    """Added to the denominator."""
    weight_decay: Real | Auto | None = built(None)
    """Decay of the weights per step, times lr. Unset: 0, but 0.01 for AdamW with torch_adam, as torch has it."""
    adam_w_mode: Bool = built(True)
    """Decoupled weight decay (AdamW) for type Adam too; false: weight decay as a part of the gradient."""
    torch_adam: Bool = built(False)
    """torch's own Adam. The update is torch's in any case; this only chooses the default of weight_decay."""
    bias_correction: Bool = refused(True, f"the moments are always bias-corrected; {_CLIENT}")
    """Correct the moments for starting at zero."""
    amsgrad: Bool = refused(False, _CLIENT)
    """Use the largest second moment seen."""
    maximize: Bool = refused(False, _CLIENT)
    """Ascend."""
    max_grad_norm: Real = refused(0.0, "set gradient_clipping at the top of the config instead")
    """Clipping inside the optimizer."""
    fused: Bool = no_effect(True, KERNEL)
    """torch's choice of kernel."""
    foreach: Bool = no_effect(False, KERNEL)
    """torch's choice of kernel."""
    capturable: Bool = no_effect(False, KERNEL)
    """For CUDA graphs."""
    differentiable: Bool = refused(
        False, "no gradient passes through the engine's step; write that loop in plain torch"
    )
    """Differentiate through the step."""
    set_grad_none: Bool = no_effect(True, "the engine owns the gradients")
    """How gradients are cleared."""
    fp32_optimizer_states: Bool = not_built(True, _FP32)
    """Keep moments in fp32."""
    freeze_step: Anything = no_effect(None, _OTHER)
    """Warm-up steps of 1-bit Adam."""
    var_freeze_step: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    var_update_scaler: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    local_step_scaler: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    local_step_clipper: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    cuda_aware: Anything = no_effect(None, _OTHER)
    """MPI of 1-bit Adam."""
    comm_backend_name: Anything = no_effect(None, _OTHER)
    """Backend of 1-bit Adam."""
    max_coeff: Anything = no_effect(None, _OTHER)
    """Of LAMB."""
    min_coeff: Anything = no_effect(None, _OTHER)
    """Of LAMB."""
    momentum: Anything = no_effect(None, _OTHER)
    """Of SGD."""


class OptimizerSection(Section):
    """The optimizer. Without this section one is passed to `initialize`."""

    type: Annotated[Literal["Adam", "AdamW"], OneOf(advice_on)]
    """Adam means AdamW unless adam_w_mode is false."""
    params: OptimizerParams = OptimizerParams()
    legacy_fusion: Bool = no_effect(False, KERNEL)
    """An older fused kernel."""


class AioSection(Section):
    """How the I/O threads read and write."""

    renames: ClassVar[Mapping[str, str]] = {"intra_op_parallelism": "thread_count", "num_threads": "thread_count"}

    block_size: Annotated[Positive, Field(multiple_of=4096)] = built(4 << 20)
    """Bytes of one request; longer transfers are cut. 4 MiB reaches the drive's limit with few calls."""
    queue_depth: Positive = built(32)
    """Requests that may wait for a thread; one more blocks the caller."""
    thread_count: Positive = built(8)
    """I/O threads, and so requests in flight; each waits in the kernel, so there may be more than cores."""
    single_submit: Bool = no_effect(False, _IO)
    """Submit requests one at a time."""
    overlap_events: Bool = no_effect(True, _IO)
    """Submit before earlier requests are done."""
    use_gds: Bool = not_built(False, "offloaded state passes through host memory, where it is checked and updated")
    """Read directly into device memory."""


class CsvMonitorSection(Section):
    """The metrics of `tensorboard` as CSV files, one for each, named after it: `step,<metric>`, where a step is the
    samples seen. A later run appends to them."""

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


class FlopsProfilerSection(Section):
    """Count floating-point operations."""

    switch = "enabled"

    enabled: Bool = not_built(False, _FLOPS)
    """Profile."""
    recompute_fwd_factor: Real = not_built(0.0, _FLOPS)
    """Forward passes that are recomputed."""
    profile_step: Positive = not_built(1, _FLOPS)
    """Step that is profiled."""
    module_depth: Position = not_built(-1, _FLOPS)
    """Depth of the report."""
    top_modules: Positive = not_built(1, _FLOPS)
    """Modules in the report."""
    detailed: Bool = not_built(True, _FLOPS)
    """Report every module."""
    output_file: Name | None = not_built(None, _FLOPS)
    """File of the report."""


class CommsLoggerSection(Section):
    """Log collectives."""

    switch = "enabled"

    enabled: Bool = not_built(False, _COUNTED)
    """Log."""
    verbose: Bool = not_built(False, _COUNTED)
    """Print each collective."""
    prof_all: Bool = not_built(True, _COUNTED)
    """Log all kinds."""
    debug: Bool = not_built(False, _COUNTED)
    """Name the caller."""
    prof_ops: Unread = not_built(None, _COUNTED)
    """Kinds to log."""


class CheckpointSection(Section):
    """How checkpoints are written."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], OneOf()] = not_built(
        "Warn", "where the ranks' tags differ, rank 0's is used, with a warning"
    )
    """Compare the tags of all ranks."""
    load_universal: Bool = no_effect(False, "every checkpoint loads at any world size")
    """Load a converted checkpoint."""
    use_node_local_storage: Bool = refused(False, "a checkpoint is one folder that all ranks see; give a shared folder")
    """Save to a folder of each node's own."""
    parallel_write: Unread = no_effect(None, "all ranks write at once")
    """Let pipeline stages write."""
    checkpoint_serialization: Bool = no_effect(True, "nothing is pickled")
    """torch's zip format."""
    writer: Unread = no_effect(None, "saving does not stall training, with one writer")
    """Another writer."""


class DataTypesSection(Section):
    """Data types of individual parts."""

    grad_accum_dtype: DataType | None = built(None)
    """Type in which gradients accumulate and wait for the update. Unset or "none": fp32 over more than one micro-batch, since
    a sum in 16 bits loses small gradients; over a single one the type in which they are reduced, which loses nothing."""
    param_dtype: DataType | None = no_effect(None, "it follows from fp16 and bf16")
    """Type of the parameters."""
    buffer_dtype: DataType | None = no_effect(None, "floating buffers follow the parameters' type, others keep theirs")
    """Type of the modules' buffers."""
