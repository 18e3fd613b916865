"""`loss.backward()`: a backward pass that the script starts, through the output of the engine's forward.

[Note: the script's backward]
The outputs of a forward have hooks. The first hook that fires in a backward starts it as `engine.backward` does, and an
autograd callback ends it once all gradients have arrived. Each hook multiplies its gradient by the loss scale and divides it
by the accumulation steps, as `engine.backward` does with the loss.

This must happen exactly once on each path. Among several tensors, the one with the newest node cannot be an input of the
others, so it gets the hook itself. Any other may be an input, such as the logits from which the model computed its loss:
the script gets a view of it with the hook, which the model's own graph bypasses.

`torch.autograd.grad` fires the hooks too, but adds no gradient to a parameter: nothing is scaled or counted, and sharded
parameters are gathered and released. The same holds for a frozen engine, whose inputs may need gradients.

A backward that raises never reaches its callback. Autograd numbers backward passes, so the next call of the engine
detects that the current one has ended, and abandons it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from zstore.errors import UsageError

from ..access.access import Access
from ..report.progress import RunReport
from ..training.training import Training


class LossBackward:
    """Backward passes that the script starts. See [Note: the script's backward]."""

    def __init__(self, training: Training, access: Access, report: RunReport) -> None:
        self._training = training
        self._access = access
        self._report = report
        self.task: int | None = None
        """Autograd's number of the running backward."""
        self._trains = False
        """Whether it computes gradients of trained parameters."""
        self._cleanup = ExitStack()
        self.in_engine_backward = False
        """Whether `engine.backward` is running, during which the hooks do nothing."""

    def watch(self, output: Any) -> Any:
        """Return a forward's output with hooks that make a backward pass through it one of the engine's."""
        training = self._training
        if not torch.is_grad_enabled() or (training.config.frozen and training.hooks is None):
            return output
        tensors = {id(tensor): tensor for tensor in _differentiable(output)}
        if not tensors:
            return output
        last = max(tensors.values(), key=lambda tensor: tensor.grad_fn._sequence_nr())  # type: ignore[union-attr]
        views = {key: tensor.view_as(tensor) for key, tensor in tensors.items() if tensor is not last}
        for tensor in (last, *views.values()):
            loss = tensor.detach() if tensor.numel() == 1 else None
            tensor.register_hook(partial(self._on_gradient, loss))  # type: ignore[no-untyped-call]
        return _with_views(output, views) if views else output

    def require_no_open_gather(self, call: str) -> None:
        """Raise UsageError if a backward would now update within a `zstore.gather` block, or undo a write through `.data`."""
        if self._training.update.runs_in_backward and self._training.accumulation.is_boundary:
            self._access.require_no_open_gather(f'{call}, which with "step_overlap": "backward" updates,')
            self._access.guard.check_sample()

    def _on_gradient(self, loss: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
        """Start the backward if it is new, and return the gradient for the model; None if it is unchanged."""
        if self.in_engine_backward:
            return None
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.abandon_failed()
            self._begin(task, loss)
        return self._scaled(gradient) if self._trains else None

    def _begin(self, task: int, loss: torch.Tensor | None) -> None:
        training = self._training
        training.notice_cleared()
        with ExitStack() as cleanup:
            cleanup.enter_context(training.world.calling("backward"))
            cleanup.enter_context(self._access.guard.during("backward"))
            cleanup.enter_context(self._report.timed("backward_s"))
            self._trains = not training.config.frozen and self._reaches_parameters()
            if self._trains:
                self.require_no_open_gather("loss.backward()")
                if loss is not None:
                    self._report.add_loss(loss)
                training.begin_backward()
            elif training.hooks is not None:
                training.hooks.start_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self.task, self._cleanup = task, cleanup.pop_all()

    def _reaches_parameters(self) -> bool:
        """Return whether the running backward computes the gradient of a trained parameter."""
        with torch.enable_grad():
            for record in self._training.state.scalars:
                if not record.parameter.requires_grad:
                    continue
                try:
                    if torch._C._will_engine_execute_node(record.gradient_edge().node):
                        return True
                except RuntimeError:  # torch.autograd.grad of a parameter
                    return False
        return False

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        scale, steps = self._training.scaler.scale, self._training.accumulation.batch.accumulation_steps
        if scale == 1.0 and steps == 1:
            return None
        if gradient.numel() == 1:  # bit-identical to engine.backward
            return (gradient.float() * scale / steps).to(gradient.dtype)
        return gradient * (scale / steps)

    def _end(self) -> None:
        """End the backward (autograd's call)."""
        self.task = None
        training, cleanup, self._cleanup = self._training, self._cleanup, ExitStack()
        with cleanup:
            if self._trains:
                training.end_backward()
            elif training.hooks is not None:
                training.hooks.end_backward(training_follows=True)

    def abandon_failed(self) -> None:
        """Abandon a backward that failed."""
        if self.task is None or torch._C._current_graph_task_id() == self.task:
            return
        self.task = None
        error = UsageError("loss.backward() raised an error, so the accumulation starts over")
        training, cleanup, self._cleanup = self._training, self._cleanup, ExitStack()
        if self._trains:
            training.abandon_backward(error)
        elif training.hooks is not None:
            training.hooks.abandon()
        # As when engine.backward() fails: the other ranks get a message.
        cleanup.__exit__(type(error), error, None)


def _differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors with a graph in a module's output: a tensor, or nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value] if value.grad_fn is not None else []
    return [tensor for item in _items(value).values() for tensor in _differentiable(item)]


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {}


def _with_views(value: Any, views: dict[int, torch.Tensor]) -> Any:
    """Return a module's output with `views` in place of the tensors with these ids."""
    if isinstance(value, torch.Tensor):
        return views.get(id(value), value)
    items = _items(value)
    changed = {key: new for key, item in items.items() if (new := _with_views(item, views)) is not item}
    if not changed:
        return value
    if isinstance(value, MutableMapping | list):
        for key, new in changed.items():
            value[key] = new
        return value
    if isinstance(value, tuple):
        both = [changed.get(key, item) for key, item in items.items()]
        return type(value)(*both) if hasattr(value, "_fields") else type(value)(both)
    return dataclasses.replace(value, **changed)
