"""What "auto" stands for, and batch sizes. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .keys import Section, rule_of
from .schema import Settings

S = TypeVar("S", bound=Section)
_WARMUP_MAX = "scheduler.params.warmup_max_lr"


@dataclass(frozen=True, kw_only=True)
class ResolveContext:
    """What the caller of `initialize` knows and a config may leave open. None: not known."""

    world_size: int
    """Ranks of the run."""
    hidden_size: int | None = None
    """Width of the model, for the sizes of buckets."""
    device_supports_bf16: bool = False
    """Whether the device computes in bf16 natively, for "auto"."""
    device_supports_fp16: bool = False
    client_optimizer: bool = False
    """Whether an optimizer was passed: then the config's section is not read."""
    client_scheduler: bool = False
    """Whether a scheduler was passed: then the config's section is not read."""
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_min_lr: float | None = None
    warmup_max_lr: float | None = None
    warmup_num_steps: int | None = None
    total_num_steps: int | None = None
    """Optimizer steps of the whole run, for schedules that end with it."""
    gradient_clipping: float | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """`train_batch_size` = `micro_batch_size` x `accumulation_steps` x world size, in samples."""

    train_batch_size: int
    """Samples of one step, over all ranks."""
    micro_batch_size: int
    """Samples of one forward on one rank."""
    accumulation_steps: int
    """Micro-batches of one step on one rank."""


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Return the three batch sizes from those given; where accumulation is neither given nor derived, it is 1.

    Raises ValueError with the numbers where they contradict or do not divide, and with a proposal where none is given.
    """
    if train is None:
        if micro is None:
            raise ValueError(
                'no batch size is given: add "train_micro_batch_size_per_gpu": 1 (samples of one forward on one rank), '
                f'or "train_batch_size": {world_size * (accumulation or 1)} (samples of one step over all ranks)'
            )
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide(train, f"gradient_accumulation_steps {accumulation}", accumulation, world_size)
    elif accumulation is None:
        accumulation = _divide(train, f"train_micro_batch_size_per_gpu {micro}", micro, world_size)
    product = micro * accumulation * world_size
    if train != product:
        raise ValueError(
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{accumulation} x world size {world_size} = {product}; change one, or leave one out"
        )
    return BatchSizes(train_batch_size=train, micro_batch_size=micro, accumulation_steps=accumulation)


def _divide(train: int, given: str, number: int, world_size: int) -> int:
    """Return train / (number x world size). Raises ValueError naming the nearest train batch sizes that divide."""
    unit = number * world_size
    quotient, rest = divmod(train, unit)
    if rest or not quotient:
        nearest = " or ".join(str(multiple * unit) for multiple in (quotient, quotient + 1) if multiple)
        raise ValueError(
            f"train_batch_size {train} is not a multiple of {given} x world size {world_size} = {unit}; "
            f"the nearest that works: {nearest}"
        )
    return quotient


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(settings: Settings, context: ResolveContext) -> BatchSizes:
    """Return the batch sizes of the config; what it leaves "auto", or all of it if it names none, is the caller's."""
    written = [getattr(settings, key) for key in BATCH_KEYS]
    caller = [context.train_batch_size, context.micro_batch_size, context.gradient_accumulation_steps]
    if written[0] is None and written[1] is None and written[2] in (None, "auto"):
        written = ["auto", "auto", "auto"]
    train, micro, accumulation = (theirs if own == "auto" else own for own, theirs in zip(written, caller, strict=True))
    return solve_batch(train, micro, accumulation, context.world_size)


def open_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths that still say "auto" and must not when the engine reads them."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        rule = rule_of(field)
        if isinstance(value, Section):
            yield from open_keys(value, f"{prefix}{name}.")
        elif value == "auto" and rule is not None and rule.auto:
            yield prefix + name


def _answers(context: ResolveContext) -> dict[str, Any]:
    """Return what each key that may be "auto" stands for; None where the caller does not say."""
    width = context.hidden_size
    given = {
        "gradient_clipping": context.gradient_clipping,
        "scheduler.params.warmup_min_lr": context.warmup_min_lr or 0.0,
        _WARMUP_MAX: context.lr if context.warmup_max_lr is None else context.warmup_max_lr,
        "scheduler.params.warmup_num_steps": context.warmup_num_steps,
        "scheduler.params.total_num_steps": context.total_num_steps,
    }
    params = {f"optimizer.params.{name}": getattr(context, name) for name in ("lr", "betas", "eps", "weight_decay")}
    sizes = {"reduce_bucket_size": 100, "allgather_bucket_size": 100, "stage3_prefetch_bucket_size": 90}
    buckets = {f"zero_optimization.{name}": width and width * width * share // 100 for name, share in sizes.items()}
    return given | params | buckets | {"zero_optimization.stage3_param_persistence_threshold": width and 10 * width}


def _precision(settings: Settings, context: ResolveContext) -> dict[str, bool]:
    """Return which 16-bit type is on: of those that are "auto" the first that the device computes natively, bf16 before
    fp16; none of them where the config demands the other."""
    bf16, fp16 = settings.bf16.enabled, settings.fp16.enabled
    if bf16 == "auto":
        bf16 = context.device_supports_bf16 and fp16 is not True
    if fp16 == "auto":
        fp16 = context.device_supports_fp16 and not bf16
    return {"bf16.enabled": bool(bf16), "fp16.enabled": bool(fp16)}


def resolve_settings(settings: Settings, context: ResolveContext) -> tuple[Settings, list[str]]:
    """Return `settings` with each "auto" and the batch sizes filled in, and what could not be filled in."""
    if context.client_optimizer:
        settings = settings.model_copy(update={"optimizer": None})
    if context.client_scheduler:
        settings = settings.model_copy(update={"scheduler": None})
    problems: list[str] = []
    values: dict[str, Any] = {}
    try:
        sizes = _batch(settings, context)
        numbers = (sizes.train_batch_size, sizes.micro_batch_size, sizes.accumulation_steps)
        values.update(zip(BATCH_KEYS, numbers, strict=True))
    except ValueError as error:
        problems.append(str(error))
    values |= _precision(settings, context)
    if settings.zstore.split_master and not values["bf16.enabled"]:
        problems.append(
            "zstore.split_master: true needs bf16, since it keeps a part of each master as the bf16 weight; set "
            '"bf16": {"enabled": true}, or leave split_master out'
        )
    answers = _answers(context)
    if settings.optimizer is not None and settings.optimizer.params.lr != "auto" and context.warmup_max_lr is None:
        answers[_WARMUP_MAX] = settings.optimizer.params.lr
    for key in open_keys(settings):
        if key in BATCH_KEYS or key in values:
            continue
        if answers[key] is None and not (key == _WARMUP_MAX and context.client_optimizer):
            source = "the model tells no hidden size" if key.startswith("zero_") else "the caller gives no value"
            problems.append(f'{key}: "auto" cannot be resolved, since {source}; write a number')
        values[key] = answers[key]
    return _replaced(settings, values), problems


def _replaced(section: S, values: Mapping[str, Any]) -> S:
    """Return a copy of `section` with the values at these dotted paths."""
    update: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    update |= {name: _replaced(getattr(section, name), below) for name, below in inner.items()}
    return section.model_copy(update=update)
