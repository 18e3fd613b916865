"""zstore.torchtitan.CheckpointManager beside torchtitan's own, by their Configs, in the same loop: equal bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integrations.titan_loop import STEPS, Names, Run
from zstore.testing.ranks import run_ranks
from zstore.torchtitan import CheckpointManager


def theirs() -> Any:
    from torchtitan.components.checkpointer import CheckpointManager as Own

    return Own


def names(folder: str) -> list[str]:
    return sorted(os.listdir(f"{folder}/checkpoint"))


def save_and_resume(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, manager, mode in (
        ("theirs", theirs(), "disabled"),
        ("sync", CheckpointManager, "disabled"),
        ("async", CheckpointManager, "async"),
    ):
        whole = Run(manager, f"{folder}/{name}", async_mode=mode).train().close()
        resumed = Run(manager, f"{folder}/{name}", seed=2, load_step=2, async_mode=mode)
        assert resumed.load()
        middle = resumed.digest()
        found[name] = [whole, middle, resumed.train().close()]
    return found


def test_a_resumed_run_has_the_bits_of_torchtitans_own(tmp_path: Path) -> None:
    for ranks in (1, 2):
        results = run_ranks(save_and_resume, ranks, str(tmp_path / str(ranks)))
        assert results == [results[0]] * ranks
        assert results[0]["theirs"] == results[0]["sync"] == results[0]["async"]
        assert results[0]["theirs"][0] == results[0]["theirs"][2]
