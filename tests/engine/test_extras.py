"""Extras: the core names none of them, and the rule of an optimizer comes without a change of the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import zstore
from tests.layout import Layout
from zstore.engine.optim.kernel import TorchKernel
from zstore.engine.optim.rules import Rule
from zstore.engine.optim.rules import register as register_rule

torch.set_num_threads(1)


_NAMES = r"one_?bit|1-bit|sends signs|sparse_attention|elastic"
_OF_THE_CONFIG = rf"{_NAMES}|muon|adafactor"
_OF_THE_CORE = (
    rf"{_NAMES}|zero\+\+|zeropp|hpz|mics|hybrid|second(ary)?_size|quantized|\bint8|\.moments|flops"
    r"|whole_tensors"
)


def test_the_core_and_the_config_name_no_extra() -> None:
    layout = Layout()
    # Not the table of keys that do not act.
    others = {"engine/api/initialize.py"} | {name for name in layout.files if name.startswith("engine/config/")}
    others -= {"engine/config/inactive.py"}
    found = {
        name: sorted({word.group() for word in re.finditer(names, layout.source[name], re.IGNORECASE)})
        for files, names in ((layout.core, _OF_THE_CORE), (others, _OF_THE_CONFIG))
        for name in files
    }
    assert {name: words for name, words in found.items() if words} == {}


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
