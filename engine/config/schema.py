"""The schema of a config: the DeepSpeed JSON dialect, and our own settings under `zstore`.

Each key is followed by its effect, unit and limits, and the reason for its default; `docs/config.md` is made from this. A
key's status (`keys.Status`) tells its effect. Those that do not act are in `inactive.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from .keys import Section, built
from .optimizers import OptimizerSection
from .scheduler import SchedulerSection
from .sections import (
    ActivationCheckpointingSection,
    AioSection,
    Bf16Section,
    CheckpointSection,
    CsvMonitorSection,
    DataTypesSection,
    Fp16Section,
    TensorboardSection,
    TimersSection,
    WandbSection,
)
from .values import Auto, Bool, Count, DataType, Drives, Folder, OneOf, Options, Positive, Real, Rules, Words
from .zero import ZeroSection

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class ZstoreSection(Section):
    """Settings of zstore's own."""

    host_budget_bytes: Positive | Annotated[Auto, Words('"auto"')] | None = built(None)
    """Bytes of host memory per machine, divided among its local ranks, for all that zstore keeps there; with nvme anything
    beyond them is on disk. "auto": 60 % of the available memory. Unset: no limit, and with nvme as little as possible:
    buffers, shards under 64 KiB, and gradients that wait for the update, in bf16 and fp16 2 bytes a parameter, over more
    than one micro-batch 4."""
    verify_reads: Bool = built(True)
    """Check the crc32c of every chunk read from disk; it costs less than a tenth of a core per GB/s."""
    keep: Rules | None = built(None)
    """Checkpoints of this run that stay in the folder when a new one is saved: a number, of the newest; or an object,
    any of whose reasons keeps one. "last": of the newest (1). "every": those whose step is a multiple. "best": the one with the
    best metric, as "loss:min" or "accuracy:max", by a number of `save_checkpoint(metrics=...)` or in the client's state.
    "tags": a list of names, or patterns of names. Unset: all."""
    storage_options: Options | None = built(None)
    """Options of the fsspec file system of URLs that are saved to and loaded from. Unset: from the environment; credentials
    belong there. See docs/remote.md."""
    upload_folder: Folder | None = built(None)
    """Where each rank's files for a URL are on their way, to be sent in the background; ranks need not share it. Unset: beside
    the first nvme_path, where state on disk is linked and not written again, else in the user's cache folder."""
    journal: Annotated[Literal["auto", False], Words('"auto" or false')] | Folder = built("auto")
    """Where the run's journal goes: a line of JSON for each step, save and load, written by rank 0. "auto": beside the
    checkpoints, as `journal-<run id>.jsonl`. A path: into that folder. false: there is none. See docs/metrics.md."""
    silent_rank_s: Real = built(45.0)
    """Seconds without a heartbeat after which a rank counts as dead and all ranks stop. A killed rank is noticed at once;
    this is for one that hangs or whose machine is lost. A slow rank still sends heartbeats. 0: wait for the timeout of
    torch.distributed."""
    step_overlap: Annotated[Literal["none", "backward", "forward", "auto"], OneOf()] = built("auto")
    """When the update runs; the bits are the same in all. "none": in step(). "forward": after it, each unit before the next
    forward needs it. "backward": each unit as its gradients arrive, which cannot undo a step that is not finite;
    with clipping or loss scaling it is treated as "forward". "auto": "forward" if state or parameters are offloaded, else
    "none". Parameters that are not gathered before their use (stages 0 to 2; a rank alone without offload_param; those that
    persist) are always updated in step(); and at stages 0 and 1 of several ranks "backward" is treated as "none"."""
    non_finite_gradients: Annotated[Literal["error", "skip", "apply"], OneOf()] = built("error")
    """How a step ends whose gradients, in fp32 or bf16, are not finite (NaN or infinite). "error": NonFiniteError on
    every rank, and nothing is changed. "skip": nothing is changed, and training goes on. "apply": the optimizer takes them,
    as in a plain loop, and with clipping every weight becomes NaN. In fp16, and with bf16.check_grad_overflow, such steps
    are skipped."""
    quantized_gradient_bits: Annotated[Literal[4, 8], OneOf()] = built(4)
    """Bits of an element of a gradient that `zero_optimization.zero_quantized_gradients` sends: 4, as in DeepSpeed, or 8, which
    sends twice as much and is about 18 times as exact."""
    moments: Annotated[Literal["fp32", "bf16"], OneOf()] | None = built(None)
    """Type of the optimizer's moments, at every tier and in checkpoints: averages of gradients and of their squares, as
    exp_avg and exp_avg_sq. "bf16": 2 bytes an element each. The update computes in fp32 and rounds stochastically, alike on
    every tier, at every world size and after a resume. Unset: "fp32", whose bits are the plain loop's, or "bf16" if
    bf16.bf16_optimizer_states or fp32_optimizer_states of the optimizer's params asks for that."""
    activations: Annotated[Literal["device", "host", "disk"], OneOf()] | None = built(None)
    """Where tensors that the forward saves for the backward are kept between the two: inputs of checkpointed blocks, and of
    blocks without checkpointing all that autograd saves. "host": copied to host memory behind the forward. "disk": written
    to the drive behind the forward, and read ahead of the backward. The bits are the same. Unset: on the device, or as
    activation_checkpointing.cpu_checkpointing says. See docs/activations.md."""
    activations_path: Drives | None = built(None)
    """Folder on the drive for "activations": "disk", or one on each drive. Unset: the nvme_path of offload_optimizer, else
    that of offload_param."""
    gradient_checkpointing: Bool = built(False)
    """Keep only the inputs of the model's blocks, and compute them again in the backward: the same bits, a third more
    computation. The blocks are transformers' own if the model has `gradient_checkpointing_enable()`, else the modules in
    its outermost ModuleLists."""


class ConfigSections(Section):
    """The whole config."""

    renames: ClassVar[Mapping[str, str]] = {
        "bfloat16": "bf16",
        "seq_parallel_communication_data_type": "seq_parallel_comm_data_type",
    }

    train_batch_size: Positive | Auto | None = built(None)
    """Samples per step over all ranks: train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size. Any
    two of the three give the third. "auto" here and in the next two: the caller's answer."""
    train_micro_batch_size_per_gpu: Positive | Auto | None = built(None)
    """Samples that one rank takes through one forward and backward."""
    gradient_accumulation_steps: Positive | Auto | None = built(None)
    """Micro-batches per step; 1 if it cannot be derived."""
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Bf16Section()
    gradient_clipping: Real | Auto = built(1.0)
    """Largest global norm of the gradients; larger ones are scaled down to it. 0: off. The default is DeepSpeed's since 0.19;
    optimizers that send signs do not clip, and the Trainers of other libraries have defaults of their own."""
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    zstore: ZstoreSection = Field(default_factory=ZstoreSection)  # when all extras have added theirs
    seed: Count = built(1234)
    """Seed of the order of training_data, and of random numbers after a resume at another world size. Fixed, so that two runs
    that say nothing about it agree. Initial values and dropout follow torch.manual_seed, which is the script's to call."""
    steps_per_print: Count = built(10)
    """Steps between lines of progress; 0: none. They go to the logger "zstore" at INFO; without a logging
    configuration, to stderr."""
    wall_clock_breakdown: Bool = built(False)
    """Add a line with the mean times of forward, backward and step. On CUDA the host then waits for the device at both
    ends of each, so that they are the device's times."""
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
    """Disable Python's garbage collector until the engine is closed, since a collection on one rank holds up all. Call
    gc.collect() when it suits."""
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: DataType | None = built(None)
    """Type in which gradients are sent to other ranks; their mean is summed in fp32 and rounded to it once (on gloo).
    Unset or "none": the parameters' type."""
    timers: TimersSection = TimersSection()

    def sections_on(self) -> Iterator[tuple[str, Section]]:
        """Yield the sections at the top that are on, by key."""
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Section) and not section.is_off:
                yield name, section

    @property
    def batch_section(self) -> str | None:
        """The key of the section that gives the batch sizes; None: their own keys do."""
        return next((name for name, section in self.sections_on() if section.gives_batch), None)

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Take an infinite steps_per_print, as Accelerate writes it, for "never"."""
        if isinstance(data, Mapping) and data.get("steps_per_print") == float("inf"):
            known: dict[Any, Any] = dict(data)
            return known | {"steps_per_print": 0}
        return data


def add_section(name: str, section: type[Section]) -> None:
    """Let configs have a section of an extra; one without a switch is on if it is there."""
    kind: Any = section if section.switch is not None else section | None
    ConfigSections.model_fields[name] = FieldInfo(annotation=kind, default=section() if kind is section else None)
    if ConfigSections.__pydantic_complete__:
        ConfigSections.model_rebuild(force=True)
