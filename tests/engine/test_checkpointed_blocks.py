"""`zstore.checkpointing` without an engine: what `configure` says."""

from __future__ import annotations

import pytest
import torch

from zstore import checkpointing
from zstore.engine.activations.checkpointing import _Process
from zstore.errors import ConfigError


def test_inputs_of_blocks_are_kept_in_host_memory_if_configure_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Process, "in_cpu", None)
    assert not checkpointing.is_configured()
    config = {"train_batch_size": "unread", "activation_checkpointing": {"cpu_checkpointing": True}}
    checkpointing.configure(None, config, partition_activations=True, profile=True)
    assert checkpointing.is_configured()
    assert "partition_activations: not built: there is no model parallelism" in caplog.text
    assert "profile: not built: blocks are not timed one by one" in caplog.text
    kept: list[int] = []
    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__enter__", lambda _: kept.append(1))
    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__exit__", lambda *_: None)
    x = torch.ones(2, 64, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert kept == [1]
    assert torch.equal(x.grad, torch.ones(2, 64).cos())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"checkpointing\.configure.*cpu_checkpointing: expected true or false"):
        checkpointing.configure(checkpoint_in_cpu="yes")  # type: ignore[arg-type]
