"""fp16's loss scale, steps that are skipped, and inputs that are cast."""

import json
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.models import batch, make_net
from tests.engine.runs import ADAM, make_config, start, state_of
from tests.engine.schedule_cases import DATA
from zstore.engine import Engine
from zstore.engine.config.sections import Fp16Section
from zstore.engine.optim.optimizer import LossScaler
from zstore.errors import NonFiniteError
from zstore.testing.ranks import run_ranks


def rules(**changes: Any) -> Fp16Section:
    return Fp16Section(**{"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1} | changes)


# A step without overflow is a point, one with it an X; the scale after each as DeepSpeed 0.19.8 gives it, E: an error.
TRACES = json.loads((DATA / "loss_scales.json").read_text())


def scales(scaler: LossScaler, trace: str) -> list[str]:
    found = []
    for step in trace:
        try:
            scaler.update(step == "X")
        except NonFiniteError:
            return [*found, "E"]
        found.append(f"{scaler.scale:g}")
    return found


@pytest.mark.parametrize(("changes", "trace", "expected"), TRACES)
def test_the_scale_follows_overflows_as_deepspeeds_does(changes: dict[str, Any], trace: str, expected: str) -> None:
    assert scales(LossScaler(settings=rules(**changes), non_finite="skip"), trace) == expected.split()


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16 dynamic": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "fp16 fixed": {"fp16": {"enabled": True, "loss_scale": 128}},
    "bf16": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    "bf16, asked": {"bf16": {"enabled": True}, "zstore": {"non_finite_gradients": "skip"}},
    "fp32, asked": {"zstore": {"non_finite_gradients": "skip"}},
}
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}


def train(engine: Engine, number: int, *, bad: bool = False) -> None:
    """One step on the data of its number; with `bad` the last rank's first micro-batch overflows."""
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(*batch(number, micro, engine.global_rank))
        overflows = bad and micro == 0 and engine.global_rank == engine.world_size - 1
        engine.backward(loss * torch.inf if overflows else loss)
        engine.step()


def everything(engine: Engine) -> dict[str, Any]:
    """All but what counts steps, and the loss scale."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return {name: value for name, value in state_of(engine).items() if name != "counters"} | {"groups": groups}


def skip(rank: int, stage: int, tier: str, precision: str) -> list[str]:
    """Return what a skipped step changed, and what a run that had one holds that one without it does not."""
    keys = {"bf16": {"enabled": False}} | PRECISIONS[precision]
    keys["scheduler"] = {"type": "OneCycle", "params": CYCLE}
    differences: list[str] = []
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        start(make_config(stage, tier, one, **keys)) as engine,
        start(make_config(stage, tier, two, **keys)) as other,
    ):
        for number in range(2):
            train(engine, number)
            train(other, number)
        before, scale = everything(engine), engine.loss_scale
        train(engine, 2, bad=True)
        after = everything(engine)
        differences += [f"skipped: {name}" for name in before if before[name] != after[name]]
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        assert not engine.was_step_applied()
        assert engine.loss_scale == (scale / 2 if "dynamic" in precision else scale)
        if "dynamic" not in precision:
            train(engine, 2)
            train(other, 2)
            mine, plain = everything(engine), everything(other)
            differences += [f"after: {name}" for name in plain if plain[name] != mine[name]]
            assert engine.was_step_applied()
    return differences


def _skips(rank: int, cases: list[tuple[int, str, str]]) -> list[tuple[Any, list[str]]]:
    return [(case, found) for case in cases if (found := skip(rank, *case))]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_skipped_step_leaves_every_bit(world_size: int) -> None:
    places = [(0, "none"), (1, "cpu"), (2, "nvme"), (0, "none"), (1, "none"), (3, "cpu"), (3, "nvme")]
    cases = [(*place, list(PRECISIONS)[number % 5]) for number, place in enumerate(places)]
    for failed in run_ranks(_skips, world_size, cases):
        assert failed == []


def test_the_scale_resumes_in_the_middle_of_a_window(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 2, "loss_scale_window": 3}
    config = make_config(bf16={"enabled": False}, gradient_accumulation_steps=1, fp16=fp16)
    with start(config) as engine:
        for number in range(3):
            train(engine, number, bad=number == 1)
        engine.save_checkpoint(str(tmp_path))
        seen = []
        for number in range(3, 9):
            train(engine, number, bad=number == 4)
            seen.append(engine.loss_scale)
        whole = state_of(engine)
    assert seen == [16, 8, 8, 8, 8, 16]
    with start(config) as engine:
        engine.load_checkpoint(str(tmp_path))
        for number, scale in zip(range(3, 9), seen, strict=True):
            train(engine, number, bad=number == 4)
            assert engine.loss_scale == scale
        assert state_of(engine) == whole


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - any namedtuple is a tuple of its own
Batch = type("Batch", (dict,), {})


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self.seen = [x.dtype, rest, named]
        return self.linear(x).sum()


def reader(**keys: Any) -> Engine:
    config = make_config(gradient_accumulation_steps=1, **({"bf16": {"enabled": False}} | keys))
    return zstore.initialize(model=Reader(), config=config)[0]


def test_auto_cast_makes_floating_inputs_fp16() -> None:
    with reader(fp16={"enabled": True, "auto_cast": True, "loss_scale": 8}) as engine:
        x, ids, double = torch.ones(2, 4), torch.ones(2, dtype=torch.long), torch.ones(1, dtype=torch.double)
        loss = engine(x, [ids, x], Pair(double, "text"), more=Batch(mask=ids > 0, x=(x,)), flag=True)
        _, (listed, pair), named = engine.module.seen
        assert engine.module.seen[0] == torch.float16
        assert [t.dtype for t in listed] == [torch.int64, torch.float16]
        assert (type(pair), pair.left.dtype, pair.right) == (Pair, torch.float16, "text")
        assert (named["more"]["mask"].dtype, named["more"]["x"][0].dtype) == (torch.bool, torch.float16)
        assert named["flag"] is True
        assert x.dtype == torch.float32
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize(
    "keys",
    [{}, {"fp16": {"enabled": False, "auto_cast": True}}, {"bf16": {"enabled": True}, "fp16": {"auto_cast": True}}],
)
def test_inputs_are_left_alone_otherwise(keys: dict[str, Any]) -> None:
    with reader(**keys) as engine:
        x = torch.ones(2, 4, dtype=next(engine.parameters()).dtype)
        double = torch.ones(1, dtype=torch.double)
        engine(x, double)
        assert engine.module.seen[1][0] is double


@pytest.mark.parametrize(("clip", "value"), [(0.0, torch.inf), (1.0, torch.nan), (1.0, torch.inf)])
@pytest.mark.parametrize(("stage", "tier", "mode"), [(0, "none", "none"), (3, "nvme", "forward")])
def test_non_finite_values_applied(stage: int, tier: str, mode: str, clip: float, value: float, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"bf16": {"enabled": False}, "gradient_accumulation_steps": 1, "gradient_clipping": clip}
    keys |= {"scheduler": None, "zstore": {"non_finite_gradients": "apply", "step_overlap": mode}}
    plain, whole = make_net(), make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM["params"], fused=True)
    for model in (plain, whole):
        model.norm.bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), bad[0]))
    bad = [0.0]
    with start(make_config(stage, tier, tmp_path, **keys), whole) as engine:
        for number in range(4):
            bad[0] = value if number == 3 else 0.0
            engine.backward(engine(*batch(number, 0, 0)))
            plain(*batch(number, 0, 0)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
            assert engine.was_step_applied()
        assert (engine.global_steps, engine.skipped_steps) == (4, 0)
        trained = [parameter for parameter in plain.parameters() if parameter in optimizer.state]
        num_nan = 0
        for name, parameter in plain.named_parameters():
            found = engine.get_full_parameter(name)
            num_nan += int(found.isnan().sum())
            # The two norms differ in their last bits.
            close = {"rtol": 1e-3, "atol": 1e-6} if clip else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found, parameter.detach(), equal_nan=True, **close)
        assert num_nan == (sum(p.numel() for p in trained) if value is torch.nan else 1)
