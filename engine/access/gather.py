"""`gather`: whole parameters in a `with` block, and their changes written back.

[Note: changes in a block]
With a `modifier_rank`, that rank's values go to all ranks at the end of the block, and into the fp32 masters of every
parameter of which a bit changed: the master becomes the new value. A parameter that was left alone keeps its master, which
has more digits than the parameter. Without one the block is for reading. A change that shows in the parameter's version
counter, or in the rows that this rank keeps of a sharded parameter, is undone and answered with an error; a write through
`.data` elsewhere is lost without one. An fp32 parameter that is its own master (fp32, whole on every rank, state on the
device) has no other copy to restore, and keeps the written values, as without an engine.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import model_array
from zstore.io.tensors import as_torch
from zstore.ranks.world import World

from ..build.builder import Builder, Built, find_built, is_built
from ..params.record import ParameterRecord, Residency
from ..zero.gradients import agree_any
from .access import Access, find_run, rows_source
from .guard import same_bits

Parameters = nn.Parameter | nn.Module | Iterable[nn.Parameter]


@contextmanager
def gather(params: Parameters, modifier_rank: int | None = None) -> Iterator[None]:
    """Give parameters all their values for the length of a `with` block (all ranks, with the same parameters).

    `params` is one parameter, several, or a module. With `modifier_rank`, that rank's values at the end of the block are
    the parameter's on every rank afterwards, and its fp32 master's. Without, the block is for reading: a change is undone
    and raises UsageError, as far as it is seen (see [Note: changes in a block]). An error in the block, on any rank, ends
    it on all ranks, and changes are undone.

    Works at every stage, in nested blocks, and within a forward for reading. Tensors taken from a sharded parameter in
    the block stay valid after it. Parameters of a model that was built within `zstore.Init`, or loaded by
    `zstore.from_pretrained`, and not yet given to `initialize` are given their values likewise. Others are left alone.

    Raises UsageError for changes within a forward or backward, and if the ranks gather different parameters.
    """
    blocks = _blocks(_listed(params), modifier_rank)
    opened: list[_Block] = []
    error: BaseException | None = None
    try:
        for block in blocks:
            with block.world.calling("gather"):
                block.open()
            opened.append(block)
        yield
    except BaseException as raised:
        error = raised
    # Ctrl-C, or a generator that is closed: this rank's alone, and the script's to handle.
    alone = error is not None and not isinstance(error, Exception)
    for block in reversed(opened):
        try:
            with nullcontext() if alone else block.world.calling("gather"):
                block.close(error)
        except BaseException as raised:
            error = error or raised
    if error is not None:
        raise error


def _listed(params: Parameters) -> list[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    listed = list(dict.fromkeys(params))
    for item in listed:
        if not isinstance(item, nn.Parameter):
            raise UsageError(f"gather() expects parameters, or a module, got {type(item).__name__}")
    return listed


def _blocks(parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> list[_Block]:
    """Return a block for each run and builder that have some of the parameters, and one for others of `zstore.Init`."""
    runs: dict[Access, list[ParameterRecord]] = {}
    builders: dict[Builder, list[Built]] = {}
    plain = []
    for parameter in parameters:
        if (in_run := find_run(parameter)) is not None:
            runs.setdefault(in_run[0], []).append(in_run[1])
        elif (built := find_built(parameter)) is not None:
            builders.setdefault(built[0], []).append(built[1])
        elif is_built(parameter):
            plain.append(parameter)
    blocks: list[_Block] = [_RunBlock(access, records, modifier_rank) for access, records in runs.items()]
    blocks += [_BuiltBlock(builder, built, modifier_rank) for builder, built in builders.items()]
    if plain and modifier_rank is not None:
        blocks.append(_PlainBlock(plain, modifier_rank))
    return blocks


class _RunBlock:
    """The part of a block that belongs to one run."""

    def __init__(self, access: Access, records: Sequence[ParameterRecord], modifier_rank: int | None) -> None:
        self.world = access.world
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._access = access
        self._records = records
        names = hashlib.sha256("\n".join(record.name for record in records).encode()).hexdigest()[:16]
        self._call = f"gather() of {len(records)} parameters ({names}), modifier_rank={modifier_rank}"

    def open(self) -> None:
        """Give the parameters their values (all ranks)."""
        rank = self._modifier_rank
        self._access.finished(self._call, lambda: _check_rank(rank, self.world), changes=rank is not None)
        if self._access.units is not None:
            self._access.units.hold(self._records, self._fill)
        self._access.open_blocks += 1
        self._versions = [record.parameter._version for record in self._records]

    def _fill(self, records: Sequence[ParameterRecord]) -> None:
        """All-gather the rows of sharded parameters, in their own type, into `full` of each, which has room (all ranks)."""
        access = self._access
        sources = [
            rows_source(r, r.owned(), r.dtype) if r.rest is None else access.source(r, r.rest.partition("/")[0])
            for r in records
        ]
        access.read_into({record: record.full for record in records}, sources)

    def close(self, error: BaseException | None) -> None:
        """Write changes back, or undo them, and let the parameters go; `error` ended the block (all ranks)."""
        try:
            try:
                _end(self.world, error)
            except Exception:
                with suppress(Exception):
                    self._restore(self._records)
                raise
            if self._modifier_rank is None:
                self._undo()
            else:
                self._write_back(self._modifier_rank)
        finally:
            for record in self._records:
                _take_over(record, keep=False)
            self._access.open_blocks -= 1
            if self._access.units is not None:
                self._access.units.let_go(self._records)

    def _write_back(self, rank: int) -> None:
        world = self.world
        with world.agreeing():
            for record in self._records:
                _take_over(record, keep=world.rank == rank)
        for record in self._records:
            world.broadcast(record.full, rank)
        changed = self._differ()
        self._access.write([(r, r.full) for r, any_ in zip(self._records, changed, strict=True) if any_])
        for record in self._records:
            record.note_version()

    def _undo(self) -> None:
        """Raise UsageError on every rank if a parameter was changed on any, and give it its values again."""
        pairs = zip(self._records, self._versions, strict=True)
        changed = agree_any(self.world, [self._is_changed(*pair) for pair in pairs])
        found = [record for record, any_ in zip(self._records, changed, strict=True) if any_]
        if not found:
            return
        self._restore(found)
        names = ", ".join(repr(record.name) for record in found[:5])
        raise UsageError(
            f"gather() without modifier_rank is read-only, but {names} changed in the block on some rank; the change is "
            "undone (except for fp32 parameters that are their own masters). Pass modifier_rank=RANK to keep that rank's "
            "changes"
        )

    def _differ(self) -> list[bool]:
        """Return for each parameter, all of whose values are in `full`, whether it differs from its master on any rank.

        Bits are compared, in the parameter's type (all ranks).
        """
        records, state = self._records, self._access.state
        found = [False] * len(records)
        with self.world.agreeing(), state.passing([[model_array(record.name)] for record in records], "read") as tiles:
            for tile in tiles:
                record = records[tile.group]
                first = record.owned_range[0]
                here = record.full[first + tile.first : first + tile.stop]
                there = as_torch(tile.views[0])
                found[tile.group] |= not same_bits(here, there.to(here.device, record.dtype))
        return agree_any(self.world, found)

    def _restore(self, records: Sequence[ParameterRecord]) -> None:
        """Cast masters into all values of parameters that are not released (all ranks)."""
        access = self._access
        sources = [access.source(r, "model") for r in records]
        access.read_into({r: r.full for r in records if r.residency is not Residency.RELEASED}, sources)
        for record in records:
            record.note_version()

    def _is_changed(self, record: ParameterRecord, version: int) -> bool:
        if record.parameter._version not in (version, record.version):
            return True
        if record.shard is None or record.residency is not Residency.GATHERED or record.is_rounded:
            return False
        first, stop = record.owned_range
        return not same_bits(record.full[first:stop], record.shard)


class _BuiltBlock:
    """The part of a block that belongs to a model that is not trained yet."""

    def __init__(self, builder: Builder, built: Sequence[Built], modifier_rank: int | None) -> None:
        self.world = builder.world
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._builder = builder
        self._built = built
        self._parameters = [parameter for one in built if (parameter := one.ref()) is not None]
        self._guard = ExitStack()

    def open(self) -> None:
        """Give the parameters their values (all ranks)."""
        _check_rank(self._modifier_rank, self.world)
        for built in self._built:
            self._builder.touch(built)
        self._versions = [parameter._version for parameter in self._parameters]
        self._guard.enter_context(self._builder.guard.suspended())

    def close(self, error: BaseException | None) -> None:
        """Write changes back, or drop them; `error` ended the block (all ranks)."""
        self._guard.close()
        changed = [p._version != version for p, version in zip(self._parameters, self._versions, strict=True)]
        pairs, kept = list(zip(self._built, self._parameters, strict=True)), False
        try:
            _end(self.world, error)
            if self._modifier_rank is None and any(agree_any(self.world, changed)):
                raise UsageError(
                    "gather() without modifier_rank is read-only, but parameters changed in the block on some rank; the "
                    "change is undone. Pass modifier_rank=RANK to keep that rank's changes"
                )
            kept = self._modifier_rank is not None
        finally:
            for built, parameter in () if kept else pairs:
                self._builder.set_placeholder(built, parameter)
        if self._modifier_rank is not None:
            for built, parameter in pairs:
                self.world.broadcast(parameter.data, self._modifier_rank)
                self._builder.release(built, parameter)


class _PlainBlock:
    """The part of a block that belongs to parameters of `zstore.Init` which are whole on every rank, and not trained yet."""

    def __init__(self, parameters: Sequence[nn.Parameter], modifier_rank: int) -> None:
        self.world = World.current()
        self._modifier_rank = modifier_rank
        self._parameters = parameters
        self._before: list[torch.Tensor] = []

    def open(self) -> None:
        """Keep the values that an error in the block restores."""
        _check_rank(self._modifier_rank, self.world)
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    def close(self, error: BaseException | None) -> None:
        """Give every rank the values of the one, or of before the block if `error` ended it (all ranks)."""
        try:
            _end(self.world, error)
        except BaseException:
            for parameter, before in zip(self._parameters, self._before, strict=True):
                parameter.data = before
            raise
        for parameter in self._parameters:
            values = parameter.data.to(self.world.device, copy=True).contiguous()
            self.world.broadcast(values, self._modifier_rank)
            parameter.data.copy_(values)


_Block = _RunBlock | _BuiltBlock | _PlainBlock


def _end(world: World, error: BaseException | None) -> None:
    """Raise the error that ended a block on any rank (all ranks). Ctrl-C, or the interpreter's end, is this rank's alone: it
    does not wait for the others."""
    if error is not None and not isinstance(error, Exception):
        raise error
    world.raise_together(error)


def _check_rank(rank: int | None, world: World) -> None:
    if rank is not None and not 0 <= rank < world.world_size:
        raise UsageError(f"gather(modifier_rank={rank}): there are ranks 0 to {world.world_size - 1}")


def _take_over(record: ParameterRecord, *, keep: bool) -> None:
    """Give a parameter its own memory again if the block replaced it (`p.data = ...`), with the values of the new one if
    `keep`."""
    values = record.parameter.data
    if keep and values.shape != record.shape:
        raise UsageError(
            f"parameter {record.name!r} has shape {tuple(values.shape)} at the end of gather(), expected "
            f"{tuple(record.shape)}: build the model in its final size before initialize()"
        )
    if values.data_ptr() != record.full.data_ptr() or not values.is_contiguous():
        if keep:
            record.full.copy_(values.reshape(-1))
        record.parameter.data = record.full.view(record.shape)


def in_step(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `generate` with transformers' `synced_gpus` on, unless the call says otherwise.

    Gathering is a collective, so a rank whose texts are complete has to go on with forwards until all are, as `synced_gpus`
    does; the ranks call `generate` equally often. A `generate` without that parameter is returned as it is: it runs equally
    many forwards on every rank, or has its own way to keep step.
    """
    signature = inspect.signature(generate)
    if "synced_gpus" not in signature.parameters:
        return generate

    @functools.wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind_partial(*args, **kwargs)
        if call.arguments.get("synced_gpus") is None:
            call.arguments["synced_gpus"] = True
        return generate(*call.args, **call.kwargs)

    return together
