"""`loss.backward()` in place of `engine.backward(loss)`: the same bits, whatever the loss is made of, and its errors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zstore
from tests.engine.bits import Case, Model, Run, all_released, compare
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step, unchanged
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

WIDTH = 160


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    more: dict[str, Any]


class Pair(nn.Module):
    """Returns its loss, the logits that this is made of, and the sums that it is made of; reads a weight from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, ids: torch.Tensor | None = None, inputs: torch.Tensor | None = None) -> Output:
        x = self.embed(ids) if inputs is None else inputs
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = F.linear(x, self.embed.weight)
        sums = [logits.float().square().mean(), x.float().square().mean()]
        return Output(sums[0] + sums[1], logits, {"sums": sums})


LOSSES: dict[str, Callable[[Output], torch.Tensor]] = {
    "the model's": lambda out: out.loss,
    "of logits": lambda out: out.logits.float().sin().mean(),
    "of both": lambda out: out.loss + out.logits.float().sin().mean(),
    "of a part": lambda out: 2 * out.more["sums"][0] + out.more["sums"][1],
}


def pair(*names: str) -> Model:
    def made(step: int, micro: int, rank: int) -> tuple[torch.Tensor, str]:
        return batch(step, micro, rank, vocab=700)[0], names[(2 * step + micro) % len(names)]

    return Model(Pair, made, lambda model, given: LOSSES[given[1]](model(given[0])))


ON_DISK = Case(3, "nvme", "fp32", 1, 0.0, threshold=0, parameters="nvme", own_backward=True)


def on_rank(rank: int) -> list[list[str]]:
    cases = [replace(ON_DISK, precision="bf16", accumulation=2, overlap=mode) for mode in ("forward", "backward")]
    cases += [Case(stage, "none", "bf16", 2, 0.0, own_backward=True) for stage in (1, 2)]
    return [compare(case, rank, 2, model=pair(*LOSSES)) for case in cases]


def test_every_loss_trains_to_the_bits_of_the_plain_loop() -> None:
    assert run_ranks(on_rank, 2) == [[[]] * 4] * 2


def test_the_loss_scale_and_a_division_by_three_come_once() -> None:
    """To the bit where the loss is the model's, else to rounding, since three is no power of two."""
    case = replace(ON_DISK, precision="fp16", accumulation=3)
    assert compare(case, 0, 1, model=pair("the model's")) == []
    with Run(case, 0, 1, model=pair("of both")) as run:
        run.step()
        assert run.engine.get_global_grad_norm() == pytest.approx(run.reference.norm, rel=1e-3)


def test_several_forwards_and_backwards_make_the_gradients_of_the_plain_loop() -> None:
    ids = [batch(0, micro, 0, vocab=700)[0] for micro in range(3)]
    with Run(ON_DISK, 0, 1, model=pair("the model's")) as run:
        plain, engine = run.reference.model, run.engine
        for model in (plain, engine):
            first, second = model(ids[0]), model(ids[1])
            with torch.no_grad():
                model(ids[2])
            (first.loss + second.logits.mean()).backward(retain_graph=True)
            first.logits.backward(gradient=torch.full_like(first.logits, 1e-3))
            torch.autograd.backward([model(ids[2]).loss, second.loss])
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.get_gradient(name), parameter.grad)
        engine.step()
        assert all_released(engine)


def test_a_gradient_of_something_else_is_neither_scaled_nor_counted(nvme: Path) -> None:
    config = make_config(3, "nvme", nvme, "nvme", bf16={"enabled": False})
    with Run(replace(ON_DISK, accumulation=4), 0, 1, model=pair("the model's")) as run:
        plain, engine = run.reference.model, run.engine
        inputs = plain.embed(run.batches()[0][0][0]).detach().requires_grad_()
        (expected,) = torch.autograd.grad(plain(inputs=inputs).loss, inputs)
        out = engine(inputs=inputs)
        (found,) = torch.autograd.grad(out.loss, inputs, retain_graph=True)
        assert torch.equal(found, expected)
        assert engine.get_gradient("embed.weight") is None
        with zstore.initialize(model=copy.deepcopy(plain), config=config, frozen=True)[0] as frozen:
            (found,) = torch.autograd.grad(frozen(inputs=inputs).loss, inputs)
            assert torch.equal(found, expected)
            frozen(inputs=inputs).loss.backward()
            assert torch.equal(inputs.grad, expected)
            assert all_released(frozen)
        out.loss.backward()
        assert all_released(engine)
        engine.step()
        with pytest.raises(UsageError, match=r"loss\.backward\(\) works too"):
            engine.step()


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.fails = False
        self.net.blocks[0].register_forward_hook(lambda module, args, x: Refuse.apply(x) if self.fails else None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(ids)
        return loss


def test_a_backward_that_fails_leaves_everything_as_it_was(nvme: Path) -> None:
    model = Failing()
    with start(make_config(3, "nvme", nvme), model.net) as engine:
        step(engine)
        with unchanged(engine):
            for call in (engine.step, lambda: engine(*batch(0, 0, 0))):
                model.fails = True
                with pytest.raises(ValueError, match="no"):
                    engine(*batch(1, 0, 0)).backward()
                model.fails = False
                if call == engine.step:
                    with pytest.raises(UsageError, match=r"without engine\.backward"):
                        call()
                else:
                    call()
                assert all_released(engine)


def test_what_the_engine_cannot_see_or_do_is_an_error() -> None:
    overlapping = make_config(0, zstore={"step_overlap": "backward"}, gradient_accumulation_steps=1)
    with start(overlapping) as engine:
        loss = engine(*batch(0, 0, 0))
        with zstore.gather(engine.module), pytest.raises(UsageError, match=r"loss.backward\(\), .* end the block"):
            loss.backward()
    with start(overlapping) as engine, pytest.raises(UsageError, match="call the engine instead of its module"):
        engine.module(*batch(0, 0, 0)).backward()


def test_the_loss_in_the_log_is_the_one_that_the_model_returned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), start(make_config(0, steps_per_print=1), Pair()) as engine:
        for choose in (LOSSES["the model's"], LOSSES["of logits"]):
            for micro in range(2):
                choose(engine(batch(0, micro, 0, vocab=700)[0])).backward()
                engine.step()
    first, second = (record.getMessage() for record in caplog.records if "step" in record.getMessage())
    assert first.startswith("step 1: loss ")
    assert second.startswith("step 2: lr ")
