"""Rules across keys: those that have no effect beside the others of a config, and those that contradict."""

from collections.abc import Iterator

from .keys import ConfigProblem, Notice, Section, stages_of
from .optimizers import AdamParams
from .schema import ConfigSections


def idle_keys(settings: ConfigSections) -> Iterator[Notice]:
    """Yield the keys that act in general, but not with the other keys of this config."""
    zero, own, optimizer = settings.zero_optimization, settings.zstore, settings.optimizer
    yield from _of_other_stages(zero, zero.stage, "zero_optimization.")
    if zero.stage != 3 and zero.offload_param.device != "none":
        yield Notice(
            "zero_optimization.offload_param",
            "not built: parameters are offloaded at stage 3 only. At stage "
            f'{zero.stage} they stay whole on the device; write "stage": 3 to offload them',
        )
    if own.quantized_gradient_bits != 4 and not zero.zero_quantized_gradients:
        yield Notice(
            "zstore.quantized_gradient_bits", "no effect: zero_optimization.zero_quantized_gradients is not set"
        )
    if zero.offload_optimizer.device == "cpu" and zero.offload_optimizer.nvme_path is not None:
        yield Notice("zero_optimization.offload_optimizer.nvme_path", 'no effect: the device is "cpu"')
    if own.activations != "disk" and own.activations_path is not None:
        yield Notice("zstore.activations_path", 'no effect: zstore.activations is not "disk"')
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if getattr(settings, key) and settings.steps_per_print == 0:
            yield Notice(key, "no effect: its line comes with those of progress, and steps_per_print is 0")
    params = optimizer.params if optimizer is not None and optimizer.type == "AdamW" else None
    if isinstance(params, AdamParams) and not params.adam_w_mode:
        message = 'no effect: AdamW always decouples weight decay, as in DeepSpeed; write type "Adam" for the other'
        yield Notice("optimizer.params.adam_w_mode", message)
    for _, section in settings.sections_on():
        yield from section.notices(settings)


def _of_other_stages(section: Section, stage: int, prefix: str) -> Iterator[Notice]:
    """Yield the keys that act at other stages than this."""
    for name, field in type(section).model_fields.items():
        value, stages = getattr(section, name), stages_of(field)
        if name not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from _of_other_stages(value, stage, f"{prefix}{name}.")
        elif stages and stage not in stages and value != field.default:
            what = (
                "parameters are sharded at stage 3 only"
                if stages == [3]
                else f"it acts at stages {' and '.join(', '.join(map(str, stages)).rsplit(', ', 1))}"
            )
            yield Notice(f"{prefix}{name}", f"no effect: {what}, and the stage is {stage}")


def contradictions(settings: ConfigSections) -> Iterator[ConfigProblem]:
    """Yield the contradictions between keys that are each right by themselves."""
    if settings.fp16.enabled is True and settings.bf16.enabled is True:
        yield ConfigProblem(("fp16.enabled", "bf16.enabled"), "both are true; set one of them to false")
    yield from _offload(settings)
    yield from _activations(settings)
    for _, section in settings.sections_on():
        yield from section.contradictions(settings)
    yield from _moments(settings)


def _offload(settings: ConfigSections) -> Iterator[ConfigProblem]:
    zero = settings.zero_optimization
    if zero.zero_hpz_partition_size > 1 and zero.stage < 3:
        message = f"it needs stage 3, got stage {zero.stage}, where every rank has all parameters; set stage 3, or leave it out"
        yield ConfigProblem(("zero_optimization.zero_hpz_partition_size", "zero_optimization.stage"), message)
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        key = f"zero_optimization.{name}"
        ignored = offload is zero.offload_param and zero.stage != 3
        if offload.device == "nvme" and offload.nvme_path is None and not ignored:
            message = 'the device is "nvme"; give the path of a folder on the drive'
            yield ConfigProblem((f"{key}.nvme_path", f"{key}.device"), message)
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        message = f'"{zero.offload_optimizer.device}" needs stage 1, 2 or 3; got stage 0'
        yield ConfigProblem(("zero_optimization.offload_optimizer.device", "zero_optimization.stage"), message)


def _activations(settings: ConfigSections) -> Iterator[ConfigProblem]:
    """Yield the errors of settings that use the drives of offloaded state, unless they have a folder of their own."""
    zero, own = settings.zero_optimization, settings.zstore
    nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none")
    if own.activations == "disk" and own.activations_path is None and not nvme:
        message = '"disk" needs a folder, and nothing else is on a drive: give the absolute path of one'
        yield ConfigProblem(("zstore.activations", "zstore.activations_path"), message)


def _moments(settings: ConfigSections) -> Iterator[ConfigProblem]:
    own, optimizer = settings.zstore, settings.optimizer
    asked = {
        "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
        "optimizer.params.fp32_optimizer_states": optimizer is not None and not optimizer.params.fp32_optimizer_states,
    }
    for key in (key for key, value in asked.items() if value and own.moments not in (None, "bf16")):
        yield ConfigProblem((key, "zstore.moments"), f'one asks for moments in bf16, one for "{own.moments}"; keep one')
