"""The schema of a config: the DeepSpeed JSON dialect, and our own settings under `zstore`.

Each key is followed by its effect, unit and limits, and the reason for its default, from which `docs/config.md` is made. Keys
that do not act are in `keys.INACTIVE`. Sizes are in elements, as in DeepSpeed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from .keys import Notice, Section, Status, built
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
    Name,
    Names,
    Number,
    OneOf,
    Options,
    Positive,
    Real,
    Rules,
    Whole,
    show,
)

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Fp16Section(Section):
    """fp16 parameters and gradients, fp32 masters, with a scaled loss. Not together with bf16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in fp16. "auto": if the device computes fp16 natively and bf16 is off."""
    loss_scale: Real = built(0.0)
    """Fixed factor of the loss; 0: dynamic, since no fixed one suits a whole run."""
    initial_scale_power: Annotated[Count, Field(le=127)] = built(16)
    """The dynamic scale starts at 2 to this power; if it is too high, a few steps are skipped, if too low, small
    gradients are lost."""
    loss_scale_window: Annotated[Whole, Expects("a whole number of at least 1")] = built(1000)
    """Steps without overflow after which the next such step doubles the scale, as DeepSpeed counts."""
    hysteresis: Positive = built(2)
    """Overflows after which the scale halves; 2 forgives a single one."""
    consecutive_hysteresis: Bool = built(False)
    """Count only overflows in a row."""
    min_loss_scale: Annotated[Number, Expects("a number above 0")] = built(1.0)
    """The dynamic scale never falls below this."""
    raise_error_at_min_scale: Bool = built(True)
    """Raise an error at an overflow with the scale at its minimum; false: skip that step too."""
    auto_cast: Bool = built(False)
    """Cast floating tensors among the arguments of engine(...) to fp16, also in lists, tuples and dicts."""

    def notices(self, settings: Any) -> Iterator[Notice]:
        for name in () if self.loss_scale else ("loss_scale_window", "min_loss_scale"):
            if (value := getattr(self, name)) <= 0:
                text = f"expected a number above 0 for a dynamic loss scale, got {show(value)}"
                yield Notice(Status.WRONG, text, (f"fp16.{name}",))


class Bf16Section(Section):
    """bf16 parameters and gradients, fp32 masters. Not together with fp16."""

    switch = "enabled"

    enabled: Bool | Auto = built(False)
    """Train in bf16. "auto": if the device computes bf16 natively and fp16 is not on."""
    check_grad_overflow: Bool = built(False)
    """Skip steps whose gradients are not finite; false: such a step is an error that changes nothing."""
    bf16_optimizer_states: Bool = built(False)
    """Store the optimizer's moments in bf16: the same as `zstore.moments` "bf16"."""


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
    """The metrics of `tensorboard` as CSV files, one per metric: `step,<metric>`, where the step is the number of samples
    seen. Later runs append."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Write the CSV files."""
    output_path: Name = built("")
    """Folder; a relative path is relative to the working folder at the start."""
    job_name: Name = built("DeepSpeedJobName")
    """Subfolder of that folder, by default DeepSpeed's."""


class TensorboardSection(CsvMonitorSection):
    """Metrics for TensorBoard, from rank 0, by the samples seen: loss, learning rate, loss scale in fp16, gradient norm,
    times of forward, backward and step."""

    enabled: Bool = built(False)
    """Write an event file. Needs `pip install 'zstore[tensorboard]'`."""


class WandbSection(Section):
    """The metrics of `tensorboard` for Weights & Biases, by `Train/samples`. A run that the script started is used and
    left open. WANDB_MODE=offline in the environment stores the metrics locally."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Send the metrics. Needs `pip install 'zstore[wandb]'`."""
    group: Name | None = built(None)
    """Group of runs."""
    team: Name | None = built(None)
    """Team. Unset: the user's own."""
    project: Name = built("deepspeed")
    """Project, by default DeepSpeed's."""


class CheckpointWriterSection(Section):
    """Whether saves run in the background."""

    decoupled: Bool = built(False)
    """Save in the background, as with `save_checkpoint(wait=False)`, for libraries that call it without `wait`. The next
    save, a load and the end of the program wait for the commit."""


class CheckpointSection(Section):
    """How checkpoints are written."""

    writer: CheckpointWriterSection = CheckpointWriterSection()


class DataTypesSection(Section):
    """Data types of individual parts."""

    grad_accum_dtype: DataType | None = built(None)
    """Type in which gradients accumulate and wait for the update. Unset or "none": fp32 over several micro-batches, since
    sums in 16 bits lose small gradients; over one the type in which they are reduced, which loses nothing."""
    buffer_dtype: DataType | None = built(None)
    """Type of the modules' floating buffers. Unset or "none": the model's own, so that frequencies of rotary embeddings
    and running statistics stay exact with 16-bit parameters."""


class ActivationCheckpointingSection(Section):
    """How the inputs of checkpointed blocks are stored until the backward; see docs/activations.md. The model,
    `zstore.checkpointing.checkpoint` or `zstore.gradient_checkpointing` selects these blocks."""

    cpu_checkpointing: Bool = built(False)
    """Keep activations in host memory: the same as `zstore.activations` "host". That key counts if both are set."""


class ThroughputSection(Section):
    """Reports of the throughput."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Log samples per second over all ranks every steps_per_print steps, the mean since the last line. Off by default,
    unlike in DeepSpeed: the journal has the times of all steps."""


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
    nvme_path: Drives | None = built(None)
    """Folder on the drive for the files, created if missing; needed with "nvme". A list spreads them over several drives.
    Optimizer state and parameters may share it; two runs cannot, since each locks its folders."""
    pin_memory: Bool = built(False)
    """Register parameters in host memory with CUDA, so that copies overlap with computation; transfer buffers always are.
    If that fails: pageable memory, and one warning. One of offload_optimizer and offload_param is enough."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """Folders of the drives, absolute; at least one with "nvme", else none."""
        return self.nvme_path or () if self.device == "nvme" else ()


class OffloadOptimizerSection(OffloadSection):
    """Where the optimizer state (fp32 master weights and the optimizer's tensors) is stored and updated, at stages 1 to
    3."""

    buffer_count: Positive = built(8)
    """Buffers for state in transit, of `buffer_size`: the pool of all arrays of an update. It takes at most half of the
    host budget, by default an eighth or 64 MiB. Few buffers mean small requests, never an error."""
    buffer_size: Positive = built(4 * 1024 * 1024)
    """fp32 elements of one buffer, 4 bytes each; not in DeepSpeed. Requests to the disk are no larger (nor than
    aio.block_size)."""
    ratio: Fraction | Annotated[Auto, Expects('"auto"')] = built(1.0)
    """Share of the optimizer state that is updated off the device, in whole parameters; 0.3 leaves 70 % on it. "auto": as
    much stays on a GPU as fits, including a micro-batch of the model's longest sequences. Bits depend on the share, since
    CPU and GPU round differently; the log and the checkpoint record it."""


class OffloadParamSection(OffloadSection):
    """Where parameters are stored between uses, at stage 3; at lower stages they stay on the device."""

    buffer_count: Positive = built(5)
    """Buffers for parameters in transit from host memory or disk; larger parameters are split."""
    buffer_size: Positive = built(100_000_000)
    """Elements of one buffer, which is never larger than a request to the disk (aio.block_size)."""
    max_in_cpu: Count | None = built(None)
    """Elements of parameters kept in host memory with "nvme", in whole parameters. Unset: as many as the host budget
    has room for, none without one; DeepSpeed's default is 1e9."""


class LeafModuleSection(Section):
    """Modules that are gathered at stage 3 with all their submodules, so that ranks may call different ones, as in
    mixtures of experts. So is a block of an outermost ModuleList, if `stage3_max_live_parameters` has room for it; a leaf
    always is."""

    classes: Names = built(
        tuple(
            f"transformers.models.{name}.modeling_{name}.{kind}SparseMoeBlock"
            for name, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
        ),
        stages=(3,),
    )
    """Classes of such modules, by class name or qualified name; by default DeepSpeed's."""
    names: Names = built((), stages=(3,))
    """Names of such modules in `model.named_modules()`."""
    name_suffixes: Names = built((), stages=(3,))
    """Suffixes of the names of such modules."""


class ZeroSection(Section):
    """What is sharded over the ranks, where it is stored, and the sizes of collectives. A bare `true` is stage 1."""

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

    stage: Stage = built(0)
    """0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too."""
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection(device="none")
    offload_param: OffloadParamSection = OffloadParamSection(device="none")
    reduce_bucket_size: Positive | Auto = built(500_000_000)
    """Elements of gradients reduced in one collective: larger is faster and needs more memory. On gloo at most 4 Mi,
    since larger ones are no faster there. "auto": hidden size squared."""
    allgather_bucket_size: Positive | Auto = built(500_000_000, stages=(1, 2, 3))
    """Elements of parameters gathered in one collective: after the update (stages 1, 2; on gloo at most 4 Mi), and of a
    unit before its use (stage 3). "auto": hidden size squared."""
    stage3_param_persistence_threshold: Count | Auto = built(100_000, stages=(3,))
    """Parameters with fewer elements stay gathered (stage 3): they cost little memory, and gathering them many small
    collectives. "auto": 10 times the hidden size."""
    stage3_model_persistence_threshold: Count | None = built(None, stages=(3,))
    """Maximum elements of parameters that stay gathered, in model order. Unset: no limit."""
    stage3_prefetch_bucket_size: Count | Auto = built(50_000_000, stages=(3,))
    """Elements prefetched ahead of use; if it is not 0, at least the next unit, a transformer block. 0: each unit is
    gathered on demand. "auto": 0.9 times the hidden size squared."""
    stage3_max_live_parameters: Count = built(1_000_000_000, stages=(3,))
    """Maximum elements of parameters gathered at one time, including prefetched ones. A block with more is gathered part
    by part; a single module's parameters are always gathered together."""
    stage3_max_reuse_distance: Count | None = built(None, stages=(3,))
    """Do not release a unit that is reused within this many elements of other units. Unset: 0, which costs no memory:
    only units used twice in a row are retained; DeepSpeed's default of 1e9 would retain 2 GB of a 16-bit model."""
    stage3_gather_16bit_weights_on_model_save: Bool = built(False)
    """Write the weights, in the type of the model, into every checkpoint's folder, in the background: safetensors for
    `from_pretrained`. At every stage."""
    reduce_scatter: Bool = built(True, stages=(1, 2))
    """Reduce-scatter gradients; false: all-reduce them, which sends twice as much for the same bits (stages 1, 2; stage 3
    always reduce-scatters, as in DeepSpeed)."""
    overlap_comm: Bool = built(True)
    """Reduce gradients and gather units while the model computes; false: wait for each at once, but not for reductions of
    stage 3, which differ in time between ranks. On by default: it costs a bucket of memory."""
    ignore_unused_parameters: Bool = built(True)
    """Leave a parameter unchanged if no rank has a gradient for it in a step; false: an error that names such
    parameters."""
    zero_hpz_partition_size: Count = built(1)
    """Size of the groups of consecutive ranks that shard a second copy of the parameters (ZeRO++ hpZ, stage 3). The first
    gather of a step is over all ranks, later ones within the group. Same bits; the copy takes the parameters' bytes,
    divided by this number, of device memory. 0 and 1: no copy."""
    zero_quantized_weights: Bool = built(False, stages=(3,))
    """Gather parameters as 8-bit integers (ZeRO++ qwZ; stage 3): one byte per element and 4 bytes per 256, half as much
    as in 16 bits. Own rows, masters and checkpoints stay exact. Biases, norms, parameters below the persistence threshold
    and the copy of `zero_hpz_partition_size` are sent in their own type. Off by default: it changes the model's numbers."""
    zero_quantized_gradients: Bool = built(False, stages=(2, 3))
    """Reduce gradients of matrices as 4-bit integers (ZeRO++ qgZ; stages 2 and 3; 8-bit by
    `zstore.quantized_gradient_bits`): an all-to-all, the mean in fp32; first within a machine, or a group of
    `zero_hpz_partition_size` ranks, then between them. Off by default: it changes the gradients."""
    leaf_module: LeafModuleSection = LeafModuleSection()

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Read `true` as stage 1, and the older `cpu_offload` and `cpu_offload_param` as their sections."""
        if isinstance(data, bool):
            return {"stage": int(data)}
        if not isinstance(data, Mapping):
            return data
        known: dict[Any, Any] = dict(data)
        pin_memory = known.get("cpu_offload_use_pin_memory")
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if known.pop(old, None) and known.get(new) is None:
                known[new] = {"device": "cpu", "pin_memory": pin_memory}
                known.pop("cpu_offload_use_pin_memory", None)
        return known


class ZstoreSection(Section):
    """Settings specific to zstore."""

    host_budget_bytes: Positive | Annotated[Auto, Expects('"auto"')] | None = built(None)
    """Bytes of host memory per machine, divided among its local ranks, for everything zstore stores there; with nvme the
    excess is on disk. "auto": 60 % of the available memory. Unset: no limit, and with nvme as little as possible:
    buffers, shards under 64 KiB, and gradients that wait for the update, in 16 bits 2 bytes per parameter, with several
    micro-batches 4."""
    verify_reads: Bool = built(True)
    """Check the crc32c of every chunk read from disk; it costs less than a tenth of a core per GB/s."""
    keep: Rules | None = built(None)
    """Checkpoints of this run to retain when a new one is saved: the number of newest ones, or an object of rules, any of
    which retains a checkpoint. "last": number of newest ones (1). "every": steps that are a multiple. "best": best
    metric, such as "loss:min", from `save_checkpoint(metrics=...)` or the client's state. "tags": list of names or
    patterns. Unset: all."""
    storage_options: Options | None = built(None)
    """Options of the fsspec file system for saving to and loading from URLs. Unset: from the environment, where
    credentials belong. See docs/remote.md."""
    upload_folder: Folder | None = built(None)
    """Folder in which each rank stages files for a URL until they are sent in the background. Unset: next to the first
    nvme_path, so that state on disk is linked and not copied, else in the user's cache folder."""
    journal: Annotated[Literal["auto", False], Expects('"auto" or false')] | Folder = built("auto")
    """Where the run's journal is written: a line of JSON per step, save and load, by rank 0. "auto": next to the
    checkpoints, as `journal-<run id>.jsonl`. A path: into that folder. false: no journal. See docs/metrics.md."""
    silent_rank_s: Real = built(45.0)
    """Seconds without a heartbeat after which a rank counts as dead and all ranks stop: one that hangs or whose machine
    is lost. A killed rank is detected at once; a slow one still sends heartbeats. 0: only the timeout of
    torch.distributed."""
    step_overlap: Annotated[Literal["none", "backward", "forward", "auto"], OneOf()] = built("auto")
    """When the update runs; the bits are the same in all modes. "none": in step(). "forward": after it, each unit before the
    next forward needs it. "backward": each unit as its gradients arrive, and what is left at the end as "forward"; this
    cannot undo a step that is not finite, and with clipping or loss scaling it is treated as "forward". "auto": "backward" if
    state or parameters are offloaded, hence "forward" with clipping; else "none". Parameters that are not gathered before
    their use (stages 0 to 2; a rank alone without offload_param; those that persist) are updated in step() at the latest; and
    at stages 0 and 1 of several ranks "backward" is treated as "none"."""
    host_kernel: Annotated[Literal["auto", "torch"], OneOf()] = built("auto")
    """Kernel that updates Adam and AdamW state in host memory and from disk; the bits are the same. "auto": a C kernel,
    in one pass, if built with zstore or by `cc`; on x86 with AVX2 and FMA. "torch": torch's fused kernel, between casts."""
    non_finite_gradients: Annotated[Literal["error", "skip", "apply"], OneOf()] = built("error")
    """Steps whose gradients are not finite, in fp32 or bf16. "error": NonFiniteError on every rank, and nothing is
    changed. "skip": nothing is changed, and training continues. "apply": they are applied, as in a plain loop; with
    clipping every weight becomes NaN. In fp16, and with bf16.check_grad_overflow, such steps are skipped."""
    quantized_gradient_bits: Annotated[Literal[4, 8], OneOf()] = built(4)
    """Bits per gradient element that `zero_optimization.zero_quantized_gradients` sends: 4, as in DeepSpeed, or 8, which
    sends twice as much and is about 18 times as exact."""
    moments: Annotated[Literal["fp32", "bf16"], OneOf()] | None = built(None)
    """Type of the optimizer's averages of gradients and of their squares, as exp_avg and exp_avg_sq, at every tier and in
    checkpoints. "bf16": 2 bytes per element each; the update computes in fp32 and rounds stochastically, identically on
    every tier, at every world size and after a resume. Unset: "fp32", with the bits of the plain loop, or "bf16" if set
    by bf16.bf16_optimizer_states or fp32_optimizer_states of the optimizer's params."""
    activations: Annotated[Literal["device", "host", "disk"], OneOf()] | None = built(None)
    """Where tensors that autograd saves for the backward are stored: of checkpointed blocks the inputs, of others
    everything. "host" and "disk": written in the background, and prefetched for the backward, with the same bits. Unset:
    on the device, or as activation_checkpointing.cpu_checkpointing says. See docs/activations.md."""
    activations_path: Drives | None = built(None)
    """Folder for "activations": "disk", or a list with one on each drive. Unset: the nvme_path of offload_optimizer, else
    that of offload_param."""
    gradient_checkpointing: Bool = built(False)
    """Save only the inputs of the model's blocks, and recompute the blocks in the backward: the same bits, a third more
    computation. Blocks are those of `gradient_checkpointing_enable()` of transformers, else modules in the outermost
    ModuleLists."""


class ConfigSections(Section):
    """The whole config."""

    renames: ClassVar[Mapping[str, str]] = {
        "bfloat16": "bf16",
        "seq_parallel_communication_data_type": "seq_parallel_comm_data_type",
    }

    train_batch_size: Positive | Auto | None = built(None)
    """Samples per step over all ranks: train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size. Two of
    these determine the third. "auto" in any of them: the caller's value."""
    train_micro_batch_size_per_gpu: Positive | Auto | None = built(None)
    """Samples per rank in one forward and backward."""
    gradient_accumulation_steps: Positive | Auto | None = built(None)
    """Micro-batches per step; 1 if it cannot be derived."""
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Bf16Section()
    gradient_clipping: Real | Auto = built(1.0)
    """Largest global norm of the gradients; larger ones are scaled down to it. 0: off. The default is DeepSpeed's since
    0.19, but 0 for optimizers that send signs."""
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    zstore: ZstoreSection = Field(default_factory=ZstoreSection)  # when all extras have added theirs
    seed: Count = built(1234)
    """Seed of the order of training_data, and of random numbers after a resume at another world size; fixed, so that runs
    without the key agree. Initial values and dropout follow torch.manual_seed of the script."""
    steps_per_print: Count = built(10)
    """Steps between progress lines of the logger "zstore" at INFO, by default to stderr; 0: none."""
    wall_clock_breakdown: Bool = built(False)
    """Add a line with the mean times of forward, backward and step. On CUDA the host then waits for the device at both
    ends of each."""
    memory_breakdown: Bool = built(False)
    """Add a line with rank 0's bytes by tier and its peaks."""
    dump_state: Bool = built(False)
    """Print once, at the start on rank 0, the keys that act with their values, and the memory in use."""
    tensorboard: TensorboardSection = TensorboardSection()
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    wandb: WandbSection = WandbSection()
    dataloader_drop_last: Bool = built(False)
    """Drop the last batch of an epoch if it is short."""
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], OneOf()] | None = built(None)
    """Level of the logger `zstore` on every rank. Unset: as the script configured it, else "info"."""
    disable_python_gc: Bool = built(False)
    """Disable Python's garbage collector until the engine is closed, since a collection on one rank stalls all."""
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: DataType | None = built(None)
    """Type in which gradients are sent to other ranks; on gloo their mean is summed in fp32 and rounded to it once. Unset
    or "none": the parameters' type."""
    timers: TimersSection = TimersSection()

    def sections_on(self) -> Iterator[tuple[str, Section]]:
        """Yield (key, section) for each top-level section that is on."""
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Section) and not section.is_off:
                yield name, section

    @property
    def batch_section(self) -> str | None:
        """The key of the section that determines the batch sizes; None: their keys do."""
        return next((name for name, section in self.sections_on() if section.gives_batch), None)

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Read an infinite steps_per_print, as Accelerate writes it, as 0."""
        if isinstance(data, Mapping) and data.get("steps_per_print") == float("inf"):
            known: dict[Any, Any] = dict(data)
            return known | {"steps_per_print": 0}
        return data


def add_section(name: str, section: type[Section]) -> None:
    """Add the section of an extra to configs; without a switch it is on if it is present."""
    kind: Any = section if section.switch is not None else section | None
    ConfigSections.model_fields[name] = FieldInfo(annotation=kind, default=section() if kind is section else None)
