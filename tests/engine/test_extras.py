"""Extras of others: a section of the config, an observer of steps, a rule of an optimizer, without a change of the
engine."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import zstore
from tests.layout import Layout
from zstore.engine.config.config import load_config
from zstore.engine.config.extra import Extra, register, unregister
from zstore.engine.config.keys import Section, built
from zstore.engine.config.values import Bool, Positive
from zstore.engine.optim.kernel import TorchKernel
from zstore.engine.optim.rules import Rule
from zstore.engine.optim.rules import register as register_rule
from zstore.errors import ConfigError, UsageError

torch.set_num_threads(1)


class ToySection(Section):
    """Notes a number on the model."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Do so."""
    factor: Positive = built(2)
    """The number."""


class Toy(Extra):
    """Notes what it is told."""

    @classmethod
    def prepare(cls, model: torch.nn.Module, section: ToySection) -> None:
        model.prepared_by = section.factor  # type: ignore[assignment]

    def __init__(self, engine: zstore.Engine, section: ToySection) -> None:
        self.engine, self.factor = engine, section.factor
        self.told: list[str] = []

    def step_ended(self) -> None:
        self.told.append(f"step {self.engine.global_steps}")

    def close(self) -> None:
        self.told.append("closed")


class HalfSGD(torch.optim.Optimizer):
    """Half of SGD."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / 2)


@pytest.fixture
def toy() -> Iterator[None]:
    register("toy", lambda: Toy, ToySection)
    yield
    unregister("toy")


def _config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **more}


@pytest.mark.usefixtures("toy")
def test_an_extra_plugs_in_by_its_section() -> None:
    model = torch.nn.Linear(3, 2)
    with zstore.initialize(model=model, config=_config(toy={"enabled": True, "factor": 3}))[0] as engine:
        assert model.prepared_by == 3
        engine.backward(engine(torch.ones(4, 3)).square().mean())
        engine.step()
        toy = cast("Toy", engine.extras["toy"])
    assert toy.told == ["step 1", "closed"]


@pytest.mark.usefixtures("toy")
def test_a_section_may_be_beside_keys_of_zstore() -> None:
    register("zstore.toy", lambda: Toy, ToySection)
    try:
        config = _config(zstore={"toy": {"enabled": True, "factor": 5}})
        with zstore.initialize(model=torch.nn.Linear(1, 1), config=config)[0] as engine:
            assert cast("Toy", engine.extras["zstore.toy"]).factor == 5
        assert load_config(_config()).settings.zstore.toy.is_off  # type: ignore[attr-defined]
    finally:
        unregister("zstore.toy")
    with pytest.raises(ConfigError, match=r"zstore\.toy: unknown key"):
        load_config(config)


class Failing(Extra):
    """Fails in every way."""

    def __init__(self, engine: zstore.Engine, section: ToySection) -> None:
        if section.factor == 1:
            raise UsageError("a factor of 1")

    def close(self) -> None:
        raise ValueError("cannot close")


@pytest.fixture
def failing() -> Iterator[None]:
    register("failing", lambda: Failing, type("FailingSection", (ToySection,), {}))
    register("toy", lambda: Toy, ToySection)
    yield
    unregister("toy")
    unregister("failing")


@pytest.mark.usefixtures("failing")
def test_the_others_end_after_one_that_fails() -> None:
    config = _config(failing={"enabled": True}, toy={"enabled": True})
    engine = zstore.initialize(model=torch.nn.Linear(1, 1), config=config)[0]
    toy = cast("Toy", engine.extras["toy"])
    with pytest.raises(ValueError, match="cannot close") as raised, engine:
        raise KeyError("of the loop")
    assert isinstance(raised.value.__context__, KeyError)  # is shown with it
    assert toy.told == ["closed"]


@pytest.mark.usefixtures("failing")
def test_extras_made_before_one_that_fails_are_closed() -> None:
    config = _config(failing={"enabled": True, "factor": 1})
    before = list(logging.getLogger("zstore").filters)
    with pytest.raises(UsageError, match="a factor of 1"):
        zstore.initialize(model=torch.nn.Linear(1, 1), config=config)
    gc.collect()
    assert logging.getLogger("zstore").filters == before  # the journal's is gone


@pytest.mark.usefixtures("toy")
def test_a_section_of_an_extra_is_checked_as_any_other() -> None:
    with pytest.raises(ConfigError, match=r"toy.factor: expected a whole number of at least 1, got 0"):
        zstore.initialize(model=torch.nn.Linear(1, 1), config=_config(toy={"enabled": True, "factor": 0}))
    with pytest.raises(ConfigError, match=r"toy.factr: unknown key; did you mean toy.factor\?"):
        zstore.initialize(model=torch.nn.Linear(1, 1), config=_config(toy={"factr": 1}))
    with zstore.initialize(model=torch.nn.Linear(1, 1), config=_config(toy={"factor": 1}))[0] as engine:
        assert "toy" not in engine.extras


@pytest.mark.parametrize(
    ("key", "section", "message"),
    [
        ("sparse_attention", None, "another extra"),
        ("gradient_clipping", ToySection, "a key 'gradient_clipping' already"),
    ],
)
def test_a_key_that_is_taken_is_refused(key: str, section: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register(key, lambda: Toy, section)


_NAMES = r"one_?bit|1-bit|sends signs|sparse_attention|elastic"
_OF_THE_CONFIG = rf"{_NAMES}|muon|adafactor"
_OF_THE_CORE = (
    rf"{_NAMES}|zero\+\+|zeropp|hpz|mics|hybrid|second(ary)?_size|quantized|\bint8|\.moments|flops"
    r"|whole_tensors"
)


def test_the_core_and_the_config_name_no_extra() -> None:
    layout = Layout()
    # Not the table of keys that do not act, nor the seam itself, which has the name of DeepSpeed's call.
    others = {"engine/api/initialize.py"} | {name for name in layout.files if name.startswith("engine/config/")}
    others -= {"engine/config/inactive.py", "engine/config/extra.py"}
    found = {
        name: sorted({word.group() for word in re.finditer(names, layout.source[name], re.IGNORECASE)})
        for files, names in ((layout.core, _OF_THE_CORE), (others, _OF_THE_CONFIG))
        for name in files
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_rule_brings_an_optimizer(device: str) -> None:
    register_rule(Rule(kinds=(HalfSGD,), kernel=TorchKernel))
    torch.manual_seed(2)
    model, inputs = torch.nn.Linear(3, 2), torch.randn(4, 3)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    optimizer = HalfSGD(plain.parameters())
    zero = {"stage": 1, "offload_optimizer": {"device": device}}
    config = {"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": zero}
    with zstore.initialize(model=model, optimizer=HalfSGD(model.parameters()), config=config)[0] as engine:
        for _ in range(3):
            optimizer.zero_grad()
            plain(inputs).square().mean().backward()
            optimizer.step()
            engine.backward(engine(inputs).square().mean())
            engine.step()
        assert torch.equal(model.weight, plain.weight)
