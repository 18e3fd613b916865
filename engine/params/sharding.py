"""The parts of the training state that a rank holds, by ZeRO stage, and the types of its gradients. Pure.

[Note: types of gradients]
Autograd makes a gradient in the parameter's type. `communication_data_type` is the type in which it is sent to other
ranks, by default the parameter's: the mean is summed in fp32 and rounded to it once. `data_types.grad_accum_dtype` is the
type in which micro-batches accumulate, by default fp32 over more than one: in 16 bits a sum of 256 equal gradients of
bf16 no longer grows. The gradient of a single micro-batch needs no more than its original type.

The held rows may be of a wider type than their sum. In the first micro-batch of a step a parameter may get its gradient in
parts (reentrant checkpointing of a shared module), which autograd would add in the parameter's type: so the first sum is in
the type of a single micro-batch, in memory that has room for later ones. A step that turns out to have more
micro-batches than expected widens the rows when the second one comes. So the bits do not depend on what was expected.

[Note: the mean of two]
a + b is b + a, so between two ranks gloo's own all-reduce has the bits of a sum in rank order, and works in the
gradients' own memory, without buckets, their padding and copies. It rounds the sum, not its half: the same bits, since
halving is exact except below the least normal number, and there the sum is exact. A sum beyond the greatest number has no
finite mean here. In fp32 it has none by rows either; in bf16 that concerns gradients of 1.6e38 alone; fp16, whose greatest
number is small, uses the exchange of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from zstore.format import Grid, make_grid

if TYPE_CHECKING:
    import torch

D = TypeVar("D")
"""A data type: torch's, or for a plan its name."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The parts of the training state of which each rank holds only its own rows, by ZeRO stage. A stage is data, and this
    is all of it.

    At world size 1 only `parameters` may be true: if they are offloaded, "its own rows" are all of them, and they are
    gathered from their store.
    """

    world_size: int
    """Ranks that share the state."""
    optimizer_state: bool
    """Masters and the optimizer's slots (stages 1 to 3)."""
    gradients: bool
    """Gradients, reduced to their owners during every backward (stages 2 and 3); else once a step, whole."""
    parameters: bool
    """Parameters, gathered by unit for forward and backward (stage 3)."""

    @staticmethod
    def of_stage(stage: int, world_size: int, *, offloads_parameters: bool = False) -> Sharding:
        """Return the sharding of `stage` (0 to 3) over `world_size` ranks."""
        many = world_size > 1
        return Sharding(
            world_size=world_size,
            optimizer_state=many and stage >= 1,
            gradients=many and stage >= 2,
            parameters=stage >= 3 and (many or offloads_parameters),
        )

    def state_grid(self, stored_shape: tuple[int, ...]) -> Grid:
        """Return how the state of a parameter of `stored_shape` is cut over the ranks."""
        return make_grid(stored_shape, self.world_size if self.optimizer_state else 1)

    def state_shard(self, rank: int) -> int:
        """Return the number of the shard of the state that `rank` holds."""
        return rank if self.optimizer_state else 0


@dataclass(frozen=True, kw_only=True)
class GradientTypes(Generic[D]):
    """The gradient types of a run. See [Note: types of gradients]."""

    summed: D
    """Type in which gradients of several micro-batches are held by default: fp32."""
    accumulation: D | None = None
    """Type in which gradients are held whatever the number of micro-batches; None: the default."""
    reduction: D | None = None
    """Type in which they are reduced; None: the parameter's. With one rank always None."""
    accumulates: bool = False
    """Whether a step is planned to have more than one micro-batch."""

    def reduced(self, dtype: D) -> D:
        """Return the type in which gradients of parameters of `dtype` are sent between ranks."""
        return self.reduction or dtype

    def held(self, dtype: D, *, several: bool) -> D:
        """Return the type of the sum of one micro-batch's, or `several` micro-batches' gradients of parameters of
        `dtype`."""
        if self.accumulation is not None:
            return self.accumulation
        return self.summed if several else self.reduced(dtype)

    def planned(self, dtype: D) -> D:
        """Return the type in which gradients of parameters of `dtype` wait for the update, as planned."""
        return self.held(dtype, several=self.accumulates)


def sums_in_place(dtype: str, world_size: int, *, native: bool) -> bool:
    """Return whether gradients that are sent in `dtype` and that every rank gets whole are summed in place; `native`: the
    backend has its own reductions of a bucket. See [Note: the mean of two]."""
    return world_size == 2 and not native and dtype in ("float32", "bfloat16")


def add_in(held: torch.Tensor, part: torch.Tensor, dtype: torch.dtype) -> None:
    """Add `part` to `held`, which can hold any value of `dtype`; the sum is rounded to `dtype`."""
    if held.dtype == dtype:
        held.add_(part)
    else:
        held.copy_(held.to(dtype).add_(part))


def is_narrower(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether memory of `dtype` has no room for values of the type `wanted`."""
    return dtype.itemsize < wanted.itemsize
