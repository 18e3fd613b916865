"""Micro-batches that the engine draws itself: from an iterator, through the model, to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the micro-batches of a loader, epoch after epoch, until one is empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


def take_batches(data_iter: Iterator[Any], count: int) -> list[Any]:
    """Return the next `count` micro-batches. Raises StopIteration if there are fewer."""
    if not hasattr(data_iter, "__next__"):
        raise UsageError(f"expected an iterator of micro-batches, got {type(data_iter).__name__}: pass iter(...) of it")
    return [next(data_iter) for _ in range(count)]


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model on a micro-batch and return its output: a mapping gives keyword arguments, a tuple or list arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode within the block, without gradients; afterwards each module has its former mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss from a model's output: the output itself, `.loss`, the value under "loss", or the first element."""
    found = getattr(output, "loss", None) if not isinstance(output, torch.Tensor) else output
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"train_batch() and eval_batch() expect the model to return its loss of one element, got {what}: return it alone, "
            "as .loss, or in front"
        )
    return found


def mean_loss(losses: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """Return the mean of the losses over all ranks, fp32 without extents (all ranks)."""
    mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
    if world.world_size == 1:
        return mean
    found: list[float] = world.all_gather_object(mean.item())
    return torch.tensor(sum(found) / len(found), device=mean.device)
