"""Values for "auto", from the caller of `initialize` or from other keys, and batch sizes. Pure functions."""

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self, TypeVar

from pydantic.fields import FieldInfo

from zstore.errors import ConfigError, UsageError

from .keys import Section, auto_value_type, problem_text, section_of, settings_in, spelled_keys
from .sections import BATCH_KEYS, ConfigSections
from .values import check, show

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class ResolveContext:
    """Facts from the caller of `initialize` that a config may leave unspecified. None means unknown."""

    world_size: int
    """Ranks of the run."""
    hidden_size: int | None = None
    """Width of the model, for the sizes of buckets."""
    native: Collection[str] = ()
    """The 16-bit dtypes, "bf16" and "fp16", that the device supports natively, for "auto"."""
    client_optimizer: bool = False
    """An optimizer was passed, which replaces the config's section."""
    optimizer_name: str = ""
    """Class name of the optimizer that was passed, set only if it needs whole tensors (exchanged between ranks)."""
    client_scheduler: bool = False
    """A scheduler was passed, which replaces the config's section."""
    frozen: bool = False
    """The engine only evaluates: keys about training are ignored, and batch sizes may be missing."""
    auto_values: Mapping[str, Any] = field(default_factory=dict)
    """The values of "auto", by dotted key, as `read_auto_values` returns them."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """`train_batch_size` = `micro_batch_size` x `accumulation_steps` x world size, in samples."""

    train_batch_size: int
    """Samples per step, over all ranks."""
    micro_batch_size: int
    """Samples per forward pass per rank."""
    accumulation_steps: int
    """Micro-batches per step per rank."""

    def with_train_batch_size(self, train_batch_size: int, world_size: int) -> Self:
        """Return sizes for `train_batch_size`, adjusting the accumulation steps. Raises UsageError if that is
        impossible."""
        samples_per_micro_step = self.micro_batch_size * world_size
        if type(train_batch_size) is not int or train_batch_size < 1 or train_batch_size % samples_per_micro_step:
            raise UsageError(
                f"train_batch_size: expected a multiple of {samples_per_micro_step}, which is train_micro_batch_size_per_gpu "
                f"{self.micro_batch_size} x world size {world_size}; got {train_batch_size!r}"
            )
        steps = train_batch_size // samples_per_micro_step
        return replace(self, train_batch_size=train_batch_size, accumulation_steps=steps)


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Return the three batch sizes from the given ones; accumulation is 1 if it is neither given nor derived.

    Raises ValueError if they are inconsistent or do not divide evenly, or (with a suggestion) if none is given.
    """
    if train is None:
        if micro is None:
            raise ValueError(
                'no batch size is given: add "train_micro_batch_size_per_gpu": 1 (samples per forward pass per rank), '
                f'or "train_batch_size": {world_size * (accumulation or 1)} (samples per step over all ranks), or pass '
                'initialize(..., auto={"train_micro_batch_size_per_gpu": 1})'
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
            f"{accumulation} x world size {world_size} = {product}; change one, or omit one"
        )
    return BatchSizes(train_batch_size=train, micro_batch_size=micro, accumulation_steps=accumulation)


def _divide(train: int, given: str, number: int, world_size: int) -> int:
    """Return train / (number x world size). Raises ValueError with the nearest train batch sizes that are divisible."""
    divisor = number * world_size
    quotient, remainder = divmod(train, divisor)
    if remainder or not quotient:
        nearest = " or ".join(str(multiple * divisor) for multiple in (quotient, quotient + 1) if multiple)
        raise ValueError(
            f"train_batch_size {train} is not a multiple of {given} x world size {world_size} = {divisor}; "
            f"nearest valid: {nearest}"
        )
    return quotient


def _batch(settings: ConfigSections, context: ResolveContext) -> BatchSizes:
    """Return the batch sizes of the config, with the caller's values for "auto", or for all three if none is set."""
    if settings.batch_section is not None and not context.frozen:
        sizes = getattr(settings, settings.batch_section).sizes_at(context.world_size)
        return BatchSizes(train_batch_size=sizes[0], micro_batch_size=sizes[1], accumulation_steps=sizes[2])
    written = [getattr(settings, key) for key in BATCH_KEYS]
    from_caller = [context.auto_values.get(key) for key in BATCH_KEYS]
    if all(size in (None, "auto") for size in written[:2]):
        # Missing ones count as "auto" if neither of the first two is a number; accumulation if all are missing.
        written = ["auto", "auto", "auto" if written[:2] == [None, None] and written[2] is None else written[2]]
    size_pairs = zip(written, from_caller, strict=True)
    train, micro, accumulation = (auto_value if size == "auto" else size for size, auto_value in size_pairs)
    try:
        return solve_batch(train, micro, accumulation, context.world_size)
    except ValueError:
        if not context.frozen:
            raise
        return solve_batch(None, micro or 1, accumulation, context.world_size)


def open_keys(settings: ConfigSections) -> dict[str, FieldInfo]:
    """Return the keys that are "auto" and need a value before the engine reads them, by dotted path."""
    autos = [setting for setting in settings_in(settings) if setting.value == "auto"]
    return {setting.key: setting.field for setting in autos if auto_value_type(setting.field) is not None}


def _precision(settings: ConfigSections, context: ResolveContext) -> dict[str, bool]:
    """Return which 16-bit dtype is enabled: among those set to "auto", the first that the device supports natively,
    preferring bf16; none if the config enables the other one."""
    bf16, fp16 = settings.bf16.enabled, settings.fp16.enabled
    if bf16 == "auto":
        bf16 = "bf16" in context.native and fp16 is not True
    if fp16 == "auto":
        fp16 = "fp16" in context.native and not bf16
    return {"bf16.enabled": bool(bf16), "fp16.enabled": bool(fp16)}


def precision_note(
    settings: ConfigSections, chosen: str, native: Collection[str], device: str
) -> tuple[int, str] | None:
    """Return the level and the text of a log line about the config's precision: what "auto" selected and why, or a warning
    about a dtype for which the device ("CPU" or "GPU") has no instructions."""
    switches = {"bf16": settings.bf16.enabled, "fp16": settings.fp16.enabled}
    if True in switches.values():
        if chosen in native:
            return None
        return logging.WARNING, (
            f"config: {chosen}.enabled: this {device} has no fast {chosen} arithmetic, so matrix products are many times "
            f'slower than in fp32; set "{chosen}": {{"enabled": "auto"}} to enable it only where it is fast, or false'
        )
    requested = " or ".join(name for name, switch in switches.items() if switch == "auto")
    reason = f"has no fast {requested} arithmetic" if chosen == "fp32" else f"computes {chosen} natively"
    return (logging.INFO, f'precision: "auto" selects {chosen}, since this {device} {reason}') if requested else None


def placeholder_values(settings: ConfigSections) -> dict[str, Any]:
    """Return 1 for a missing batch size and for each "auto" without a default, standing in for a training script's values, so
    that the other keys of a config can be checked."""
    values: dict[str, Any] = {key: 1 for key, field in open_keys(settings).items() if field.is_required()}
    sizes = (settings.train_batch_size, settings.train_micro_batch_size_per_gpu)
    if all(size in (None, "auto") for size in sizes) and settings.batch_section is None:
        values["train_micro_batch_size_per_gpu"] = 1
    return values


_BUCKETS = {"reduce_bucket_size": 100, "allgather_bucket_size": 100, "stage3_prefetch_bucket_size": 90}
"""Bucket sizes, in hundredths of the hidden size squared."""


def resolve_settings(
    settings: ConfigSections, context: ResolveContext
) -> tuple[ConfigSections, tuple[str, ...], dict[str, Any]]:
    """Return `settings` with each "auto" and the batch sizes filled in: with the caller's value, else one derived from the
    model and other keys, else the key's default.

    Also return the problems, which are keys that cannot be filled in or that conflict (then the settings are
    meaningless), and the keys that got their default.
    """
    if context.client_optimizer or context.frozen:
        settings = settings.model_copy(update={"optimizer": None})
    if context.client_scheduler or context.frozen:
        settings = settings.model_copy(update={"scheduler": None})
    problems: list[str] = []
    values: dict[str, Any] = {}
    try:
        sizes = _batch(settings, context)
        numbers = (sizes.train_batch_size, sizes.micro_batch_size, sizes.accumulation_steps)
        values.update(zip(BATCH_KEYS, numbers, strict=True))
    except ValueError as error:
        problems.append(str(error))
    settings = with_auto_values(settings, context.auto_values)
    values |= _precision(settings, context)
    if values["bf16.enabled"] and values["fp16.enabled"]:
        problems.append(
            'fp16.enabled and bf16.enabled: both are true with the values for "auto"; set one of them to false'
        )
    size, world_size = settings.zero_optimization.zero_hpz_partition_size, context.world_size
    if size > 1 and world_size % size:
        divisors = [str(number) for number in range(2, world_size + 1) if world_size % number == 0]
        advice = f"use {' or '.join(divisors)}, or leave it out" if divisors else "leave it out"
        problems.append(
            f"zero_optimization.zero_hpz_partition_size {size} does not divide the world size {world_size}; {advice}"
        )
    derived, defaults, missing = _fill(settings, context.hidden_size)
    return _with_values(settings, values | derived | defaults), (*problems, *missing), defaults


def with_auto_values(settings: ConfigSections, auto_values: Mapping[str, Any]) -> ConfigSections:
    """Return `settings` with "auto" replaced by `auto_values`, except for batch sizes."""
    keys = open_keys(settings).keys() - BATCH_KEYS
    return _with_values(settings, {key: auto_values[key] for key in keys & auto_values.keys()})


def _fill(settings: ConfigSections, hidden_size: int | None) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return values for the keys that are still "auto": those derived from the model and other keys, and defaults; and an
    error message for each key that has neither."""
    derived: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    missing: list[str] = []
    sizes: dict[str, int] = {}
    if hidden_size is not None:
        sizes = {f"zero_optimization.{key}": hidden_size**2 * share // 100 for key, share in _BUCKETS.items()}
        sizes["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden_size
    optimizer = settings.optimizer
    for key, info in open_keys(settings).items():
        if key in sizes:
            derived[key] = sizes[key]
        elif key == "scheduler.params.warmup_max_lr":
            # With the caller's optimizer: the rate of each group.
            derived[key] = None if optimizer is None else defaults.get("optimizer.params.lr", optimizer.params.lr)
        elif key == "optimizer.params.weight_decay" and optimizer is not None and info.default is None:
            defaults[key] = optimizer.default_weight_decay
        elif key not in (*BATCH_KEYS, "bf16.enabled", "fp16.enabled"):
            if info.is_required():
                missing.append(
                    f'{key}: "auto" has no default; set a number, or pass initialize(..., auto={{"{key}": ...}})'
                )
            else:
                defaults[key] = info.default
    return derived, defaults, missing


def _with_values(section: S, values: Mapping[str, Any]) -> S:
    """Return a copy of `section` with `values` set at their dotted paths."""
    update: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, inner_path = path.partition(".")
        if inner_path:
            inner.setdefault(name, {})[inner_path] = value
        else:
            update[name] = value
    update |= {name: _with_values(getattr(section, name), inner_values) for name, inner_values in inner.items()}
    return section.model_copy(update=update)


_SOURCE = "initialize(auto=...)"


@cache
def _auto_keys() -> Mapping[str, tuple[str, Any]]:
    """Return, by each spelling of a dotted key, the schema's spelling and the type of its values: None for a key that cannot
    be "auto", Section for a section. If a section has several variants, any of them may match."""
    types: dict[str, tuple[str, Any]] = {}
    for written, key, info in spelled_keys(ConfigSections):
        kind = Section if section_of(info) else auto_value_type(info)
        if kind is not None or written not in types:
            types[written] = key, kind
    return types


def read_auto_values(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values in `given` as {dotted key: typed value}.

    Keys are dotted paths in any spelling, or nested as in a config, or both; None means no value. Raises ConfigError
    naming every key that is unknown or cannot be "auto", and every invalid value.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_SOURCE}: expected a dict of config keys and values, got {type(given).__name__}")
    auto_values: dict[str, Any] = {}
    problems: list[str] = []
    for written, value in _flat(given):
        try:
            key, auto_value = _read(written, value)
            if auto_values.setdefault(key, auto_value) != auto_value:
                raise ValueError(f"given twice, as {show(auto_values[key])} and as {show(auto_value)}; keep one")
        except ValueError as error:
            problems.append(f"{written}: {error}")
    if problems:
        raise ConfigError(problem_text(_SOURCE, problems))
    return auto_values


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key as written, value), including the keys in nested sections."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and _auto_keys().get(key, ("", Section))[1] is Section:
            yield from _flat(value, f"{key}.")
        elif value is not None:
            yield key, value


def _read(written: str, value: object) -> tuple[str, Any]:
    """Return (key in the schema's spelling, typed value). Raises ValueError if either is invalid."""
    if written not in (known := _auto_keys()):
        close = difflib.get_close_matches(written, known, n=1, cutoff=0.85)
        raise ValueError(f"unknown key{f'; did you mean {close[0]}?' if close else ''}")
    key, kind = known[written]
    if kind is Section:
        raise ValueError(f"expected an object with keys of that section, got {show(value)}")
    if kind is None:
        raise ValueError('this key cannot be "auto"; set it in the config')
    return key, check(kind, value)
