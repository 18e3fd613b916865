"""TrainingArguments and the config: answers to "auto", contradictions, and arguments that zstore does not serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers.optimization import AdafactorSchedule
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available

from zstore.engine.adapters.accelerate.arguments import ask_for_precision, mismatch_text, section, written
from zstore.engine.api.engine import Engine
from zstore.engine.config.config import CONFIG_VARIABLE, load_config
from zstore.engine.params.record import PRECISIONS
from zstore.engine.runtime.messages import show_messages
from zstore.errors import ConfigError, UsageError

_log = logging.getLogger("zstore")

_ELEMENT_WISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_SCHEDULE_FREE = ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd")
_WHOLE = ("adafactor", "adamw_anyprecision", "stable_adamw", *_SCHEDULE_FREE)
"""Values of `optim`: optimizers that step each element by itself, and those that need whole tensors."""
_NEVER = {
    "grokadamw": "it keeps its state in its parameter groups, by parameter, where a checkpoint cannot keep it",
    **dict.fromkeys(("lomo", "adalomo"), "it changes parameters in a backward of its own, in place of the engine's"),
}
"""Values of `optim` that are not served at any stage, and why."""
_NAMES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x world size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys of a config that must say what an argument says, or "auto"."""


def answers_of(args: Any, max_steps: int | None = None) -> dict[str, Any]:
    """Return the answers to "auto" by dotted key; those that depend on the length of training if `max_steps` is given."""
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    answers = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * args.world_size,
        "gradient_clipping": float(args.max_grad_norm or 0.0),
        "optimizer.params.lr": float(args.learning_rate),
        "optimizer.params.betas": (args.adam_beta1, args.adam_beta2),
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": float(args.learning_rate),
        **precision_answers(args),
    }
    if max_steps is not None:
        answers["scheduler.params.total_num_steps"] = max_steps
        answers["scheduler.params.warmup_num_steps"] = max(1, args.get_warmup_steps(max_steps))
    return answers


def precision_answers(args: Any, precision: str | None = None) -> dict[str, bool]:
    """Return the answers about the type in which an engine computes: `precision`, or that of training."""
    precision = precision or ("fp16" if args.fp16 else "bf16" if args.bf16 else None)
    return {f"{kind}.enabled": kind == precision for kind in ("fp16", "bf16")}


def count_micro_batches(engine: Engine, samples: int) -> None:
    """Have the engine count micro-batches of so many samples, which `auto_find_batch_size` found."""
    training = engine.training_state
    batch = training.accumulation.batch
    total = samples * batch.accumulation_steps * training.world.world_size
    training.resize(replace(batch, micro_batch_size=samples, train_batch_size=total))


def evaluation_precision(args: Any) -> str | None:
    """Return the type of `fp16_full_eval` or `bf16_full_eval`, which is for evaluation alone; None without them."""
    return "fp16" if args.fp16_full_eval else "bf16" if args.bf16_full_eval else None


@contextmanager
def evaluating(args: Any, engine: Engine | None, precision: str | None) -> Iterator[None]:
    """Evaluate in a type in the block: under autocast if the engine computes in fp32. The arguments are hidden from Trainer,
    which casts the model itself and leaves the trained parameters in 16 bits."""
    asked = args.fp16_full_eval, args.bf16_full_eval
    args.fp16_full_eval = args.bf16_full_eval = False
    casts = precision is not None and engine is not None and engine.training_state.config.precision == "fp32"
    try:
        # Without autocast's cache, which would keep a whole model in 16 bits.
        with torch.autocast(args.device.type, PRECISIONS[precision or "bf16"], enabled=casts, cache_enabled=False):
            yield
    finally:
        args.fp16_full_eval, args.bf16_full_eval = asked


def default_config(args: Any) -> dict[str, Any]:
    """Return the config of a Trainer that was given an empty one or none: all values are the Trainer's, in memory."""
    if args.process_index == 0:
        show_messages()
        _log.info(
            'nothing is configured: stage 0, in memory. To offload, pass the Trainer zstore_config={"zero_optimization": '
            '{"stage": 3, "offload_optimizer": %s, "offload_param": %s}} or a JSON file\'s path, also in the variable %s',
            *(['{"device": "nvme", "nvme_path": FOLDER}'] * 2),
            CONFIG_VARIABLE,
        )
    return {"gradient_clipping": "auto"}


def complete_config(raw: dict[str, Any], source: str, args: Any) -> None:
    """Leave missing keys of the config to the Trainer."""
    ask_for_precision(raw)
    _take_activation_offloading(raw, source, args)
    raw.setdefault("steps_per_print", 0)  # the Trainer prints its own lines
    if "gradient_clipping" not in raw:
        raw["gradient_clipping"] = "auto"
        if args.max_grad_norm != 1.0 and args.process_index == 0:
            _log.warning(
                "the config has no gradient_clipping, so max_grad_norm=%g is used (0: none); DeepSpeed would clip to 1, its "
                "default: for that set max_grad_norm=1",
                args.max_grad_norm or 0.0,
            )


def _take_activation_offloading(raw: dict[str, Any], source: str, args: Any) -> None:
    """Turn on the engine's version of trl's `activation_offloading`. Raises ConfigError if the config says otherwise."""
    if not getattr(args, "activation_offloading", False):
        return
    where = section(raw, "zstore").setdefault("activations", "host")
    if where == "device":
        raise ConfigError(mismatch_text(source, ["zstore.activations is 'device', but activation_offloading is True"]))
    # trl's own copies parameters too, behind a stream, which stage 3 frees meanwhile; without a GPU it fails.
    args.activation_offloading = False
    if args.process_index == 0:
        _log.info('activation_offloading: the engine does it, by "zstore": {"activations": "%s"}', where)


def check_matches(raw: Mapping[str, Any], source: str, args: Any) -> None:
    """Raise ConfigError that names each value of the config that contradicts an argument."""
    wanted = answers_of(args)
    differing = [
        f"{key} is {found!r}, but {name} is {wanted[key]!r}"
        for key, name in _NAMES.items()
        if (found := written(raw, key)) not in (None, "auto") and not _equal(found, wanted[key])
    ]
    if differing:
        raise ConfigError(mismatch_text(source, differing))
    overlap = written(raw, "zstore.step_overlap")
    if args.enable_jit_checkpoint and overlap == "backward":
        raise ConfigError(
            f'{source}: "zstore.step_overlap": "{overlap}" changes the state within the backward, but enable_jit_checkpoint '
            'saves between backward and step: set it to "forward" or "none"'
        )


def check_optim(raw: Mapping[str, Any], source: str, args: Any) -> None:
    """Raise UsageError if `optim` names an optimizer that cannot step sharded or offloaded parameters, or whose state
    cannot be stored."""
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _ELEMENT_WISE or written(raw, "optimizer") is not None:
        return
    config = load_config(raw, name=source)
    offloads = any(each.device != "none" for each in (config.offload_optimizer, config.offload_param))
    if optim in _WHOLE and config.stage == 0 and not offloads:
        return
    if optim in _WHOLE:
        place = "offloads" if offloads else f"shards at stage {config.stage}"
        reason = f"it needs whole tensors, which the engine {place}: use it at stage 0 without offload"
    else:
        reason = _NEVER.get(optim, "the engine does not know what a checkpoint has to keep of its state")
    raise UsageError(
        f'TrainingArguments(optim="{optim}"): {reason}; or choose one of {", ".join(_ELEMENT_WISE)}, or name one in the '
        'config\'s "optimizer" section (Adafactor, Lion, Lamb and Muon too)'
    )


class _OwnRates(AdafactorSchedule):  # type: ignore[misc]
    """transformers' schedule of the rates that Adafactor chooses, which shows those of the step before: by itself it does so
    only while there are gradients, which are gone when the engine's step is over."""

    def get_lr(self) -> list[Any]:
        """Return the rate of each group, or the first one before there is a step."""
        firsts = [(group, self.optimizer.state.get(group["params"][0])) for group in self.optimizer.param_groups]
        return [self.optimizer._get_lr(group, state) for group, state in firsts if state] or self.base_lrs


def show_own_rates(schedule: Any) -> None:
    """Let transformers' schedule of Adafactor's rates show them after the engine's steps too. See `_OwnRates`."""
    if type(schedule) is AdafactorSchedule:
        schedule.__class__ = _OwnRates


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, tuple):
        return isinstance(one, list | tuple) and tuple(one) == other
    return bool(one == other)


def keeps_global_batch(raw: Mapping[str, Any]) -> bool:
    """Return whether the config leaves open how many micro-batches make up a step, so that they may follow the world
    size."""
    return all(written(raw, key) in (None, "auto") for key in ("gradient_accumulation_steps", "train_batch_size"))


def keep_global_batch(args: Any, kept: Mapping[str, Any], *, may_accumulate: bool) -> None:
    """Accumulate so many micro-batches that a step has as many samples as before, at another world size."""
    before, micro = int(kept["train_batch_size"]), args.per_device_train_batch_size * args.world_size
    now = micro * args.gradient_accumulation_steps
    if before == now:
        return
    fits = before % micro == 0 and kept["world_size"] != args.world_size
    if fits and may_accumulate:
        args.gradient_accumulation_steps = before // micro
        text = (
            "gradient_accumulation_steps is %d from here on, so that a step has %d samples as before, at world size %d"
        )
        if args.process_index == 0:
            _log.warning(text, args.gradient_accumulation_steps, before, args.world_size)
        return
    text = "a step had %d samples in the checkpoint, and has %d now: data and schedule go on from another place"
    if args.process_index == 0:
        _log.warning(text, before, now)


def writes_weights(raw: dict[str, Any]) -> bool:
    """Return whether each checkpoint is to have the weights for other software: yes, unless the config says no."""
    return section(raw, "zero_optimization").get("stage3_gather_16bit_weights_on_model_save", True) is not False


def check_arguments(args: Any) -> None:
    """Raise UsageError, with the way out, for arguments that zstore does not serve."""
    for problem in _problems(args):
        raise UsageError(problem)


def _problems(args: Any) -> Iterator[str]:
    if args.deepspeed is not None:
        yield "TrainingArguments(deepspeed=...) starts DeepSpeed itself: leave it out, and pass the same JSON as zstore_config"
    if args.fsdp:
        yield "TrainingArguments(fsdp=...): leave it out; zero_optimization.stage of the config shards the model"
    if getattr(args, "parallelism_config", None) is not None:
        yield "TrainingArguments(parallelism_config=...): zstore is data parallel alone; leave it out"
    if args.save_on_each_node:
        yield "TrainingArguments(save_on_each_node=True): all machines write into one shared output_dir; leave it out"
    if args.save_only_model and args.load_best_model_at_end:
        yield "TrainingArguments: load_best_model_at_end needs whole checkpoints; set save_only_model=False"
    if is_torch_xla_available() or is_sagemaker_mp_enabled():
        yield "zstore trains on GPUs and CPUs, not on TPUs or with SageMaker's model parallelism"
    if args.world_size == 1 < int(os.environ.get("WORLD_SIZE", "1")):
        yield (
            "this process is one of several, but TrainingArguments found no process group, since there is no GPU: pass "
            "use_cpu=True to them"
        )
    if args.n_gpu > 1:
        number = torch.cuda.device_count()
        yield (
            f"this process sees {number} GPUs, which Trainer would use by DataParallel: start a process for each with "
            f"`torchrun --nproc-per-node {number}`, or hide the others with CUDA_VISIBLE_DEVICES=0"
        )
