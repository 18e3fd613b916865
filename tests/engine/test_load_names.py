"""Loading where the checkpoint calls things otherwise, and what a load says of what it did not find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import make_net
from tests.engine.runs import make_config, start, state_of, step
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.tools.convert import ConvertOptions, convert_command


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    with start() as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(str(tmp_path / "ckpt"), "base")
        step(engine)
        return str(tmp_path / "ckpt"), state_of(engine)


def wrapped(seed: int = 5) -> nn.Module:
    """The same model, of which every part has another name."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_net(seed)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(ids)

    return Wrapped()


def inner(name: str) -> str:
    return f"inner.{name}"


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("inner.", ""): value for name, value in state.items()}


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_function_renames_everything(saved: tuple[str, dict[str, Any]], tmp_path: Path, tier: str) -> None:
    (tmp_path / "nvme").mkdir()
    folder, _ = saved
    with start(make_config(1, tier, tmp_path / "nvme")) as plain, start(make_config(1), wrapped()) as engine:
        plain.load_checkpoint(folder)
        step(plain)
        engine.load_checkpoint(folder, names=inner)
        assert engine.load_report is not None
        assert (engine.load_report.missing, engine.load_report.unexpected) == ((), ())
        assert engine.global_steps == 2
        step(engine)
        assert unwrapped(engine_digests(engine)) == engine_digests(plain)
        scalars = {record.name: dict(s) for record, s in engine.training_state.state.scalars.items()}
        assert set(scalars["inner.embed.weight"].values()) >= {3.0}


def test_links_follow_the_names(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with start(make_config(3, "nvme", nvme)) as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path / "ckpt"))
        step(engine)
        expected = engine_digests(engine)
    with start(make_config(3, "nvme", nvme), wrapped()) as engine:
        engine.load_checkpoint(str(tmp_path / "ckpt"), names=inner)
        assert engine.load_report is not None
        assert engine.load_report.linked_bytes > 500_000
        step(engine)
        assert unwrapped(engine_digests(engine)) == expected


class Partly(nn.Module):
    """The saved model with one part called otherwise, and without another."""

    def __init__(self) -> None:
        super().__init__()
        for name, child in make_net(seed=5).named_children():
            if name != "unused":
                self.add_module({"frozen": "fixed"}.get(name, name), child)
        base = make_net(seed=5)
        self.start, self.mix = base.start, base.mix
        self.register_buffer("moved", base.shift)
        self.fresh = nn.Linear(56, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fresh(self.blocks[0](self.embed(ids) + self.start)).float().square().mean()


NAMES = {"frozen.weight": "fixed.weight", "frozen.bias": "fixed.bias", "shift": "moved", "unused.bias": None}


def test_a_mapping_names_what_differs_and_the_report_the_rest(saved: tuple[str, dict[str, Any]]) -> None:
    folder, _ = saved
    with start(make_config(1), Partly()) as engine:
        with pytest.raises(CheckpointMismatchError) as caught:
            engine.load_checkpoint(folder, names=NAMES)
        text = str(caught.value)
        assert "missing: model/fresh.weight" in text
        assert "model/unused.weight" in text
        # Left out by name, so no difference.
        assert "unused.bias" not in text
        assert engine.load_report is None
        engine.load_checkpoint(folder, names=NAMES, load_module_strict=False)
        report = engine.load_report
    assert report is not None
    assert report.path.endswith("/base")
    slots = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    assert set(report.missing) == {f"{slot}/fresh.{name}" for slot in slots for name in ("weight", "bias")}
    assert set(report.unexpected) == {f"{slot}/unused.{name}" for slot in slots for name in ("weight", "bias")}


def test_everything_under_one_name_is_given(saved: tuple[str, dict[str, Any]]) -> None:
    folder, expected = saved
    swap = {"blocks.0.up.weight": "blocks.1.up.weight", "blocks.1.up.weight": "blocks.0.up.weight"}
    with start() as engine:
        engine.load_checkpoint(folder, names=swap)
        first = sums(engine)
        engine.load_checkpoint(folder)
        assert sums(engine) == first[::-1]
        assert first[0] != first[1]
        step(engine)
        assert state_of(engine) == expected


def sums(engine: Engine) -> list[float]:
    return [float(engine.get_full_parameter(f"blocks.{i}.up.weight").sum()) for i in (0, 1)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"embed.wight": "x"}, "has no parameter or buffer 'embed.wight'; the nearest is 'embed.weight'"),
        ({"blocks.0.gain": "blocks.1.gain"}, "would both be '[a-z_/]*/blocks.1.gain'"),
        (lambda name: 3, "would be called 3; expected a name"),
        ({"shift": ""}, "would be called ''"),
        ("embed", "expected a mapping or a function of a name, got str"),
    ],
)
def test_names_that_make_no_sense(saved: tuple[str, dict[str, Any]], names: Any, words: str) -> None:
    folder, _ = saved
    with start() as engine:
        before = state_of(engine)
        with pytest.raises(UsageError, match=words.replace("(", r"\(")):
            engine.load_checkpoint(folder, names=names)
        assert state_of(engine) == before
        step(engine)


def weights_of(engine: Engine) -> dict[str, Any]:
    """Bits of masters, parameters and the buffer."""
    digests = {name: bits for name, bits in engine_digests(engine).items() if "exp_avg" not in name}
    return {**digests, "buffer": state_of(engine)["buffer"]}


def test_tied_weights_and_buffers_load_from_what_torch_stored_under_each_of_their_names(
    saved: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    plain, theirs, back = tmp_path / "plain.pt", tmp_path / "dcp", tmp_path / "back"
    torch.save({"model": zstore.load_state_dict(saved[0], tag="base", dtype="fp32")}, plain)
    torch_save_to_dcp(plain, theirs)
    assert convert_command(theirs, back, ConvertOptions()) == 0
    with start() as engine:
        engine.load_checkpoint(saved[0], "base")
        expected = weights_of(engine)
    for folder in (theirs, back):
        with start(model=make_net(9)) as engine:
            engine.load_checkpoint(str(folder), load_module_only=True)
            assert weights_of(engine) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_weights_that_are_one_here_are_refused_where_their_values_differ(tmp_path: Path) -> None:
    state = {name: value.detach().clone() for name, value in make_net(9).state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "tied", no_dist=True)
    tied = [name for name in state if name not in dict(make_net(9).named_parameters()) and name.endswith("weight")]
    with start() as engine:
        engine.load_checkpoint(str(tmp_path / "tied"), load_module_only=True)
        state[tied[0]].view(-1)[-1] += 1
        dcp.save({"model": state}, checkpoint_id=tmp_path / "two", no_dist=True)
        with pytest.raises(CheckpointMismatchError, match=f"not in the model or its optimizer: model/{tied[0]}"):
            engine.load_checkpoint(str(tmp_path / "two"), load_module_only=True)
