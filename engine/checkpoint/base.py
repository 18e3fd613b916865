"""Checkpoints without frozen parameters: the source of these, and proof that a resume has the same.

[Note: digests]
The digest of a parameter is the crc32c of its values, in order, in the type that the engine has it in. Each rank takes that
of the rows that it owns, and these are put together: so it is the same at every world size, stage and tier. It is
computed when a save or a load first needs it, and again only if a pass has changed the array. A checkpoint is
compared with the values rounded to its own type; one of a wider type than the engine's cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from crc32c import crc32c
from torch import nn

from zstore.checkpoint import BASE_KEY
from zstore.errors import CheckpointMismatchError
from zstore.format import model_array
from zstore.io.tensors import as_bytes, as_torch, dtype_name

from ..build.pretrained import folder_of
from ..params.record import ParameterRecord
from ..runtime.messages import warn_once

if TYPE_CHECKING:
    from zstore.checkpoint import ArraySource

    from ..training.training import Training

_POLYNOMIAL = 0x82F63B78
"""Of crc32c, reflected."""


class BaseWeights:
    """The frozen parameters of a run, as its checkpoints know them. See [Note: digests]."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: dict[tuple[str, str], tuple[int, int]] = {}
        """The version that was read and its digest, by parameter and type."""

    def record(self, frozen: Sequence[ParameterRecord]) -> dict[str, Any]:
        """Return the part about these parameters of the record of a checkpoint without them (all ranks)."""
        folder, revision = source_of(self._training.model)
        digests = self._digests([(one, dtype_name(one.dtype)) for one in frozen])
        named = {one.name: [dtype_name(one.dtype), digest] for one, digest in zip(frozen, digests, strict=True)}
        return {BASE_KEY: {"folder": folder, "revision": revision, "digests": named}}

    def check(self, source: ArraySource, *, strict: bool) -> None:
        """Raise CheckpointMismatchError, on every rank, if the engine's parameters are not those that a checkpoint was
        trained beside; without `strict` that is a warning (all ranks)."""
        base = source.record.base
        if base is None:
            return
        by_name = {one.name: one for one in self._training.state.records}
        there = [(by_name[name], dtype) for name, (dtype, _) in base.digests.items() if name in by_name]
        alike = [(one, dtype) for one, dtype in there if _holds(one.dtype, dtype)]
        for (one, _), digest in zip(alike, self._digests(alike), strict=True):
            if digest == base.digests[one.name][1]:
                continue
            message = (
                f"{source.location} was saved without its frozen parameters, and {one.name!r} is not the one that it was "
                f"trained beside: its weights came from {base.text}. Build the model from these, or pass "
                "load_module_strict=False"
            )
            if strict:
                raise CheckpointMismatchError(message)
            warn_once("%s", message)
            return
        if len(alike) < len(there):
            odd = next(one.name for one, dtype in there if not _holds(one.dtype, dtype))
            warn_once(
                "%s",
                f"{source.location} was saved without its frozen parameters, in a type that this run's does not hold: "
                f"whether {odd!r} and {len(there) - len(alike) - 1} others are the same was not checked",
            )

    def _digests(self, parameters: Sequence[tuple[ParameterRecord, str]]) -> list[int]:
        """Return the digests of parameters, each in the type beside it (all ranks)."""
        training = self._training
        world, is_sharded = training.world, training.state.is_sharded
        mine: list[tuple[int, int]] = []
        with world.agreeing():
            for number, (record, dtype) in enumerate(parameters):
                # If every rank has all of them, each takes its share of the work.
                own = is_sharded or number % world.world_size == world.rank
                rows = record.owned_numel if own else 0
                mine.append((self._digest_of_rows(record, dtype) if rows else 0, rows * _itemsize(dtype)))
        found = []
        for parts in zip(*world.all_gather_object(mine), strict=True):
            digest = 0
            for part, nbytes in parts:
                digest = combine(digest, part, nbytes)
            found.append(digest)
        return found

    def _digest_of_rows(self, record: ParameterRecord, dtype: str) -> int:
        state, name = self._training.state, model_array(record.name)
        version = state.store.version(name)
        known = self._known.get((record.name, dtype))
        if known is not None and known[0] == version:
            return known[1]
        target: torch.dtype = getattr(torch, dtype)
        digest = 0
        with state.passing([[name]], "read") as tiles:
            for tile in tiles:
                digest = crc32c(as_bytes(as_torch(tile.views[0]).to("cpu", target)), digest)
        self._known[record.name, dtype] = version, digest
        return digest


def source_of(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the folder or name that a model's weights came from, and the revision, as far as that is known, for a model
    that `zstore.from_pretrained` or transformers loaded, whole or in part."""
    for module in model.modules():
        config = getattr(module, "config", None)
        name = folder_of(module) or getattr(config, "_name_or_path", None)
        if isinstance(name, str) and name:
            revision = getattr(config, "_commit_hash", None)
            path = Path(name).expanduser()
            where = str(path.absolute()) if path.is_dir() else name
            return where, revision if isinstance(revision, str) else None
    return None, None


def _holds(dtype: torch.dtype, stored: str) -> bool:
    """Return whether `dtype` can hold every value of type `stored`."""
    wanted: torch.dtype = getattr(torch, stored)
    return dtype == wanted or (dtype == torch.float32 and wanted.is_floating_point and wanted.itemsize < 4)


def _itemsize(dtype: str) -> int:
    wanted: torch.dtype = getattr(torch, dtype)
    return wanted.itemsize


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32c of two pieces one after the other, from that of each and the length of the second.

    Source: zlib's crc32_combine: a zero byte is a linear map of the checksum, whose powers are squares of squares.
    """
    operator = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # of one zero bit
    operator = _squared(_squared(operator))
    while second_bytes:
        operator = _squared(operator)
        if second_bytes & 1:
            first = _applied(operator, first)
        second_bytes >>= 1
    return first ^ second


def _applied(operator: Sequence[int], vector: int) -> int:
    result = 0
    for column in operator:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _squared(operator: Sequence[int]) -> list[int]:
    return [_applied(operator, column) for column in operator]
