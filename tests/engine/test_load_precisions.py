"""A checkpoint of any precision loads in any other: masters and moments have the same bytes, and the loss scale is one
that was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import make_net
from tests.engine.runs import make_config, start, step
from zstore.engine import Engine

torch.set_num_threads(1)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVED_SCALE, OWN_SCALE = 2.0**7, 2.0**10


def config(precision: str, stage: int, tier: str, nvme: Path, scale: float = OWN_SCALE) -> dict[str, Any]:
    keys: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}}
    if precision == "fp16":
        keys["fp16"] = {"enabled": True, "initial_scale_power": int(scale).bit_length() - 1}
    return make_config(stage, tier, nvme, **keys)


def held(engine: Engine) -> dict[str, torch.Tensor]:
    """Every master and moment, whole and in fp32; what is frozen in its own type."""
    found: dict[str, torch.Tensor | None] = {}
    for record in engine.training_state.state.records:
        found[record.name] = engine.get_full_parameter(record.name)
        if record.group is not None:
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"{slot} of {record.name}"] = engine.get_optimizer_state(record.name, slot)
    return {name: value.clone() for name, value in found.items() if value is not None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A folder with a checkpoint of each precision, and what each run held."""
    folder = tmp_path_factory.mktemp("precisions")
    values = {}
    for precision in DTYPES:
        with start(config(precision, 1, "cpu", folder, SAVED_SCALE)) as engine:
            for _ in range(2):
                step(engine)
            engine.save_checkpoint(str(folder), precision)
            values[precision] = held(engine)
    return folder, values


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_every_precision_loads_in_every_other(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]], of: str, into: str, tmp_path: Path
) -> None:
    folder, values = saved
    number = list(DTYPES).index(of) + list(DTYPES).index(into)
    stage, tier = [(3, "nvme"), (1, "none"), (2, "cpu")][number % 3]
    with start(config(into, stage, tier, tmp_path), make_net(1)) as engine:
        engine.load_checkpoint(str(folder), of)
        expected, found = values[of], held(engine)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            frozen = name.startswith("frozen.")
            wanted = value.to(DTYPES[into]).to(found[name].dtype) if frozen else value
            assert frozen or found[name].dtype == value.dtype == torch.float32
            assert torch.equal(found[name].view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), name
        assert {parameter.dtype for parameter in engine.module.parameters()} == {DTYPES[into]}
        expected_scale = 1.0 if into != "fp16" else SAVED_SCALE if of == "fp16" else OWN_SCALE
        assert engine.loss_scale == expected_scale
        step(engine)
        assert engine.was_step_applied()
        assert engine.global_steps == 3
