"""Tiers of activations off the device: host memory, or arrays of the store on disk.

A piece is the memory of one storage, as bytes. `make` returns a place for one and `free` frees it, called by one thread at a
time; `make` raises BudgetError or DiskFullError if there is none. `write` copies `source`, uint8 on the device, to a place,
and `read` a place to `target`, after an event and done on return: each is carried out by a thread of its own.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from contextlib import closing
from typing import Any

import torch

from zstore.format import ArraySpec, make_grid
from zstore.io.tensors import as_torch
from zstore.store import TensorStore

from ..config.config import Config
from ..runtime.device import Event, Transfers

_log = logging.getLogger("zstore")

_WORD_BYTES = 4
"""Bytes of an element of an array on disk; chunks are cut by elements."""


class HostPieces:
    """Host memory, pinned if possible, within the store's budget."""

    name = "host"

    def __init__(self, store: TensorStore, transfers: Transfers) -> None:
        self._budget = store.budget
        self._transfers = transfers

    def make(self, nbytes: int) -> torch.Tensor:
        self._budget.require(
            nbytes, 'an activation ("activations": "host")', ', or set zstore.activations to "disk" or "device"'
        )
        memory = self._transfers.streams.empty_host(nbytes, torch.uint8)
        self._budget.take(nbytes)
        return memory

    def write(self, place: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        self._transfers.begin(place, source, after=after).wait()

    def read(self, place: torch.Tensor, target: torch.Tensor, after: Event) -> None:
        self._transfers.begin(target, place, after=after).wait()

    def free(self, place: torch.Tensor) -> None:
        self._budget.release(place.nbytes)


class DiskPieces:
    """Arrays of the store, which writes them with checksums; each is reused for the next piece of its size."""

    name = "disk"

    def __init__(self, store: TensorStore, transfers: Transfers, pool_bytes: int) -> None:
        self._store = store
        self._transfers = transfers
        # Each its own: a read must not wait for the writes behind the forward.
        self._writing = store.make_pool(pool_bytes // 2)
        self._reading = store.make_pool(pool_bytes // 2)
        self._free: dict[int, list[str]] = defaultdict(list)
        """Unused arrays, by their number of words."""
        self._made = 0

    def make(self, nbytes: int) -> str:
        words = -(-nbytes // _WORD_BYTES)
        if self._free[words]:
            return self._free[words].pop()
        spec = ArraySpec(name=f"activation/{self._made}", shape=(words,), dtype="int32")
        self._store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        self._made += 1
        return spec.name

    def write(self, place: str, source: torch.Tensor, after: Event) -> None:
        with closing(self._store.stream([[place]], "fill", pool=self._writing)) as tiles:
            for tile in tiles:
                part = source[tile.first * _WORD_BYTES : tile.stop * _WORD_BYTES]
                self._copy(as_torch(tile.views[0]).view(torch.uint8)[: part.numel()], part, after)

    def read(self, place: str, target: torch.Tensor, after: Event) -> None:
        with closing(self._store.stream([[place]], "read", pool=self._reading, ahead=True)) as tiles:
            for tile in tiles:
                part = target[tile.first * _WORD_BYTES : tile.stop * _WORD_BYTES]
                self._copy(part, as_torch(tile.views[0]).view(torch.uint8)[: part.numel()], after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        if self._transfers.link(source, target) is None:
            # One memcpy, without torch's threads, which the computation has.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
        else:
            # The buffer is given back when the next tile is asked for.
            self._transfers.begin(target, source, after=after).wait()

    def free(self, place: str) -> None:
        self._free[self._store.valid_numel(place)].append(place)


ActivationTier = HostPieces | DiskPieces
Place = Any
"""Of one piece; only the tier that made it knows more."""


def make_tier(config: Config, store: TensorStore, transfers: Transfers, pool_bytes: int) -> ActivationTier | None:
    """Return the tier of activations that the config names, with buffers of `pool_bytes` to the disk; None if they stay on the
    device."""
    if config.activations == "disk":
        return DiskPieces(store, transfers, pool_bytes)
    if config.activations == "host" and not transfers.streams.device_is_host:
        return HostPieces(store, transfers)
    if config.activations == "host":
        _log.info("activations stay where they are: the CPU computes, in host memory")
    return None
