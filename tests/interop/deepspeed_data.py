"""The checkpoints that DeepSpeed made (tests/data/deepspeed), and small ones written as it writes them, by torch alone."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
CASES = sorted(path.parent.name for path in DATA.glob("*/expected.json"))


def root_of(case: str) -> Path:
    inner = DATA / case / "checkpoint-3"
    return inner if inner.exists() else DATA / case


def expected(case: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / case / "expected.safetensors")


def facts(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / case / "expected.json").read_text())
    return found


NUMBERS = torch.arange(23.0)


def states(rank: int, world_size: int = 2) -> dict[str, Any]:
    """A rank's optimizer states at stage 2, of a parameter `w` [4, 5] and one `b` [3]."""
    flat = torch.cat([NUMBERS, torch.zeros(-len(NUMBERS) % (2 * world_size))])
    part, whole = flat.chunk(world_size)[rank], NUMBERS.chunk(world_size)
    return {
        "zero_stage": 2,
        "partition_count": [world_size],
        "single_partition_of_fp32_groups": [
            part[: len(part) - (len(flat) - len(NUMBERS) if rank == world_size - 1 else 0)]
        ],
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": part * 2, "exp_avg_sq": part * 3}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
        "whole": len(whole),
    }


def model_states(world_size: int = 2) -> dict[str, Any]:
    shapes = OrderedDict(w=torch.Size([4, 5]), b=torch.Size([3]))
    return {
        "module": OrderedDict(w=NUMBERS[:20].reshape(4, 5).bfloat16(), b=NUMBERS[20:].bfloat16(), m=torch.ones(2)),
        "buffer_names": ["m"],
        "param_shapes": [shapes],
        "shared_params": {},
        "global_steps": 9,
        "skipped_steps": 2,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 8, "bf16": {"enabled": True}},
        "ds_version": "0.0.1",
    }


def write(
    root: Path,
    *,
    model: dict[str, Any] | None = None,
    ranks: list[dict[str, Any]] | None = None,
    tag: str = "global_step9",
) -> Path:
    """Write a stage-2 checkpoint of two ranks, with other entries of the model states or other ranks' states."""
    folder = root / tag
    folder.mkdir(parents=True)
    torch.save(model_states() | (model or {}), folder / "mp_rank_00_model_states.pt")
    for rank, state in enumerate([states(0), states(1)] if ranks is None else ranks):
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(tag)
    return folder
