"""What is tuned for: the config, the model or script, and the ranks."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zstore.engine.config.autotuning import AutotuningSection
from zstore.engine.config.config import Config, load_config, read_config
from zstore.engine.config.resolve import ResolveContext, stand_ins
from zstore.engine.plan.rates import MatmulRates
from zstore.errors import ConfigError, UsageError

from ..plan.job import Job as PlanJob
from ..plan.job import make_job
from ..plan.machine import own_gpus, own_rates
from ..plan.options import PlanOptions
from ..run.job import Job
from ..run.options import RunOptions
from ..run.plan import make_plan
from .options import TuneOptions
from .space import Batch

_MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is tuned for."""

    options: TuneOptions
    base: dict[str, Any]
    """The config to start from, as JSON."""
    section: AutotuningSection
    batch: Batch
    num_ranks: int
    context: ResolveContext
    """What this machine answers."""
    plan_job: PlanJob | None
    """What the plan is made for; None: the shape of the script's model is not known."""
    nvme_path: str | None
    """Where to offload to a drive; None: offload to a drive is not tried."""
    space: tuple[int, str, str]
    """The base's stage, and tiers of optimizer state and parameters."""
    on_gpu: bool
    """Whether ranks have GPUs."""

    def digest(self, config: Mapping[str, Any]) -> str:
        """Return a short name of what a trial of `config` runs: one that was run need not be run again."""
        options = self.options
        told = [
            config,
            options.script,
            options.model,
            str(options.data),
            options.seq_len,
            self.num_ranks,
            [options.as_deepspeed, options.module],
            [self.section.start_profile_step, self.section.end_profile_step],
        ]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]

    def job(self, config_path: Path, config: Mapping[str, Any]) -> Job:
        """Return the ranks of a trial with the config in `config_path`."""
        options = self.options
        if options.script:
            script, *words = options.script
            words = replaced_config(words, options.config, config_path)
            words = mapped(words, config, self.section.arg_mappings or {})
            asked = RunOptions(
                script=script,
                args=words,
                nproc=self.num_ranks,
                as_deepspeed=options.as_deepspeed,
                module=options.module,
                standalone=True,
                shutdown_timeout=0,
            )
            return make_plan(asked, os.environ, lambda: 0).job
        words = ["--config", str(config_path), "--model", str(options.model), "--seq-len", str(options.seq_len)]
        words += ["--steps", str(self.section.end_profile_step)]
        words += [] if options.data is None else ["--data", str(options.data)]
        command = (sys.executable, "-u", "-m", "zstore", "train", *words)
        return Job(command=command, num_ranks=self.num_ranks, shutdown_timeout_s=0)


def make_task(options: TuneOptions) -> Task:
    """Return the task that the command line gives. Raises ConfigError and UsageError for what cannot be run."""
    base = read_config(options.config)
    loaded = load_config(base, name=str(options.config))
    section = loaded.settings.autotuning
    if section.end_profile_step < section.start_profile_step:
        raise ConfigError(
            f"{options.config}: autotuning.end_profile_step: expected at least start_profile_step "
            f"{section.start_profile_step}, got {section.end_profile_step}"
        )
    if options.script:
        replaced_config(options.script[1:], options.config, options.config)
    gpus = own_gpus()[0]
    num_ranks = options.nproc or max(1, gpus)
    rates = own_rates(gpus, is_this_machine=True)
    context = _context(loaded, num_ranks, rates)
    resolved = loaded.resolve(context)
    if loaded.settings.elasticity.enabled or _MICRO_BATCH not in context.answers:
        samples = resolved.batch.micro_batch_size * resolved.batch.accumulation_steps
    else:
        samples = None
    batch = Batch(
        samples_per_rank=samples,
        micro_batch=resolved.batch.micro_batch_size,
        accumulation=resolved.batch.accumulation_steps,
        is_elastic=loaded.settings.elasticity.enabled,
    )
    nvme = options.nvme_path or next(
        iter((*resolved.offload_optimizer.nvme_paths, *resolved.offload_param.nvme_paths)), None
    )
    return Task(
        options=options,
        base=base,
        section=section,
        batch=batch,
        num_ranks=num_ranks,
        context=context,
        plan_job=_plan_job(options, section, num_ranks, gpus),
        nvme_path=None if nvme is None else str(nvme.absolute()),
        space=(resolved.stage, resolved.offload_optimizer.device, resolved.offload_param.device),
        on_gpu=gpus > 0,
    )


def _context(config: Config, num_ranks: int, rates: MatmulRates | None) -> ResolveContext:
    native = () if rates is None else rates.native
    return ResolveContext(
        world_size=num_ranks,
        device_supports_bf16="bf16" in native,
        device_supports_fp16="fp16" in native,
        answers=stand_ins(config.settings),
    )


def _plan_job(options: TuneOptions, section: AutotuningSection, num_ranks: int, gpus: int) -> PlanJob | None:
    info = section.model_info
    params, hidden, layers = options.params, options.hidden, options.layers
    if options.model is None and params is None:
        params, hidden, layers = info.num_params, info.hidden_size, info.num_layers
        if None in (params, hidden, layers):
            return None
    job = make_job(
        PlanOptions(
            config=options.config,
            model=options.model,
            params=params,
            hidden=hidden,
            layers=layers,
            gpus=min(gpus, num_ranks),
            memory=options.memory,
            seq_length=options.seq_len,
        )
    )
    if options.nvme_path is not None:
        job = replace(job, nvme_path=type(job.nvme_path)(options.nvme_path.absolute()))
    if gpus:
        return job
    return replace(job, machine=replace(job.machine, cpu_ranks=num_ranks))


def replaced_config(words: Sequence[str], config: Path, by: Path) -> list[str]:
    """Return a script's arguments with the path `config` replaced. Raises UsageError where none of them is that path."""
    found, count = [], 0
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if value and Path(value).absolute() == config.absolute():
            count += 1
            found.append(f"{option}{equals}{by}")
        else:
            found.append(word)
    if not count:
        raise UsageError(
            f"the script's arguments do not name {config}: each trial replaces it there, so write for instance "
            f"`-- train.py --deepspeed_config {config}`"
        )
    return found


def mapped(words: Sequence[str], config: Mapping[str, Any], mappings: Mapping[str, str]) -> list[str]:
    """Return a script's arguments with each option of `mappings` set to the value of its key in `config`, where the config
    has one."""
    found = list(words)
    for key, option in mappings.items():
        value: Any = config
        for name in key.strip().split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None or isinstance(value, Mapping):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        place = next((at for at, word in enumerate(found) if word.partition("=")[0] == option), None)
        if place is None:
            found += [option, text]
        elif "=" in found[place]:
            found[place] = f"{option}={text}"
        else:
            found[place + 1 : place + 2] = [text]
    return found
