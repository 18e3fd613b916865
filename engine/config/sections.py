"""The schema of a config: the DeepSpeed JSON dialect, and zstore's own settings under `zstore`.

Each key is followed by its effect, unit and limits, and the reason for its default, from which `docs/config.md` is
generated. Inactive keys are in `keys.INACTIVE`. Sizes are in elements, as in DeepSpeed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from .keys import Notice, Section, Status, option
from .optimizers import OptimizerSection, SchedulerSection
from .values import (
    Auto,
    Bool,
    Count,
    DataType,
    Drives,
    Expects,
    Folder,
    Fraction,
    Int,
    Name,
    Names,
    Number,
    OneOf,
    Options,
    Positive,
    Real,
    Rules,
    show,
)

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Fp16Section(Section):
    """fp16 parameters and gradients, fp32 master weights, and a scaled loss. Cannot be combined with bf16."""

    switch = "enabled"

    enabled: Bool | Auto = option(False)
    """Train in fp16. "auto": if the device computes fp16 natively and bf16 is off."""
    loss_scale: Real = option(0.0)
    """Fixed loss scale; 0: dynamic, since no fixed scale is right for a whole run."""
    initial_scale_power: Annotated[Count, Field(le=127)] = option(16)
    """The dynamic scale starts at 2 to this power. If it is too high, a few steps are skipped; if too low, small
    gradients are lost."""
    loss_scale_window: Annotated[Int, Expects("a whole number of at least 1")] = option(1000)
    """Number of steps without overflow after which the next such step doubles the scale, as in DeepSpeed."""
    hysteresis: Positive = option(2)
    """Number of overflows after which the scale is halved; 2 tolerates a single one."""
    consecutive_hysteresis: Bool = option(False)
    """Count only consecutive overflows."""
    min_loss_scale: Annotated[Number, Expects("a number above 0")] = option(1.0)
    """The dynamic scale never falls below this."""
    raise_error_at_min_scale: Bool = option(True)
    """Raise an error if gradients overflow with the scale at its minimum; false: skip that step too."""
    auto_cast: Bool = option(False)
    """Cast floating-point tensors in the arguments of engine(...) to fp16, including those in lists, tuples and dicts."""

    def notices(self, settings: Any) -> Iterator[Notice]:
        for name in () if self.loss_scale else ("loss_scale_window", "min_loss_scale"):
            if (value := getattr(self, name)) <= 0:
                text = f"expected a number above 0 for a dynamic loss scale, got {show(value)}"
                yield Notice(Status.INVALID, text, (f"fp16.{name}",))


class Bf16Section(Section):
    """bf16 parameters and gradients, and fp32 master weights. Cannot be combined with fp16."""

    switch = "enabled"

    enabled: Bool | Auto = option(False)
    """Train in bf16. "auto": if the device computes bf16 natively and fp16 is not on."""
    check_grad_overflow: Bool = option(False)
    """Skip steps whose gradients are not finite; false: such a step raises an error and changes nothing."""
    bf16_optimizer_states: Bool = option(False)
    """Store the optimizer's moments in bf16: the same as `zstore.moments` "bf16"."""


class AioSection(Section):
    """How the I/O threads read and write."""

    renames: ClassVar[Mapping[str, str]] = {"intra_op_parallelism": "thread_count", "num_threads": "thread_count"}

    block_size: Annotated[Positive, Field(multiple_of=4096)] = option(4 << 20)
    """Bytes per request; longer transfers are split. 4 MiB reaches the drive's limit with few calls."""
    queue_depth: Positive = option(32)
    """Requests that may wait for a thread; further requests block the caller."""
    thread_count: Positive = option(8)
    """I/O threads, and thus requests in flight. They wait in the kernel, so there may be more threads than cores."""


class CsvMonitorSection(Section):
    """The metrics of `tensorboard` as CSV files, one per metric: `step,<metric>`, where the step is the number of samples
    seen. Later runs append."""

    switch = "enabled"

    enabled: Bool = option(False)
    """Write the CSV files."""
    output_path: Name = option("")
    """Folder; a relative path is relative to the working directory at startup."""
    job_name: Name = option("DeepSpeedJobName")
    """Subfolder of that folder; the default is DeepSpeed's."""


class TensorboardSection(CsvMonitorSection):
    """Metrics for TensorBoard, from rank 0, by samples seen: loss, learning rate, loss scale in fp16, gradient norm, and
    times of forward pass, backward pass and step."""

    enabled: Bool = option(False)
    """Write an event file. Needs `pip install 'zstore[tensorboard]'`."""


class WandbSection(Section):
    """The metrics of `tensorboard` for Weights & Biases, by `Train/samples`. If the script started a run, it is used and
    left open. WANDB_MODE=offline in the environment stores the metrics locally."""

    switch = "enabled"

    enabled: Bool = option(False)
    """Send the metrics. Needs `pip install 'zstore[wandb]'`."""
    group: Name | None = option(None)
    """Group of runs."""
    team: Name | None = option(None)
    """Team. Unset: the user's own."""
    project: Name = option("deepspeed")
    """Project; the default is DeepSpeed's."""


class CheckpointWriterSection(Section):
    """Whether saves run in the background."""

    decoupled: Bool = option(False)
    """Save in the background, as with `save_checkpoint(wait=False)`, for libraries that call it without `wait`. The next
    save, a load and the end of the program wait for the commit."""


class CheckpointSection(Section):
    """How checkpoints are written."""

    writer: CheckpointWriterSection = CheckpointWriterSection()


class DataTypesSection(Section):
    """Data types of individual parts."""

    grad_accum_dtype: DataType | None = option(None)
    """Type in which gradients are accumulated and stored until the update. Unset or "none": fp32 with several
    micro-batches, since 16-bit sums lose small gradients; with one, the type in which they are reduced."""
    buffer_dtype: DataType | None = option(None)
    """Type of the modules' floating-point buffers. Unset or "none": unchanged, so that frequencies of rotary embeddings
    and running statistics stay exact with 16-bit parameters."""


class ActivationCheckpointingSection(Section):
    """How the inputs of checkpointed blocks are stored until the backward pass; see docs/activations.md. The blocks are
    selected by the model, `zstore.checkpointing.checkpoint` or `zstore.gradient_checkpointing`."""

    cpu_checkpointing: Bool = option(False)
    """Keep activations in host memory: the same as `zstore.activations` "host", which takes precedence if both are set."""


class ThroughputSection(Section):
    """Throughput reports."""

    switch = "enabled"

    enabled: Bool = option(False)
    """Every steps_per_print steps, log the mean samples per second across all ranks since the previous line. Off by
    default, unlike in DeepSpeed, since the journal has the times of all steps."""


class TimersSection(Section):
    """Timers."""

    throughput: ThroughputSection = ThroughputSection()


Stage = Annotated[Literal[0, 1, 2, 3], OneOf()]
Device = Annotated[Literal["none", "cpu", "nvme"], OneOf()]


class OffloadSection(Section):
    """Where state is stored."""

    switch = "device"

    device: Device
    """Tier: "none" (the device), "cpu" (host memory) or "nvme" (files in `nvme_path`)."""
    nvme_path: Drives | None = option(None)
    """Folder on the drive for the files, created if missing; needed with "nvme". A list spreads them over several drives.
    Optimizer state and parameters may share it; two runs cannot, since each locks its folders."""
    pin_memory: Bool = option(False)
    """Register parameters in host memory with CUDA, so that copies overlap with computation; transfer buffers always are.
    If that fails, memory stays pageable, with one warning. Setting it in offload_optimizer or offload_param is enough."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """Folders of the drives, absolute; at least one with "nvme", else none."""
        return self.nvme_path or () if self.device == "nvme" else ()


class OffloadOptimizerSection(OffloadSection):
    """Where the optimizer state (fp32 master weights and the optimizer's tensors) is stored and updated, at stages 1 to
    3."""

    buffer_count: Positive = option(8)
    """Number of buffers of `buffer_size` for state in transit, shared by all arrays of an update. They take at most half
    of the host budget, by default an eighth or 64 MiB. Too few buffers lead to small requests, never to an error."""
    buffer_size: Positive = option(4 * 1024 * 1024)
    """Elements of one buffer, 4 bytes each; not in DeepSpeed. Disk requests are no larger than a buffer, or than
    aio.block_size."""
    ratio: Fraction | Annotated[Auto, Expects('"auto"')] = option(1.0)
    """Share of the optimizer state that is updated off the device, in whole parameters; 0.3 keeps 70 % on it. "auto":
    the GPU keeps as much as fits next to a micro-batch of the model's longest sequences. Results depend on the share,
    since CPU and GPU round differently; the log and the checkpoint record it."""


class OffloadParamSection(OffloadSection):
    """Where parameters are stored between uses, at stage 3; at lower stages they stay on the device."""

    buffer_count: Positive = option(5)
    """Number of buffers for parameters in transit from host memory or disk; larger parameters are split."""
    buffer_size: Positive = option(100_000_000)
    """Elements of one buffer, which is never larger than a disk request (aio.block_size)."""
    max_in_cpu: Count | None = option(None)
    """Elements of parameters kept in host memory with "nvme", in whole parameters. Unset: as many as fit in the host
    budget, none without a budget; DeepSpeed's default is 1e9."""


class LeafModuleSection(Section):
    """Modules that stage 3 always gathers with all their submodules, so that ranks may call different submodules, as in
    mixture-of-experts models. Blocks of an outermost ModuleList are gathered the same way if they fit in
    `stage3_max_live_parameters`."""

    classes: Names = option(
        tuple(
            f"transformers.models.{name}.modeling_{name}.{kind}SparseMoeBlock"
            for name, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
        ),
        stages=(3,),
    )
    """Classes of such modules, by class name or qualified name; the default is DeepSpeed's."""
    names: Names = option((), stages=(3,))
    """Names of such modules in `model.named_modules()`."""
    name_suffixes: Names = option((), stages=(3,))
    """Suffixes of the names of such modules."""


class ZeroSection(Section):
    """What is sharded across ranks, where it is stored, and the sizes of collectives. A bare `true` means stage 1."""

    renames: ClassVar[Mapping[str, str]] = {
        name: f"stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
        )
    } | {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}

    stage: Stage = option(0)
    """0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too."""
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection(device="none")
    offload_param: OffloadParamSection = OffloadParamSection(device="none")
    reduce_bucket_size: Positive | Auto = option(500_000_000)
    """Gradient elements reduced in one collective: larger values are faster and need more memory. At most 4 Mi on gloo,
    which is no faster beyond that. "auto": hidden size squared."""
    allgather_bucket_size: Positive | Auto = option(500_000_000, stages=(1, 2, 3))
    """Parameter elements gathered in one collective: after the update (stages 1 and 2; at most 4 Mi on gloo), or before a
    unit is used (stage 3). "auto": hidden size squared."""
    stage3_param_persistence_threshold: Count | Auto = option(100_000, stages=(3,))
    """Parameters with fewer elements stay gathered (stage 3): they take little memory, and gathering them would take many
    small collectives. "auto": 10 times the hidden size."""
    stage3_model_persistence_threshold: Count | None = option(None, stages=(3,))
    """Maximum number of parameter elements that stay gathered, in model order. Unset: no limit."""
    stage3_prefetch_bucket_size: Count | Auto = option(50_000_000, stages=(3,))
    """Elements prefetched ahead of use, but at least the next unit (a transformer block). 0: each unit is gathered on
    demand. "auto": 0.9 times the hidden size squared."""
    stage3_max_live_parameters: Count = option(1_000_000_000, stages=(3,))
    """Maximum number of parameter elements gathered at a time, including prefetched ones. A larger block is gathered in
    parts; a single module's parameters are always gathered together."""
    stage3_max_reuse_distance: Count | None = option(None, stages=(3,))
    """Do not release a unit that is reused within this many elements of other units. Unset: 0, which retains only units
    used twice in a row and costs no memory; DeepSpeed's default of 1e9 would retain 2 GB of a 16-bit model."""
    stage3_gather_16bit_weights_on_model_save: Bool = option(False)
    """Write the weights in the model's dtype into every checkpoint's folder, in the background, as safetensors for
    `from_pretrained`. Works at every stage."""
    reduce_scatter: Bool = option(True, stages=(1, 2))
    """Reduce-scatter gradients; false: all-reduce them, which sends twice as much and is bit-identical (stages 1, 2;
    stage 3 always reduce-scatters, as in DeepSpeed)."""
    overlap_comm: Bool = option(True)
    """Reduce gradients and gather units while the model computes; false: wait for each immediately, except for stage 3's
    reductions, whose timing differs between ranks. On by default, since it costs only one bucket of memory."""
    ignore_unused_parameters: Bool = option(True)
    """Leave a parameter unchanged if no rank has a gradient for it in a step; false: raise an error that names such
    parameters."""
    zero_hpz_partition_size: Count = option(1)
    """Size of the groups of consecutive ranks that shard a second copy of the parameters (ZeRO++ hpZ, stage 3). The first
    gather of a step is over all ranks, later ones within the group. Results are bit-identical; the copy takes as much
    device memory as the parameters divided by this number. 0 and 1: no copy."""
    zero_quantized_weights: Bool = option(False, stages=(3,))
    """Gather parameters as 8-bit integers (ZeRO++ qwZ; stage 3): one byte per element plus 4 bytes per 256 elements, about
    half of bf16. A rank's own rows, master weights and checkpoints stay exact. Biases, norms, parameters below the persistence
    threshold and the copy of `zero_hpz_partition_size` are sent in their own type. Off by default: it changes results."""
    zero_quantized_gradients: Bool = option(False, stages=(2, 3))
    """Reduce gradients of matrices as 4-bit integers (ZeRO++ qgZ; stages 2 and 3; 8-bit with
    `zstore.quantized_gradient_bits`): an all-to-all and a mean in fp32, first within a machine or a group of
    `zero_hpz_partition_size` ranks, then between them. Off by default: it changes the gradients."""
    leaf_module: LeafModuleSection = LeafModuleSection()

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Read `true` as stage 1, and the older `cpu_offload` and `cpu_offload_param` as their sections."""
        if isinstance(data, bool):
            return {"stage": int(data)}
        if not isinstance(data, Mapping):
            return data
        data_copy: dict[Any, Any] = dict(data)
        pin_memory = data_copy.get("cpu_offload_use_pin_memory")
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if data_copy.pop(old, None) and data_copy.get(new) is None:
                data_copy[new] = {"device": "cpu", "pin_memory": pin_memory}
                data_copy.pop("cpu_offload_use_pin_memory", None)
        return data_copy


class ZstoreSection(Section):
    """Settings specific to zstore."""

    host_budget_bytes: Positive | Annotated[Auto, Expects('"auto"')] | None = option(None)
    """Bytes of host memory per machine, divided among its local ranks, for all that zstore stores there; with nvme, the
    excess is on disk. "auto": 60 % of the available memory. Unset: no limit, and with nvme as little as possible:
    buffers, shards under 64 KiB, and gradients that wait for the update (2 bytes per parameter in 16-bit precision, 4
    with several micro-batches)."""
    verify_reads: Bool = option(True)
    """Verify the crc32c of every chunk read from disk, which takes less than a tenth of a core per GB/s."""
    keep: Rules | None = option(None)
    """Checkpoints of this run to retain when a new one is saved: the number of newest ones, or an object of rules, any of
    which retains a checkpoint. "last": number of newest ones (1). "every": steps divisible by this number. "best": the
    best by a metric such as "loss:min", from `save_checkpoint(metrics=...)` or the client's state. "tags": list of names
    or patterns. Unset: all."""
    storage_options: Options | None = option(None)
    """Options of the fsspec file system for saving to and loading from URLs. Unset: read from the environment, which is
    the place for credentials. See docs/remote.md."""
    upload_folder: Folder | None = option(None)
    """Folder in which each rank stages files for a URL until they are uploaded in the background. Unset: next to the first
    nvme_path, so that state on disk is linked instead of copied, or else in the user's cache folder."""
    journal: Annotated[Literal["auto", False], Expects('"auto" or false')] | Folder = option("auto")
    """Where rank 0 writes the run's journal, with a line of JSON per step, save and load. "auto": next to the checkpoints,
    as `journal-<run id>.jsonl`. A path: in that folder. false: no journal. See docs/metrics.md."""
    silent_rank_s: Real = option(45.0)
    """Seconds without a heartbeat after which a rank is considered dead and all ranks stop, for a rank that hangs or whose
    machine is lost. A killed rank is detected at once; a slow rank still sends heartbeats. 0: only the timeout of
    torch.distributed applies."""
    step_overlap: Annotated[Literal["none", "backward", "forward", "auto"], OneOf()] = option("auto")
    """When the update runs; all modes are bit-identical. "none": in step(). "forward": after it, each unit before the next
    forward pass needs it. "backward": each unit as its gradients arrive, and others as with "forward"; a step with
    non-finite gradients cannot be undone, and with clipping or loss scaling it is treated as "forward". "auto": "backward" if
    state or parameters are offloaded, and so "forward" with clipping; else "none". Parameters that are not gathered before
    use (stages 0 to 2; a single rank without offload_param; persistent parameters) are updated in step() at the latest. With
    several ranks at stages 0 and 1, "backward" is treated as "none"."""
    host_kernel: Annotated[Literal["auto", "torch"], OneOf()] = option("auto")
    """Kernel that updates Adam and AdamW state in host memory and on disk; both are bit-identical. "auto": a single-pass C
    kernel if one was built with zstore or by `cc`, on x86 with AVX2 and FMA. "torch": torch's fused kernel, with casts."""
    non_finite_gradients: Annotated[Literal["error", "skip", "apply"], OneOf()] = option("error")
    """What to do in a step with non-finite gradients, in fp32 or bf16. "error": raise NonFiniteError on every rank and
    change nothing. "skip": change nothing and continue. "apply": apply them, as in a plain loop; with clipping every
    weight becomes NaN. In fp16, and with bf16.check_grad_overflow, such steps are skipped."""
    quantized_gradient_bits: Annotated[Literal[4, 8], OneOf()] = option(4)
    """Bits per gradient element that `zero_optimization.zero_quantized_gradients` sends: 4, as in DeepSpeed, or 8, which
    sends twice as much and is about 18 times as precise."""
    moments: Annotated[Literal["fp32", "bf16"], OneOf()] | None = option(None)
    """Type of the optimizer's averages of gradients and squared gradients (exp_avg and exp_avg_sq), on every tier and in
    checkpoints. "bf16": 2 bytes per element each; the update computes in fp32 and rounds stochastically, identically on
    every tier, at every world size and after a resume. Unset: "fp32", bit-identical to a plain loop, or "bf16" if set
    by bf16.bf16_optimizer_states or fp32_optimizer_states of the optimizer's params."""
    activations: Annotated[Literal["device", "host", "disk"], OneOf()] | None = option(None)
    """Where tensors that autograd saves for the backward pass are stored: the inputs of checkpointed blocks, and all
    saved tensors of other blocks. "host", "disk": written in the background and prefetched for the backward pass,
    bit-identically. Unset: on the device, unless activation_checkpointing.cpu_checkpointing is set. See docs/activations.md."""
    activations_path: Drives | None = option(None)
    """Folder for "activations": "disk", or a list with one per drive. Unset: the nvme_path of offload_optimizer, else
    that of offload_param."""
    gradient_checkpointing: Bool = option(False)
    """Save only the inputs of the model's blocks, and recompute the blocks in the backward pass: bit-identical, for a
    third more computation. Blocks are those of transformers' `gradient_checkpointing_enable()`, otherwise the modules in the
    outermost ModuleLists."""


class ConfigSections(Section):
    """The whole config."""

    renames: ClassVar[Mapping[str, str]] = {
        "bfloat16": "bf16",
        "seq_parallel_communication_data_type": "seq_parallel_comm_data_type",
    }

    train_batch_size: Positive | Auto | None = option(None)
    """Samples per step over all ranks: train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size. Any two
    of these determine the third. "auto" in any of them: the caller's value."""
    train_micro_batch_size_per_gpu: Positive | Auto | None = option(None)
    """Samples per rank in one forward and backward pass."""
    gradient_accumulation_steps: Positive | Auto | None = option(None)
    """Micro-batches per step; 1 if it cannot be derived."""
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Bf16Section()
    gradient_clipping: Real | Auto = option(1.0)
    """Maximum global norm of the gradients, which are scaled down to it. 0: no clipping. The default is that of DeepSpeed
    since 0.19, but 0 for optimizers that cannot clip."""
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    zstore: ZstoreSection = Field(default_factory=ZstoreSection)  # created when all extras have added their keys
    seed: Count = option(1234)
    """Seed for the order of training_data, and for random numbers after a resume at a different world size; the default is
    fixed, so that runs without the key agree. Initial values and dropout depend on the script's torch.manual_seed."""
    steps_per_print: Count = option(10)
    """Steps between progress lines, which the logger "zstore" writes at INFO, by default to stderr; 0: none."""
    wall_clock_breakdown: Bool = option(False)
    """Add a line with the mean times of forward pass, backward pass and step. On CUDA the host then waits for the device
    before and after each."""
    memory_breakdown: Bool = option(False)
    """Add a line with rank 0's bytes by tier and its peaks."""
    dump_state: Bool = option(False)
    """Print the active keys with their values, and the memory in use, once at startup on rank 0."""
    tensorboard: TensorboardSection = TensorboardSection()
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    wandb: WandbSection = WandbSection()
    dataloader_drop_last: Bool = option(False)
    """Drop the last batch of an epoch if it is short."""
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], OneOf()] | None = option(None)
    """Level of the logger `zstore` on every rank. Unset: as the script configured it, else "info"."""
    disable_python_gc: Bool = option(False)
    """Disable Python's garbage collector until the engine is closed, since a collection on one rank stalls all ranks."""
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: DataType | None = option(None)
    """Type in which gradients are sent to other ranks; on gloo they are averaged in fp32 and rounded to it once. Unset or
    "none": the parameters' type."""
    timers: TimersSection = TimersSection()

    def enabled_sections(self) -> Iterator[tuple[str, Section]]:
        """Yield (key, section) for each top-level section that is on."""
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Section) and not section.is_off:
                yield name, section

    @property
    def batch_section(self) -> str | None:
        """The key of the section that determines the batch sizes; None if their own keys do."""
        return next((name for name, section in self.enabled_sections() if section.determines_batch), None)

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Read an infinite steps_per_print, as Accelerate writes it, as 0."""
        if isinstance(data, Mapping) and data.get("steps_per_print") == float("inf"):
            data_copy: dict[Any, Any] = dict(data)
            return data_copy | {"steps_per_print": 0}
        return data


def add_section(name: str, section: type[Section]) -> None:
    """Add the section of an extra to the schema; a section without a switch is on if it is present."""
    kind: Any = section if section.switch is not None else section | None
    ConfigSections.model_fields[name] = FieldInfo(annotation=kind, default=section() if kind is section else None)
