"""The examples of `docs/large-models.md` run as they are printed, on one rank and on two, and its table is measured."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.runs import make_config, start
from zstore.io.buffers import PAGE_BYTES
from zstore.store.options import StoreStatistics
from zstore.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/large-models.md"
WIDTH = 320  # large enough for parameters that are sharded by default


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _run(rank: int, folder: str, examples: list[str]) -> tuple[int, bool, bool]:
    os.chdir(folder)
    names: dict[str, Any] = {"SWAP_FOLDER": str(Path(folder, "swap")), "MODEL_FOLDER": str(Path(folder, "model"))}
    building, others, loading = examples[:2], examples[2], examples[3]
    for example in building:
        exec(example, names)
    engine = names["engine"]
    weight = engine.get_full_parameter("layers.7.weight")
    engine.backward(engine(torch.ones(2, 512, dtype=engine.module.layers[0].weight.dtype)).float().square().mean())
    engine.step()
    torch.manual_seed(0)
    built = torch.equal(weight, names["Wide"]().layers[7].weight)
    exec(others, names)
    exec(loading, names)
    exec(examples[4], names)
    name = "model.layers.1.self_attn.q_proj.weight"
    with names["engine"] as engine:
        found = engine.get_full_parameter(name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(names["MODEL_FOLDER"])
    return engine.global_steps, built, torch.equal(found, plain.get_parameter(name))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_examples_run(world_size: int, tmp_path: Path) -> None:
    assert len(blocks()) == 5
    (tmp_path / "swap").mkdir()
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert run_ranks(_run, world_size, str(tmp_path), blocks()) == [(0, True, True)] * world_size


def test_the_table_says_what_buffers_take(nvme: Path) -> None:
    def held(section: str = "offload_param", **keys: int) -> StoreStatistics:
        config = make_config(3, "nvme", nvme)
        config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(nvme)}
        config["zero_optimization"][section] |= keys
        with start(config, torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])) as engine:
            return engine.statistics().store

    usual = held()
    state_bytes, parameter_bytes = 128 * 2**20, 20 * 2**20
    assert usual.pool_bytes == state_bytes + parameter_bytes
    rows = re.findall(r"^\| `(\w+)`: .* \| (\d+) x (\d+): ([\d,]+) bytes", PAGE.read_text(), re.MULTILINE)
    assert [section for section, *_ in rows] == ["offload_optimizer", "offload_param"]
    for section, count, size, told in rows:
        nbytes = int(told.replace(",", ""))
        # A request, and so each of the parameters' five buffers, is a twelfth of the state's.
        others = state_bytes if section == "offload_param" else 5 * (nbytes // 12)
        found = held(section, buffer_count=int(count), buffer_size=int(size)).pool_bytes
        assert 0 <= found - others - nbytes < PAGE_BYTES
    ((numel, told),) = re.findall(r"`max_in_cpu` .* \| (\d+): up to ([\d,]+) bytes", PAGE.read_text())
    kept = held(max_in_cpu=int(numel))
    assert 0 < kept.host_bytes - usual.host_bytes <= int(told.replace(",", ""))
    assert usual.disk_bytes - kept.disk_bytes == kept.host_bytes - usual.host_bytes
