"""`gather` (whole parameters in a `with` block), and access to their state under DeepSpeed's names (`deepspeed.utils`).

All calls are collectives: every rank calls them for the same parameters, in the same order. Getters return None for a parameter
that no open engine trains.

[Note: changes in a block]
With a `modifier_rank`, that rank's values are broadcast at the end of the block; the fp32 master of each parameter with a
changed bit becomes the new value. An unchanged parameter keeps its master, which is more precise. Without it the block is
read-only: a change detected by the parameter's version counter, or in this rank's rows of a sharded parameter, raises and is
undone; a write through `.data` elsewhere is lost silently. An fp32 parameter that is its own master (whole on every rank,
state on the device) has no copy to restore from, and keeps the written values, as without an engine.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import model_array
from zstore.io.memory import as_torch
from zstore.ranks.world import World, agree_any

from ..build.builder import Builder, BuiltParameter, find_built, seen_by_init
from ..params.record import ParameterRecord, Residency
from .access import Access, RankArray, find_run, rows_source
from .guard import same_bits

Parameters = nn.Parameter | nn.Module | Iterable[nn.Parameter]


@contextmanager
def gather(params: Parameters, modifier_rank: int | None = None) -> Iterator[None]:
    """Gather parameters for the duration of a `with` block (all ranks, with the same parameters).

    `params` is one parameter, several, or a module. With `modifier_rank`, every rank's parameters and fp32 masters are set to
    that rank's values at the end of the block. Without it the block is read-only: a detected change is undone and raises
    UsageError (see [Note: changes in a block]). An error in the block on any rank ends it on all, and undoes changes.

    Works at every stage, in nested blocks, and within a forward for reading. Tensors taken from a sharded parameter in
    the block stay valid after it. It also gathers parameters of a model that was built within `zstore.Init`, or loaded by
    `zstore.from_pretrained`, and not yet passed to `initialize`. Any other parameter is left unchanged.

    Raises UsageError for changes within a forward or backward, and if the ranks gather different parameters.
    """
    worlds: list[World] = []
    with ExitStack() as opened:
        error: Exception | None = None
        try:
            for world, block in _gather_blocks(_as_list(params), modifier_rank):
                with world.calling("gather"):
                    opened.enter_context(block)
                worlds.append(world)
            yield
        except Exception as raised:  # not Ctrl-C or the end of a closed generator, which happen on this rank only
            error = raised
        with ExitStack() as closing:
            for world in worlds:
                closing.enter_context(world.calling("gather"))
            closing.push(opened.pop_all())
            for world in worlds:
                world.raise_on_all_ranks(error)
            if error is not None:
                raise error


def _as_list(params: Parameters) -> list[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    listed = list(dict.fromkeys(params))
    for item in listed:
        if not isinstance(item, nn.Parameter):
            raise UsageError(f"gather() expects parameters, or a module, got {type(item).__name__}")
    return listed


def _gather_blocks(
    parameters: Sequence[nn.Parameter], modifier_rank: int | None
) -> list[tuple[World, AbstractContextManager[None]]]:
    """Return a block and its ranks for each run, for each builder, and for the parameters that `zstore.Init` left whole."""
    runs: dict[Access, list[ParameterRecord]] = {}
    builders: dict[Builder, list[BuiltParameter]] = {}
    unsharded = []
    for parameter in parameters:
        if (in_run := find_run(parameter)) is not None:
            runs.setdefault(in_run[0], []).append(in_run[1])
        elif (built := find_built(parameter)) is not None:
            builders.setdefault(built[0], []).append(built[1])
        elif parameter in seen_by_init:
            unsharded.append(parameter)
    blocks: list[tuple[World, AbstractContextManager[None]]]
    blocks = [(access.world, _gather_in_run(access, records, modifier_rank)) for access, records in runs.items()]
    blocks += [
        (builder.world, _gather_in_builder(builder, built, modifier_rank)) for builder, built in builders.items()
    ]
    if unsharded and modifier_rank is not None:
        world = World.current()
        blocks.append((world, _broadcast_after(world, unsharded, modifier_rank)))
    return blocks


def _check_rank(rank: int | None, world: World) -> None:
    if rank is not None and not 0 <= rank < world.world_size:
        raise UsageError(f"gather(modifier_rank={rank}): there are ranks 0 to {world.world_size - 1}")


@contextmanager
def _gather_in_run(access: Access, records: Sequence[ParameterRecord], rank: int | None) -> Iterator[None]:
    """Gather parameters of a run; at the end write changes back, or undo them, and release the parameters."""
    names = hashlib.sha256("\n".join(record.name for record in records).encode()).hexdigest()[:16]
    call = f"gather() of {len(records)} parameters ({names}), modifier_rank={rank}"
    access.prepare(call, lambda: _check_rank(rank, access.world), changes=rank is not None)
    if access.units is not None:
        access.units.gather(records, partial(_all_gather, access))
    access.guard.open_blocks += 1
    versions = [record.parameter._version for record in records]
    try:
        try:
            yield
        except Exception:
            with suppress(Exception):
                _restore(access, records)
            raise
        if rank is None:
            _undo(access, records, versions)
        else:
            _write_back(access, records, rank)
    finally:
        for record in records:
            _restore_memory(record, keep=False)
        access.guard.open_blocks -= 1
        if access.units is not None:
            access.units.ungather(records)


def _all_gather(access: Access, records: Sequence[ParameterRecord]) -> None:
    """All-gather the rows of sharded parameters into the allocated `full` of each (all ranks)."""
    sources = [
        rows_source(r, r.owned(), r.dtype)
        if r.stored_array is None
        else access.source(r, r.stored_array.partition("/")[0])
        for r in records
    ]
    access.read_into({record: record.full for record in records}, sources)


def _write_back(access: Access, records: Sequence[ParameterRecord], rank: int) -> None:
    """Set parameters, and the masters that differ from them, to the values of `rank` (all ranks)."""
    world = access.world
    with world.agreeing():
        for record in records:
            _restore_memory(record, keep=world.rank == rank)
    for record in records:
        world.broadcast(record.full, rank)
    differ = [False] * len(records)
    with world.agreeing(), access.state.open_pass([[model_array(r.name)] for r in records], "read") as tiles:
        for tile in tiles:
            record, master = records[tile.group], as_torch(tile.views[0])
            first = record.owned_range[0]
            rows = record.full[first + tile.first : first + tile.stop]
            differ[tile.group] |= not same_bits(rows, master.to(rows.device, record.dtype))
    access.write([(r, r.full) for r, differs in zip(records, agree_any(world, differ), strict=True) if differs])
    for record in records:
        record.note_version()


def _undo(access: Access, records: Sequence[ParameterRecord], versions: Sequence[int]) -> None:
    """Restore parameters that any rank has changed since these versions, and raise UsageError on every rank."""
    changed = agree_any(access.world, [_is_changed(*pair) for pair in zip(records, versions, strict=True)])
    restored = [record for record, differs in zip(records, changed, strict=True) if differs]
    if not restored:
        return
    _restore(access, restored)
    names = ", ".join(repr(record.name) for record in restored[:5])
    raise _read_only_error(names, " (except for fp32 parameters that are their own masters)")


def _read_only_error(names: str, exception: str = "") -> UsageError:
    return UsageError(
        f"gather() without modifier_rank is read-only, but {names} changed in the block on some rank; the change was "
        f"undone{exception}. Pass modifier_rank=RANK to keep that rank's changes"
    )


def _is_changed(record: ParameterRecord, version: int) -> bool:
    if record.parameter._version not in (version, record.version):
        return True
    if record.shard is None or record.residency is not Residency.GATHERED or record.is_rounded:
        return False
    first, stop = record.owned_range
    return not same_bits(record.full[first:stop], record.shard)


def _restore(access: Access, records: Sequence[ParameterRecord]) -> None:
    """Restore parameters that are not released from their masters (all ranks)."""
    sources = [access.source(r, "model") for r in records]
    access.read_into({r: r.full for r in records if r.residency is not Residency.RELEASED}, sources)
    for record in records:
        record.note_version()


def _restore_memory(record: ParameterRecord, *, keep: bool) -> None:
    """Restore a parameter's storage if the block replaced it (`p.data = ...`); with `keep`, copy the new values."""
    values = record.parameter.data
    if keep and values.shape != record.shape:
        raise UsageError(
            f"parameter {record.name!r} has shape {tuple(values.shape)} at the end of gather(), expected "
            f"{tuple(record.shape)}: create the model with its final shapes before initialize()"
        )
    if values.data_ptr() != record.full.data_ptr() or not values.is_contiguous():
        if keep:
            record.full.copy_(values.reshape(-1))
        record.parameter.data = record.full.view(record.shape)


@contextmanager
def _gather_in_builder(builder: Builder, built: Sequence[BuiltParameter], rank: int | None) -> Iterator[None]:
    """Gather parameters of a model that is being built in shards; at the end write changes back, or discard them."""
    _check_rank(rank, builder.world)
    for record in built:
        builder.make_live(record)
    pairs = [(record, parameter) for record in built if (parameter := record.ref()) is not None]
    versions = [parameter._version for _, parameter in pairs]
    keeps_changes = False
    try:
        with builder.guard.suspended():
            yield
        changed = [p._version != version for (_, p), version in zip(pairs, versions, strict=True)]
        if rank is None and any(agree_any(builder.world, changed)):
            raise _read_only_error("parameters")
        keeps_changes = rank is not None
    finally:
        for record, parameter in () if keeps_changes else pairs:
            builder.set_placeholder(record, parameter)
    if rank is not None:
        for _, parameter in pairs:
            builder.world.broadcast(parameter.data, rank)
        with builder.world.agreeing():
            for record, parameter in pairs:
                builder.release(record, parameter)


@contextmanager
def _broadcast_after(world: World, parameters: Sequence[nn.Parameter], rank: int) -> Iterator[None]:
    """At the end, broadcast whole parameters of `zstore.Init` from `rank`; after an error, restore them."""
    _check_rank(rank, world)
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    except BaseException:
        for parameter, values in zip(parameters, before, strict=True):
            parameter.data = values
        raise
    for parameter in parameters:
        values = parameter.data.to(world.device, copy=True).contiguous()
        world.broadcast(values, rank)
        parameter.data.copy_(values)


def with_synced_gpus(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `generate` with transformers' `synced_gpus` on by default.

    Gathering is a collective, so a rank whose texts are complete must run forwards until all are complete: `synced_gpus` does
    that. A `generate` without that parameter is returned unchanged: it must run the same number of forwards on every rank.
    """
    signature = inspect.signature(generate)
    if "synced_gpus" not in signature.parameters:
        return generate

    @functools.wraps(generate)
    def synced(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind_partial(*args, **kwargs)
        if call.arguments.get("synced_gpus") is None:
            call.arguments["synced_gpus"] = True
        return generate(*call.args, **call.kwargs)

    return synced


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole fp32 master of a parameter on the CPU."""
    found = _find(param)
    return None if found is None else found[0].parameter(found[1].name)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole optimizer slot of a parameter, such as "exp_avg", on the CPU."""
    found = _find(param)
    return None if found is None else found[0].optimizer_state(found[1].name, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient in the current step, averaged over ranks and unscaled, fp32, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].gradient(found[1].name)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter and its fp32 master with rank 0's values."""
    access, record = _find_or_raise(param)
    access.set_parameter(record.name, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an optimizer slot of a parameter with rank 0's values."""
    access, record = _find_or_raise(param)
    access.set_optimizer_state(record.name, optim_state_key, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's averaged, unscaled gradient with rank 0's values, after the last backward of a step.

    Raises UsageError if there is none, or if it is on disk.
    """
    access, record = _find_or_raise(param)

    def check() -> None:
        if not access.gradients.with_gradient([record]):
            raise UsageError(
                f"parameter {record.name!r} has no gradient to replace: set it between backward() and step()"
            )
        access.check_values(record, value)

    access.prepare(f"safe_set_full_grad({record.name!r})", check)
    full = access.broadcast_from_rank0(record, value, torch.float32)
    access.gradients.replace(record, full.mul_(access.scaler.scale))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one with the result of `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's rows of the fp32 master of a parameter, 1-D."""
    if (found := _find(param)) is None:
        return None
    access, record = found
    call = f"get_full_parameter({record.name!r})"
    return _read_rows(access.prepare(call, lambda: access.source(record, "model")))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's rows of an optimizer slot of a parameter, 1-D."""
    if (found := _find(param)) is None:
        return None
    access, record = found
    source = access.slot(record.name, optim_state_key)
    return _read_rows(source) if isinstance(source, RankArray) else torch.tensor(source)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of the gradient that `safe_get_full_grad` returns, 1-D."""
    gradient, found = safe_get_full_grad(param), _find(param)
    return None if gradient is None or found is None else gradient.flatten()[slice(*found[1].owned_range)].clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's rows of a parameter and its fp32 master."""
    safe_set_full_fp32_param(param, _from_local_rows(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's rows of an optimizer slot of a parameter."""
    safe_set_full_optimizer_state(param, _from_local_rows(param, value), optim_state_key)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's rows of a parameter's gradient, as `safe_set_full_grad` does."""
    safe_set_full_grad(param, _from_local_rows(param, value))


def _read_rows(source: RankArray) -> torch.Tensor:
    return source.start_read(0, source.record.owned_numel)().clone()


def _from_local_rows(param: nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    """Return the whole values of a parameter from each rank's `rows` (all ranks). Raises UsageError on every rank if any rank
    passes a wrong number of elements."""
    access, record = _find_or_raise(param)
    with access.world.agreeing():
        if rows.numel() != record.owned_numel:
            raise UsageError(
                f"parameter {record.name!r}: expected this rank's {record.owned_numel} values, got {rows.numel()}"
            )
    full = torch.empty(record.shape, dtype=torch.float32)
    access.read_into({record: full.view(-1)}, [rows_source(record, rows.detach().flatten(), torch.float32)])
    return full


def _find(param: nn.Parameter) -> tuple[Access, ParameterRecord] | None:
    found = find_run(param)
    return None if found is None or found[1].group is None else found


def _find_or_raise(param: nn.Parameter) -> tuple[Access, ParameterRecord]:
    found = _find(param)
    if found is None:
        raise UsageError(f"a parameter of shape {tuple(param.shape)} is not trained by any open engine")
    return found
