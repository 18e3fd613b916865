"""Inputs of blocks shared among the ranks of a model-parallel group: each keeps its part, and gathers them again.

[Note: parts]
The ranks of a group run a block on the same inputs. Each keeps one of n equal parts of an input's elements, the last one
padded. Before the block is computed again the parts are all-gathered, in the order in which blocks are computed again,
which is the same on all ranks of the group. Inputs that are not floating, that overlap in memory, or have fewer elements
than there are ranks are kept whole. What is gathered has the same bytes, and the strides that the input had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zstore.format import round_up

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class Slots:
    """One buffer of `number` places for each size of part, in which parts lie side by side."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._buffers: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._free: dict[tuple[int, torch.device], list[int]] = defaultdict(list)

    def emptied(self) -> Slots:
        """Return buffers of as many places, of which none is made yet; parts that are kept stay where they are."""
        return Slots(self._number)

    def take(self, part: torch.Tensor) -> tuple[torch.Tensor, _Place | None]:
        """Return `part`, uint8, in a place of a buffer, and what holds that place; or as it is, where all are taken."""
        key = (part.numel(), part.device)
        if key not in self._buffers:
            self._buffers[key] = part.new_empty((self._number, part.numel()))
            self._free[key] = list(range(self._number))
        if not self._free[key]:
            return part, None
        place = _Place(self._free[key], self._free[key].pop())
        there = self._buffers[key][place.number]
        there.copy_(part)
        return there, place


class _Place:
    """A place in a buffer, free again when nobody needs it."""

    def __init__(self, free: list[int], number: int) -> None:
        self._free = free
        self.number = number

    def __del__(self) -> None:
        self._free.append(self.number)


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of a tensor."""

    packed: Any
    place: _Place | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    nbytes: int


class Partition:
    """Saved-tensor hooks that keep this rank's part of the group's tensors. `pack` and `unpack` keep the part itself. See
    [Note: parts]."""

    def __init__(self, group: dist.ProcessGroup, pack: Pack, unpack: Unpack, slots: Slots | None = None) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._pack = pack
        self._unpack = unpack
        self._slots = slots

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what is kept of `tensor`."""
        # A tensor that is its own storage; bytes of others could not be laid out again.
        dense = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
        if (
            isinstance(tensor, nn.Parameter)
            or not tensor.is_floating_point()
            or not dense
            or tensor.numel() < self._ranks
        ):
            return self._pack(tensor)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage(), 0, (tensor.nbytes,), (1,))
        share = round_up(-(-tensor.nbytes // self._ranks), _ALIGN_BYTES)
        part = whole.new_zeros(share)
        own = whole[self._rank * share : (self._rank + 1) * share]
        part[: own.numel()].copy_(own)
        place = None
        if self._slots is not None:
            part, place = self._slots.take(part)
        return _Part(self._pack(part), place, tensor.dtype, tensor.size(), tensor.stride(), tensor.nbytes)

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor with all its values (all ranks of the group)."""
        if not isinstance(kept, _Part):
            return self._unpack(kept)
        part = self._unpack(kept.packed)
        whole = part.new_empty(part.numel() * self._ranks)
        _all_gather_single(whole, part.contiguous(), group=self._group)
        empty = torch.empty(0, dtype=kept.dtype, device=part.device)
        return empty.set_(whole.untyped_storage(), 0, kept.size, kept.stride)


_ALIGN_BYTES = 16

# Its name since torch 2.13.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
