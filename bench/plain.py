"""The plain PyTorch loop that engines are compared with: in bf16 with fp32 masters, clipping and a cast back."""

from collections.abc import Callable

import torch
from torch import nn


class PlainStep:
    """Trains `called`, which is `model` or wraps it, on batches of token ids."""

    def __init__(
        self, model: nn.Module, called: nn.Module, masters: list[nn.Parameter], *, lr: float, clip: float
    ) -> None:
        self._parameters = list(model.parameters())
        self._called = called
        self._masters = masters
        self._clip = clip
        self._optimizer = torch.optim.AdamW(masters or self._parameters, lr=lr, fused=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Take a whole step; return the loss."""
        loss = self.backward(ids)
        self.step()
        return loss

    def backward(self, ids: torch.Tensor) -> torch.Tensor:
        """Make the gradients; return the loss."""
        loss: torch.Tensor = self._called(ids, labels=ids)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self) -> None:
        """Update the parameters and drop the gradients."""
        if self._masters:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_([*self._parameters], [*self._masters])


def plain_step(
    model: nn.Module, precision: str, *, lr: float, clip: float, wrap: Callable[[], nn.Module] | None = None
) -> PlainStep:
    """Return the plain loop of `model`, on the device that it is on, cast to `precision` ("fp32" or "bf16").

    In fp32 it neither takes the norm nor clips. `wrap` returns what is called in the model's place.
    """
    masters: list[nn.Parameter] = []
    if precision == "bf16":
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model.bfloat16()
    return PlainStep(model, model if wrap is None else wrap(), masters, lr=lr, clip=clip)
