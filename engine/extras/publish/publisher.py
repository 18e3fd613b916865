"""Weights in bf16 for whoever serves them, published as steps change them.

[Note: changes without a copy]
The weights that `zstore consolidate --dtype bf16` gives are the fp32 masters, cast. So the bits before a step are the cast of a
tile of the master before the kernel changes it, at any stage, tier and precision, and no second copy of them is kept: a
tile's changes go to a file as they are found. Each rank writes those of its own rows. Of a tile the crc32c of its bits is
kept; if they are others at the next step, somebody else changed them (a load, a script), and the next version is a full
one. So it is if a version could not be published, if files of changes would be larger than the weights, if a buffer changed,
and if the optimizer steps whole tensors, which are not observed.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from crc32c import crc32c
from torch import nn

from zstore.errors import ZstoreError
from zstore.interop.huggingface import WeightsReader
from zstore.io.tensors import bytes_of
from zstore.open.weights_target import target_of
from zstore.weights.delta import Bits, DeltaWriter
from zstore.weights.versions import INDEX_FILE, PREFIX, WeightsVersion

from ...config.extra import Extra
from ...optim.kernel import Tensors
from ...params.record import ParameterRecord
from ...runtime.device import Scratch
from ...training.training import Training
from .section import PublishSection

_log = logging.getLogger("zstore")


class Changes:
    """Finds what updates change of this rank's rows, and writes it to a file of changes. See [Note: changes without a copy]."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._room = Scratch()
        self._crcs: dict[tuple[str, int], tuple[int, int]] = {}
        """Length and crc32c of the bits of each tile, by parameter and first element."""
        self._file: IO[bytes] | None = None
        self._writer: DeltaWriter | None = None
        self.is_whole = False
        """Whether all changes since the last version are in the file."""

    def begin(self, *, writes: bool) -> None:
        """Begin a file; without `writes` there is none, as there is no version that changes could follow."""
        self.end()
        self.is_whole = writes
        if writes:
            try:
                self._file = self.path.open("wb")
                self._writer = DeltaWriter(self._file)
            except OSError as error:
                self._fail(error)

    def end(self) -> tuple[int, int]:
        """Complete the file; return its bytes and crc32c."""
        writer, file, self._writer, self._file = self._writer, self._file, None, None
        if writer is None or file is None:
            return 0, 0
        try:
            with file:
                writer.finish()
        except OSError as error:
            self._fail(error)
        return writer.nbytes, writer.crc

    def _fail(self, why: object) -> None:
        if self.is_whole:
            _log.warning("the changes of a step cannot be published, so that the next version is a full one: %s", why)
        self.is_whole = False

    def before(self, masters: Tensors) -> list[torch.Tensor]:
        return self._cast("before", masters)

    def _cast(self, name: str, masters: Tensors) -> list[torch.Tensor]:
        numels = [master.numel() for master in masters]
        parts = list(torch.split(self._room.take(name, masters[0], torch.bfloat16, sum(numels)), numels))
        torch._foreach_copy_(parts, list(masters))
        return parts

    def after(self, places: Sequence[tuple[ParameterRecord, int]], masters: Tensors, before: Tensors) -> None:
        for (record, first), old, new in zip(places, before, self._cast("after", masters), strict=True):
            if new.numel():
                self._add(record.name, record.owned_range[0] + first, _bits(old), _bits(new))

    def _add(self, name: str, first: int, old: Bits, new: Bits) -> None:
        key, crc = (name, first), int(crc32c(new.data))
        former, self._crcs[key] = self._crcs.get(key), (new.size, crc)
        writer = self._writer
        if writer is None or not self.is_whole:
            return
        if former is not None and former[0] == old.size and former[1] != crc32c(old.data):
            self._fail(f"{name!r} differs from its values after the last step")
        elif writer.nbytes > self._most_bytes:
            self._fail("they take more than the weights")
        else:
            try:
                writer.add(name, first, old, new, crc)
            except OSError as error:
                self._fail(error)


def _bits(values: torch.Tensor) -> Bits:
    found: Bits = values.view(torch.int16).cpu().numpy().view(np.uint16)
    return found


class WeightsPublisher(Extra):
    """Publishes the weights of an engine after its steps. See [Note: a version] and [Note: how a version appears]."""

    def __init__(self, engine: Any, section: PublishSection) -> None:
        training: Training = engine.training_state
        config, state = training.config, training.state
        self._engine, self._run, self._complete = engine, training.run_id, training.pending.complete
        self._section = section
        self._world = world = engine.world
        publisher = f"{training.run_id}, process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        publisher = world.broadcast_object(publisher)
        with world.agreeing():
            self._target = target_of(str(section.to), world.rank, publisher, config.storage_options)
        try:
            with world.agreeing():
                self._target.discard()
                if world.rank == 0:
                    self._target.begin()
        except BaseException:
            self._target.close()
            raise
        self._since_full = self._since = 0
        self._fulls: list[int] = []
        self._last: WeightsVersion | None = None
        """The version that the next one's changes are since; rank 0's."""
        self._newest = 0
        self._buffers = 0
        self._full_bytes = 2 * sum(record.numel for record in state.records)
        self._changes: Changes | None = None
        """None: other ranks have all rows of this one."""
        self._tiles = training.stepper is None
        """Whether updates run over tiles."""
        if world.rank == 0 if not state.is_sharded else state.records[0].copy in (None, 0):
            path = self._target.room / f".{PREFIX}-{world.rank:05d}"
            self._changes = Changes(path, 2 * sum(record.owned_numel for record in state.records))
            state.observers.append(self._changes)

    def step_ended(self) -> None:
        """Publish a version, unless the step was skipped or the next one is due later."""
        self._since += self._engine.was_step_applied()
        if self._since < self._section.every:
            return
        self._since = 0
        self._complete()
        changes, world = self._changes, self._world
        nbytes, crc = (0, 0) if changes is None else changes.end()
        whole = self._tiles and (changes is None or changes.is_whole)
        told = world.all_gather_object([nbytes, crc, whole, _crc_of_buffers(self._engine.module)])
        follows = all(one[2] for one in told) and sum(one[0] for one in told) < self._full_bytes
        follows = follows and told[0][3] == self._buffers
        full = not follows or self._since_full + 1 >= self._section.full_every
        deltas = {f"delta-{rank:05d}.bin": one[:2] for rank, one in enumerate(told) if follows and one[0]}
        done = False
        try:
            self._publish(deltas, full)
            done = True
        except (OSError, ZstoreError) as error:
            self._target.discard()
            if world.rank == 0:
                _log.warning("step %d could not be published: %s", self._engine.global_steps, error)
        else:
            self._buffers = told[0][3]
            self._since_full = 0 if full else self._since_full + 1
        if changes is not None:
            changes.begin(writes=done)

    def _publish(self, deltas: Mapping[str, list[int]], full: bool) -> None:
        world, target, mine = self._world, self._target, f"delta-{self._world.rank:05d}.bin"
        with world.agreeing():
            if world.rank == 0:
                target.begin()
            if world.rank == 0 and (self._last is None or not deltas):
                self._newest = target.newest()  # somebody else's, or one of which no answer came
        number = world.broadcast_object(self._newest) + 1
        with world.agreeing():
            place = target.place(number)
            if self._changes is not None and mine in deltas:
                self._changes.path.rename(place / mine)
                target.send(number, [mine])
        crcs: dict[str, int] = {}
        if full:
            self._engine.save_16bit_model(Path(world.broadcast_object(str(place))), dtype="bf16", crcs=crcs)
        with world.agreeing():
            if world.rank:
                return
            files, nbytes = _files_in(place) if full else ({}, self._full_bytes)
            last = self._last if deltas else None
            version = WeightsVersion(
                number=number,
                id=uuid.uuid4().hex,
                base=None if last is None else last.number,
                base_id=None if last is None else last.id,
                step=self._engine.global_steps,
                run=self._run,
                deltas=deltas,
                weights={name: crcs.get(name, 0) for name in files},
                files=files,
                full_bytes=nbytes,
            )
            written = os.listdir(place) if full else ()
            target.send(number, [name for name in written if name not in (INDEX_FILE, *deltas)])
            self._fulls += [number] if full else []
            target.commit(number, version.index(), self._fulls[-2] if self._fulls[1:] else 0)
            self._last, self._newest = version, number

    def close(self) -> None:
        if self._changes is not None:
            self._changes.end()
            self._changes.path.unlink(missing_ok=True)
        self._target.close()


def _crc_of_buffers(model: nn.Module) -> int:
    """Return the checksum of the buffers that are in a state dict of the model."""
    crc = 0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                crc = int(crc32c(bytes_of(buffer).data, crc))
    return crc


def _files_in(folder: Path) -> tuple[dict[str, str], int]:
    """Return the file of each tensor in a folder of weights, and the bytes of all."""
    with WeightsReader(folder) as reader:
        weights = reader.weights.values()
        return {weight.name: weight.path.name for weight in weights}, sum(weight.nbytes for weight in weights)
