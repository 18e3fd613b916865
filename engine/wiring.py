"""Laying a model out over ranks and tiers: stores, records, units, gradients."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from zstore.errors import UsageError
from zstore.io import Files, map_large_blocks
from zstore.ranks.groups import Groups, make_groups
from zstore.ranks.world import World
from zstore.store import TensorStore

from .activations.blocks import find_blocks
from .activations.offload import ActivationOffload
from .activations.recompute import set_up_checkpointing
from .activations.tiers import make_tier
from .build.layout import Layout
from .build.model import check_model, normalize_in_type_of_statistics, place_buffers
from .build.store import open_store, store_key
from .build.takeover import BuiltModel
from .config.config import Config
from .data.loader import TrainingLoader
from .device import Streams, Transfers, streams_for
from .optim.client_step import check_client
from .optim.in_backward import update_in_backward
from .optim.kernel import Kernel
from .optim.loss_scale import LossScaler
from .optim.lr_schedules import LRSchedule
from .optim.optimizer import ZeroOptimizer, group_of_parameters
from .optim.rules import CLIENT, Rule, codec_of, kernels_for, rule_of
from .optim.state import OptimizerState
from .optim.updater import StepMode, Updater
from .params.record import PRECISIONS, named_parameters
from .params.sharding import GradientTypes, Sharding
from .params.units import Unit, find_units
from .plan.needs import spill_pool_bytes
from .plan.plan import Plan, Slots
from .plan.run import budget_of_rank, check_drives, plan_run, tell_plan
from .training import Accumulation, PendingUpdate, Training
from .zero.exchanges import Exchanges, exchanges_of
from .zero.gradients import GradientRules, Gradients, WholeGradients, agree_any
from .zero.hooks import UnitHooks
from .zero.spill import GradientSpill
from .zero.unit_gradients import UnitGradients
from .zero.unshard import make_sharded_units

_log = logging.getLogger("zstore")


def wire(  # noqa: PLR0913 - two of them are seams for tests
    model: nn.Module,
    config: Config,
    world: World,
    optimizer: ZeroOptimizer,
    *,
    schedule: LRSchedule,
    loader: TrainingLoader | None,
    files: Files | None = None,
    streams: Streams | None = None,
) -> Training:
    """Return the run of `model` as the config says (all ranks); the model is changed in place.

    `files` is the run's access to its disks, `streams` are those of copies between host and device.
    """
    offloads_parameters = config.offload_param.device != "none"
    sharding = Sharding.of_stage(
        config.stage, world.world_size, offloads_parameters=offloads_parameters, copy_size=config.copy_size
    )
    groups = {} if config.frozen else group_of_parameters(optimizer, model)
    rule = rule_of(optimizer.kind, whole=config.stage == 0 and config.offload_optimizer.device == "none")
    kernels = _kernels(rule, optimizer, config)
    codec = codec_of(config, kernels, optimizer.kind.__name__)
    section = config.settings.activation_checkpointing
    set_up_checkpointing(model, section, enable=config.own.gradient_checkpointing and not config.frozen)
    names = list(named_parameters(model))
    check_model(model, world, gathers=sharding.parameters)
    # Before anything is changed: a folder that cannot be used leaves the model as it is.
    built = BuiltModel(model, world, copies=config.frozen)
    streams = streams or streams_for(world.device)
    slots = {name: rule.slots(kernels[groups[p]], p.shape) for name, _, p in names if p in groups}
    plan, store = _open(model, config, built, slots, streams, files)
    if config.frozen:
        model.requires_grad_(False)
    transfers = Transfers(streams, store.links, store.rooms)
    if config.offload_optimizer.nvme_paths or config.offload_param.nvme_paths or config.activations_paths:
        map_large_blocks()
    try:
        _require_own_snapshots(config, store, world)
        check_drives(plan, config, world, _present_bytes(store))
        buffer_type = config.settings.data_types.buffer_dtype
        place_buffers(model, world, None if buffer_type is None else PRECISIONS[buffer_type])
        normalize_in_type_of_statistics(model)
        state = OptimizerState(
            store,
            kernels,
            transfers,
            is_sharded=sharding.optimizer_state,
            splits=config.own.split_master,
            keeps_whole=rule.keeps_whole,
            types=GradientTypes.of(config, world.world_size, PRECISIONS),
        )
        state.codec = codec
        layout = Layout(config, sharding, built, plan)
        records = layout.lay_out_all([(*name, groups.get(name[2])) for name in names], state)
        built.end()
        _warn_of_fallbacks(store, world)
        live_numel = config.zero.stage3_max_live_parameters if sharding.parameters else None
        units = find_units(model, {record.parameter: record for record in records}, live_numel)
        updater, mode = Updater(store, transfers), StepMode(config.step_overlap)
        rank_groups, tier = _groups(config, sharding, world), make_tier(config, store, transfers)
        exchanges = exchanges_of(config, sharding, world, rank_groups)
        hooks = _hooks(model, units, state, config, sharding, world, exchanges)
        if hooks is not None:
            hooks.units.fetcher.ready = updater.wait_for
        gradients = _gradients(state, units, hooks, config, sharding, world, exchanges)
        stepper = (
            None if rule.stepper is None or config.frozen else rule.stepper(optimizer.client, state, exchanges.world)
        )
        if stepper is not None and stepper.owns_gradients and isinstance(gradients, WholeGradients):
            gradients.averaged = stepper.averaged
        copies = tier is None or store.budget.limit_bytes is None  # else activations need what is free
        fetcher = None if hooks is None else hooks.units.fetcher
        within = partial(update_in_backward, mode, model, state, gradients, updater, copies=copies, fetcher=fetcher)
        return Training(
            world=world,
            copy_world=exchanges.world,
            groups=rank_groups,
            config=config,
            accumulation=Accumulation(batch=config.batch, world_size=world.world_size),
            sharding=sharding,
            model=model,
            plan=plan,
            state=state,
            pending=PendingUpdate(world, updater, within() if mode.runs_in_backward else None),
            step_mode=mode,
            gradients=gradients,
            hooks=hooks,
            optimizer=optimizer,
            schedule=schedule,
            scaler=LossScaler(settings=config.loss_scaling, non_finite=config.non_finite_gradients),
            loader=loader,
            run_id=world.broadcast_object(uuid.uuid4().hex),
            stepper=stepper,
            activations=None
            if tier is None
            else ActivationOffload(model, records, find_blocks(model), tier, transfers),
        )
    except BaseException:
        store.close()
        raise


def _open(
    model: nn.Module,
    config: Config,
    built: BuiltModel,
    slots: Mapping[str, Slots],
    streams: Streams,
    files: Files | None,
) -> tuple[Plan, TensorStore]:
    """Return the placement of everything, and the store that holds it: the one in which the model was built, or a new one
    (all ranks)."""
    world, key = built.world, store_key(config)
    # An adopted store has its budget already; "auto" would be another by now.
    former = built.store_of(key)
    budget_bytes = budget_of_rank(config, world) if former is None else former.options.host_budget_bytes
    plan = plan_run(model, config, world, slots, budget_bytes, device_is_host=streams.device_is_host)
    tell_plan(plan, config, world)
    store = built.take_over(key)
    pins, runtime = not streams.device_is_host, streams.cuda_runtime
    store = store or open_store(config, world, budget_bytes, pins=pins, files=files, cuda=runtime)
    store.expect(plan.shared_bytes)
    return plan, store


def _require_own_snapshots(config: Config, store: TensorStore, world: World) -> None:
    """Raise UsageError, on every rank, if two engines of a process would have their step snapshots in one folder."""
    with world.agreeing():
        if config.step_folder is not None and config.own.durability_path is None and not store.is_first:
            raise UsageError(
                f'"durability": "step": another engine of this process has its snapshots in {config.step_folder}: give '
                "this one another nvme_path, or a zstore.durability_path of its own"
            )


def _kernels(rule: Rule, optimizer: ZeroOptimizer, config: Config) -> list[Kernel]:
    """Return the kernel of each parameter group. Raises UsageError if the config does not let the optimizer do its
    work."""
    if rule is CLIENT:
        check_client(optimizer.client)
        for key, unfit in (
            ("step_overlap", StepMode(config.step_overlap).runs_in_backward),
            ("split_master", config.own.split_master),
            ("moments", config.moments != "fp32"),
            ("ema", config.own.ema is not None),
        ):
            if unfit:
                raise UsageError(
                    f"optimizer {optimizer.kind.__name__} is not known to update each element by itself, and steps whole fp32 "
                    f'tensors, all at once: take {key} out of the config\'s "zstore" section'
                )
    return kernels_for(rule, optimizer.kind, optimizer.param_groups, config.own.ema)


def _warn_of_fallbacks(store: TensorStore, world: World) -> None:
    """Log once the requests that the system refused, and on which ranks (all ranks)."""
    ranks: dict[str, list[int]] = {}
    for rank, messages in enumerate(world.all_gather_object(store.fallbacks)):
        for message in messages:
            ranks.setdefault(message, []).append(rank)
    for message, which in ranks.items() if world.rank == 0 else ():
        where = "every rank" if len(which) == world.world_size else f"rank {', '.join(map(str, which))}"
        _log.warning("%s: %s", where, message)


def _present_bytes(store: TensorStore) -> Counter[Path]:
    """Return the bytes of the files that a store has already, by folder."""
    present: Counter[Path] = Counter()
    for name, folder in store.disk_folders().items():
        present[folder] += store.local(name).nbytes
    return present


def _groups(config: Config, sharding: Sharding, world: World) -> tuple[Groups, ...]:
    """Return the groups of ranks that hold one copy of the state, or of the parameters; the last ones are for reductions.
    Empty if all ranks share one copy (all ranks)."""
    if sharding.num_copies == 1:
        return () if config.secondary_size is None else (make_groups(world, config.secondary_size),)
    groups = make_groups(world, sharding.copy_size)
    # Gathers come in another order than reductions within a group, which gloo has none of: see CopiesReduction.
    return (groups,) if world.backend == "gloo" else (groups, make_groups(world, sharding.copy_size))


def _hooks(
    model: nn.Module,
    units: list[Unit],
    state: OptimizerState,
    config: Config,
    sharding: Sharding,
    world: World,
    exchanges: Exchanges,
) -> UnitHooks | None:
    """Return the object that gathers the parameters of units for their use; None if they stay whole."""
    if not sharding.parameters:
        return None
    sharded = make_sharded_units(units, config, state.store, state.transfers, world=world, exchanges=exchanges)
    return UnitHooks(model, sharded)


def _gradients(
    state: OptimizerState,
    units: list[Unit],
    hooks: UnitHooks | None,
    config: Config,
    sharding: Sharding,
    world: World,
    exchanges: Exchanges,
) -> Gradients:
    trained = [record for record in state.records if record.group is not None]
    # These get gradients that are not needed.
    others = [record.parameter for record in state.records if record.group is None]
    in_backward = StepMode(config.step_overlap).runs_in_backward
    # Without other ranks, gradients for host memory are copied off the device as they arrive.
    leaves = bool(state.spilled) or (bool(state.gradients_on_host) and not state.transfers.streams.device_is_host)
    by_unit = sharding.gradients or (world.world_size == 1 and (in_backward or sharding.parameters or leaves))
    by_unit = by_unit and not config.frozen
    rules = GradientRules(
        bucket_numel=config.reduce_bucket_numel,
        scatter=config.zero.reduce_scatter or sharding.parameters,
        overlap=config.zero.overlap_comm or sharding.parameters,
        types=GradientTypes.of(config, world.world_size, PRECISIONS),
        # Those of the disk go by way of host memory: sums of squares have the same bits then, wherever gradients wait.
        to_host=frozenset(state.gradients_on_host.union(state.spilled)),
        spills=agree_any(world, [bool(state.spilled)])[0],
        keeps_rows=config.offload_optimizer.device == "none",
        squares_at_once=in_backward,
        copies=sharding.num_copies,
        exchanges=exchanges,
    )
    if not by_unit:
        everywhere = not (sharding.optimizer_state and rules.scatter)
        return WholeGradients(trained, others, world, rules, everywhere=everywhere)
    spill = None
    if state.spilled:
        budget_bytes = state.store.options.host_budget_bytes
        spill = GradientSpill(state.store, state.spilled, state.transfers, spill_pool_bytes(budget_bytes or 0))
    arrived = None if hooks is None else hooks.arrived
    return UnitGradients(units, others, world, rules, state.transfers, spill=spill, arrived=arrived)
