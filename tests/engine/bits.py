"""Cases of the engine's exactness, the bits that it and the plain loop hold, and the one comparison of both."""

import contextlib
import hashlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

import zstore
from tests.engine.models import batch, draw_shape, make_net
from tests.reference import Reference
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.build.builder import find_built
from zstore.engine.params.record import ParameterRecord, Residency
from zstore.engine.report.statistics import placed_arrays
from zstore.io.memory import as_torch

STEPS = 3
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATIC_SCALE = 128.0
SPILLS = 4_000_000
"""A host budget that leaves gradients on disk, where parameters rest there too."""


@dataclass(frozen=True)
class Model:
    """What is trained, and how: the same in the engine and in the plain loop."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    """What the loss is of, by step, micro-batch and rank."""
    loss: Callable[[Any, Any], torch.Tensor] = lambda model, batch: model(*batch)
    groups: Callable[[dict[str, nn.Parameter]], list[Any]] | None = None
    """The optimizer's groups of what is trained, by name; None: all is one."""
    evaluates_in: tuple[Any, ...] = (torch.no_grad, torch.inference_mode)


@dataclass(frozen=True)
class Rule:
    """An optimizer other than the config's AdamW."""

    make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
    """Of what is trained, by name: in the plain loop of its masters."""
    section: dict[str, Any] | None = None
    """Of the config; None: the script makes the object and passes it."""


@dataclass(frozen=True)
class Case:
    stage: int
    tier: str
    precision: str
    accumulation: int
    clip: float
    bucket: int = 500_000_000
    threshold: int = 100
    parameters: str = "none"
    """Tier of the parameters."""
    overlap: str = "none"
    """Step mode."""
    keys: dict[str, Any] | None = None
    """Further keys of the ZeRO section."""
    seed: int | None = None
    """Of the model's shape and values; None: the usual small model."""
    types: tuple[str | None, str | None] = (None, None)
    """Types in which gradients accumulate and in which they are reduced; None: not said."""
    budget: int | None = None
    """Bytes of the host budget, so small that gradients wait on disk."""
    counts: tuple[int, ...] | None = None
    """Micro-batches of each step, whose ends the caller names; None: what the config says."""
    resume: int = 0
    """Steps after which it is saved, and another engine goes on."""
    built: bool = False
    """Whether the model is built within `zstore.Init`."""
    own_backward: bool = False
    """Whether the script calls `loss.backward()`."""
    own: dict[str, Any] | None = None
    """Further keys of the config's section of ours."""
    model: str = ""
    """Name among the models that `compare_all` is given; empty: the usual one."""
    optimizer: str = ""
    """Name among the rules that `compare_all` is given; empty: the config's AdamW."""

    @property
    def net(self) -> Model:
        shape = {"vocab": 1203} if self.seed is None else draw_shape(self.seed)
        return Model(partial(make_net, self.seed or 0, **shape), partial(batch, vocab=shape["vocab"]))

    def reference(self, world_size: int, model: Model | None = None, rule: Rule | None = None) -> Reference:
        model = model or self.net
        torch.manual_seed(self.seed or 0)
        made = Reference(
            model.make(),
            world_size,
            stage=self.stage,
            precision=self.precision,
            accumulation=self.accumulation,
            clip=self.clip,
            scale=STATIC_SCALE if self.precision == "fp16" else 1.0,
            accumulate=self.types[0],
            reduce=self.types[1],
            adam=ADAM,
            loss=model.loss,
            **({"groups": model.groups} if model.groups else {}),
        )
        if rule is not None:
            made.optimizer = rule.make(made.masters)
            stepped = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
            made.masters = {name: master for name, master in made.masters.items() if id(master) in stepped}
            made.trained = {name: made.trained[name] for name in made.masters}
        return made

    def config(self, world_size: int, nvme_path: str) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            "stage3_param_persistence_threshold": self.threshold,
        }
        if self.tier != "none":
            zero["offload_optimizer"] = {"device": self.tier}
            if self.tier == "nvme":
                zero["offload_optimizer"]["nvme_path"] = nvme_path
        if self.parameters != "none":
            zero["offload_param"] = {"device": self.parameters}
            if self.parameters == "nvme":
                zero["offload_param"]["nvme_path"] = nvme_path
        for name, value in (self.keys or {}).items():
            zero[name] = {**zero.get(name, {}), **value} if isinstance(value, dict) else value
        config: dict[str, Any] = {
            "train_batch_size": 2 * world_size * self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": {"step_overlap": self.overlap} | (self.own or {}),
        }
        if self.types[0] is not None:
            config["data_types"] = {"grad_accum_dtype": self.types[0]}
        if self.types[1] is not None:
            config["communication_data_type"] = self.types[1]
        if self.budget is not None:
            config["zstore"]["host_budget_bytes"] = self.budget
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "loss_scale": STATIC_SCALE}
        return config


def digest(values: torch.Tensor) -> str:
    data = bytes(values.detach().cpu().view(torch.uint8).numpy()) if values.numel() else b""
    return hashlib.sha256(data).hexdigest()[:16]


def all_released(engine: Engine) -> bool:
    """Return whether no parameter that is sharded is gathered, in other memory than it rests in."""
    records = [record for record in engine.training_state.state.records if record.residency is not Residency.RESIDENT]
    return all(
        record.residency is Residency.RELEASED and (record.is_in_place or record.full.untyped_storage().nbytes() == 0)
        for record in records
    )


def rows_at_rest(engine: Engine, record: ParameterRecord) -> torch.Tensor:
    """Return this rank's rows of a parameter, wherever they rest."""
    if record.stored_array is None:
        return record.owned()
    return as_torch(engine.training_state.state.store.read(record.stored_array).wait())


def engine_digests(engine: Engine) -> dict[str, str]:
    """Return the hash of this rank's rows of every array, and of every parameter's rows."""
    training = engine.training_state
    training.update.wait()
    found: dict[str, str] = {}
    for record in training.state.records:
        found[record.name] = digest(rows_at_rest(engine, record))
        if record.group is not None:
            arrays = [as_torch(training.state.store.read(name).wait()) for name in training.state.array_names[record]]
            for name, values in zip(training.state.array_names[record], arrays, strict=True):
                found[name] = digest(values)
    return found


def reference_digests(reference: Reference, rows: dict[str, tuple[int, int]]) -> dict[str, str]:
    parameters = {name: p.detach().reshape(-1) for name, p in reference.model.named_parameters()}
    found = {name: digest(values[slice(*rows[name])]) for name, values in parameters.items()}
    for name, values in reference.arrays().items():
        fqn = name.split("/", 1)[1] if name.startswith("model/") else name.split("/", 2)[2]
        found[name] = digest(values[slice(*rows[fqn])])
    return found


def slot_digests(engine: Engine, reference: Reference) -> dict[str, str]:
    """Return the hashes of this rank's rows of what is trained in the plain loop, with all that its optimizer keeps of what it
    updated."""
    state = engine.training_state.state
    found: dict[str, str] = {}
    for record in state.records:
        if record.name not in reference.masters:
            continue
        master = reference.masters[record.name]
        wholes = {record.name: reference.trained[record.name], f"model/{record.name}": master}
        found |= {name: digest(whole.reshape(-1)[slice(*record.owned_range)].clone()) for name, whole in wholes.items()}
        for array in state.array_names[record][1:] if master.grad is not None else ():
            slot, spec = reference.optimizer.state[master][array.split("/")[1]], state.store.spec(array)
            assert tuple(spec.shape) == tuple(slot.shape)
            slot = slot.to(getattr(torch, spec.dtype))  # moments in bf16, which the plain loop rounds
            found[array] = digest(slot.reshape(-1)[slice(*state.owned_range(record, array))].clone())
    return found


def misplanned(engine: Engine) -> list[str]:
    """Return the bytes that the store holds, by kind and tier, where the plan says others."""
    training = engine.training_state
    training.update.wait()
    plan, counted = training.plan, training.state.store.statistics()
    measured: Counter[tuple[str, str]] = Counter()
    for name, tier, kind, nbytes in placed_arrays(training):
        slot = {"master weights": "master", "optimizer state": name.split("/")[1]}.get(kind, kind)
        measured[slot, tier] += nbytes
    slots = {slot.name for record in training.state.scalars for slot in training.state.slots_of(record)}
    kinds = {kind: held for kind, held in plan.held.items() if kind in slots | {"parameters", "master"}}
    planned = Counter({(k, tier): getattr(h, tier) for k, h in kinds.items() for tier in ("device", "host", "disk")})
    measured["all", "disk"], planned["all", "disk"] = counted.disk_bytes, plan.held_total.disk
    in_store = (held.host for kind, held in plan.held.items() if kind not in ("gradients", "buffers"))
    measured["all", "host"], planned["all", "host"] = counted.host_bytes, sum(in_store)
    found = [f"{key}: {planned[key]}, {measured[key]}" for key in planned | measured if planned[key] != measured[key]]
    return found + ["buffers"] * (counted.pool_bytes > plan.held["buffers"].host)


SCALARS = ("step", "mu_product", "eta", "mu")


class Run:
    """An engine and the plain loop, side by side; a `with` block closes the engine."""

    def __init__(
        self,
        case: Case,
        rank: int,
        world_size: int,
        *,
        model: Model | None = None,
        rule: Rule | None = None,
        **given: Any,
    ) -> None:
        """`given` goes to `initialize`."""
        self.case, self.rank, self.world_size = case, rank, world_size
        self.model, self.rule, self.given, self.is_usual = model or case.net, rule, given, model is None
        self._folder = tempfile.TemporaryDirectory()
        self.reference = case.reference(world_size, self.model, rule)
        self.parameters = dict(self.reference.model.named_parameters())
        self.engine = self._start(case.seed or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._folder as folder:
            self.engine.__exit__(*error)
            assert error[0] is not None or not list(Path(folder).rglob("*.shard"))

    def _start(self, seed: int) -> Engine:
        case, given = self.case, dict(self.given)
        config = case.config(self.world_size, self._folder.name)
        with zstore.Init(config=config, live_bytes=0, enabled=case.built):
            torch.manual_seed(seed)
            model = self.model.make()
        in_shards = case.built and case.stage == 3 and case.parameters != "none" and case.threshold < 1000
        assert not in_shards or any(find_built(parameter) is not None for parameter in model.parameters())
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.model.groups:
            given["model_parameters"] = self.model.groups(named)
        if self.rule is not None:
            config["optimizer"] = self.rule.section
            given |= {} if self.rule.section else {"optimizer": self.rule.make(named)}
        self.client = given.get("optimizer")
        engine: Engine = zstore.initialize(model=model, config=config, **given)[0]
        store = engine.training_state.state.store
        if "host_budget_bytes" not in (case.own or {}):
            on_disk = any(store.tier(name).name == "disk" for name in store.names())
            assert on_disk or not self.is_usual or "nvme" not in (case.tier, case.parameters)
            assert bool(engine.training_state.state.spilled) == (case.budget is not None)
        return engine

    def batches(self) -> list[list[Any]]:
        number = self.engine.global_steps
        count = self.case.accumulation if self.case.counts is None else self.case.counts[number]
        return [[self.model.batch(number, m, r) for r in range(self.world_size)] for m in range(count)]

    def step(self, between: Callable[[list[list[Any]]], object] = lambda batches: None) -> list[str]:
        """Take a step with both; return what differs of what needs no end of the update. `between` is called with the step's
        batches between its last backward and `engine.step()`."""
        case, engine, batches = self.case, self.engine, self.batches()
        losses, found = [], []
        for number, micro in enumerate(batches):
            is_last = number == len(batches) - 1
            if case.counts is not None:
                engine.set_gradient_accumulation_boundary(is_last)
            with contextlib.nullcontext() if is_last else engine.no_sync():
                loss = self.model.loss(engine, micro[self.rank])
                losses.append(float(loss.detach()))
                loss.backward() if case.own_backward else engine.backward(loss)  # type: ignore[no-untyped-call]
            if case.stage == 3 and not case.keys and not all_released(engine):
                found.append("still gathered after the backward")
            if is_last:
                between(batches)
            engine.step()
        assert all(p.grad is None for p in engine.parameters())
        assert engine.was_step_applied()
        self.reference.model.train()
        self.reference.step(batches)
        if engine.get_global_grad_norm() != self.reference.norm:
            found.append(f"norm {engine.get_global_grad_norm()} != {self.reference.norm}")
        if losses != reference_losses(self.reference, self.rank, case, self.world_size, len(batches)):
            found.append(f"losses {losses}")
        return found

    def differences(self) -> list[str]:
        """Return the arrays, buffers and scalars of the plain loop of which this rank has others."""
        engine, reference = self.engine, self.reference
        expected, found = slot_digests(engine, reference), engine_digests(engine)
        if self.rule is None:
            rows = {record.name: record.owned_range for record in engine.training_state.state.records}
            expected |= reference_digests(reference, rows)
        differing = [array for array in expected if found.get(array) != expected[array]]
        theirs = dict(reference.at_rank(self.rank).named_buffers(remove_duplicate=False))
        for name, buffer in engine.module.named_buffers(remove_duplicate=False):
            same = buffer.dtype == theirs[name].dtype
            if not same or digest(buffer.reshape(-1)) != digest(theirs[name].reshape(-1)):
                differing.append(f"buffer {name}")
        if self.rule is not None and self.rule.section is None and self.case.stage == 0:
            return differing  # the script's object steps by itself, and keeps its own scalars
        scalars = {record.name: scalars for record, scalars in engine.training_state.state.scalars.items()}
        return differing + [
            f"{scalar} of {name}: {scalars[name].get(scalar)}"
            for name, master in reference.masters.items()
            for scalar, value in reference.optimizer.state[master].items()
            if master.grad is not None and scalar in SCALARS and scalars[name].get(scalar) != float(value)
        ]

    def evaluated(self) -> list[str]:
        """Return what differs of losses in eval, in each of the model's modes."""
        models, found = (self.engine, self.reference.at_rank(self.rank)), []
        for mode in self.model.evaluates_in:
            with mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a reentrant checkpoint without gradients
                losses = [float(self.model.loss(model.eval(), self.model.batch(90, 0, self.rank))) for model in models]
            if losses[0] != losses[1]:
                found.append(f"{mode.__name__} gives {losses[0]} != {losses[1]}")
            if not all_released(self.engine):
                found.append(f"still gathered after {mode.__name__}")
        self.engine.train()
        return found

    def resume(self) -> None:
        """Save, and go on in another engine, whose model began otherwise; the checkpoint has no fault."""
        folder = self._folder.name
        if self.world_size > 1:
            folder = self.engine.world.all_gather_object(folder)[0]
        self.engine.save_checkpoint(f"{folder}/saved", client_state={"mine": 5})
        self.engine.close()
        self.engine = self._start((self.case.seed or 0) + 1)
        assert self.engine.load_checkpoint(f"{folder}/saved")[1] == {"mine": 5}
        with open_checkpoint(f"{folder}/saved") as saved:
            assert verify_checkpoint(saved) == []

    def change(self, name: str, change: Callable[[torch.Tensor], Any]) -> None:
        change(self.parameters[name].data)
        if name in self.reference.masters:
            self.reference.masters[name].data.copy_(self.parameters[name].data)


def compare(
    case: Case,
    rank: int,
    world_size: int,
    steps: int | None = None,
    *,
    end: Callable[[Run], object] = lambda run: None,
    **given: Any,
) -> list[str]:
    """Return what differs between engine and plain loop after each of so many steps, and between the plan and what is held;
    `end` is called after all of them, and `given` goes to `Run`.

    Where no number of steps is given several ranks take two: the second has moments, and units in the order that the
    first recorded; or those whose ends the case names."""
    steps = steps or len(case.counts or range(STEPS if world_size == 1 else 2))
    found: list[str] = []
    with Run(case, rank, world_size, **given) as run:
        for step in range(steps):
            differing = run.step()
            # Reading the state would wait for the update: let it run into the next forward.
            if case.overlap != "forward" or step == steps - 1:
                differing += run.differences() + (run.evaluated() if given.get("model") else [])
            found += [f"step {step}: {one}" for one in differing]
            if case.resume == step + 1:
                run.resume()
        if case.counts is None:  # of more micro-batches than the config says gradients take more
            found += [f"planned and held of {one}" for one in misplanned(run.engine)]
        end(run)
    return found


def reference_losses(
    reference: Reference, rank: int, case: Case, world_size: int, count: int | None = None
) -> list[float]:
    if case.stage < 2 or world_size == 1:
        return reference.losses[rank]
    return [reference.losses[micro * world_size + rank][0] for micro in range(count or case.accumulation)]


def compare_all(
    rank: int,
    world_size: int,
    cases: Iterable[Case],
    steps: int | None = None,
    *,
    models: Mapping[str, Model] | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> list[tuple[str, list[str]]]:
    """Return the cases in which something differs, with it; models and optimizers are looked up by their names."""
    found = []
    for case in cases:
        model, rule = (models or {}).get(case.model), (rules or {}).get(case.optimizer)
        if differences := compare(case, rank, world_size, steps, model=model, rule=rule):
            found.append((str(case), differences))
    return found


def assert_equal(engine: Engine, expected: Reference) -> None:
    rows = {record.name: record.owned_range for record in engine.training_state.state.records}
    found, wanted = engine_digests(engine), reference_digests(expected, rows)
    assert {name: found[name] for name in wanted} == wanted
