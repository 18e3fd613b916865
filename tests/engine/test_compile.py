"""`engine.compile` where parameters come and go: units are compiled within their gather."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.bits import all_released, engine_digests
from tests.engine.models import WIDTH, Base, Block, ids_of
from tests.engine.runs import make_config
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

HIDDEN = "The .grad attribute of a Tensor that is not a leaf"
"""A warning that torch hides itself, where warnings are no errors."""
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{HIDDEN}:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # as inductor is imported
]

STEPS, ACCUMULATION = 1, 2
CLOSE = 2e-5  # relative, of losses in fp32


class Graphs:
    def __init__(self, backend: str = "aot_eager") -> None:
        self.count = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.count += 1
        return self._compile(graph, inputs)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.weight)


class Outer(nn.Module):
    """Holds a unit, and a parameter of its own, which it reads after that one was released."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.feed = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = x + self.gain * self.feed(x)
        return fed


class Net(Base):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([Block(WIDTH) for _ in range(3)])
        self.outer = Outer()
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.outer(self.blocks[0](x))
        for block, reentrant in ((self.blocks[1], False), (self.blocks[2], True)):
            x = checkpoint(block, x, use_reentrant=reentrant) if torch.is_grad_enabled() else block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def start(model: nn.Module, rest: str = "none", nvme: str | Path = "") -> Engine:
    keys = {"gradient_accumulation_steps": ACCUMULATION, "bf16": {"enabled": False}, "scheduler": None}
    config = make_config(3, "none", nvme, rest, **keys)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return zstore.initialize(model=model, config=config)[0]


def step(engine: Engine) -> list[float]:
    losses = []
    for micro in range(ACCUMULATION):
        loss = engine(ids_of(engine.global_steps, 2 * micro + engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def evaluated(engine: Engine) -> float:
    with torch.no_grad():
        return float(engine(ids_of(50, engine.global_rank)))


def train(engine: Engine, after_first: Callable[[], None] = lambda: None) -> list[float]:
    losses = [*step(engine), evaluated(engine)]
    after_first()
    losses += [loss for _ in range(STEPS) for loss in step(engine)]
    name = "blocks.0.up.weight"
    values = engine.get_full_parameter(name)
    engine.set_full_parameter(name, values * 0.5)
    losses += step(engine)
    model: Any = engine.module
    with zstore.gather(model.outer, modifier_rank=0):
        model.outer.gain.data.mul_(2.0)
    with zstore.gather(model.blocks[1]):
        losses += [evaluated(engine)]
        loss = engine(ids_of(70, engine.global_rank))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    loss = engine(ids_of(71, engine.global_rank))
    engine.backward(loss)
    engine.step()
    return [*losses, loss.item()]


def compare(rank: int, base: str) -> tuple[list[str], int, int]:
    """Train plainly and compiled; return the units that were compiled, and how many graphs there were after the first
    step and at the end."""
    warnings.filterwarnings("ignore", message=HIDDEN)
    warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
    folder, rest, graphs = Path(base), "cpu", Graphs()
    counts: list[int] = []
    (folder / "nvme").mkdir(exist_ok=True)
    with start(Net(), rest, folder / "nvme") as plain:
        expected = train(plain)
        plain.save_checkpoint(str(folder), "plain")
        expected += step(plain)
        names = list(engine_digests(plain))
    with start(Net(), rest, folder / "nvme") as engine:
        engine.compile(graphs)
        assert engine.is_compiled
        losses = train(engine, lambda: counts.append(graphs.count))
        engine.load_checkpoint(str(folder), "plain")
        losses += step(engine)
        assert losses == pytest.approx(expected, rel=CLOSE)
        assert all_released(engine)
        assert list(engine_digests(engine)) == names
        engine.save_checkpoint(str(folder), "compiled")
        compiled = engine.training_state.compiled
    with start(Net(), rest, folder / "nvme") as plain:
        plain.load_checkpoint(str(folder), "compiled")
        assert list(engine_digests(plain)) == names
    return [] if compiled is None else compiled.names, counts[0], graphs.count


def test_compiled_units_train_as_eager_ones_and_share_their_graphs(tmp_path: Path) -> None:
    for names, first, last in run_ranks(compare, 2, str(tmp_path)):
        assert names == ["blocks.0", "blocks.1", "blocks.2", "outer.feed"]
        # A block as it is trained, recomputed and evaluated, and the unit within the other: less than one a call.
        assert first == last <= 5


class Numbered(nn.Module):
    """A block whose graph has a number in it, as the index of a layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = x + self.number * self.scale(x)
        return scaled


def test_a_model_that_torch_compiled_trains_from_disk_unit_by_unit(nvme: Path) -> None:
    """More blocks of a kind than torch allows graphs for a function."""

    def make() -> Base:
        torch.manual_seed(0)
        blocks = [Numbered(number) for number in range(10)]
        blocks[3].scale.register_forward_hook(lambda _, args, output: output + args[0])  # the user's own
        blocks[5].requires_grad_(False)
        return Base(list(blocks))

    graphs = Graphs("eager")
    model = make()
    with start(make(), "nvme", nvme) as plain:
        expected = step(plain) + step(plain)
    with start(torch.compile(model, backend=graphs), "nvme", nvme) as engine:  # type: ignore[arg-type]
        assert engine.module is model
        assert step(engine) == pytest.approx(expected[:ACCUMULATION], rel=CLOSE)
        assert graphs.count == 10
        assert step(engine) == pytest.approx(expected[ACCUMULATION:], rel=CLOSE)
        assert graphs.count == 10
        # A module within a unit, called by itself.
        blocks: Any = engine.module.blocks
        x = torch.randn(2, WIDTH)
        inner = blocks[1].scale
        weight = engine.get_full_parameter("blocks.1.scale.weight")
        with torch.no_grad():
            assert torch.allclose(inner(x) - inner(torch.zeros(2, WIDTH)), x @ weight.T, atol=1e-5)
        assert list(inspect.signature(blocks[0].forward).parameters) == ["x"]
        engine.compile(again := Graphs("eager"))
        step(engine)
        assert (graphs.count, again.count) == (10, 10)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "inducktor"}, "refuses these arguments: .*inducktor"),
        ({"compile_kwargs": {"mod": "default"}}, "refuses these arguments: .*'mod'"),
        ({"mode": "reduce-overhead"}, "CUDA graphs need parameters at fixed addresses"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs need"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments: dict[str, Any], message: str) -> None:
    with start(Net(), "cpu") as engine:
        with pytest.raises(UsageError, match=message):
            engine.compile(**arguments)
        assert not engine.is_compiled


def test_a_machine_without_a_compiler_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with start(Net(), "cpu") as engine, pytest.raises(UsageError, match=r"no compiler 'g\+\+'"):
        engine.compile()


def test_a_model_without_blocks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with start(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "cpu") as engine:
        engine.compile("eager")
        assert not engine.is_compiled
    assert "none of the 1 units is compiled" in caplog.text


@pytest.mark.soak
def test_inductor_trains_as_eager() -> None:
    with start(Net(), "cpu") as plain:
        expected = train(plain)
    with start(Net(), "cpu") as engine:
        engine.compile()
        assert train(engine) == pytest.approx(expected, rel=CLOSE)
