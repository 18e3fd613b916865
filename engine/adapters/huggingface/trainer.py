"""The mixin that puts a Trainer's model into an engine.

[Note: hooks into Trainer]
Trainer has no plug-in for engines but DeepSpeed's and FSDP's, whose flags stay off here: it takes its plain paths, and its
accelerator is ours. `_open_engine` comes before Trainer prepares anything, so that Trainer finds model and optimizer
prepared. Trainer names the last micro-batch of each step by `sync_gradients`, so that short accumulations at the end of an
epoch are whole steps. Its loss is divided already. Loading is one call, at the point at which Trainer loads the optimizer;
when it loads weights, before the engine is there, the checkpoint is only looked at.

[Note: saves in the background]
A save returns once the state is pinned, and is complete before the next one begins, before weights are loaded, and at the
end of training; only then do `save_total_limit` and the links of the weights follow. It is complete at once if somebody
looks at the folder right after it: a callback with an `on_save` of its own, `push_to_hub`, JIT checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import TorchDynamoPlugin, broadcast_object_list
from accelerate.utils.deepspeed import DummyOptim
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from zstore.engine.access.gather import gather
from zstore.engine.adapters.accelerate.accelerator import Accelerator
from zstore.engine.adapters.accelerate.arguments import read_source
from zstore.engine.adapters.accelerate.optimizer import EngineOptimizer, EngineScheduler
from zstore.engine.api.engine import Engine
from zstore.engine.checkpoint.record import plain, restored
from zstore.engine.params.record import PRECISIONS
from zstore.errors import CheckpointNotFoundError, UsageError

from .arguments import (
    answers_of,
    check_arguments,
    check_matches,
    check_optim,
    complete_config,
    count_micro_batches,
    default_config,
    evaluating,
    evaluation_precision,
    keep_global_batch,
    keeps_global_batch,
    precision_answers,
    show_own_rates,
    writes_weights,
)
from .callback import RunCallback
from .checkpoints import (
    STATE_KEY,
    adapter_names,
    adapter_state,
    begin_folder,
    is_converted,
    link_weights,
    move_journal,
    newest_folder,
    require_committed,
    rotate,
    tag_of,
    wait_for_removal,
)
from .hub import journals_stay

_log = logging.getLogger("zstore")


class TrainerAccelerator(Accelerator):
    """The accelerator of one Trainer: its arguments answer "auto", and its engine outlives a call of `train()`."""

    def __init__(self, raw: dict[str, Any], source: str, arguments: Any, **kwargs: Any) -> None:
        self._arguments = arguments
        self.max_steps: int | None = None
        """Steps of the next training, for schedules in the config; None: not known."""
        self.frozen_precision: str | None = None
        """Precision of a model that is prepared for evaluation alone; None: that of training."""
        super().__init__(zstore_config=(raw, source), **kwargs)

    def _read_config(self, given: Any) -> tuple[dict[str, Any], str]:
        raw, source = given
        return raw, source

    def _check_accumulation(self) -> None:
        """Do nothing: the Trainer cuts the batches, and its arguments were checked."""

    def _precision_answers(self) -> dict[str, Any]:
        return precision_answers(self._arguments, self.frozen_precision)

    def _answers(self, optimizer: Any, args: Any) -> dict[str, Any]:
        return answers_of(self._arguments, self.max_steps)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`; of a model that no engine holds yet in its `.grad`, as accelerate does."""
        plain = super(Accelerator, self).backward
        (plain if self.engine is None else super().backward)(loss, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Forget all prepared objects except the engines, and return as many None as `objects`."""
        return super(Accelerator, self).free_memory(*objects)


class ZstoreTrainerMixin(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose model, optimizer and checkpoints are a zstore engine's: `class Mine(ZstoreTrainerMixin, SFTTrainer)`.

    `zstore_config` is a config in DeepSpeed's dialect: a dict, a path or JSON text; by default the variable ZSTORE_CONFIG
    names it. TrainingArguments fill in its "auto". All else is the Trainer's. `checkpoint-N` holds a checkpoint
    of zstore beside the Trainer's own small files, and resumes at any world size. See [Note: hooks
    into Trainer], [Note: saves in the background].

    Raises ConfigError for a config that contradicts the arguments, UsageError for arguments that zstore does not serve.
    """

    optimizer: Any
    lr_scheduler: Any
    model: Any

    def __init__(self, *args: Any, zstore_config: Any = None, **kwargs: Any) -> None:
        self._zstore_config = zstore_config
        self._accelerator_args: dict[str, Any] = {}
        self._unfinished: tuple[str, str] | None = None
        """Folder and tag of a save in the background."""
        self._in_checkpoint = False
        """Whether `checkpoint-N` is being saved, and not weights alone."""
        super().__init__(*args, **kwargs)

    # -- construction -----------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return the accelerator's arguments, without those that would repeat the engine's work."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_args = {**found, "deepspeed_plugin": None}
        return {**self._accelerator_args, "mixed_precision": "no", "dynamo_plugin": TorchDynamoPlugin(backend="no")}

    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator, then put ours in its place."""
        check_arguments(self.args)
        raw, source = read_source(self._zstore_config, "zstore_config", default={})
        if not raw:
            raw = default_config(self.args)
        complete_config(raw, source, self.args)
        check_matches(raw, source, self.args)
        check_optim(raw, source, self.args)
        super().create_accelerator_and_postprocess()
        self._writes_weights = writes_weights(raw)
        self._keeps_global_batch = keeps_global_batch(raw)
        self.accelerator = TrainerAccelerator(raw, source, self.args, **self._accelerator_args)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model in its place: the engine moves it, piece by piece if it is larger than the device."""

    # -- preparing --------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine | None:
        """The engine that holds the model; None until `train()`, `evaluate()` or `predict()`."""
        return self.accelerator.engine_of(self.model)

    def _open_engine(self, max_steps: int | None) -> None:
        """Put the model into an engine that trains it, if none does yet (all ranks)."""
        accelerator = self.accelerator
        if accelerator.engine is not None and accelerator.engine.module is not self.model:
            accelerator.close_engines()  # model_init made another one
            self.optimizer = None
        if accelerator.engine is not None:
            self.optimizer.forget()  # of a training that was interrupted
            return
        if isinstance(self.optimizer, EngineOptimizer):
            raise UsageError(
                "this Trainer was closed, or another one trains its model now, and its optimizer's state is gone: make another "
                "Trainer"
            )
        accelerator.take_over(self.model)
        background = self._writes_weights and not self._saves_whole and not self.args.save_only_model
        accelerator.config.setdefault("zero_optimization", {})[_WEIGHTS_KEY] = background
        if self.lr_scheduler is not None:
            accelerator.leave_schedule_to_loop()
            show_own_rates(self.lr_scheduler)
        accelerator.max_steps = max_steps
        self.create_optimizer()
        self.model_wrapped, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        self._begin_journal()

    def _begin_journal(self) -> None:
        """Let the run's journal be in the newest `checkpoint-N`: people count the entries of `output_dir`."""
        if (engine := self.engine) is not None:
            engine.journal.file.follow(None)
            self.remove_callback(RunCallback)
            self.add_callback(RunCallback(engine))

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Have the engine before Trainer prepares anything."""
        self._open_engine(max_steps)
        if (engine := self.engine) is not None:
            if self.args.auto_find_batch_size:
                count_micro_batches(engine, self._train_batch_size)
            engine.journal.note(loop="trainer", total_steps=max_steps)
        return super()._prepare_for_training(max_steps, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer: the config's if it names one, with one group as DeepSpeed has it, else Trainer's."""
        if self.optimizer is None and "optimizer" in self.accelerator.config:
            self.optimizer = DummyOptim([one for one in self.model.parameters() if one.requires_grad])
            return self.optimizer
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the schedule: the config's if it names one, else Trainer's."""
        engine = self.accelerator.engine
        if self.lr_scheduler is not None or engine is None or engine.lr_scheduler is None:
            return super().create_scheduler(*args, **kwargs)
        engine.lr_scheduler.load_state_dict({"last_batch_iteration": -1})  # a second train() begins anew
        self.lr_scheduler = EngineScheduler(engine)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model's engine, if it has one."""
        return self.engine or model

    def _prepare_input(self, data: Any) -> Any:
        """Return inputs on the device, floating ones in the engine's precision."""
        data = super()._prepare_input(data)
        engine = self.engine
        if engine is not None and isinstance(data, torch.Tensor) and data.is_floating_point():
            return data.to(PRECISIONS[engine.training_state.config.precision])
        return data

    # -- evaluating -------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the engine; before `train()` one is made: with a train_dataset that of the training, else
        one without an optimizer (all ranks)."""
        precision = None if self.is_in_train else evaluation_precision(self.args)
        if self.engine is None:
            if self.train_dataset is None:
                self.accelerator.frozen_precision = precision
                self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
                self.accelerator.frozen_precision = None
            else:
                self._open_engine(self._known_max_steps())
        with evaluating(self.args, self.engine, precision):
            return super().evaluation_loop(*args, **kwargs)

    def _known_max_steps(self) -> int | None:
        """Return the steps of the next training, if the config has a schedule that may need them."""
        if "scheduler" not in self.accelerator.config:
            return None
        return int(self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])

    # -- resuming ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does. `resume_from_checkpoint=True` takes the newest committed folder `checkpoint-N`."""
        if resume_from_checkpoint is True:
            found = [newest_folder(self.args.output_dir)]
            if self.args.world_size > 1:
                broadcast_object_list(found)
            if found[0] is None:
                raise CheckpointNotFoundError(
                    f"No valid checkpoint found in output directory ({self.args.output_dir}): expected a folder checkpoint-N "
                    "with a committed checkpoint of zstore. Check output_dir, or leave resume_from_checkpoint out to train "
                    "from the start"
                )
            resume_from_checkpoint = found[0]
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Look at the checkpoint, before the engine is there that loads it: see `_load_optimizer_and_scheduler`."""
        kept = require_committed(resume_from_checkpoint)
        if kept:
            keep_global_batch(self.args, kept, may_accumulate=self._keeps_global_batch)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load everything, at any world size (all ranks)."""
        engine = self.accelerator.engine
        if checkpoint is None or engine is None:
            return
        engine.set_gradient_accumulation_boundary(True)  # Trainer cuts the batches
        _, state = engine.load_checkpoint(checkpoint)
        schedule = state.get(STATE_KEY, {}).get("lr_scheduler")
        if schedule is not None and not isinstance(self.lr_scheduler, EngineScheduler):
            self.lr_scheduler.load_state_dict(restored(schedule))
        if isinstance(self.lr_scheduler, EngineScheduler):
            self.lr_scheduler.step()

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint (all ranks)."""
        self._complete_save()
        if self.accelerator.engine is not None:
            _log.info("loading the best model, of %s", self.state.best_model_checkpoint)
            self.accelerator.engine.load_checkpoint(self.state.best_model_checkpoint, load_module_only=True)

    # -- saving -----------------------------------------------------------------------------------------------------

    @property
    def _saves_whole(self) -> bool:
        """Whether weights are gathered on rank 0 to be written in the form of transformers, peft or the Trainer's own class:
        adapters, models whose files have other tensors than the model, and classes that save in a way of their own."""
        return _is_peft(self.model) or is_converted(self.model) or self._has_own_save

    @property
    def _has_own_save(self) -> bool:
        return type(self)._save is not transformers.Trainer._save

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config and tokenizer as `from_pretrained` finds them; of a PEFT model its adapters (all ranks)."""
        engine = self.engine
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        in_checkpoint = self._in_checkpoint and not self.args.save_only_model
        if self._saves_whole:
            self._save_gathered(engine, folder, skip=in_checkpoint and not self._writes_weights)
        else:
            with engine.world.agreeing():
                if self.args.should_save:
                    self._save_companions(folder)
            if not in_checkpoint:
                engine.save_16bit_model(folder, overwrite=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload `output_dir` as Trainer does, without the run's journal (all ranks)."""
        with journals_stay():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint's files as Trainer does, without the run's journal."""
        with journals_stay():
            super()._push_from_checkpoint(checkpoint_folder)

    def _read_by_save(self) -> list[nn.Parameter]:
        """Return parameters that saving may read from the model itself, not from the given state dict: all if
        the class decides, and peft's of a prompt."""
        if _is_peft(self.model):
            is_prompt = any(one.is_prompt_learning for one in self.model.peft_config.values())
            return [p for p in self.model.parameters() if p.requires_grad and is_prompt]
        return list(self.model.parameters()) if self._has_own_save else []

    def _save_gathered(self, engine: Engine, folder: Path, *, skip: bool) -> None:
        """Let Trainer write weights that are gathered on rank 0; with `skip` all but those of a whole model. A class with a
        `_save` of its own gets the whole model, and decides itself."""
        peft, own = _is_peft(self.model), self._has_own_save
        state: dict[str, Any] | None = None
        if peft:
            state = adapter_state(engine, adapter_names(engine))
        elif not own:
            state = {} if skip else engine.module_state_dict()
        with gather(self._read_by_save()), engine.world.agreeing():
            if self.args.should_save and (state or own or not skip):
                self._save(os.fspath(folder), state_dict=state)
            elif self.args.should_save:
                self._save_companions(folder)

    def _save_companions(self, folder: Path) -> None:
        """Write all of Trainer's files except the weights (rank 0)."""
        own = folder / _TEMPORARY
        shutil.rmtree(own, ignore_errors=True)
        with _no_progress_bars():  # they would tell of no weights
            self._save(os.fspath(own), state_dict={})
        shutil.copytree(own, folder, ignore=shutil.ignore_patterns("model*.safetensors*"), dirs_exist_ok=True)
        shutil.rmtree(own)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save `checkpoint-N`; see [Note: saves in the background] (all ranks)."""
        self._complete_save()
        # Not before this one is committed.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._in_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit, self._in_checkpoint = limit, False
        if self._unfinished is None and self.args.should_save:
            rotate(self, self._get_output_dir(trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save everything that is the engine's, and the schedule (all ranks)."""
        engine, args = self.accelerator.engine, self.args
        if engine is None:
            return
        is_engines = isinstance(self.lr_scheduler, EngineScheduler)
        kept = {
            "lr_scheduler": None if is_engines else plain(self.lr_scheduler.state_dict()),
            "train_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "world_size": args.world_size,
        }
        tag = tag_of(self.state.global_step)
        if args.should_save:
            begin_folder(engine, Path(output_dir))
        engine.save_checkpoint(
            output_dir,
            tag,
            {STATE_KEY: kept},
            trainable_only=_is_peft(self.model),
            keep_frozen=adapter_names(engine) if _is_peft(self.model) else (),
            overwrite=True,
            wait=False,
            gradients=False,  # a resume repeats a step that had begun, as Trainer's own does
        )
        self._unfinished = output_dir, tag
        if self._saves_at_once():
            self._complete_save(rotates=False)

    def _saves_at_once(self) -> bool:
        """Return whether somebody looks at the folder as soon as it is saved."""
        hooked = any(type(one).on_save is not TrainerCallback.on_save for one in self.callback_handler.callbacks)
        return hooked or self.args.push_to_hub or self.args.enable_jit_checkpoint

    def _complete_save(self, *, rotates: bool = True) -> None:
        """Complete a save in the background, and the work that waits for it (all ranks)."""
        if self._unfinished is None or self.accelerator.engine is None:
            return
        engine, (folder, tag) = self.accelerator.engine, self._unfinished
        engine.wait_for_checkpoint()
        self._unfinished = None
        with engine.world.agreeing():
            if self.args.should_save:
                link_weights(Path(folder), tag)
                if rotates:
                    rotate(self, os.path.dirname(folder))

    def close(self) -> None:
        """Complete a save under way and close the engine, which frees memory and nvme_path for another run in this process (all
        ranks). This Trainer trains no more, and a model whose parameters are sharded can be used no more."""
        self._complete_save()
        self.accelerator.close_engines()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Complete the last save, then end as Trainer does, which may keep the best checkpoint alone."""
        self._complete_save()
        if self.args.save_total_limit == 1 and self.state.best_model_checkpoint is not None:
            move_journal(self.engine, Path(self.state.best_model_checkpoint))
        wait_for_removal()
        return super()._finalize_training(*args, **kwargs)


_WEIGHTS_KEY = "stage3_gather_16bit_weights_on_model_save"
_TEMPORARY = ".zstore-files"


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Let transformers draw no progress bars in the block."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _is_peft(model: nn.Module) -> bool:
    """Return whether the model has adapters of peft."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    try:
        from peft import PeftMixedModel, PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel | PeftMixedModel)


def wrap(trainer_class: Any) -> Any:
    """Return a subclass of a Trainer class that trains on zstore; see `ZstoreTrainerMixin`."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise UsageError(f"wrap(): expected a subclass of transformers.Trainer, got {trainer_class!r}")
    if issubclass(trainer_class, ZstoreTrainerMixin):
        return trainer_class
    return type(
        trainer_class.__name__,
        (ZstoreTrainerMixin, trainer_class),
        {"__doc__": trainer_class.__doc__, "__module__": __name__},
    )


Trainer = wrap(transformers.Trainer)
Seq2SeqTrainer = wrap(transformers.Seq2SeqTrainer)
