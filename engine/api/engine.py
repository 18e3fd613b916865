"""The engine: the object that a training loop calls. It checks arguments and delegates to `training`."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import signal
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zstore.checkpoint import SaveHandle
from zstore.errors import CheckpointExistsError, UsageError
from zstore.io import UserPath, user_location, user_path
from zstore.io.closing import complete_or_warn, make_finalizer
from zstore.ranks.world import World
from zstore.weights.files import MAX_FILE_BYTES

from ..access.access import Access, StateByParameter
from ..access.module_state import (
    CustomLoad,
    hand_back,
    load_module_state,
    module_state_dict,
    save_weights,
)
from ..access.offloading import OffloadedStates
from ..access.safe_access import gather, with_synced_gpus
from ..checkpoint.record import ClientState, ClientValues, LoadOptions, LoadReport, check_client_state, current_state
from ..checkpoint.save import Checkpoints, SaveOptions
from ..report.monitors import Monitors
from ..report.progress import RunReport
from ..report.statistics import EngineStatistics, engine_statistics
from ..runtime.process import STOP_SIGNALS, STOPPED_EXIT_CODE, CollectorPause, FrozenObjects, StopSignals
from ..training.compiled import make_compiler
from ..training.loader import TrainingLoader, call_with, evaluating, loss_of, mean_loss, repeat, take_batches
from ..training.training import Training
from .loss_backward import LossBackward

_log = logging.getLogger("zstore")

P = ParamSpec("P")
R = TypeVar("R")


def _phase(
    name: str, *, barrier: bool = False, needs: tuple[str, ...] | None = None
) -> Callable[[Callable[Concatenate[Engine, P], R]], Callable[Concatenate[Engine, P], R]]:
    """Mark a method as a phase of the run: an error on one rank fails the run on all. With `barrier`, it starts once all ranks
    have called it. `needs` are the states of `offload_states` that must not be offloaded, by default all."""

    def mark(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
        meeting = f"engine.{method.__name__}()" if barrier else None

        @functools.wraps(method)
        def call(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self._loss_backward.task is not None:
                self._loss_backward.abandon_failed()
            if self.training_state.accumulation.backwards:
                self.training_state.notice_cleared()
            if self.training_state.offloaded_states:
                self.training_state.require_not_offloaded(f"engine.{method.__name__}()", needs)
            with self.training_state.world.calling(name, meeting=meeting):
                return method(self, *args, **kwargs)

        return call

    return mark


class Engine(nn.Module):
    """A model in training: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`, for every micro-batch.

    Created by `zstore.initialize`. Close it, or use it in a `with` block; a clean exit closes it too. The class is over 300
    lines long because it has every method that a training script may call.
    """

    def __init__(self, training: Training, monitors: Monitors) -> None:
        super().__init__()
        self.module = training.model
        self.training_state = training
        self.report = RunReport(training, monitors)
        self.journal = self.report.journal
        """The run's journal; a loop adds what the engine cannot know with `note(tokens=..., total_steps=...)`."""
        self.checkpoints = Checkpoints(training, self.journal)
        self._unchecked_states: list[ClientState] = []
        """Client states of `save_on_signal` to check in the next step."""
        self._save_and_stop: Callable[[], NoReturn] | None = None
        """Set by `save_on_signal`."""
        self._batches: Iterator[Any] | None = None
        """The micro-batches of the engine's loader, repeated."""
        self._open_no_syncs = 0
        self.monitor = monitors
        """Accepts a script's own values: `if engine.monitor.enabled: engine.monitor.write_events([(name, value, sample)])`."""
        checkpoints = self.checkpoints
        # Not a bound method, which would keep this object from being collected.
        self.journal.save_stall_s = lambda: {"save called": checkpoints.stall_s}
        self.access = Access(self._modules, training, self.checkpoints.wait)
        stepper = training.update.stepper
        if not (training.config.frozen or (stepper is not None and stepper.needs_saved)):
            training.optimizer.state = StateByParameter(self.access)  # type: ignore[assignment]
        if training.hooks is not None and training.world.world_size == 1:
            for record in training.state.records:
                record.gather_for_copy = gather  # on several ranks, a copy on one rank would wait for the others
        self._loss_backward = LossBackward(training, self.access, self.report)
        self.signals = StopSignals(training.world)
        cleanup = contextlib.ExitStack()  # calls the last one first
        if training.config.settings.disable_python_gc:
            cleanup.callback(CollectorPause().end)
        for call in (
            FrozenObjects().end,
            self.signals.close,
            self.journal.close,
            training.world.watch.close,
            training.close,
            monitors.close,
            self.checkpoints.finish,
            self.access.close,
            # Called first: other ranks may wait for this one, and the other calls may wait for them.
            training.world.watch.report_uncaught,
        ):
            cleanup.callback(call)
        self._finalizer: weakref.finalize[..., Any] = make_finalizer(self, cleanup.close)

    @_phase("forward", needs=("lp_params",))
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. With fp16's `auto_cast`, floating-point inputs are cast to fp16."""
        config = self.training_state.config
        if config.settings.fp16.auto_cast and config.precision == "fp16":
            args, kwargs = tree_map(_to_fp16, (args, kwargs))
        self.require_parameters()
        with self.report.time_forward(), self.access.guard.during("forward"), self._around_forward():
            return self._loss_backward.watch(self.module(*args, **kwargs))

    @contextlib.contextmanager
    def _around_forward(self) -> Iterator[None]:
        activations, hooks = self.training_state.activations, self.training_state.hooks
        with contextlib.nullcontext() if activations is None else activations.around_forward():
            try:
                yield
            except BaseException as error:
                if hooks is not None and not isinstance(error, Exception):  # on Ctrl-C torch calls no hooks
                    hooks.end_interrupted()
                raise

    @_phase("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of `loss`, the mean over this rank's micro-batch; return its part of the step's loss.

        The engine divides the loss (and the returned one) by the accumulation steps, unless `scale_wrt_gas` is False;
        applies the loss scale in fp16; and averages gradients over ranks.
        """
        self.training_state.require_optimizer("engine.backward()")
        if loss.numel() != 1:
            raise UsageError(
                f"engine.backward() expects a loss of one element, got shape {tuple(loss.shape)}; take its mean first"
            )
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward() got a loss that needs no gradient: it was detached, or computed under no_grad"
            )
        self._loss_backward.require_no_open_gather("engine.backward()")
        steps = self.gradient_accumulation_steps()
        self.report.add_loss(loss, is_part=not scale_wrt_gas)
        self._loss_backward.in_engine_backward = True
        try:
            with self.report.timed("backward_s"), self.access.guard.during("backward"):
                self.training_state.backward(loss, divide=scale_wrt_gas, retain_graph=retain_graph)
        finally:
            self._loss_backward.in_engine_backward = False
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    @_phase("step")
    def step(self) -> None:
        """End a micro-batch; at the last one of an accumulation, update the parameters and advance the schedule.

        Raises NonFiniteError, on every rank, if the gradients are not finite and loss scaling is off.
        """
        training = self.training_state
        training.require_optimizer("engine.step()")
        if self.access.guard.open_blocks:
            self.access.require_no_open_gather("engine.step()")
        accumulation = training.accumulation
        boundary = accumulation.is_boundary
        has_backward = accumulation.backwards or accumulation.was_cleared
        if not has_backward and (accumulation.is_new or not accumulation.boundary_override):
            raise UsageError(
                "engine.step() without engine.backward(loss): call both for every micro-batch. loss.backward() works too, "
                "if the loss was computed from the outputs of engine(...)"
            )
        if boundary and self._open_no_syncs and self.world_size > 1:
            raise UsageError(
                "engine.step() within no_sync(): each rank would step with its own gradients, as in accelerate's LocalSGD, but "
                "zstore trains one model on all ranks: end the block before the step (LocalSGD(..., enabled=False)); a larger "
                "gradient_accumulation_steps exchanges gradients less often"
            )
        self.require_parameters()
        training.was_applied = False
        try:
            if boundary:
                if self.world_size > 1:
                    self.report.begin_step()
                with self.report.timed("optimizer_s"):
                    self.access.guard.check_sample()
                    training.step()
                    self.access.guard.note_sample()
            else:
                training.gradients.exposed.hide()
        finally:
            training.counters.micro_steps += 1
            accumulation.end_micro_batch(boundary=boundary)
        if boundary:
            if self.report.enabled:
                self.report.end_step()
            while self._unchecked_states:  # here, since the save on a signal must not fail
                check_client_state(current_state(self._unchecked_states.pop()))
            if self._save_and_stop is not None and self.stop_requested is not None:
                self._save_and_stop()

    @_phase("step")
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Return the norm of the next step's gradients, over all ranks, unscaled, before clipping; clip to `max_norm` from
        this step on, or do not clip if it is 0 or infinity (all ranks).

        Call it between the last `backward` of a step and its `step()`. Raises UsageError without such a backward, and if
        updates run in the backward, before the norm is known.
        """
        training = self.training_state
        if math.isnan(max_norm) or max_norm < 0:
            raise UsageError(f"clip_grad_norm_: expected a norm of at least 0, got {max_norm}")
        clip_norm = 0.0 if math.isinf(max_norm) else float(max_norm)
        if clip_norm and training.update.runs_in_backward:
            raise UsageError(
                f'clip_grad_norm_({max_norm}): with "step_overlap": "backward" parameters are updated before the norm is '
                'known: write "gradient_clipping" into the config'
            )
        if training.accumulation.is_new and not training.accumulation.was_cleared:
            raise UsageError("clip_grad_norm_() without a backward: call it between backward() and step()")
        return training.clip(clip_norm)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the last of its step, until the next call; None restores automatic counting.

        The next `step()` at a boundary updates the parameters after any number of micro-batches. Call it before `backward`
        if possible, or before the `step()`. Losses are still divided by the accumulation steps (see `scale_wrt_gas` of
        `backward`). Every rank passes the same value.
        """
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise UsageError(f"set_gradient_accumulation_boundary: expected True, False or None, got {is_boundary!r}")
        self.training_state.set_boundary(is_boundary)

    @_phase("access")
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Use `train_batch_size` samples per step over all ranks from now on, in more or fewer micro-batches (all ranks).

        Over several micro-batches gradients accumulate in fp32 (see `data_types.grad_accum_dtype`), with more memory than
        planned if there was only one before. A resumed run starts with the config's size. Raises UsageError, on every rank,
        within an accumulation, or for a number that is not a multiple of the micro-batch size times the world size.
        """
        training, call = self.training_state, f"set_train_batch_size({train_batch_size!r})"
        training.require_optimizer(call)
        batch = self.access.prepare(call, lambda: training.accumulation.batch_with_size(train_batch_size))
        training.accumulation.resize(batch, training.counters.global_steps)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: the engine exchanges gradients only when an accumulation ends, by a `step()` after the block."""
        self._open_no_syncs += 1
        try:
            yield
        finally:
            self._open_no_syncs -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the current step's gradients, between a `backward` and its `step()`; at other times do nothing: the
        engine clears gradients after each step, and a `step()` within an accumulation keeps them (all ranks).

        `zero_grad()` of the model or an optimizer, which sets them to None, does the same at the next call of the engine. A
        `step()` without a further backward updates nothing; `set_to_none` is ignored. Raises UsageError with
        `"step_overlap": "backward"` if the backward has updated parameters.
        """
        self.training_state.zero_grad()

    def require_parameters(self) -> None:
        """Raise UsageError if the engine no longer trains the model's parameters, for instance after one was replaced."""
        if not self.access.guard.open_blocks:  # gather may assign parameters different storage
            self.access.guard.check()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise UsageError: the engine trains only the model's parameters."""
        raise UsageError(
            f"engine.{name} = Parameter(...) would not be trained: add it to the model before initialize()"
        )

    # A micro-batch is the model's input: a tuple or list of arguments, a mapping of keyword arguments, or one argument.
    # The model returns its loss, or an output that has it as `.loss`, under "loss" or as the first element.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take one optimizer step over `gradient_accumulation_steps` micro-batches of `data_iter`; return the mean of their
        losses over all ranks (all ranks).

        By default they come from the loader that `initialize` returned, epoch after epoch. The model is set to train mode.
        Raises StopIteration, before any computation, if the iterator has fewer, and UsageError within an accumulation.
        """
        self.training_state.require_optimizer("engine.train_batch()")
        if self.training_state.counters.micro_steps % self.gradient_accumulation_steps():
            raise UsageError(
                "train_batch() in the middle of an accumulation: complete the step with engine.step() first"
            )
        if data_iter is None:
            if self.training_dataloader is None:
                raise UsageError("train_batch() without an iterator: pass one, or training_data=... to initialize()")
            if self._batches is None:
                self._batches = repeat(self.training_dataloader)
            data_iter = self._batches
        batches = take_batches(data_iter, self.gradient_accumulation_steps())
        self.train()
        losses = []
        for batch in batches:
            loss = loss_of(call_with(self, batch))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return mean_loss(losses, self.world)

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> torch.Tensor:
        """Return the mean loss, over all ranks, of `num_micro_batches` of `data_iter` (default:
        `gradient_accumulation_steps`), without gradients and with the model in eval mode (all ranks)."""
        batches = take_batches(data_iter, num_micro_batches or self.gradient_accumulation_steps())
        with evaluating(self):
            return mean_loss([loss_of(call_with(self, batch)) for batch in batches], self.world)

    # Collectives: every rank calls them with the same names, in the same order. `name` is as in `model.named_parameters()`;
    # tied parameters have several. A wrong name raises UsageError on every rank, with the nearest names.

    @_phase("access")
    def get_full_parameter(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a copy on the CPU of a parameter's fp32 master, or of the parameter if it is not trained (all ranks).

        Returns None on other ranks with `rank0_only`.
        """
        return self.access.parameter(name, rank0_only=rank0_only)

    @_phase("access")
    def get_optimizer_state(self, name: str, slot: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a copy of an optimizer state of a parameter, such as "exp_avg", on the CPU in fp32 (all ranks).

        It has the parameter's shape; a scalar, such as "step", is 0-D. None on other ranks with `rank0_only`. Raises UsageError
        for a slot that the optimizer does not have.
        """
        return self.access.optimizer_state(name, slot, rank0_only=rank0_only)

    @_phase("access")
    def get_gradient(self, name: str, *, rank0_only: bool = False) -> torch.Tensor | None:
        """Return a copy of a parameter's accumulated gradient in the current step, on the CPU in fp32 (all ranks).

        It is the mean over ranks, summed over the micro-batches, unscaled, before clipping. None after `step()`, for a
        parameter that no backward reached or that is not trained, and on other ranks with `rank0_only`.
        """
        return self.access.gradient(name, rank0_only=rank0_only)

    @_phase("access")
    def set_full_parameter(self, name: str, values: Any) -> None:
        """Set a parameter, and its fp32 master, to rank 0's `values` (all ranks).

        `values` is anything that torch.as_tensor accepts, in the parameter's shape; other ranks may pass None. Raises
        UsageError for a different shape, and within a forward or backward.
        """
        self.access.set_parameter(name, values)

    @_phase("access")
    def set_optimizer_state(self, name: str, slot: str, values: Any) -> None:
        """Set an optimizer state of a parameter to rank 0's `values`; other ranks may pass None (all ranks)."""
        self.access.set_optimizer_state(name, slot, values)

    @_phase("access", barrier=True)
    def save_16bit_model(
        self,
        save_dir: UserPath,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        filename: str | None = None,
        dtype: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        overwrite: bool = False,
    ) -> list[Path]:
        """Write parameters and buffers as safetensors into `save_dir`, and return the files (all ranks; rank 0 writes).

        More than `max_file_bytes` are split into numbered files with an index. Names follow `save_filename` (or
        `filename`), by default those that `from_pretrained` expects; a suffix .bin or .pt becomes .safetensors, with a log
        message. The config of a transformers model is written too. Floating values are rounded from the fp32 masters to
        `dtype` ("bf16", "fp16", "fp32"; by default the model's compute dtype). Tied weights are written once.
        `exclude_frozen_parameters` omits those. Every rank needs a few tens of MiB of memory, whatever the model's size.

        Files are renamed when they are complete and durable; with `overwrite` they replace weights of that name. Raises
        CheckpointExistsError without it if `save_dir` has any, CheckpointError for values out of fp16's range, and
        DiskFullError.
        """
        return save_weights(
            self.access,
            user_path(save_dir),
            filename if save_filename is None else save_filename,
            precision=dtype or self.training_state.config.precision,
            max_file_bytes=max_file_bytes,
            without_frozen=exclude_frozen_parameters,
            overwrite=overwrite,
        )

    @_phase("access", barrier=True)
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict (all ranks), without frozen parameters if `exclude_frozen_parameters`.

        With sharded parameters (stage 3) it has whole copies in rank 0's host memory, and is empty on other ranks. Otherwise
        it is the model's own `state_dict()`, on every rank.
        """
        return module_state_dict(self.access, exclude_frozen=exclude_frozen_parameters)

    @_phase("access", barrier=True)
    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load rank 0's `state_dict` into the model and the fp32 masters, at every stage; other ranks may pass {} (all
        ranks).

        The optimizer's state is unchanged. Without `strict`, keys that only one of the two has are ignored.
        `custom_load_fn(src=state_dict, dst=model)` is called on rank 0 instead, with gathered parameters to write to.
        `fetch_z3_params` is ignored: sharded parameters are always gathered. Raises UsageError with the mismatches before
        any change.
        """
        self.access.require_no_open_gather("engine.load_module_state_dict()")
        load_module_state(self.access, state_dict, strict=strict, custom=custom_load_fn)

    @_phase("access", barrier=True)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict as `load_module_state_dict` does, and return its missing and unexpected keys (all ranks).

        Raises UsageError for `assign`, which would replace the parameters' memory.
        """
        if assign:
            raise UsageError(
                "engine.load_state_dict(assign=True) would give parameters storage that no step updates: omit it"
            )
        self.access.require_no_open_gather("engine.load_state_dict()")
        return load_module_state(self.access, state_dict, strict=strict)

    @functools.cached_property
    def _offloaded(self) -> OffloadedStates:
        return OffloadedStates(self.training_state, self.access)

    @_phase("access", needs=())
    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload the engine's state between two steps and free its memory, until `reload_states` (all ranks).

        `include` has DeepSpeed's names: "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"; by
        default all. With `device` "cpu" state on the device moves to host memory; with "nvme" state on both moves to the run
        folder. A forward needs "lp_params"; other calls, such as saves, raise UsageError until everything is reloaded.
        `pin_memory` and `non_blocking` are ignored: the config determines pinning, and the move is complete on return.

        Raises UsageError within a step, BudgetError and DiskFullError, before any move, if there is no room.
        """
        self._offloaded.offload(include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back everything that `offload_states` offloaded, bit-identical (all ranks)."""
        with self.world.calling("access"):
            self._offloaded.reload()

    @_phase("save", barrier=True)
    def save_checkpoint(  # noqa: PLR0913 - DeepSpeed's signature, then ours
        self,
        save_dir: UserPath,
        tag: str | float | None = None,
        client_state: ClientValues | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: ClientValues | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool | None = None,
        overwrite: bool = False,
        keep_frozen: Collection[str] = (),
    ) -> SaveHandle:
        """Save the whole state in `save_dir` under `tag`, by default `step-` and the step (all ranks).

        It is committed on return; or, with `wait=False` (default: `checkpoint.writer.decoupled` of the config), when the
        handle's `wait()` or `wait_for_checkpoint()` returns, while training continues. `client_state` (or `client_sd`) is a
        dict of JSON data, tensors, numpy arrays and numbers and `argparse.Namespace`; see [Note: client values] in
        `engine/checkpoint/record.py`. `metrics` are numbers by name, for the config's `keep`. A checkpoint of this run with
        the same tag is replaced, with a log message. Without `save_latest` the folder's `latest` is unchanged.
        `exclude_frozen_parameters` omits those, and a load keeps the model's; `keep_frozen` names the frozen parameters to
        save nevertheless, such as those of adapters, which the base model lacks.

        Within a step the state after the last step is saved: a load repeats the step. Raises UsageError within a step in
        mode "backward" or with a loader of `initialize`, and for client state that cannot be stored; CheckpointExistsError
        for a tag that a different run committed, unless `overwrite`.
        """
        state = client_state if client_state is not None else client_sd
        options = SaveOptions(
            folder=user_location(save_dir),
            tag=tag,
            state={} if state is None else state,
            metrics=metrics or {},
            wait=not self.training_state.config.settings.checkpoint.writer.decoupled if wait is None else wait,
            overwrite=overwrite,
            is_latest=save_latest,
            excludes_frozen=exclude_frozen_parameters,
            kept_frozen=frozenset(keep_frozen),
        )
        if not self.access.guard.open_blocks:
            self.access.guard.check_values()
        return self.checkpoints.save(options)

    def note_save_folder(self, save_dir: UserPath) -> None:
        """Set the folder of checkpoints before the first save, so that the journal starts there with the first step (all
        ranks). Raises UsageError for a URL of an unknown kind."""
        self.checkpoints.note_folder(user_location(save_dir))

    def load_checkpoint(
        self, load_dir: UserPath, tag: str | float | None = None, **options: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, by default the newest, and return its path and client state (all ranks).

        `options` are DeepSpeed's, all true or false: `load_module_only`, `load_optimizer_states`,
        `load_lr_scheduler_states`, `load_module_strict`; see `LoadOptions`. State that is not loaded is unchanged and
        listed in `load_report`. Returns (None, {}) with a warning if no tag was given and there is no checkpoint. Raises
        CheckpointNotFoundError for a missing tag, CheckpointMismatchError for a different model or an impossible batch size.
        """
        load_options = LoadOptions.of(options)
        self._loss_backward.abandon_failed()
        self.training_state.require_not_offloaded("engine.load_checkpoint()")
        self._batches = None  # the next `train_batch` continues at the loaded position
        self.access.require_no_open_gather("engine.load_checkpoint()")
        with self.world.calling("load", meeting="engine.load_checkpoint()"):
            return self.checkpoints.load(user_location(load_dir), tag, load_options)

    def log(self, values: Mapping[str, Any]) -> None:
        """Add numbers to the run's journal, for the last step, such as an accuracy or an evaluation loss ("eval_loss").
        Tensors of one element count as numbers; other values are ignored, as are those of ranks other than 0."""
        self.journal.log_metrics(values)

    @property
    def load_report(self) -> LoadReport | None:
        """Bytes read and linked by the last load on this rank, and missing and unexpected keys; None before the first."""
        return self.checkpoints.report

    @_phase("save")
    def wait_for_checkpoint(self) -> None:
        """Wait until a save with `wait=False` is committed; raise its error, on every rank (all ranks)."""
        self.checkpoints.wait()

    def save_on_signal(
        self,
        save_dir: UserPath,
        tag: str | float | None = None,
        client_state: ClientState | None = None,
        *,
        signals: Iterable[int] = STOP_SIGNALS,
    ) -> None:
        """When any rank receives one of `signals`, save in the next `step()` and end the process, with code 75 (all ranks).

        The default is SIGTERM and SIGUSR1; a second signal ends the process at once. A function as `client_state` is called
        in that `step()`, and once in the next `step()`, which raises UsageError for values that cannot be stored.
        Raises UsageError outside the main thread.
        """
        self.training_state.require_optimizer("engine.save_on_signal()")
        self.watch_signals(signals)
        folder = user_location(save_dir)
        self.checkpoints.note_folder(folder)
        if client_state is not None:
            self._unchecked_states.append(client_state)
        self._save_and_stop = lambda: self.save_and_stop(folder, tag, client_state)

    def watch_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        """Record these signals in `stop_requested`; a second one ends the process (all ranks). Raises UsageError outside
        the main thread."""
        self.signals.watch(signals)

    @property
    def stop_requested(self) -> signal.Signals | None:
        """The signal that some rank has received, or None. It is the same on every rank after each `step()`, even a skipped
        one, so all ranks leave the loop together, with `save_and_stop`."""
        return self.signals.requested

    def save_and_stop(
        self, save_dir: UserPath | None, tag: str | float | None = None, client_state: ClientState | None = None
    ) -> NoReturn:
        """Save, and raise SystemExit with code 75 (all ranks).

        An error of an earlier save that is still running becomes a warning. A tag that another run committed is not
        replaced: this run's id is appended to it. With None as `save_dir` only a running save is completed. The exit does not
        count as a failure of the run.
        """
        with self.world.calling("save"):
            if save_dir is not None:
                state = None if client_state is None else current_state(client_state)
                complete_or_warn(self.checkpoints.wait, "the running save failed: ")
                try:
                    self.save_checkpoint(save_dir, tag, state)
                except CheckpointExistsError as error:
                    new_tag = self.checkpoints.unique_tag(tag)
                    if self.world.rank == 0:
                        _log.warning("%s; this one is saved as %r", error, new_tag)
                    self.save_checkpoint(save_dir, new_tag, state)
            self.wait_for_checkpoint()
            self.world.watch.error_is_shared = True  # no failure of the run
            self.journal.record_stop(stop := SystemExit(STOPPED_EXIT_CODE))
            raise stop

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.training_state.world

    @property
    def global_rank(self) -> int:
        """This rank, from 0."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This rank's index on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        """Device on which the model computes; batches must be there."""
        return self.training_state.world.device

    @property
    def optimizer(self) -> Any:
        """The `ZeroOptimizer` that `initialize` returned; None in a frozen engine."""
        return None if self.training_state.config.frozen else self.training_state.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `initialize` returned, if any."""
        schedule = self.training_state.schedule
        return None if schedule is None else schedule.scheduler

    @property
    def training_dataloader(self) -> TrainingLoader | None:
        """The loader that `initialize` returned; None without training data."""
        return self.training_state.loader

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken, skipped ones too."""
        return self.training_state.counters.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because their gradients were not finite."""
        return self.training_state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`."""
        return self.training_state.counters.micro_steps

    @property
    def loss_scale(self) -> float:
        """Factor of the loss; always 1 except in fp16."""
        return self.training_state.scaler.scale

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16; floating-point inputs must be, too."""
        return self.training_state.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16; floating-point inputs must be, too."""
        return self.training_state.config.precision == "bf16"

    def train_batch_size(self) -> int:
        """Return the samples per step over all ranks."""
        return self.training_state.accumulation.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one forward on one rank."""
        return self.training_state.accumulation.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step on one rank."""
        return self.training_state.accumulation.batch.accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        return self.training_state.accumulation.is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` changed parameters: not within an accumulation, nor after an overflow."""
        return self.training_state.was_applied

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the next step."""
        return [float(group["lr"]) for group in self.training_state.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients over all ranks, unscaled, before clipping; None before a step."""
        return self.training_state.norm

    def statistics(self) -> EngineStatistics:
        """Return the counters of this rank."""
        report = self.report
        return engine_statistics(self.training_state, report.times, self.journal.save_stall_s(), report.utilisation)

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps taken, over all ranks."""
        return self.training_state.samples

    def compile(self, backend: Any = "inductor", compile_kwargs: Any = None, **options: Any) -> None:
        """Compile the model in its next forwards, as `torch.compile(backend=backend, **compile_kwargs)` does (all ranks).

        If parameters are sharded or offloaded each unit (a block of a ModuleList) is compiled separately, within its
        gather; blocks of one class share graphs. Parameter names are unchanged. A second call recompiles with new arguments.
        Raises UsageError for arguments that torch.compile does not accept, without a C++ compiler for inductor, and for modes
        with CUDA graphs if parameters are gathered and released.
        """
        self.training_state.compile(make_compiler(backend, {**(compile_kwargs or {}), **options}))

    @property
    def is_compiled(self) -> bool:
        """Whether the model, or some of its units, is compiled."""
        training = self.training_state
        units = training.compiled is not None and bool(training.compiled.names)
        return units or training.model._compiled_call_impl is not None

    def close(self) -> None:
        """Complete a running save, then release hooks, memory, threads and the run folder; a second call does nothing."""
        self._finalizer()

    def destroy(self) -> None:
        """Alias of `close()`."""
        self.close()

    def hand_back(self, config: Any = None) -> nn.Module:
        """Close the engine and return the model with its trained values, from the fp32 masters, on the engine's device (all
        ranks).

        With a `config` that shards or offloads parameters they are stored as in a block of `zstore.Init(config=config)`,
        for the next `initialize(config=config)`. Optimizer state is dropped. Within a step it raises UsageError and changes
        nothing.
        """
        hooks = self.training_state.hooks
        hand_back(self.access, config, (lambda: None) if hooks is None else hooks.remove)
        self.close()
        return self.module

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None:
            self.world.watch.report_error(value)
            if not isinstance(value, SystemExit):
                self.journal.record_stop(value)
        try:
            self.close()
        except BaseException as error:
            if error is not value:
                error.__context__ = error.__context__ or value  # an ExitStack omits it
            raise

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute if the engine has none of that name, such as `engine.config`; `generate` of a sharded
        model keeps the ranks synchronized."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            try:
                value = getattr(self.module, name)
            except AttributeError as error:
                raise AttributeError(
                    f"the engine has no attribute {name!r}; of its model: {error}", name=name
                ) from error
        gathers = self.world_size > 1 and self.training_state.hooks is not None
        return with_synced_gpus(value) if name == "generate" and gathers else value


def _to_fp16(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, dict):  # a subclass: pytree has traversed plain dicts
        return {key: tree_map(_to_fp16, item) for key, item in value.items()}
    return type(value)(tree_map(_to_fp16, list(value))) if isinstance(value, list | tuple) else value
