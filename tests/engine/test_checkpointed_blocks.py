"""`zstore.checkpointing`: times; what `configure` and a config say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.deep import WIDTH
from zstore import checkpointing
from zstore.engine.activations import checkpointing as process


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    process._process.__init__()  # type: ignore[misc]


def test_what_configure_was_told_holds_before_a_config() -> None:
    assert not checkpointing.is_configured()
    section = {"activation_checkpointing": {"profile": True, "cpu_checkpointing": True}}
    checkpointing.configure(None, section, synchronize=True)
    assert checkpointing.is_configured()
    chosen = process._process.choices
    assert (chosen.profile, chosen.in_cpu, chosen.synchronize) == (True, True, True)
    x = torch.ones(2, WIDTH, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert process.block_times().blocks == process.block_times().recomputed == 1
    assert torch.equal(x.grad, torch.ones(2, WIDTH).cos())  # type: ignore[arg-type]


def test_shares_of_model_parallel_ranks_are_said_not_to_act(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    assert "partition_activations does not act: there is no model parallelism" in caplog.text


@pytest.mark.parametrize(("asked", "waits"), [(True, 4), (False, 0)])
def test_a_boundary_waits_for_the_device_where_it_is_asked_to(
    asked: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"activation_checkpointing": {"synchronize_checkpoint_boundary": asked}}
    checkpointing.configure(None, section)
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    x = torch.ones(2, WIDTH, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(waited) == waits  # before and after, forward and again
