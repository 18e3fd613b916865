"""Status of config keys, messages about keys, the base class of all sections of the schema, and the inactive keys."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from .values import Anything, Auto, Bool, Count, DataType, Fraction, Ignored, OneOf, Position, Positive, Real


class Status(Enum):
    """The effect of a key that is set."""

    ACTIVE = "active"
    """It has the documented effect."""
    NOT_IMPLEMENTED = "not implemented"
    """Training gives the same result without it; a notice names the drawback and the alternative."""
    NO_EFFECT = "no effect"
    """Nothing is lost without it, since it happens anyway or does not apply; it is reported."""
    REFUSED = "refused"
    """Training without it would differ from the config: an error."""
    INVALID = "error"
    """An unknown key, a wrong value, or a conflict with another key."""


@dataclass(frozen=True)
class Notice:
    """Set keys that have no effect, have another effect than the config says, or are errors."""

    status: Status
    text: str
    """The alternative or the reason; for an error, its text."""
    keys: tuple[str, ...]
    """Dotted paths."""

    @property
    def is_error(self) -> bool:
        """Whether it makes the config invalid."""
        return self.status in (Status.REFUSED, Status.INVALID)

    @property
    def key(self) -> str:
        """The names of the keys; empty for the config as a whole."""
        return " and ".join(filter(None, self.keys))

    @property
    def message(self) -> str:
        """The text, preceded by the status if the keys are inactive."""
        is_inactive = self.status in (Status.NOT_IMPLEMENTED, Status.NO_EFFECT)
        return f"{self.status.value}: {self.text}" if is_inactive else self.text

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


def problem_text(source: str, problems: Sequence[str]) -> str:
    """Return the message of an error about `problems` in `source`."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return f"{source}: {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def option(default: Any, *, stages: tuple[int, ...] = (), text: str | None = None) -> Any:
    """Declare an active key, restricted to these ZeRO stages if any are given; `text` replaces a docstring."""
    return Field(default=default, description=text, json_schema_extra={"stages": list(stages)})


def _field_extra(field: FieldInfo) -> Mapping[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def status_of(field: FieldInfo) -> tuple[Status, str]:
    """Return the status of a key, and the reason if it is inactive."""
    extra = _field_extra(field)
    return extra.get("status", Status.ACTIVE), extra.get("why", "")


def stages_of(field: FieldInfo) -> Sequence[int]:
    """Return the ZeRO stages at which a key is active; empty means all."""
    stages: Sequence[int] = _field_extra(field).get("stages", ())
    return stages


def type_of(field: FieldInfo) -> Any:
    """Return the type of a field, with its annotations."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def auto_value_type(field: FieldInfo) -> Any:
    """Return the type of the values that can replace "auto" in a field; None if it cannot be "auto"."""
    kinds = get_args(field.annotation)
    return Union[tuple(kind for kind in kinds if kind not in (Auto, NoneType))] if Auto in kinds else None  # noqa: UP007


class Section(BaseModel):
    """An object in the config, read by `parse`. Frozen; unknown keys are errors; null counts as a missing key."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    renames: ClassVar[Mapping[str, str]] = {}
    """Other spellings of keys."""
    variants: ClassVar[Mapping[str, Mapping[str, "type[Section]"]]] = {}
    """Keys whose section is selected from several by the preceding key `type`; a missing section is empty."""
    switch: ClassVar[str | None] = None
    """The key that turns the section on; if it is off, the other keys have no effect."""
    determines_batch: ClassVar[bool] = False
    """Whether the section, if on, determines the batch sizes by `sizes_at`, overriding their keys."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        rows = [(Status(status), *row) for status, rows in INACTIVE.items() for row in rows]
        for status, section, keys, kind, default, why in rows:
            if section == cls.__name__ and cls.__module__.startswith("zstore."):
                for key in keys.split():
                    cls.__annotations__[key] = kind
                    extra: Any = {"status": status, "why": why}
                    setattr(cls, key, Field(default=default, json_schema_extra=extra))

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Return `data` in the current form."""
        return data

    def notices(self, settings: Any) -> Iterator[Notice]:
        """Yield, if the section is on, its errors and conflicts with other keys, and keys it leaves without effect."""
        return iter(())

    def prepare(self, model: Any) -> None:
        """Modify the model, if the section is enabled, before an engine is created for it."""

    def sizes_at(self, world_size: int) -> tuple[int, int, int]:
        """Return (train batch, micro-batch, accumulation steps) for a world size. Raises ValueError, with advice, if none
        fit."""
        raise NotImplementedError

    @property
    def is_off(self) -> bool:
        """Whether the section's switch is off."""
        return self.switch is not None and getattr(self, self.switch) in (None, False, "none")


class Setting(NamedTuple):
    """A key that a config sets."""

    key: str
    """Dotted path, in the schema's spelling."""
    section: Section
    name: str
    value: Any
    field: FieldInfo


def settings_in(section: Section, prefix: str = "") -> Iterator[Setting]:
    """Yield the keys that are set in `section` and its inner sections, in the order of the schema."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set:
            setting = Setting(f"{prefix}{name}", section, name, getattr(section, name), field)
            if isinstance(setting.value, Section):
                yield from settings_in(setting.value, f"{setting.key}.")
            else:
                yield setting


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class that is the type of a field; None if its type is not a section."""
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def description(section: type[Section], name: str) -> str:
    """Return the docstring of a key, read from the source on demand: pydantic would read all of them at startup."""
    if (text := section.model_fields[name].description) is not None:
        return text
    return next((docstrings[name] for kind in section.__mro__ if name in (docstrings := _docstrings(kind))), "")


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields that a section declares itself, without inherited ones."""
    if not issubclass(kind, Section):
        return {}
    try:
        source = inspect.getsource(kind)
    except OSError:  # a class generated from a table with descriptions
        return {}
    docstrings = {}
    for pair in pairwise(ast.parse(source).body[0].body):  # type: ignore[attr-defined]
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                docstrings[name] = inspect.cleandoc(text)
    return docstrings


def known_keys(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted path, field) of each key of `section` and its inner sections, in the order of the schema."""
    for written, key, field in spelled_keys(section):
        if written == key:
            yield key, field


def spelled_keys(section: type[Section], written: str = "", key: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (dotted path as written, dotted path, field) for each spelling of the keys of `section` and its inner sections;
    `written` and `key` are prefixes of the paths."""
    for spelling, name in ({name: name for name in section.model_fields} | dict(section.renames)).items():
        field = section.model_fields[name]
        yield written + spelling, key + name, field
        for inner in section.variants.get(name, {"": section_of(field)}).values():
            if inner is not None:
                yield from spelled_keys(inner, f"{written}{spelling}.", f"{key}{name}.")


def active_values(section: Section) -> dict[str, Any]:
    """Return the active keys of `section` and its inner sections with their values, as JSON data."""
    fields = type(section).model_fields
    active = {name for name, field in fields.items() if not section_of(field) and status_of(field)[0] is Status.ACTIVE}
    values = section.model_dump(mode="json", include=active)
    for name in fields:
        if isinstance(inner := getattr(section, name), Section) and (keys := active_values(inner)):
            values[name] = keys
    return {name: values[name] for name in fields if name in values}


_MEAN = (
    "gradients are always averaged in the same, tested way; to avoid overflow in fp16, lower "
    "fp16.initial_scale_power, or train in bf16"
)
_KERNEL = "every device uses one update kernel, torch's fused one"
_ANY_SIZE = "every checkpoint loads at any world size"
_FLAT_GATHERS = "parameters are always gathered flat, unit by unit"
_UNUSED = "DeepSpeed's class does not use it either; eps is added to the root"
_FP32 = (
    "master weights stay in fp32, at 4 bytes per parameter; zstore.moments saves 4 of the 8 bytes of Adam's moments, and "
    "offload_optimizer moves them off the device"
)
_IO = "threads always submit requests one by one, and overlap them"
_NOT_PARTITIONED = (
    "there is no model parallelism, so each rank keeps the full inputs of its blocks; cpu_checkpointing moves them "
    "off the device"
)

INACTIVE: Mapping[str, tuple[tuple[str, str, Any, Any, str], ...]] = {
"no effect": (
    ("ConfigSections", "seq_parallel_comm_data_type", DataType | None, None, "there is no sequence parallelism"),
    ("ConfigSections", "disable_allgather", Bool, False, "updated shards are always all-gathered"),
    ("ConfigSections", "zero_allow_untested_optimizer", Bool, False,
     ("every optimizer that a config can name works at every stage and tier; an object of a class not listed in "
      "docs/optimizers.md works at stage 0 without offload")),
    ("ConfigSections", "zero_force_ds_cpu_optimizer", Bool, True, _KERNEL),
    ("ConfigSections", "use_data_before_expert_parallelism", Bool, False, "there is no expert parallelism"),
    ("ConfigSections", "autotuning", Ignored, None,
     "a run trains with the config as written; `zstore plan --config FILE` says what fits"),
    ("ConfigSections", "vocabulary_size", Ignored, None, "the model determines it"),
    ("OffloadOptimizerSection", "fast_init", Bool, False,
     "new moments are not written at all: unwritten data reads as zeros"),
    ("OffloadOptimizerSection", "pipeline_read pipeline_write", Bool, False,
     "an update always prefetches and writes back in the background, as far as its buffers permit"),
    ("OffloadOptimizerSection", "convert_grad_on_cpu", Bool, True,
     "the update casts 16-bit gradients tile by tile, on the device that runs it"),
    ("ZeroSection", "sub_group_size", Positive | None, None,
     "an update streams tiles of at most 1 MiB through a few buffers, for models of any size"),
    ("ZeroSection", "contiguous_gradients", Bool, True,
     "gradients are always reduced from flat buckets, which are freed at once, so memory is not fragmented"),
    ("ZeroSection", "allgather_partitions", Bool, True,
     "updated shards are always all-gathered: a broadcast from each owner would send the same bytes in more calls"),
    ("ZeroSection", "round_robin_gradients", Bool, False, "each rank copies its own rows, all ranks at once"),
    ("ZeroSection", "elastic_checkpoint", Bool, False, _ANY_SIZE),
    ("ZeroSection", "use_multi_rank_bucket_allreduce", Bool, True,
     "a bucket is reduced for all ranks in one collective"),
    ("ZeroSection", "compute_grad_norm", Bool, True, "the global norm is computed at every step"),
    ("ZeroSection", "parameter_alignment", Bool, False, "shards are cut at multiples of 16 elements"),
    ("ZeroSection", "stage3_module_granularity_threshold", Count, 0, _FLAT_GATHERS),
    ("ZeroSection", "stage3_use_all_reduce_for_fetch_params", Bool, False, _FLAT_GATHERS),
    ("ZeroSection", "stage3_partition_stream_chunk_size", Count, 0, "parameters of any size are cut by rows"),
    ("ZeroSection", "mics_hierarchical_params_gather", Bool, False, "it is part of mics_shard_size"),
    ("ZeroSection", "memory_efficient_linear", Bool, True, "linear layers are torch's own"),
    ("ZeroSection", "override_module_apply", Bool, True, "modules are not patched"),
    ("ZeroSection", "pipeline_loading_checkpoint", Bool, False, "each rank reads only the rows that it owns"),
    ("ZeroSection", "enable_sanity_checks", Bool, False, "every transfer is always checked"),
    ("ZeroSection", "legacy_stage1", Bool, False, "one implementation serves all stages"),
    ("ZeroSection", "save_muon_momentum_buffer_in_memory", Bool, False,
     "it is stored with all other state: see offload_optimizer"),
    ("ZeroSection", "cpu_offload_use_pin_memory", Bool, False,
     "without cpu_offload there is nothing to pin; with an offload section, write pin_memory there"),
    ("OptimizerParams", "fused", Bool, True, _KERNEL),
    ("OptimizerParams", "foreach capturable", Bool, False, _KERNEL),
    ("OptimizerParams", "set_grad_none", Bool, True, "the engine owns the gradients"),
    ("AdamParams", ("freeze_step var_freeze_step var_update_scaler local_step_scaler local_step_clipper "
                     "cuda_aware comm_backend_name max_coeff min_coeff momentum"), Anything, None,
     "it is an argument of a different optimizer and has no effect on Adam; remove it"),
    ("MuonParams", "ns_method", Anything, None, "the standard iteration is used; the others agree with it up to rounding"),
    ("_OneBitParams", "cuda_aware comm_backend_name", Anything, None, "signs are sent by the process group's backend"),
    ("OneBitAdamParams", "eps_inside_sqrt", Anything, None, _UNUSED),
    ("ZeroOneAdamParams", "eps_inside_sqrt", Anything, None, _UNUSED),
    ("OptimizerSection", "legacy_fusion", Bool, False, _KERNEL),
    ("Bf16Section", "immediate_grad_update", Bool, False, "gradients are always accumulated as they arrive"),
    ("AioSection", "single_submit", Bool, False, _IO),
    ("AioSection", "overlap_events", Bool, True, _IO),
    ("CheckpointSection", "load_universal", Bool, False, _ANY_SIZE),
    ("CheckpointSection", "parallel_write", Ignored, None, "all ranks write at once"),
    ("CheckpointSection", "checkpoint_serialization", Bool, True, "nothing is pickled"),
    ("CheckpointWriterSection", "type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel", Ignored,
     None, "there is one writer, whose buffers are sized by the memory budget"),
    ("DataTypesSection", "param_dtype", DataType | None, None, "fp16 and bf16 determine it"),
    ("ThroughputSection", "synchronized", Bool, True, "a progress line waits for the loss, and so for the device"),
    ("ElasticitySection", "min_time", Count, 0,
     "it tells a cluster scheduler how long to wait before it changes a job's size"),
),
"not implemented": (
    ("ConfigSections", "comet trackio", Ignored, None, "this monitor is not supported; use tensorboard, wandb or csv_monitor"),
    ("ConfigSections", "flops_profiler", Ignored, None,
     ("modules are not profiled: torch.profiler's trace has the engine's phases, torch.utils.flop_counter.FlopCounterMode "
      "counts by module, and model FLOPs utilisation is in engine.statistics() and the monitors")),
    ("ConfigSections", "comms_logger", Ignored, None,
     ("collectives are not timed one by one: engine.statistics().links has the bytes and the time of each kind, "
      "torch.profiler those of single calls")),
    ("ConfigSections", "prescale_gradients", Bool, False, _MEAN),
    ("ConfigSections", "gradient_predivide_factor", Real, 1.0, _MEAN),
    ("ConfigSections", "sparse_gradients", Bool, False,
     "gradients of embeddings are reduced densely; use sparse=False, since a sparse gradient raises an error"),
    ("ConfigSections", "graph_harvesting", Bool, False,
     'no CUDA graph is captured by default; engine.compile(mode="reduce-overhead") captures them, at stages 0 to 2'),
    ("ConfigSections", "nebula", Ignored, None,
     "checkpoints are written only to the folder or URL of save_checkpoint(); with wait=False they do not delay training"),
    ("ConfigSections", "datastates_ckpt", Ignored, None,
     "only zstore writes checkpoints; save_checkpoint(wait=False) does not delay training"),
    ("OffloadOptimizerSection", "super_offload", Bool, False,
     "the update of offloaded state is the same on every machine, bit-identical to torch's fused kernel on the CPU"),
    ("OffloadOptimizerSection", "cpuadam_cores_perc", Fraction, 0.8,
     "the update uses its rank's cores, or two threads during computation; torch's kernel uses OMP_NUM_THREADS threads"),
    ("ZeroSection", "load_from_fp32_weights", Bool, True,
     "master weights are always loaded from the fp32 weights, since 16-bit ones would lose precision"),
    ("ZeroSection", "stage3_allgather_sequential", Bool, False,
     "a unit is gathered as a whole; to lower peak memory, lower stage3_max_live_parameters"),
    ("ZeroSection", "zero_quantized_nontrainable_weights", Bool, False,
     "frozen weights stay in the model's compute type, and take its memory"),
    ("ZeroSection", "log_trace_cache_warnings", Bool, False,
     "nothing is logged; engine.statistics().units.orders counts the recorded module orders"),
    ("Fp16Section", "fp16_master_weights_and_grads", Bool, False, _FP32),
    ("Bf16Section", "bf16_master_weights_and_grads", Bool, False, _FP32),
    ("AioSection", "use_gds", Bool, False,
     "offloaded state passes through host memory, where it is checked and updated"),
    ("CheckpointSection", "tag_validation", Annotated[Literal["Ignore", "Warn", "Fail"], OneOf()], "Warn",
     "if the ranks' tags differ, rank 0's is used, with a warning"),
    ("ActivationCheckpointingSection", "partition_activations contiguous_memory_optimization", Bool, False,
     _NOT_PARTITIONED),
    ("ActivationCheckpointingSection", "number_checkpoints", Positive | None, None, _NOT_PARTITIONED),
    ("ActivationCheckpointingSection", "synchronize_checkpoint_boundary profile", Bool, False,
     "blocks are not timed one by one: torch.profiler shows the forward pass and the recomputation of each"),
),
"refused": (
    ("ConfigSections", "gradient_allreduce_op", Annotated[Literal["mean", "sum"], OneOf()], "mean",
     "gradients are averaged over train_batch_size; multiply the loss instead"),
    ("ConfigSections", "managed_gradient_accumulation", Bool, True,
     "call step() after each micro-batch; it updates after the last"),
    ("ConfigSections", "amp", Ignored, None, "Apex's amp is no longer maintained: use bf16 or fp16"),
    ("ConfigSections", "torch_autocast", Ignored, None,
     "use bf16 or fp16, or torch.autocast inside the model's forward pass"),
    ("ConfigSections", "compile", Ignored, None,
     "call engine.compile() after initialize(): torch.compile, unit by unit at stage 3"),
    ("ConfigSections", "pipeline", Ignored, None,
     ("there is no pipeline parallelism: remove the section and use ZeRO stage 3, with offload_param for models "
      "larger than memory")),
    ("ConfigSections", "tensor_parallel", Ignored, None,
     ("there is no tensor parallelism: remove the section and use ZeRO stage 3, with offload_param for models larger "
      "than memory; to split single tensors use FSDP2 or torchtitan")),
    ("ConfigSections", "expert_parallel", Ignored, None,
     "there is no expert parallelism: remove the section; experts are parameters like any others, sharded at stage 3"),
    ("ConfigSections", "sequence_parallel_size", Positive, 1,
     ("there is no sequence parallelism: for long sequences use activation_checkpointing, with cpu_checkpointing, or "
      "zstore.activations")),
    ("ConfigSections", "hybrid_engine", Ignored, None,
     "there is no inference engine: engine.save_16bit_model() writes weights for a server of your choice"),
    ("ConfigSections", "compression_training quantize_training weight_quantization", Ignored, None,
     ("training does not compress the model: train without it, then zstore consolidate, and quantize or prune the "
      "result with torchao")),
    ("CheckpointSection", "use_node_local_storage", Bool, False,
     ("all ranks save one checkpoint, in a folder visible to all: pass a shared folder or a bucket to save_checkpoint(); "
      "offloaded state stays on each machine's nvme_path")),
    ("ConfigSections", "curriculum_learning", Ignored, None,
     ("the data determines sequence lengths: truncate by engine.global_steps in the loader's collate_fn, and remove "
      "the section")),
    ("ConfigSections", "data_efficiency", Ignored, None,
     ("samples are drawn by the loader: give it a torch.utils.data.Sampler that draws them by difficulty, or sort and "
      "filter with `datasets`, and remove the section")),
    ("ConfigSections", "eigenvalue", Ignored, None, "it is only used by quantize_training; remove the section"),
    ("ConfigSections", "progressive_layer_drop", Ignored, None,
     "layers are not dropped by the engine: drop them in the model's forward pass, by engine.global_steps"),
    ("ZeroSection", "mics_shard_size", Annotated[Position, AfterValidator(lambda ranks: ranks or -1)], -1,
     ("state is sharded over all ranks: remove the key, and set zero_hpz_partition_size at stage 3, which gathers within "
      "a group of that many ranks in the backward pass")),
    ("ZeroSection", "zeropp_loco_param", Ignored, None,
     ("errors of quantized gradients are not fed back: remove the key, and set zstore.quantized_gradient_bits to 8, which "
      "is about 18 times as precise as 4")),
    ("ZeroSection", "zenflow", Ignored, None, "delayed updates would change the result; remove the key"),
    ("OptimizerParams", "max_grad_norm", Real, 0.0, "set gradient_clipping at the top of the config instead"),
    ("OptimizerParams", "differentiable", Bool, False,
     "no gradient passes through the engine's step; write that loop in plain torch"),
    ("AdagradParams", "amsgrad", Bool, False, "Adagrad has no AMSGrad variant; remove it"),
    ("LambParams", "amsgrad", Bool, False, "LAMB has no AMSGrad variant; remove it"),
    ("_OneBitParams", "amsgrad", Bool, False, "the 1-bit optimizers have no AMSGrad variant; remove it"),
    ("ElasticitySection", "model_parallel_size", Positive, 1, "there is no model parallelism; remove the key"),
),
}  # fmt: skip
"""By status: section class, keys, their type, their default (which describes what the engine does anyway), and reason."""
