"""Parameters stay those that the engine trains, in the groups that torch makes: what would part them is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zstore
from tests.engine import runs
from tests.engine.bits import engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config
from zstore.engine import Engine
from zstore.engine.adapters.deepspeed.engine import initialize as initialize_as_deepspeed
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command

STAGES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2, host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, host": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
}


def start(place: str = "stage 0", model: nn.Module | None = None, **changes: Any) -> Engine:
    keys = {"gradient_accumulation_steps": 1, "scheduler": None, "zero_optimization": STAGES[place]} | changes
    return runs.start(make_config(**keys), model)


def step(engine: Engine, number: int = 0) -> None:
    engine.backward(engine(*batch(number, 0, 0)))
    engine.step()


def trains(engine: Engine) -> bool:
    before = engine.get_full_parameter("blocks.0.up.weight")
    seen = shown(engine)
    step(engine, 7)
    after = engine.get_full_parameter("blocks.0.up.weight")
    return not torch.equal(before, after) and not torch.equal(seen, shown(engine))


def shown(engine: Engine) -> torch.Tensor:
    with zstore.gather(engine.module.blocks[0].up.weight):
        return engine.module.blocks[0].up.weight.detach().clone()


CHANGES: dict[str, Callable[[Any], object]] = {
    "half": lambda module: module.half(),
    "float": lambda module: module.float(),
    "double": lambda module: module.double(),
    "to type": lambda module: module.to(torch.float16),
    "to device": lambda module: module.to("meta"),
    "type": lambda module: module.type(torch.float64),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
}


@pytest.mark.parametrize("place", STAGES)
def test_a_conversion_after_initialize_is_refused_and_training_goes_on(place: str) -> None:
    with start(place) as engine:
        step(engine)
        before = engine_digests(engine)
        for name, change in CHANGES.items():
            for module in (engine, engine.module, engine.module.blocks[1].up):
                with pytest.raises(UsageError, match=r"converted after initialize\(\).*in the config") as caught:
                    change(module)
                assert "parameter '" in str(caught.value), name
        assert all(p.dtype == torch.bfloat16 for p in engine.parameters())
        assert all(b.dtype == torch.float32 for b in engine.buffers())
        assert engine_digests(engine) == before
        assert trains(engine)


@pytest.mark.parametrize("place", STAGES)
def test_a_conversion_that_changes_nothing_passes(place: str) -> None:
    with start(place) as engine, start(place) as other:
        for module in (engine, engine.module, engine.module.head):
            assert module.to(engine.device) is module
            assert module.bfloat16().cpu().to(torch.bfloat16).to(torch.zeros(1, dtype=torch.bfloat16)) is module
        step(engine)
        step(other)
        assert engine_digests(engine) == engine_digests(other)


def test_after_close_the_model_may_be_converted() -> None:
    engine = start()
    model = engine.module
    engine.close()
    assert "_apply" not in vars(model)
    assert model.float().head.weight.dtype == torch.float32
    model.load_state_dict(make_net(3).state_dict())
    assert torch.isfinite(engine(*batch(0, 0, 0)))


@pytest.mark.parametrize("data", [torch.zeros(168, 56, dtype=torch.bfloat16), torch.zeros(3, 4)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("place", STAGES)
def test_replaced_data_is_named_at_the_next_forward_and_put_back(place: str, data: torch.Tensor) -> None:
    with start(place) as engine:
        step(engine)
        before, seen = engine_digests(engine), shown(engine)
        engine.module.blocks[0].up.weight.data = data
        with pytest.raises(UsageError, match=r"'blocks\.0\.up\.weight' was given .*set_full_parameter"):
            engine(*batch(0, 0, 0))
        assert engine_digests(engine) == before
        assert torch.equal(shown(engine), seen)
        assert trains(engine)


def test_a_parameter_that_comes_later_is_named() -> None:
    with start() as engine:
        with pytest.raises(UsageError, match=r"engine\.late = Parameter"):
            engine.late = nn.Parameter(torch.ones(1))
        for late in (nn.Parameter(torch.ones(1)), nn.Linear(3, 3)):
            engine.module.late = late
            with pytest.raises(UsageError, match=r"'late(.weight)?' was added .* after initialize"):
                step(engine)
            del engine.module.late
        up = engine.module.blocks[0].up
        up.weight, weight = nn.Parameter(up.weight.detach().clone()), up.weight
        with pytest.raises(UsageError, match=r"'blocks\.0\.up\.weight' was added"):
            step(engine)
        up.weight = weight
        assert trains(engine)


def test_what_is_not_trained_may_come_later(caplog: pytest.LogCaptureFixture) -> None:
    with start() as engine:
        engine.module.extra = nn.Identity()
        engine.module.reference = nn.Linear(3, 3).requires_grad_(False)
        step(engine)
        step(engine)
        assert len([r for r in caplog.records if "'reference.weight' and 1 more: added" in r.message]) == 1
        engine.module.reference.requires_grad_(True)
        with pytest.raises(UsageError, match=r"'reference\.weight' was added"):
            step(engine)


@pytest.mark.parametrize("place", STAGES)
def test_a_frozen_parameter_that_came_later_is_saved_and_loaded(place: str, tmp_path: Path) -> None:
    def with_reference(engine: Engine, scale: float) -> nn.Linear:
        engine.module.reference = nn.Linear(3, 3).requires_grad_(False)
        nn.init.constant_(engine.module.reference.weight, scale)
        return engine.module.reference

    with start(place) as engine:
        with_reference(engine, 2.5)
        step(engine)
        engine.save_checkpoint(str(tmp_path), "one")
        wanted = {name: value.detach().clone() for name, value in engine.module.reference.state_dict().items()}
    assert consolidate_command(tmp_path / "one", out=tmp_path / "whole") == 0
    weights = load_file(next((tmp_path / "whole").glob("*.safetensors")))
    assert torch.equal(weights["reference.weight"].float(), wanted["weight"])
    with start(place) as engine:
        late = with_reference(engine, 0.0)
        engine.load_checkpoint(str(tmp_path), "one")
        assert all(torch.equal(value, wanted[name]) for name, value in late.state_dict().items())
    with start(place) as engine, pytest.raises(CheckpointMismatchError, match=r"model/reference\.weight"):
        engine.load_checkpoint(str(tmp_path), "one")


@pytest.mark.parametrize("place", STAGES)
def test_frozen_parameters_cannot_be_thawed_and_trained_ones_can_be_frozen(place: str) -> None:
    with start(place) as engine:
        engine.requires_grad_(True)
        with pytest.raises(UsageError, match=r"'frozen\.weight' was frozen at initialize\(\)"):
            engine(*batch(0, 0, 0))
        with torch.no_grad():
            engine(*batch(0, 0, 0))
        engine.module.frozen.requires_grad_(False)
        up, down = engine.get_full_parameter("blocks.0.up.weight"), engine.get_full_parameter("blocks.1.up.weight")
        engine.module.blocks[0].requires_grad_(False)
        step(engine)
        assert torch.equal(up, engine.get_full_parameter("blocks.0.up.weight"))
        assert not torch.equal(down, engine.get_full_parameter("blocks.1.up.weight"))
        engine.requires_grad_(True).module.frozen.requires_grad_(False)
        assert trains(engine)


def loads_state_dicts(rank: int, place: str) -> list[str]:
    found = []
    for way in ("load_module_state_dict", "load_state_dict", "custom"):
        with start(place) as engine:
            step(engine)
            state = {name: value.float() * 1.001 for name, value in make_net(3).state_dict().items()}
            given: dict[str, Any] = state if rank == 0 else {}
            if way == "custom":
                engine.load_module_state_dict(given, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
                state = {name: value if name == "shift" else value.bfloat16() for name, value in state.items()}
            elif way == "load_state_dict":
                given = {f"module.{name}": value for name, value in given.items()}
                assert engine.load_state_dict(given) == ([], [])
            else:
                engine.load_module_state_dict(given)
            with zstore.gather(engine.module):
                for name, value in engine.module.state_dict().items():
                    if not torch.equal(value, state[name].to(value.dtype)):
                        found.append(f"{way}: {name} of the model")
            for name, _ in engine.module.named_parameters():
                master = engine.get_full_parameter(name)
                wanted = state[name].bfloat16() if name.startswith("frozen") else state[name]
                if master is None or not torch.equal(master.float(), wanted.float()):
                    found.append(f"{way}: {name}")
            if not trains(engine):
                found.append(f"{way}: does not train")
    return found


@pytest.mark.parametrize("place", STAGES)
def test_a_state_dict_goes_into_parameters_masters_and_buffers(place: str) -> None:
    assert loads_state_dicts(0, place) == []


def loads_many_buffers(rank: int) -> list[str]:
    layers = [nn.BatchNorm1d(n) for n in sorted(range(1, 20), reverse=bool(rank))]  # addresses in another order
    model = nn.Sequential(*sorted(layers, key=lambda layer: layer.num_features))
    state = {name: torch.full_like(value, value.numel()).float() for name, value in model.state_dict().items()}
    with start(model=model) as engine:
        engine.load_module_state_dict(state if rank == 0 else {})
        return [name for name, value in model.state_dict().items() if not torch.equal(value.float(), state[name])]


def loads_on_every_rank(rank: int) -> list[str]:
    zstore.init_distributed()
    return [fault for place in list(STAGES)[1:] for fault in loads_state_dicts(rank, place)] + loads_many_buffers(rank)


def test_rank_0s_state_dict_counts_on_every_rank() -> None:
    assert run_ranks(loads_on_every_rank, 2) == [[], []]


@pytest.mark.parametrize("place", STAGES)
def test_a_state_dict_that_does_not_fit_changes_nothing(place: str) -> None:
    with start(place) as engine:
        before = engine_digests(engine)
        state = make_net(3).state_dict()
        wrong = {**state, "odd": torch.ones(1), "shift": torch.ones(3)}
        del wrong["start"]
        with pytest.raises(UsageError) as caught:
            engine.load_module_state_dict(wrong)
        for part in ("missing: start", "not in the model: odd", "shift: expected a tensor of shape (56,), got (3,)"):
            assert part in str(caught.value)
        with pytest.raises(UsageError, match="assign=True"):
            engine.load_state_dict(state, assign=True)
        with pytest.raises(UsageError, match=r"on a model in training.*engine.load_module_state_dict"):
            engine.module.load_state_dict(state)
        with pytest.raises(UsageError, match="model in training"):
            engine.module.blocks[0].up.load_state_dict(nn.Linear(56, 168).state_dict())
        assert engine_digests(engine) == before
        wrong["shift"] = state["shift"]
        assert engine.load_state_dict(wrong, strict=False) == (["start"], ["odd"])


def test_state_dicts_leave_frozen_parameters_out_where_asked() -> None:
    with start() as engine:
        names = set(engine.module_state_dict())
        assert names - set(engine.module_state_dict(exclude_frozen_parameters=True)) == {"frozen.weight", "frozen.bias"}


Given = Callable[[nn.Module], Any]
GIVEN: dict[str, Given] = {
    "one empty": lambda m: [{"params": m.parameters(), "weight_decay": 0.0}, {"params": [], "weight_decay": 0.5}],
    "two of four empty": lambda m: [
        {"params": []},
        {"params": [m[0].weight, m[1].weight], "weight_decay": 0.3},
        {"params": [], "lr": 0.5},
        {"params": m[0].bias},
    ],
    "a frozen group": lambda m: [{"params": [m[1].bias], "lr": 0.5}, {"params": [m[0].weight, m[1].weight]}],
    "frozen ones": lambda m: m.parameters(),
    "with names": lambda m: m.named_parameters(),
    "groups with names": lambda m: [
        {"params": list(m.named_parameters())[2:]},
        {"params": list(m.named_parameters())[:2]},
    ],
}
WAYS = ("config", "object", "callable")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    net[1].bias.requires_grad_(False)
    return net


def _start_groups(
    way: str, given: Given, kind: Any = torch.optim.AdamW, lr_scheduler: Any = None, **settings: Any
) -> Engine:
    model, arguments = _net(), {"lr": 0.01} | settings
    config: Any = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
    if way == "config":
        config["optimizer"] = {"type": kind.__name__, "params": arguments}
    shared: dict[str, Any] = {"model": model, "lr_scheduler": lr_scheduler, "config": config}
    if way == "callable":
        make = lambda params: kind(params, **arguments)  # noqa: E731
        return initialize_as_deepspeed(optimizer=make, model_parameters=given(model), **shared)[0]
    optimizer = kind(given(model), **arguments) if way == "object" else None
    parameters = given(model) if way == "config" else None
    return zstore.initialize(optimizer=optimizer, model_parameters=parameters, **shared)[0]


def _seen(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    shown = ("lr", "initial_lr", "betas", "eps", "weight_decay", "param_names")
    return [
        {"params": [names[parameter] for parameter in group["params"]]}
        | {name: group[name] for name in shown if name in group}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("way", WAYS)
def test_groups_are_those_that_torch_makes(way: str, given: str) -> None:
    model = _net()
    theirs = torch.optim.AdamW(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    with _start_groups(way, GIVEN[given], weight_decay=0.1) as engine:
        assert _seen(engine.optimizer, engine.module) == _seen(theirs, model)


def test_without_a_list_the_model_is_one_group() -> None:
    model = _net()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with _start_groups("config", lambda _: None, weight_decay=0.1) as engine:
        assert _seen(engine.optimizer, engine.module) == _seen(theirs, model)


RATES = [lambda step: 0.5**step, lambda step: 1.0 / (1 + step), lambda step: 1.0, lambda step: 2.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("way", WAYS)
def test_a_schedule_with_a_function_for_each_group_trains_and_resumes(way: str, kind: Any, tmp_path: Path) -> None:
    given = GIVEN["two of four empty"]
    plain = _net()
    theirs = kind(given(plain), lr=0.01, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, RATES)

    def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, RATES)

    for first in (0, 2):
        with _start_groups(way, given, kind, scheduled, weight_decay=0.1) as engine:
            if first:
                engine.optimizer.param_groups[1]["weight_decay"] = 0.9  # which the load takes back
                engine.load_checkpoint(str(tmp_path))
            for step in (first, first + 1):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
                engine.backward(engine(x).square().mean())
                engine.step()
                plain(x).square().mean().backward()
                theirs.step()
                schedule.step()
                theirs.zero_grad()
            assert engine.get_lr() == schedule.get_last_lr()
            assert [len(group["params"]) for group in engine.optimizer.param_groups] == [0, 2, 0, 1]
            for name, value in plain.named_parameters():
                assert torch.equal(engine.get_full_parameter(name), value)  # type: ignore[arg-type]
            engine.save_checkpoint(str(tmp_path))


def test_names_of_parameters_are_torchs_after_a_resume(tmp_path: Path) -> None:
    given = GIVEN["groups with names"]
    for way in WAYS:
        with _start_groups(way, given) as engine:
            engine.save_checkpoint(str(tmp_path / way))
            engine.load_checkpoint(str(tmp_path / way))
            model = _net()
            theirs = torch.optim.AdamW(given(model), lr=0.01)
            found = [group.get("param_names") for group in engine.optimizer.param_groups]
            assert found == [group.get("param_names") for group in theirs.param_groups]


OTHERS = ["Adam", "Adagrad", "RMSprop", "Lion", "Lamb", "Adafactor", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_keep_empty_groups(name: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 0},
    }
    model = _net()
    engine = zstore.initialize(model=model, model_parameters=GIVEN["two of four empty"](model), config=config)[0]
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 4)).square().mean())
            engine.step()
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [0, 2, 0, 1]
