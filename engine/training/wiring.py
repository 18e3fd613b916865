"""Creates a run: opens the store, distributes the model over ranks and tiers, and connects the parts."""

from __future__ import annotations

import uuid
from functools import partial

from torch import nn

from zstore.io import Files
from zstore.ranks.world import World, agree_any

from ..activations.checkpointing import checkpoint_blocks
from ..activations.offload import ActivationOffload, make_tier
from ..build.model import cast_for_running_statistics, check_model, place_buffers
from ..build.store import BuiltModel, Layout, open_run_store, warn_of_fallbacks
from ..config.config import Config
from ..optim.optimizer import ZeroOptimizer, group_of_parameters
from ..optim.rules import CLIENT, check_client, codecs, rule_of
from ..optim.state import OptimizerState
from ..optim.update import StepMode, Update
from ..params.record import PRECISIONS, named_parameters
from ..params.sharding import Sharding, find_units
from ..plan.plan import Plan, activation_pool_bytes, gradient_types
from ..runtime.device import Streams, Transfers, streams_for
from ..zero.collectives import Exchanges, GradientRules, exchanges_of
from ..zero.gradients import Gradients
from ..zero.hooks import UnitHooks
from ..zero.unshard import ShardedUnits
from .training import Training


def wire(
    model: nn.Module,
    config: Config,
    world: World,
    optimizer: ZeroOptimizer,
    *,
    files: Files | None = None,
    streams: Streams | None = None,
) -> Training:
    """Return the run of `model` that the config describes (all ranks); the model is changed in place.

    `files` accesses the run's disks; `streams` run the copies between host and device.
    """
    offloads_parameters = config.offload_param.device != "none"
    sharding = Sharding.of_stage(config.stage, world.world_size, offloads_parameters=offloads_parameters)
    groups = {} if config.frozen else group_of_parameters(optimizer, model)
    rule = rule_of(optimizer.kind, whole=config.stage == 0 and config.offload_optimizer.device == "none")
    if rule is CLIENT:
        check_client(optimizer.client, config)
    kernels = [rule.kernel(optimizer.kind, group) for group in optimizer.param_groups]
    codec = codecs[config.moment_type](kernels, optimizer.kind.__name__)
    if config.zstore.gradient_checkpointing and not config.frozen:
        checkpoint_blocks(model)
    names = list(named_parameters(model))
    check_model(model, world, gathers=sharding.parameters)
    # First, so that an unusable folder leaves the model unchanged.
    built = BuiltModel(model, world, may_copy=config.frozen)
    streams = streams or streams_for(world.device)
    slots = {name: rule.slots(kernels[groups[p]], p.shape, world.world_size) for name, _, p in names if p in groups}
    plan, store = open_run_store(
        model, config, built, slots, device_is_host=streams.device_is_host, files=files, cuda=streams.cuda_runtime
    )
    if config.frozen:
        model.requires_grad_(False)
    transfers = Transfers(streams, store.links, store.rooms)
    try:
        buffer_type = config.settings.data_types.buffer_dtype
        place_buffers(model, world, None if buffer_type is None else PRECISIONS[buffer_type])
        cast_for_running_statistics(model)
        state = OptimizerState(
            store,
            kernels,
            transfers,
            is_sharded=sharding.optimizer_state,
            codec=codec,
            host_ranks=world.local_world_size if config.zstore.host_kernel == "auto" else 0,
        )
        if plan.packs_small:
            store.share_files()
        layout = Layout(config, sharding, built, plan)
        records = layout.lay_out_all(
            [(*name, groups.get(name[2])) for name in names],
            partial(state.add, types=gradient_types(config, world.world_size, PRECISIONS)),
        )
        built.unwatch()
        warn_of_fallbacks(store, world)
        live_numel = config.zero.stage3_max_live_parameters if sharding.parameters else None
        units = find_units(model, {record.parameter: record for record in records}, live_numel)
        exchanges, hooks = exchanges_of(config, sharding, world) if world.world_size > 1 else Exchanges(), None
        tier = (
            None
            if config.activations == "device"
            else make_tier(config, store, transfers, activation_pool_bytes(store.options.host_budget_bytes))
        )
        if sharding.parameters:
            sharded = ShardedUnits(units, config, store, transfers, world=world, exchanges=exchanges)
            hooks = UnitHooks(model, sharded)
        rules = _gradient_rules(state, plan, config, sharding, world, exchanges)
        gradients = Gradients(
            units,
            # These receive gradients that are not needed.
            [record.parameter for record in state.records if record.group is None],
            world,
            rules,
            transfers,
            spill=state.gradient_spill() if rules.each_backward and state.spilled else None,
            arrived=None if hooks is None else hooks.arrived,
        )
        stepper = None if rule.stepper is None or config.frozen else rule.stepper(optimizer.client, state, world)
        if stepper is not None and stepper.owns_gradients and not rules.each_backward:
            gradients.step.averaged = stepper.averaged
        mode, fetcher = StepMode(config.step_overlap), None if hooks is None else hooks.units.fetcher
        update = Update(model, state, gradients, world, mode, fetcher, stepper)
        if hooks is not None and update.guard is not None:
            hooks.add_handles(update.guard.handles)
        return Training(
            world=world,
            config=config,
            model=model,
            plan=plan,
            state=state,
            update=update,
            gradients=gradients,
            hooks=hooks,
            optimizer=optimizer,
            run_id=world.broadcast_object(uuid.uuid4().hex),
            activations=None
            if tier is None
            else ActivationOffload(model, lambda: (record.full for record in records), tier, transfers),
        )
    except BaseException:
        store.close()
        raise


def _gradient_rules(
    state: OptimizerState, plan: Plan, config: Config, sharding: Sharding, world: World, exchanges: Exchanges
) -> GradientRules:
    on_host = {record for record in state.scalars if plan.placements[record.name].gradient == "host"}
    in_backward = StepMode(config.step_overlap) is StepMode.BACKWARD
    # On a single rank, gradients for host memory are copied from the device as they arrive.
    leave_device = bool(state.spilled) or (bool(on_host) and not state.transfers.streams.device_is_host)
    by_unit = sharding.gradients or (world.world_size == 1 and (in_backward or sharding.parameters or leave_device))
    each_backward = by_unit and not config.frozen
    return GradientRules(
        each_backward=each_backward,
        bucket_numel=int(config.zero.reduce_bucket_size),
        scatter=sharding.optimizer_state and (config.zero.reduce_scatter or sharding.parameters),
        overlap=config.zero.overlap_comm or sharding.parameters,
        types=gradient_types(config, world.world_size, PRECISIONS),
        # Gradients on disk pass through host memory, so that sums of squares are bit-identical wherever gradients wait.
        to_host=frozenset(on_host.union(state.spilled) if each_backward else ()),
        spills=agree_any(world, [bool(state.spilled)])[0],
        keeps_rows=each_backward and config.offload_optimizer.device == "none" and world.world_size > 1,
        squares_at_once=each_backward and in_backward,
        exchanges=exchanges,
    )
