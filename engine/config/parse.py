"""From what was written to `Settings`: every problem is found and named by its key, and every key that does not act."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .keys import Section, Status, about, known_keys, type_of
from .optimizers import AdamParams
from .schema import BATCH_KEYS, Settings
from .values import expected, refusal, show

_EVERY_KEY = tuple(path for path, _ in known_keys(Settings))

_CLOSE = 0.72
"""How close a key of the same section must be to be guessed, as difflib counts."""
_CLOSE_ELSEWHERE = 0.85
"""How close a key of another section must be."""
_MOST_HOMES = 2
"""Sections that are named as the home of a key: one like "enabled" has too many to mean any."""
_MOST_KEYS = 8
"""Keys of a section that are listed."""
_TELLING = 5
"""Letters without which a part of a name says little."""


@dataclass(frozen=True)
class Notice:
    """A key that was set and does not act, or not as it could be read."""

    key: str
    """Dotted path, as written."""
    message: str
    """What happens instead, or why nothing is left to do."""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class Problem:
    """What is wrong, and the keys that it is about."""

    keys: tuple[str, ...]
    what: str

    @property
    def message(self) -> str:
        """What is wrong, after the names of the keys."""
        named = " and ".join(filter(None, self.keys))
        return f"{named}: {self.what}" if named else self.what


def parse(raw: Mapping[str, Any]) -> tuple[Settings, list[Problem], list[Notice]]:
    """Return settings, problems and notices of `raw`, all of them; with problems, the settings mean nothing."""
    problems: list[Problem] = []
    sound, removed = dict(raw), set[tuple[str, ...]]()
    while True:
        try:
            settings = Settings.model_validate(sound)
            break
        except ValidationError as failure:
            # What is wrong is taken out and the rest is read again, so that checks across keys are made too.
            seen, before = sound, frozenset(removed)
            for error in failure.errors(include_url=False):
                path, problem = _problem(seen, error)
                wrong = path
                if _is_missing(error, path):  # then its section goes, or what that belongs to
                    wrong = path[:-1]
                    while wrong in before:
                        wrong = wrong[:-1]
                # Else it was taken out, alone or with its section, or is refused by the other members of a union too.
                if path not in removed and not any(path[:depth] in before for depth in range(1, len(path))):
                    problems.append(problem)
                removed |= {path, wrong}
                sound = _without(sound, wrong)
            if sound == seen:  # what is wrong was written as another key, in an older form
                sound = _without(sound, path[:1])
    broken = {key for problem in problems for key in problem.keys}
    for section in ("optimizer", "scheduler"):
        if f"{section}.type" in broken:  # Its params belong to a type that is not offered.
            problems = [problem for problem in problems if not problem.keys[0].startswith(f"{section}.params")]
    found, notices = _review(settings, sound)
    notices += _idle(settings)
    problems += [problem for problem in [*found, *_contradictions(settings)] if not broken & set(problem.keys)]
    return settings, problems, notices


def _problem(raw: Any, error: ErrorDetails) -> tuple[tuple[str, ...], Problem]:
    """Return the path of the key that pydantic's `error` is about, as the schema spells it, and what it means, with the
    key as it was written."""
    section: type[Section] | None = Settings
    field: FieldInfo | None = None
    variants: Mapping[str, type[Section]] = {}
    path: list[str] = []
    written: list[str] = []
    for name in map(str, error["loc"]):
        if section is None:  # inside a value
            break
        holder = section
        path.append(name)
        written.append(_spelled(raw, section, name))
        field = section.model_fields.get(name)
        section = section.section_at(name, raw)
        raw = raw.get(written[-1]) if isinstance(raw, Mapping) else None
        if section is not None:
            variants = holder.variants.get(name, {})
    key = ".".join(written)
    if error["type"] == "extra_forbidden":
        others = [kind for kind, other in variants.items() if path[-1] in other.model_fields]
        here = f" here ({' and '.join(others)} {'have' if others[1:] else 'has'} it)" if others else ""
        message = f"unknown key{here}{nearest_key(holder, path)}"
    elif field is None or section is not None:
        message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    elif _is_missing(error, path):
        message = f"the key is missing; expected {expected(type_of(field))}"
    else:
        message = refusal(type_of(field), error["input"] if raw is None else raw, error)
    return tuple(path), Problem((key,), message)


def _is_missing(error: ErrorDetails, path: Sequence[str]) -> bool:
    """Return whether `error` is about a key that is not there, and not about an item of a value."""
    return error["type"] == "missing" and len(error["loc"]) == len(path)


def nearest_key(section: type[Section], path: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown key of `section`, the last part of `path`: the known key that is
    meant, where one is really close, else the keys of the section that act, where they are few."""
    prefix = "".join(f"{part}." for part in path[:-1])
    name = path[-1]
    homes = list(dict.fromkeys(key for key in _EVERY_KEY if key.rpartition(".")[2] == name and key != prefix + name))
    if 0 < len(homes) <= _MOST_HOMES:
        return f"; it belongs {' or '.join(_home(key) for key in homes)}"
    here = [*section.model_fields, *section.renames]
    close = _with_words_of(name, section) or difflib.get_close_matches(name, here, n=1, cutoff=_CLOSE)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    names = {key.rpartition(".")[2]: key for key in reversed(_EVERY_KEY)}
    far = difflib.get_close_matches(name, names.keys() - {name}, n=1, cutoff=_CLOSE_ELSEWHERE)
    if far:
        return f"; did you mean {names[far[0]]}?"
    keys = [key for key, field in section.model_fields.items() if about(field)[0] is Status.BUILT]
    return f"; the keys there are {', '.join(keys)}" if len(keys) <= _MOST_KEYS else ""


def _with_words_of(name: str, section: type[Section]) -> list[str]:
    """Return the one key of `section` that has all words of `name`; nothing where several do, or where that says
    little."""
    words = set(name.lower().split("_"))
    spellings = {
        spelled: section.renames.get(spelled, spelled) for spelled in (*section.model_fields, *section.renames)
    }
    found = {key for spelled, key in spellings.items() if words <= set(spelled.split("_"))}
    return list(found) if len(found) == 1 and len(name) >= _TELLING else []


def _home(key: str) -> str:
    """Return where a key stands, for a sentence."""
    section = key.rpartition(".")[0]
    return f"in {section}" if section else "at the top of the config"


def _spelled(raw: Any, section: type[Section], name: str) -> str:
    """Return how `raw` spells the key `name` of `section`."""
    if not isinstance(raw, Mapping) or raw.get(name) is not None:
        return name
    return next((other for other, target in section.renames.items() if target == name and other in raw), name)


def _without(raw: Any, path: Sequence[str], section: type[Section] | None = Settings) -> Any:
    """Return a copy of `raw` without the key at `path`, however spelled."""
    if not path or section is None or not isinstance(raw, Mapping):
        return {}
    name, *rest = path
    names = {name, *(other for other, target in section.renames.items() if target == name)}
    copy = {other: value for other, value in raw.items() if str(other) not in names}
    spelled = _spelled(raw, section, name)
    if rest and spelled in raw:
        copy[spelled] = _without(raw[spelled], rest, section.section_at(name, raw))
    return copy


def _review(section: Section, raw: Any, prefix: str = "") -> tuple[list[Problem], list[Notice]]:
    """Return the refused keys and the ones that do not act, among those set in `section` and what lies in it."""
    problems: list[Problem] = []
    notices: list[Notice] = []
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set or (section.is_off and name != section.switch):
            continue
        value = getattr(section, name)
        spelled = _spelled(raw, type(section), name)
        key = prefix + spelled
        if isinstance(value, Section):
            inner = _review(value, raw.get(spelled) if isinstance(raw, Mapping) else None, f"{key}.")
            problems += inner[0]
            notices += inner[1]
            continue
        status, why = about(field)
        asks = value != field.default
        off_switch = name == section.switch and section.is_off
        if status is Status.REFUSED and asks:
            problems.append(Problem((key,), f"{show(value)} is not supported: {why}"))
        elif status in (Status.NOT_BUILT, Status.NO_EFFECT) and asks and not off_switch:
            notices.append(Notice(key, f"{status.value}: {why}"))
    return problems, notices


def _idle(settings: Settings) -> Iterator[Notice]:
    """Yield the keys that act in general, but not with the other keys of this config."""
    zero, own, optimizer = settings.zero_optimization, settings.zstore, settings.optimizer
    if zero.stage != 3 and "stage3_param_persistence_threshold" in zero.model_fields_set:
        yield Notice(
            "zero_optimization.stage3_param_persistence_threshold",
            f"no effect: parameters are sharded at stage 3 only, and the stage is {zero.stage}",
        )
    if zero.stage != 3 and zero.offload_param.device != "none":
        yield Notice(
            "zero_optimization.offload_param",
            "not built: parameters are offloaded at stage 3 only. At stage "
            f'{zero.stage} they stay whole on the device; write "stage": 3 to offload them',
        )
    yield from _idle_quantization(settings)
    if zero.offload_optimizer.device == "cpu" and zero.offload_optimizer.nvme_path is not None:
        yield Notice("zero_optimization.offload_optimizer.nvme_path", 'no effect: the device is "cpu"')
    if own.activations != "disk" and own.activations_path is not None:
        yield Notice("zstore.activations_path", 'no effect: zstore.activations is not "disk"')
    if own.durability != "step" and own.durability_path is not None:
        yield Notice("zstore.durability_path", 'no effect: zstore.durability is not "step"')
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if getattr(settings, key) and settings.steps_per_print == 0:
            yield Notice(key, "no effect: its line comes with those of progress, and steps_per_print is 0")
    params = None if optimizer is None else optimizer.params
    if (
        optimizer is not None
        and optimizer.type == "AdamW"
        and isinstance(params, AdamParams)
        and not params.adam_w_mode
    ):
        message = 'no effect: AdamW always decouples weight decay, as in DeepSpeed; write type "Adam" for the other'
        yield Notice("optimizer.params.adam_w_mode", message)
    if settings.elasticity.enabled and settings.elasticity.ignore_non_elastic_batch_info:
        for key in BATCH_KEYS:
            if getattr(settings, key) not in (None, "auto"):
                yield Notice(key, "no effect: elasticity gives the batch sizes")
    if settings.autotuning.enabled:
        yield Notice(
            "autotuning", "acts in `zstore tune --config FILE` only; this run trains with the config as it is written"
        )


def _idle_quantization(settings: Settings) -> Iterator[Notice]:
    """Yield the keys of ZeRO++ that do nothing at this stage."""
    zero = settings.zero_optimization
    if zero.zero_quantized_weights and zero.stage != 3:
        yield Notice(
            "zero_optimization.zero_quantized_weights",
            f"no effect: parameters are gathered for each use at stage 3 only, and the stage is {zero.stage}; what an update "
            "changed is gathered in its own type",
        )
    if zero.zero_quantized_gradients and zero.stage < 2:
        yield Notice(
            "zero_optimization.zero_quantized_gradients",
            f"no effect: gradients are sharded at stages 2 and 3, and the stage is {zero.stage}",
        )
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        yield Notice(
            "zero_optimization.zeropp_loco_param", "no effect: zero_optimization.zero_quantized_gradients is not set"
        )
    if settings.zstore.quantized_gradient_bits != 4 and not zero.zero_quantized_gradients:
        yield Notice(
            "zstore.quantized_gradient_bits", "no effect: zero_optimization.zero_quantized_gradients is not set"
        )


def _contradictions(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong between keys that are each right by themselves."""
    zero, own, optimizer = settings.zero_optimization, settings.zstore, settings.optimizer
    if settings.fp16.enabled is True and settings.bf16.enabled is True:
        yield Problem(("fp16.enabled", "bf16.enabled"), "both are true; set one of them to false")
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        key = f"zero_optimization.{name}"
        ignored = offload is zero.offload_param and zero.stage != 3
        if offload.device == "nvme" and offload.nvme_path is None and not ignored:
            message = 'the device is "nvme"; give the absolute path of a folder on the drive'
            yield Problem((f"{key}.nvme_path", f"{key}.device"), message)
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        message = f'"{zero.offload_optimizer.device}" needs stage 1, 2 or 3; got stage 0'
        yield Problem(("zero_optimization.offload_optimizer.device", "zero_optimization.stage"), message)
    nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none")
    if own.durability == "step" and own.durability_path is None and not nvme:
        message = '"step" needs a folder for its snapshots, and nothing is on a drive: give the absolute path of one'
        yield Problem(("zstore.durability", "zstore.durability_path"), message)
    if own.activations == "disk" and own.activations_path is None and not nvme:
        message = '"disk" needs a folder, and nothing else is on a drive: give the absolute path of one'
        yield Problem(("zstore.activations", "zstore.activations_path"), message)
    checkpointing = settings.activation_checkpointing
    if checkpointing.contiguous_memory_optimization and not (
        checkpointing.partition_activations and checkpointing.number_checkpoints
    ):
        message = "true needs partition_activations and number_checkpoints, the places of its buffers; set both"
        yield Problem(("activation_checkpointing.contiguous_memory_optimization",), message)
    if own.durability_path is not None and len(own.durability_path) > 1:
        message = f"expected one folder, got {len(own.durability_path)}: a snapshot is in one place"
        yield Problem(("zstore.durability_path",), message)
    if settings.checkpoint.use_node_local_storage:
        yield from _local_storage(settings)
    yield from _elasticity(settings)
    asked = {
        "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
        "optimizer.params.fp32_optimizer_states": optimizer is not None and not optimizer.params.fp32_optimizer_states,
    }
    for key in (key for key, value in asked.items() if value and own.moments not in (None, "bf16")):
        yield Problem((key, "zstore.moments"), f'one asks for moments in bf16, one for "{own.moments}"; keep one')
    if settings.curriculum_learning.enabled:
        for key, what in settings.curriculum_learning.problems():
            yield Problem((f"curriculum_learning.{key}",), what)
    for key, what in settings.data_efficiency.problems():
        yield Problem((f"data_efficiency.{key}",), what)
    threads, aio = own.io_threads, settings.aio
    if threads is not None and "thread_count" in aio.model_fields_set and threads != aio.thread_count:
        message = f"these are the same setting, but one is {threads} and one {aio.thread_count}; keep one"
        yield Problem(("zstore.io_threads", "aio.thread_count"), message)


def _local_storage(settings: Settings) -> Iterator[Problem]:
    zero, key = settings.zero_optimization, "checkpoint.use_node_local_storage"
    if zero.stage == 0 or zero.mics_shard_size > 0:
        other = "zero_optimization.stage" if zero.stage == 0 else "zero_optimization.mics_shard_size"
        message = (
            "each rank loads what ranks of other machines saved; use stage 1, 2 or 3 over all ranks, or a shared folder"
        )
        yield Problem((key, other), message)
    if zero.stage3_gather_16bit_weights_on_model_save:
        message = "no machine has all weights; leave one of them out, and gather the weights with `zstore consolidate`"
        yield Problem((key, "zero_optimization.stage3_gather_16bit_weights_on_model_save"), message)


def _elasticity(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with a section `elasticity` that is enabled, by itself and with the batch sizes beside it."""
    section = settings.elasticity
    if not section.enabled:
        return
    missing = [key for key in ("max_train_batch_size", "micro_batch_sizes") if getattr(section, key) is None]
    for key in missing:
        kind = expected(type_of(type(section).model_fields[key]))
        yield Problem((f"elasticity.{key}",), f"the key is missing, and elasticity is enabled; expected {kind}")
    beside = [key for key in BATCH_KEYS if getattr(settings, key) not in (None, "auto")]
    if beside and not section.ignore_non_elastic_batch_info:
        message = (
            "elasticity gives the batch sizes; remove the key, or write "
            '"ignore_non_elastic_batch_info": true into the section elasticity'
        )
        for key in beside:
            yield Problem((key,), message)
    if not missing:
        try:
            section.batch()
        except ValueError as error:
            yield Problem(("elasticity",), str(error))
