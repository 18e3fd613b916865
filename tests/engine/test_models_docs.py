"""The tables of `docs/models.md` name what the tests do; and what it refuses is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.linear_runs import one_step, start
from tests.engine.transformers_models import ARCHITECTURES, REENTRANT, WRITERS, build
from zstore.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
KINDS = {True: "reentrant", False: "non-reentrant", None: "no"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_architectures_is_the_tests() -> None:
    found = {name: (kind, layers, writes) for name, kind, _, layers, writes in rows("Architectures")}
    assert found == {
        name: (f"`{type(build(name)).__name__}`", KINDS[REENTRANT.get(name)], "yes" if name in WRITERS else "")
        for name in ARCHITECTURES
    }


def test_the_files_that_it_names_are_there() -> None:
    words = PAGE.read_text(encoding="utf-8").split("`")
    named = [word for word in words if word.startswith("tests/")]
    assert len(named) == 7
    assert all((PAGE.parent.parent / name).exists() for name in named)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        module: nn.Module = torch.jit.script(nn.Linear(8, 8))
    return module


def turning() -> nn.Module:
    model = nn.Linear(8, 8)
    model.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return model


def compiled(in_place: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    if not in_place:
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    model[0].compile(backend="eager")
    return model


OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("make", "zero", "message"),
    [
        (lambda: nn.Sequential(scripted()), {"stage": 0}, "module '0' is scripted"),
        (turning, {"stage": 0}, "parameter 'turn' is torch.complex64"),
        (lambda: compiled(in_place=True), OFFLOADED, "module '0' is compiled"),
        (lambda: nn.Sequential(compiled(in_place=False)), OFFLOADED, "module '0' is compiled"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], nn.Module], zero: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        start(make(), zero_optimization=zero)


def test_compiled_modules_train_where_parameters_stay() -> None:
    losses = []
    for make in (lambda: compiled(in_place=True), lambda: compiled(in_place=False)):
        with start(make(), zero_optimization={"stage": 3}) as engine:
            losses.append([one_step(engine) for _ in range(3)])
    plain = compiled(in_place=True)
    plain[0]._compiled_call_impl = None  # type: ignore[index, union-attr]
    with start(plain, zero_optimization={"stage": 3}) as engine:
        assert losses == 2 * [[one_step(engine) for _ in range(3)]]
