"""The memory estimators, against what an engine then counts, and against the formulas of the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.models import batch, make_net
from zstore.errors import UsageError
from zstore.profiling import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zstore.testing.ranks import run_ranks

CHOICES = [(2, "cpu", "none"), (2, "none", "none"), (3, "cpu", "cpu"), (3, "cpu", "none"), (3, "none", "none")]


def _counted(rank: int) -> list[tuple[int, int, int]]:
    """Return by choice: what the plan has on the device, what the store counts there, and in host memory."""
    torch.set_num_threads(1)
    found = []
    for stage, optimizer, param in CHOICES:
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": optimizer}}
        zero["offload_param"] = {"device": param}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": 0,
        }
        with zstore.initialize(model=make_net(), config=config)[0] as engine:
            engine.backward(engine(*batch(0, 0, rank)))
            held = engine.statistics().held.gradients
            engine.step()
            plan, memory = engine.training_state.plan, engine.statistics().memory
            device = plan.held_total.device + plan.gathered_bytes
            state = sum(
                plan.held[kind].device for kind in plan.held if kind not in {"parameters", "gradients", "buffers"}
            )
            # fp32 parameters are their own masters, and state of the store too.
            assert memory.device_bytes >= state
            assert held == plan.held["gradients"].total
            found.append((device, memory.device_bytes, memory.host_bytes + plan.held["gradients"].host))
    return found


def test_estimates_are_what_an_engine_counts(capsys: pytest.CaptureFixture[str]) -> None:
    counted = run_ranks(_counted, 2)[0]
    model = make_net()
    rows = estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=2)
    rows += estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=2)
    estimated = {(row.stage, row.offload_optimizer, row.offload_param, row.zero_init): row for row in rows}
    whole_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for (stage, optimizer, param), (device, _, host) in zip(CHOICES, counted, strict=True):
        row = estimated[stage, optimizer, param, stage == 3]
        assert row.device_bytes == device
        if stage == 3:
            assert row.host_bytes == host
            assert estimated[stage, optimizer, param, False].host_bytes == max(host, whole_bytes)
        else:
            assert row.host_bytes == max(host, whole_bytes)
    text = capsys.readouterr().out
    assert "at stage 3, on 2 machines of 1 GPU" in text
    assert "offload_optimizer=cpu, offload_param=cpu, zero_init=1" in text


def test_formulas_of_large_models() -> None:
    numel, unit, gpus, nodes = 8 * 2**30, 2**28, 8, 2
    ranks = gpus * nodes
    # Stage 2: bf16 parameters everywhere; gradients, fp32 master and two moments over the ranks.
    _, device = estimate_zero2_model_states_mem_needs(numel, gpus, nodes, cpu_offload=False)
    assert device == pytest.approx(2 * numel + 14 * numel // ranks, rel=1e-5)  # rows are padded to whole chunks
    host, device = estimate_zero2_model_states_mem_needs(numel, gpus, nodes)
    assert device == 2 * numel
    assert host == 4 * numel * gpus  # each rank builds it
    # Stage 3: all over the ranks, and two units gathered.
    found = estimate_zero3_model_states_mem_needs(numel, unit, gpus, nodes, cpu_offload=False, cpu_offload_params=False)
    assert found[0] == 0
    assert found[1] == pytest.approx(16 * numel // ranks + 2 * 2 * unit, rel=1e-4)
    assert found[2] == 2 * unit
    host, device, _ = estimate_zero3_model_states_mem_needs(numel, unit, gpus, nodes)
    assert device == 2 * 2 * unit
    assert host == pytest.approx(16 * numel // ranks * gpus, rel=1e-3)
    slack = estimate_zero3_model_states_mem_needs(numel, unit, gpus, nodes, additional_buffer_factor=1.5)
    assert slack[0] == pytest.approx(1.5 * host)


def test_cold_estimates_and_frozen_parameters() -> None:
    rows = estimate_zero3_model_states_mem_needs_all_cold(10**6, 10**5, num_gpus_per_node=2)
    assert len(rows) == 6
    assert estimate_zero2_model_states_mem_needs_all_cold(10**6)[1].device_bytes == 16 * 10**6
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)
    model.requires_grad_(False)
    assert estimate_zero2_model_states_mem_needs_all_live(model)[1].device_bytes == 2 * 10**6
    for bad in ((0, 1), (10, 11), (1.5, 1)):
        with pytest.raises(UsageError, match="whole numbers"):
            estimate_zero3_model_states_mem_needs_all_cold(*bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_nodes"):
        estimate_zero2_model_states_mem_needs_all_cold(10, num_nodes=0)
    with pytest.raises(UsageError, match="additional_buffer_factor"):
        estimate_zero2_model_states_mem_needs_all_cold(10, additional_buffer_factor=0.5)
