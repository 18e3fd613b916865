"""The engine: what a training loop calls. It checks the calls and delegates; the work is in `training`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World

from .access.access import Access
from .access.generation import in_step
from .checkpoint.save import Checkpoints
from .checkpoint.snapshots import StepSnapshots
from .deepspeed_names import DeepSpeedNames
from .loader import TrainingLoader
from .optim.optimizer import ZeroOptimizer
from .params.guard import ParameterGuard
from .params.tensors import cast_floating
from .report.monitors import Monitors
from .report.progress import RunReport
from .report.statistics import EngineStatistics, engine_statistics
from .report.timers import Timers
from .runtime.distributed import phase
from .runtime.garbage import CollectorPause
from .runtime.signals import StopSignals
from .save_calls import SaveCalls
from .training import Training


class Engine(SaveCalls, DeepSpeedNames, nn.Module):
    """A model in training: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`, for every micro-batch.

    Made by `zstore.initialize`. Close it, or use it in a `with` block; a clean exit closes it too.
    """

    def __init__(self, training: Training, monitors: Monitors) -> None:
        super().__init__()
        settings = training.config.settings
        self.module = training.model
        self.training_state = training
        self.checkpoints = Checkpoints(training)
        self._unchecked = []
        self.timers = Timers(_wait_for(training.device) if settings.wall_clock_breakdown else None)
        self.report = RunReport(training, self.timers, monitors)
        self.monitor = monitors
        training.optimizer.scaler = training.scaler
        self.steps = StepSnapshots(training, self.checkpoints)
        # Not a method of this object, which would then never be collected.
        self._complete_saves = partial(_complete_saves, self.checkpoints, self.steps)
        self.access = Access(training, self._complete_saves)
        self.parameter_guard = ParameterGuard(self._modules, training.model, training.state.records)
        self.signals = StopSignals(training.world)
        pause = CollectorPause() if settings.disable_python_gc else None
        last = (pause.end if pause is not None else None, self.signals.close, self.parameter_guard.remove)
        self._finalizer = weakref.finalize(
            self, _close, training, self.checkpoints, self.steps, self.report, self.access, last
        )

    # -- the loop ---------------------------------------------------------------------------------------------------

    @phase("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns. With fp16's `auto_cast`, floating tensors go to it in fp16."""
        if self.training_state.config.casts_inputs:
            args, kwargs = cast_floating(args, torch.float16), cast_floating(kwargs, torch.float16)
        self.require_parameters()
        with self.timers.phase("forward"), self.access.during("forward"):
            return self.module(*args, **kwargs)

    @phase("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of `loss`, the mean over this rank's micro-batch; return the loss.

        The engine divides by the accumulation steps, scales in fp16, and averages over ranks. With `scale_wrt_gas=False` it
        does not divide: the loss is divided already.
        """
        if loss.numel() != 1:
            raise UsageError(
                f"engine.backward() expects a loss of one element, got shape {tuple(loss.shape)}; take its mean first"
            )
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward() got a loss that needs no gradient: it was detached, or computed under no_grad"
            )
        if self.training_state.updates_within:
            self.access.require_no_block('engine.backward(), which with "step_overlap": "backward" updates,')
        self.report.add_loss(loss)
        with self.timers.phase("backward"), self.access.during("backward"):
            scaled = self.training_state.scaled(loss, divide=scale_wrt_gas)
            self.training_state.backward(scaled, retain_graph=retain_graph)
        return loss

    @phase("step")
    def step(self) -> None:
        """End a micro-batch; at the last of an accumulation update the parameters and advance the schedule.

        Raises NonFiniteError, on every rank, where the gradients are not finite and loss scaling is off.
        """
        training = self.training_state
        self.access.require_no_block("engine.step()")
        accumulation, boundary = training.accumulation, training.is_boundary
        if accumulation.backwards == 0 and (accumulation.is_new or not accumulation.named):
            raise UsageError("engine.step() without engine.backward(loss): call both for every micro-batch")
        self.require_parameters()
        training.was_applied = False
        try:
            if boundary:
                with self.timers.phase("optimizer"):
                    training.step()
        finally:
            training.counters.micro_steps += 1
            accumulation.end_micro_batch(boundary=boundary)
        if boundary:
            self.report.step_ended()
            self.check_client_state()
            self.steps.take()
            self.stop_if_asked()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch under way is the last of its step, until this is called again; None: count again.

        Then the next `step()` at a boundary updates the parameters, however many micro-batches there were, and the
        micro-batch after it begins a new step. Call it before `backward` where that can be, or before a `step()` that
        ends what was accumulated. Losses are still divided by the accumulation steps (see `scale_wrt_gas` of `backward`).
        Every rank says the same.
        """
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise UsageError(f"set_gradient_accumulation_boundary: expected True, False or None, got {is_boundary!r}")
        self.training_state.name_boundary(is_boundary)

    @phase("access")
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take so many samples a step over all ranks from now on, by more or fewer micro-batches (all ranks).

        Over more than one micro-batch gradients accumulate in fp32 (see `data_types.grad_accum_dtype`): from one to more
        they take more memory than the plan at the start says. A resumed run begins with the config's size.
        Raises UsageError, on every rank, where it is not a multiple of the micro-batch's size times the world size, and
        in the middle of an accumulation.
        """
        self.access.set_train_batch_size(train_batch_size)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: the engine exchanges gradients when the accumulation asks for it."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Change nothing: the engine clears gradients after each step."""

    def require_parameters(self) -> None:
        """Raise UsageError where the model's parameters are no longer those that the engine trains."""
        if not self.access.open_blocks:  # which may give them other memory for its length
            self.parameter_guard.check()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise UsageError: the engine trains the model's parameters alone."""
        raise UsageError(
            f"engine.{name} = Parameter(...) would not be trained: give it to the model before initialize()"
        )

    # -- what is asked of it ----------------------------------------------------------------------------------------

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
        """This rank's number on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        """Where the model computes; batches belong there."""
        return self.training_state.device

    @property
    def optimizer(self) -> ZeroOptimizer:
        """The optimizer that `initialize` returned."""
        return self.training_state.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `initialize` returned; None without one."""
        return self.training_state.schedule.scheduler

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
        """Steps whose gradients were not finite, and that changed nothing."""
        return self.training_state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`."""
        return self.training_state.counters.micro_steps

    @property
    def loss_scale(self) -> float:
        """Factor of the loss; 1 but in fp16."""
        return self.training_state.scaler.scale

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16; floating inputs must be, too."""
        return self.training_state.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16; floating inputs must be, too."""
        return self.training_state.config.precision == "bf16"

    def train_batch_size(self) -> int:
        """Return the samples of a step over all ranks."""
        return self.training_state.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one forward on one rank."""
        return self.training_state.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step on one rank."""
        return self.training_state.batch.accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        return self.training_state.is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` changed parameters: not within an accumulation, nor at an overflow."""
        return self.training_state.was_applied

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients over all ranks, unscaled, before clipping; None before the
        first."""
        return self.training_state.norm

    def statistics(self) -> EngineStatistics:
        """Return the counters of this rank."""
        return engine_statistics(self.training_state, self.timers, self.checkpoints.stall_s, self.steps.stall_s)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Complete a save under way, then give hooks, memory, threads and the run folder back; twice is once."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None:
            self.world.escaped(value)
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the engine has none of that name, as `engine.config`; `generate` of a
        sharded model keeps the ranks in step."""
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
        return in_step(value) if name == "generate" and gathers else value


def _complete_saves(checkpoints: Checkpoints, steps: StepSnapshots) -> None:
    """Complete what is being saved (all ranks)."""
    checkpoints.wait()
    steps.complete()


def _wait_for(device: torch.device) -> Callable[[], None] | None:
    """Return what waits until `device` has done all that it was asked to; None where it never lags behind."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def _close(
    training: Training,
    checkpoints: Checkpoints,
    steps: StepSnapshots,
    report: RunReport,
    access: Access,
    last: Sequence[Callable[[], None] | None],
) -> None:
    with contextlib.ExitStack() as last_to_first:
        for end in last:
            if end is not None:
                last_to_first.callback(end)
        last_to_first.callback(training.world.end_watch)
        last_to_first.callback(training.close)
        last_to_first.callback(report.close)
        last_to_first.callback(steps.finish)
        last_to_first.callback(checkpoints.finish)
        last_to_first.callback(access.close)
        # First of all: others may wait for this rank, and what follows may wait for them.
        last_to_first.callback(training.world.tell_uncaught)
