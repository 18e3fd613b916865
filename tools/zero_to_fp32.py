"""`deepspeed.utils.zero_to_fp32`: full fp32 weights from a checkpoint of zstore or DeepSpeed."""

from __future__ import annotations

import argparse
import filecmp
import logging
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zstore.checkpoint import natural_key
from zstore.engine.access.access import find_run
from zstore.engine.access.safe_access import gather
from zstore.errors import CheckpointExistsError, ZstoreError
from zstore.io import user_path
from zstore.open.checkpoint import open_checkpoint
from zstore.ranks.world import World
from zstore.weights.files import plan_model
from zstore.weights.from_checkpoint import frozen_weights

from .consolidate import consolidate
from .options import DEFAULTS, parse_size

_log = logging.getLogger("zstore")
_ONE_FILE_BYTES = 2**62


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint (by default the newest) in fp32 on the CPU, by their names in the model.

    They are tensors in memory even with `lazy_mode`. Raises CheckpointNotFoundError if there is no checkpoint.
    """
    with open_checkpoint(checkpoint_dir, tag) as checkpoint:
        frozen = frozen_weights(checkpoint.source) if exclude_frozen_parameters else set()
        return checkpoint.load_state_dict(exclude=sorted(frozen), dtype="fp32")


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Return DeepSpeed's optimizer state files in a tag's folder, sorted by number. Raises FileNotFoundError if there are
    none."""
    paths = [os.fspath(path) for path in user_path(checkpoint_dir).glob("*_optim_states.pt")]
    if not paths:
        raise FileNotFoundError(f"{checkpoint_dir}: expected DeepSpeed's files *_optim_states.pt, got none")
    return sorted(paths, key=natural_key)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load the fp32 weights of a checkpoint into `model` and return it, moved to the CPU; the model of an engine stays in
    place and continues training with them (all ranks)."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if any(find_run(parameter) is not None for parameter in model.parameters()):
        with gather(model, modifier_rank=0):
            model.load_state_dict(state, strict=False)
        return model
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32 to the new folder `output_dir`, as safetensors, in bounded memory.

    If `safe_serialization` is false, a warning says that safetensors are written nevertheless. One or all ranks may call it:
    each writes, and the first folder is kept. Raises CheckpointExistsError if the folder exists with other content.
    """
    if not safe_serialization:
        _log.warning("zero_to_fp32: writing safetensors to %s, not pickles", output_dir)
    size = _ONE_FILE_BYTES if max_shard_size is None else parse_size(max_shard_size)
    world, target = World.current(), user_path(output_dir)
    rank_folder = target if world.world_size == 1 else target.with_name(f"{target.name}.rank-{world.rank}")
    plan_files = partial(plan_model, max_file_bytes=size, uses_peft_names=False)  # DeepSpeed keeps the model's names
    consolidate(checkpoint_dir, rank_folder, "fp32", plan_files, tag, exclude_frozen_parameters, DEFAULTS)
    if rank_folder != target:
        _publish(rank_folder, target)


def _publish(rank_folder: Path, target: Path) -> None:
    """Rename a rank's folder to the target; if another rank was first, compare the two and remove the rank's folder."""
    try:
        rank_folder.rename(target)
        return
    except OSError:
        names = sorted(path.name for path in rank_folder.iterdir())
        is_same = target.is_dir() and names == sorted(path.name for path in target.iterdir())
        is_same = is_same and not any(filecmp.cmpfiles(rank_folder, target, names, shallow=False)[1:])
    shutil.rmtree(rank_folder)
    if not is_same:
        raise CheckpointExistsError(f"{target} exists and has other content: remove it, or choose another folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Run DeepSpeed's command `zero_to_fp32.py CHECKPOINT OUT`, with its options; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Write the fp32 weights of a checkpoint, of zstore or DeepSpeed, as safetensors.",
    )
    parser.add_argument("checkpoint_dir", help="the folder with `latest`, or a tag's folder")
    parser.add_argument("output_dir", help="the folder to create")
    parser.add_argument("--max_shard_size", default="5GB", help="maximum file size")
    parser.add_argument("--safe_serialization", action="store_true", help="no effect: always safetensors")
    parser.add_argument("-t", "--tag", help="tag of the checkpoint (default: the newest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="omit untrained parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    arguments = vars(parser.parse_args(argv))
    del arguments["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**arguments)
    except (ZstoreError, OSError) as error:
        parser.exit(1, f"zero_to_fp32.py: {error}\n")
    return 0
