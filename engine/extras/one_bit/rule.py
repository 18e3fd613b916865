"""The part of these optimizers in a step of one parameter.

A rule sees whole parameters on every rank, and this rank's own gradient. Its phase says what the ranks exchange in a
step: "exact", gradients are averaged as for any optimizer; "compressed", the tensor that the rule gives to
`Exchange.compressed`; "local", nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Phase = Literal["exact", "compressed", "local"]


@dataclass
class TensorState:
    """The state of one parameter on this rank. All tensors are fp32, 1-D [numel], changed in place."""

    shape: tuple[int, ...]
    """Name of the parameter."""
    master: torch.Tensor
    slots: dict[str, torch.Tensor]
    """By the names of `SignRule.slots`; zero at first."""
    scalars: dict[str, float]
    """By the names of `SignRule.initial`."""


Compressed = Callable[[torch.Tensor], torch.Tensor]
"""Return the mean over ranks of a tensor [numel] sent as signs and scales with error feedback: the same bits on every rank.
The errors of a parameter are kept by the caller."""


class SignRule(Protocol):
    """One of the optimizers."""

    slots: tuple[str, ...]
    """Tensors of the parameter's shape that it keeps, the same on every rank after each step that is not "local"."""
    own_slots: tuple[str, ...]
    """Those of them that each rank has for itself."""

    def initial(self) -> dict[str, float]:
        """Return the scalars of a parameter that was never updated; `step` counts its updates."""

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        """Return the phase of update number `step`, from 1, with the settings of the parameter's group."""

    def update(
        self, group: Mapping[str, Any], state: TensorState, gradient: torch.Tensor, compressed: Compressed
    ) -> None:
        """Take one update: `gradient` [numel], fp32, may be changed; it is the mean over ranks in the phase "exact", else this
        rank's own. `compressed` is called once in the phase "compressed" and not in others."""
