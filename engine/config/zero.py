"""The `zero_optimization` section and its parts. Sizes are in elements, as DeepSpeed has them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from .keys import Section, built
from .values import Auto, Bool, Count, Drives, Fraction, Names, OneOf, Positive, Words

Stage = Annotated[Literal[0, 1, 2, 3], OneOf()]
Device = Annotated[Literal["none", "cpu", "nvme"], OneOf()]


class OffloadOptimizerSection(Section):
    """Where the optimizer state (fp32 master weights and the optimizer's own tensors) is kept and updated."""

    switch = "device"

    device: Device
    """Tier of the state: "none" (the device), "cpu" (host memory) or "nvme" (files in `nvme_path`). Stages 1 to 3."""
    nvme_path: Drives | None = built(None)
    """Folder on the drive for the state's files, made if it is missing; needed with "nvme". A list spreads them over several
    drives. Each run locks its folders; processes of two runs cannot share one."""
    pin_memory: Bool = built(False)
    """Register parameters in host memory with CUDA, for copies that run beside the computation; transfer buffers always are.
    If that fails: pageable memory, and one warning."""
    buffer_count: Positive = built(8)
    """Buffers for state on its way: the pool has room for so many of `buffer_size`, and takes half of the host budget at
    most, by default an eighth or 64 MiB. Pieces of all of an update's arrays share it, so that few buffers mean small
    requests, never an error."""
    buffer_size: Positive = built(4 * 1024 * 1024)
    """fp32 elements of one buffer, 4 bytes each; a key that DeepSpeed does not have. A request to the disk is no larger
    (nor than aio.block_size)."""
    ratio: Fraction | Annotated[Auto, Words('"auto"')] = built(1.0)
    """Share of the optimizer state that is updated off the device, in whole parameters; 0.3 keeps 70 % on it. "auto": as much
    stays on a GPU as it has memory for beside the rest, a micro-batch of the model's longest sequences included. CPU and GPU
    round differently: bits depend on the share, which the log and the checkpoint name."""


class OffloadParamSection(Section):
    """Where parameters are kept between their uses, at stage 3. Below it parameters stay on the device, and the section is
    reported."""

    switch = "device"

    device: Device
    """Tier of the parameters: "none" (the device), "cpu" (host memory) or "nvme" (files in `nvme_path`)."""
    nvme_path: Drives | None = built(None)
    """Folder on the drive, or a list of folders on several; needed with "nvme". It may be that of the optimizer state."""
    pin_memory: Bool = built(False)
    """The same as offload_optimizer.pin_memory: one of the two is enough."""
    buffer_count: Positive = built(5)
    """Buffers for parameters on their way from host memory or disk. Larger parameters are cut; without a free
    buffer a transfer waits."""
    buffer_size: Positive = built(100_000_000)
    """Elements of one buffer. No buffer is larger than a request to the disk (aio.block_size), so that the default costs
    little."""
    max_in_cpu: Count | None = built(None)
    """Elements of parameters kept in host memory with "nvme", in whole parameters. Unset: as many as the host budget
    has room for, none without one; DeepSpeed's default is 1e9."""


class LeafModuleSection(Section):
    """Modules that are gathered as a whole at stage 3, with all below them, so that a rank may call other ones of their modules
    than another does: mixtures of experts. A block of an outermost ModuleList is gathered as a whole too, as long as
    `stage3_max_live_parameters` has room for it; a leaf always."""

    classes: Names = built(
        tuple(
            f"transformers.models.{name}.modeling_{name}.{kind}SparseMoeBlock"
            for name, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
        ),
        stages=(3,),
    )
    """Classes of such modules, by their names, short or with their Python module's; by default DeepSpeed's."""
    names: Names = built((), stages=(3,))
    """Such modules, as `model.named_modules()` calls them."""
    name_suffixes: Names = built((), stages=(3,))
    """How the names of such modules end."""


class ZeroSection(Section):
    """What is sharded over the ranks, where it is kept, and in which sizes it travels. A bare `true` is stage 1."""

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
    """0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too. Off unless asked for."""
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection(device="none")
    offload_param: OffloadParamSection = OffloadParamSection(device="none")
    reduce_bucket_size: Positive | Auto = built(500_000_000)
    """Elements of gradients reduced in one collective: more is faster, and takes that memory. On gloo at most 4 Mi:
    larger ones are no faster there. "auto": hidden size squared."""
    allgather_bucket_size: Positive | Auto = built(500_000_000, stages=(1, 2, 3))
    """Elements of parameters gathered in one collective: after the update (stages 1, 2; on gloo at most 4 Mi), and of a unit
    before its use (stage 3). "auto": hidden size squared."""
    stage3_param_persistence_threshold: Count | Auto = built(100_000, stages=(3,))
    """Parameters with fewer elements keep their gathered copy (stage 3): they cost little memory and many small
    collectives. "auto": 10 times the hidden size."""
    stage3_model_persistence_threshold: Count | None = built(None, stages=(3,))
    """Most elements of parameters that keep their gathered copy, taken in the order of the model. Unset: no limit."""
    stage3_prefetch_bucket_size: Count | Auto = built(50_000_000, stages=(3,))
    """Elements gathered ahead of use; if it is not 0, at least the next unit, a transformer block. 0: each unit is
    gathered when it is needed. "auto": 0.9 times the hidden size squared."""
    stage3_max_live_parameters: Count = built(1_000_000_000, stages=(3,))
    """Most elements of parameters gathered at one time, with those gathered ahead. A block with more is gathered part by
    part; a single module's parameters are gathered whatever they are."""
    stage3_max_reuse_distance: Count | None = built(None, stages=(3,))
    """Keep a unit gathered that is used again before so many elements of other units are. Unset: 0, which keeps units that
    are used twice in a row and costs no memory; DeepSpeed's default of 1e9 would keep 2 GB of a 16-bit model."""
    stage3_gather_16bit_weights_on_model_save: Bool = built(False)
    """Write the weights, as the model computes with them, into every checkpoint's folder: safetensors that `from_pretrained`
    loads from there. At every stage; in the background, before the checkpoint is committed."""
    reduce_scatter: Bool = built(True, stages=(1, 2))
    """Reduce-scatter gradients; false: all-reduce them, which sends twice as much and gives the same bits (stages 1, 2; at
    stage 3 they are always reduce-scattered, as in DeepSpeed)."""
    overlap_comm: Bool = built(True)
    """Reduce gradients and gather units while the model computes; false: wait for each at once. Reductions of stage 3 are
    not waited for, since they come at different times on different ranks. On by default: it costs a bucket of memory."""
    ignore_unused_parameters: Bool = built(True)
    """Leave a parameter as it is if no rank has a gradient for it in a whole step; false: an error that names such
    parameters."""
    zero_hpz_partition_size: Count = built(1)
    """Ranks that keep a second copy of the parameters among them (ZeRO++ hpZ, stage 3): neighbouring ones, as many as a fast
    link joins. After the first gather of a step, which is from all ranks, parameters are gathered within the group. The same
    bits; in device memory the bytes of the parameters over so many ranks. 0 and 1: none, which takes the least memory."""
    zero_quantized_weights: Bool = built(False, stages=(3,))
    """Gather parameters as 8-bit integers (ZeRO++ qwZ; stage 3): one byte an element and 4 bytes for each 256, half as much
    as in 16 bits. Each rank's own rows, masters and checkpoints stay exact. Biases, norms and parameters below the
    persistence threshold travel in their own type, as the second copy of `zero_hpz_partition_size` does. Off by default: it
    changes the numbers that the model computes with."""
    zero_quantized_gradients: Bool = built(False, stages=(2, 3))
    """Reduce gradients of matrices as 4-bit integers (ZeRO++ qgZ; stages 2 and 3; `zstore.quantized_gradient_bits` takes 8):
    an all-to-all, the mean in fp32. Of several machines, or groups of `zero_hpz_partition_size` ranks, within each group
    first and then between them. Off by default: it changes the gradients."""
    leaf_module: LeafModuleSection = LeafModuleSection()

    @classmethod
    def rewrite(cls, data: object) -> object:
        """Take `true` for stage 1, and the older `cpu_offload` and `cpu_offload_param` for their sections."""
        if isinstance(data, bool):
            return {"stage": int(data)}
        if not isinstance(data, Mapping):
            return data
        known: dict[Any, Any] = dict(data)
        pin_memory, taken = known.get("cpu_offload_use_pin_memory"), False
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if known.pop(old, None) and known.get(new) is None:
                known[new] = {"device": "cpu", "pin_memory": pin_memory}
                taken = True
        if taken:
            known.pop("cpu_offload_use_pin_memory", None)
        return known
