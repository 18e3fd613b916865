"""Accumulation block by block: the bits of the usual order, what is read, and models that it cannot take."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.bits import ADAM, SPILLS, Case, assert_equal, compare_all
from tests.engine.block_models import Base, ids_of, loss_of
from tests.reference import Reference
from zstore.engine import Engine
from zstore.errors import ConfigError, UsageError
from zstore.testing.ranks import run_ranks

COUNT = 3


def cases(world_size: int) -> list[Case]:
    """Return every tier of the parameters, precision and step mode, and gradients that wait on disk."""
    places = [("cpu", "cpu"), ("nvme", "nvme"), *([("none", "none")] if world_size > 1 else [])]
    found = [
        Case(3, state, precision, COUNT, clip, 40_000, 0, parameters, overlap, by_block=True)
        for (state, parameters), (precision, overlap, clip) in zip(
            places * 3,
            [
                ("bf16", "forward", 0.25),
                ("fp32", "backward", 0.0),
                ("fp16", "none", 0.25),
                ("fp32", "forward", 0.25),
                ("bf16", "backward", 0.0),
                ("bf16", "none", 0.0),
            ],
            strict=False,
        )
    ]
    return [*found, Case(3, "nvme", "bf16", COUNT, 0.25, 40_000, 0, "nvme", "forward", budget=SPILLS, by_block=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_are_those_of_a_plain_loop(world_size: int) -> None:
    for failed in run_ranks(compare_all, world_size, world_size, [asdict(case) for case in cases(world_size)], 3):
        assert failed == []


def start(model: nn.Module, order: str = "block", zero: dict[str, Any] | None = None, **own: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
            **(zero or {}),
        },
        "steps_per_print": 0,
        "zstore": {"accumulation_order": order, "journal": False, **own},
    }
    return zstore.initialize(model=model, config=config)[0]


def train(engine: Engine, steps: int = 3, batch: Callable[[int, int], Any] = ids_of) -> list[float]:
    return [float(engine.train_batch(batch(step, micro) for micro in range(COUNT))) for step in range(steps)]


def values(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()}  # type: ignore[misc]


def assert_same(model: nn.Module, batch: Callable[[int, int], Any] = ids_of, **own: Any) -> None:
    """Both orders give the losses and the state of a plain loop, and the second has taken steps by block."""

    def loss_of_plain(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss if isinstance(batch, dict) else model(batch)
        return found

    plain = Reference(
        copy.deepcopy(model).train(), 1, stage=3, accumulation=COUNT, clip=1.0, adam=ADAM, loss=loss_of_plain
    )
    losses = []
    for number in range(3):
        plain.step([[batch(number, micro)] for micro in range(COUNT)])
        losses.append(float(torch.tensor(plain.losses[0]).mean()))
    with start(copy.deepcopy(model), "micro_batch", **own) as usual, start(model, **own) as engine:
        assert train(usual, batch=batch) == train(engine, batch=batch) == losses
        assert_equal(engine, plain)
        assert engine.global_steps == 3
        assert engine.micro_steps == usual.micro_steps == 3 * COUNT
        found, expected = values(engine), values(usual)
        assert engine._by_block is not None
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Feed(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make(*blocks: nn.Module, kind: type[Base] = Base) -> Base:
    torch.manual_seed(0)
    return kind(list(blocks) or [Feed() for _ in range(4)])


@pytest.mark.parametrize("own", [{"gradient_checkpointing": True}, {"activations": "host"}, {}], ids=str)
def test_blocks_that_are_computed_again_or_whose_activations_leave_have_the_same_bits(own: dict[str, Any]) -> None:
    assert_same(make(), **own)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_have_the_same_bits() -> None:
    with start(make(), "micro_batch") as usual, start(make()) as engine:
        for each in (usual, engine):
            each.compile(backend="eager")
        assert train(usual) == train(engine)
        found, expected = values(engine), values(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(block._forward_hooks_with_kwargs for block in engine.module.blocks)


def test_each_parameter_is_read_twice_a_step_and_not_twice_a_micro_batch(tmp_path: Path) -> None:
    def read(order: str) -> int:
        config = Case(3, "nvme", "fp32", COUNT, 0.0, 500_000_000, 0, "nvme").config(1, str(tmp_path / order))
        config["zstore"]["accumulation_order"] = order
        model = make(*(Feed(256) for _ in range(4)))
        model.embed, model.norm, model.head = nn.Embedding(50, 256), nn.LayerNorm(256), nn.Linear(256, 50)
        with zstore.initialize(model=model, config=config)[0] as engine:
            train(engine)  # the order of units is recorded
            before = engine.statistics().units
            train(engine, 1)
            after = engine.statistics().units
            assert before is not None
            assert after is not None
            return after.read_bytes - before.read_bytes

    nbytes = sum(p.numel() * 4 for block in (Feed(256) for _ in range(4)) for p in block.parameters())
    usual, by_block = read("micro_batch"), read("block")
    # The last block is still there when the backward begins; the ends of the model are 2 % of it.
    assert nbytes < by_block < 2.05 * nbytes
    assert usual > (2 * COUNT - 2) / 2 * by_block


@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_of_transformers(checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2, use_cache=False))

    def batch(step: int, micro: int) -> dict[str, torch.Tensor]:
        return {"input_ids": ids_of(step, micro), "labels": ids_of(step, micro)}

    assert_same(model, batch, gradient_checkpointing=checkpointing)


def test_an_encoder_and_a_decoder_whose_blocks_share_a_position_bias() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "vocab_size": 50,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 3,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    )

    def batch(step: int, micro: int) -> dict[str, torch.Tensor]:
        return {"input_ids": ids_of(step, micro), "labels": ids_of(step + 7, micro)}

    assert_same(model, batch)


class Dropping(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(ids), 0.3)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3)
        return loss_of(self.head(self.norm(x)), ids)


def test_each_micro_batch_draws_random_numbers_from_a_state_of_its_own() -> None:
    model = make(kind=Dropping)
    with start(copy.deepcopy(model), "micro_batch") as usual, start(model) as engine:
        torch.manual_seed(5)
        first = train(engine, 1)
        second = float(engine.train_batch(ids_of(1, micro) for micro in range(COUNT)))
        after = torch.get_rng_state()
        torch.manual_seed(5)
        assert train(usual, 1) == first
        losses = []
        seeds = torch.randint(2**62, (COUNT,)).tolist()
        state = torch.get_rng_state()
        for micro in range(COUNT):
            torch.manual_seed(seeds[micro])
            loss = usual(ids_of(1, micro))
            losses.append(loss.detach())
            usual.backward(loss)
            usual.step()
        assert float(torch.stack(losses).mean()) == second
        found, expected = values(engine), values(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(after, state)


# -- models that it cannot take ---------------------------------------------------------------------------------------


class Skipping(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for block in self.blocks:
            x = block(x) + first
        return loss_of(self.head(self.norm(x)), ids)


class Reentrant(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return loss_of(self.head(self.norm(x)), ids)


class Leaving(Base):
    calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        for block in list(self.blocks)[: 4 - self.calls % 2]:
            x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Skipping, "'blocks.1' uses a tensor that went past the block ahead"),
        (Reentrant, "runs without gradients, as reentrant checkpointing lets it"),
        (Leaving, "ran through different numbers of blocks"),
    ],
)
def test_a_model_whose_blocks_are_not_apart_is_refused_with_the_reason(kind: type[Base], message: str) -> None:
    with start(make(kind=kind)) as engine:
        train(engine, 1)
        with pytest.raises(UsageError, match=message):
            train(engine, 1)


def test_a_model_without_blocks_is_refused() -> None:
    with start(make(Feed())) as engine:
        train(engine, 1)
        with pytest.raises(UsageError, match="no two modules with parameters in a ModuleList"):
            train(engine, 1)


class Failing(Base):
    fails: int | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if self.fails is not None and int(ids[0, 0]) == self.fails:
                raise RuntimeError("no such token")
        return loss_of(self.head(self.norm(x)), ids)


def test_an_error_in_a_micro_batch_is_raised_and_the_step_can_be_taken_again() -> None:
    model = make(kind=Failing)
    with start(copy.deepcopy(model), "micro_batch") as usual, start(model) as engine:
        train(engine, 2)
        model.fails = int(ids_of(2, 1)[0, 0])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such token"):
                engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        model.fails = None
        engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        train(usual, 3)
        assert engine.micro_steps == usual.micro_steps
        found, expected = values(engine), values(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Tied(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(F.linear(self.norm(x), self.embed.weight), ids)


def test_ctrl_c_in_a_forward_leaves_nothing_behind() -> None:
    came: list[int] = []

    def interrupt(*_: Any) -> None:
        came.append(0)
        if len(came) == COUNT:  # the other forwards wait at the next block, and end before this one
            left, deadline = threading.active_count() - (COUNT - 1), time.monotonic() + 60
            os.kill(os.getpid(), signal.SIGINT)
            while threading.active_count() > left and time.monotonic() < deadline:
                time.sleep(0.01)

    model, zero = make(kind=Tied), {"stage3_max_live_parameters": 0}
    with start(copy.deepcopy(model), "micro_batch", zero) as usual, start(model, "block", zero) as engine:
        train(engine, 2)
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        handle.remove()
        engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        train(usual, 3)
        found, expected = values(engine), values(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Raises(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if Raises.on:
            raise RuntimeError("in the backward")
        return gradients[0]


def test_an_error_in_the_backward_starts_the_accumulation_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fed(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = Raises.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return made

    model = make(Feed(), Fed(), Feed())
    with start(copy.deepcopy(model), "micro_batch") as usual, start(model) as engine:
        train(engine, 2)
        monkeypatch.setattr(Raises, "on", True)
        with pytest.raises(RuntimeError, match="in the backward"):
            engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        monkeypatch.setattr(Raises, "on", False)
        engine.train_batch(ids_of(2, micro) for micro in range(COUNT))
        train(usual, 3)
        assert engine.micro_steps == usual.micro_steps
        found, expected = values(engine), values(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_the_config_says_of_it(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    with zstore.initialize(model=make(), config=config | {"zstore": {"accumulation_order": "block"}})[0]:
        assert "zstore.accumulation_order: no effect" in caplog.text
    config["zero_optimization"] = {"stage": 3, "zero_quantized_gradients": True}
    with pytest.raises(ConfigError, match="fed back from backward to backward"):
        zstore.initialize(model=make(), config=config | {"zstore": {"accumulation_order": "block"}})
