"""Runs that publish their weights, and what others' software makes of what they published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.engine.models import make_net
from tests.engine.runs import make_config
from zstore.engine import Engine
from zstore.tools.consolidate import consolidate_command

RATE = 2e-5
"""Learning rate at which some elements of bf16 change, and most do not."""

Weights = dict[str, torch.Tensor]


def publishing(to: Path | str, stage: int = 1, tier: str = "none", **keys: Any) -> dict[str, Any]:
    """A config that publishes every step to `to`; `publish` and `own` are merged into its sections."""
    nvme = keys.pop("nvme", "")
    own = {"publish": {"to": str(to), **keys.pop("publish", {})}, **keys.pop("own", {})}
    plain = {
        "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        "scheduler": None,
        "gradient_accumulation_steps": 1,
    }
    return make_config(stage, tier, nvme, zstore=own, **plain | keys)


def consolidated(engine: Engine, folder: Path) -> Weights:
    """The present weights, by way of a checkpoint and `zstore consolidate --dtype bf16` (all ranks)."""
    name = f"step-{engine.global_steps}"
    engine.save_checkpoint(str(folder / name))
    if engine.global_rank == 0:
        consolidate_command(str(folder / name), folder / name / "hf", dtype="bf16")
    engine.world.raise_together(None)
    return load_file(folder / name / "hf" / "model.safetensors")


def served() -> torch.nn.Module:
    """The model as a server has it: in bf16, with other values than the trained one."""
    model = make_net(seed=7).to(torch.bfloat16)
    model.shift = model.shift.float()
    return model


def in_folder(folder: Path) -> Weights:
    """The weights in a folder of Hugging Face's layout, as its index places them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: Weights = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= {name: value for name, value in load_file(folder / file).items() if index["weight_map"][name] == file}
    assert found.keys() == index["weight_map"].keys()
    return found


def same(found: Weights, expected: Weights) -> bool:
    """Whether all expected weights are there with their shapes, types and bits; a state dict has tied ones twice."""
    return expected.keys() <= found.keys() and all(_bits(found[name]) == _bits(expected[name]) for name in expected)


def _bits(value: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    return value.shape, value.dtype, value.detach().flatten().view(torch.uint8).numpy().tobytes()


def versions(to: Path) -> dict[int, dict[str, Any]]:
    """The record of each version, by number."""
    found = {}
    for path in sorted(to.glob("weight_v*")):
        metadata = json.loads((path / "model.safetensors.index.json").read_text())["metadata"]
        found[int(path.name.removeprefix("weight_v"))] = metadata["zstore"]
    return found
