"""Which files a DeepSpeed checkpoint consists of, and which checkpoint a path means.

[Note: the folders]
`<root>/latest` holds the tag, `<root>/<tag>/` the files: model states, one file at stages 0 to 2 and one for each rank at
stage 3; optimizer states, one file for each rank, none at stage 0 (except with bf16); `offloaded_tensors/rank<NN>/`, tensors
from NVMe; `zero/<parameter>/fp32.pt` and its like, if the folder is a universal one (then the root has
`latest_universal`). A trainer's `checkpoint-<N>/` is such a root.
Source: deepspeed/runtime/engine.py and deepspeed/checkpoint/ds_to_universal.py of 0.19.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.names import natural_key, tag_text
from ...errors import CheckpointMismatchError, CheckpointNotFoundError, CorruptionError, UsageError

_MODEL = re.compile(r"\A(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"\A(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt\Z")
_PIPELINE = re.compile(r"\Alayer_\d+-model_.*model_states\.pt\Z")
_EXPERT = re.compile(r"\A(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt\Z|\Aexpp_rank_\d+_.*\.pt\Z")
MODEL_STATES = "mp_rank_00_model_states.pt"
"""The file of all model states, at stages 1 and 2."""
_OFFLOADED = "offloaded_tensors"
_UNIVERSAL = "zero"
_HINTS = ("latest", "latest_universal")
_MAX_HINT_BYTES = 4096
_MOST_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint. See [Note: the folders]."""

    path: Path
    tag: str
    model: dict[int, Path] = field(default_factory=dict)
    """Model states by rank; rank 0's alone at stages 0 to 2."""
    optimizer: dict[int, Path] = field(default_factory=dict)
    """Optimizer states by rank."""
    universal: dict[str, Path] = field(default_factory=dict)
    """Of a universal folder, each parameter's folder, and `optimizer_state.pt`."""
    offloaded: dict[int, dict[str, Path]] = field(default_factory=dict)
    """Tensors from NVMe: files by rank and name."""


def find(location: Path, tag: str | None) -> CheckpointFiles | None:
    """Return the checkpoint that `location` and `tag` mean: a tag's folder, or the root above; None for none of DeepSpeed.

    Without a tag it is that of `latest`, or `latest_universal`, or the highest step's. Raises CheckpointNotFoundError
    that names the tags that are there, CheckpointMismatchError for parallel layouts that are not read, CorruptionError.
    """
    if _is_checkpoint(location):
        if tag is not None and tag != location.name:
            return None
        return _files(location)
    tags = sorted((path.name for path in _folders(location) if _is_checkpoint(path)), key=natural_key)
    if not tags:
        return None
    wanted = tag if tag is not None else _hinted(location)
    if wanted is None:
        wanted = tags[-1]
    if wanted not in tags:
        named = "" if tag is not None else ", which `latest` names"
        there = ", ".join(map(repr, tags[-_MOST_LISTED:]))
        raise CheckpointNotFoundError(
            f"{location} has no checkpoint with the tag {wanted!r}{named}; it has the DeepSpeed tags {there}"
        )
    return _files(location / wanted)


def _is_checkpoint(path: Path) -> bool:
    return any(kind.match(name) for name in _names(path) for kind in (_MODEL, _OPTIMIZER, _PIPELINE, _EXPERT))


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _folders(path: Path) -> list[Path]:
    return [path / name for name in _names(path) if (path / name).is_dir()]


def _hinted(root: Path) -> str | None:
    """Return the tag that the root's hint names, None if there is none."""
    for name in _HINTS:
        try:
            with (root / name).open("rb") as file:
                text = file.read(_MAX_HINT_BYTES)
        except (FileNotFoundError, IsADirectoryError):
            continue
        try:
            return tag_text(text.decode().strip())
        except (UnicodeDecodeError, UsageError) as error:
            raise CorruptionError(
                f"{root / name} does not name a tag, but has {text[:60]!r}: give the tag's folder instead"
            ) from error
    return None


def _files(path: Path) -> CheckpointFiles:
    names = _names(path)
    _refuse_parallel(path, names)
    universal = {folder.name: folder for folder in _folders(path / _UNIVERSAL)}
    if universal and MODEL_STATES in names:  # stage 3 has a file beside it, of the same content except the weights
        names = [name for name in names if name == MODEL_STATES or not _MODEL.match(name)]
    optimizer: dict[int, Path] = {}
    model: dict[int, Path] = {}
    for name in names:
        for kind, found in ((_MODEL, model), (_OPTIMIZER, optimizer)):
            match = kind.match(name)
            if match is None:
                continue
            rank = int(match[1] or 0)
            if rank in found:
                raise CorruptionError(
                    f"{path} has two files of rank {rank}, {found[rank].name} and {name}: two runs saved into it; remove the "
                    "files of one"
                )
            found[rank] = path / name
    state = path / _UNIVERSAL / "optimizer_state.pt"
    if universal and state.is_file():
        universal[state.name] = state
    return CheckpointFiles(
        path=path, tag=path.name, model=model, optimizer=optimizer, universal=universal, offloaded=_offloaded(path)
    )


def _refuse_parallel(path: Path, names: list[str]) -> None:
    """Raise CheckpointMismatchError for layouts in which no file alone describes a tensor."""
    found = {
        "pipeline parallel": [name for name in names if _PIPELINE.match(name)],
        "expert parallel (a mixture of experts)": [name for name in names if _EXPERT.match(name)],
        "tensor or pipeline parallel": [
            name for name in names if (m := _MODEL.match(name) or _OPTIMIZER.match(name)) and int(m[2]) > 0
        ],
    }
    for what, files in found.items():
        if files:
            raise CheckpointMismatchError(
                refusal(path, what, f"{files[0]} and {len(files) - 1} more files of that kind")
            )


def refusal(path: Path, what: str, why: str) -> str:
    """Return the message for a parallel layout that is not read."""
    return (
        f"{path} is a {what} checkpoint of DeepSpeed ({why}), which is not read: the ranks hold parts of tensors, and how they "
        "fit together is known to the program that trained. Export its weights with that program, as Hugging Face "
        "safetensors, and start from those"
    )


def _offloaded(path: Path) -> dict[int, dict[str, Path]]:
    ranks: dict[int, dict[str, Path]] = {}
    for folder in _folders(path / _OFFLOADED):
        digits = folder.name.removeprefix("rank")
        if digits.isdecimal():
            ranks[int(digits)] = {name: folder / name for name in _names(folder)}
    return ranks


def check_ranks(folder: CheckpointFiles, files: dict[int, Path], world_size: int, what: str) -> None:
    """Raise CorruptionError unless there is one file for each of `world_size` ranks."""
    missing = [rank for rank in range(min(world_size, 2**20)) if rank not in files]
    if missing:
        listed = ", ".join(map(str, missing[:_MOST_LISTED])) + (", ..." if len(missing) > _MOST_LISTED else "")
        raise CorruptionError(
            f"{folder.path}: {what} of {len(missing)} of {world_size} ranks are missing (ranks {listed}): not every rank "
            "saved, or their files are on other machines; copy them here"
        )
    if len(files) > world_size:
        raise CorruptionError(
            f"{folder.path} has {what} of {len(files)} ranks, but {world_size} trained: some are from another save; remove "
            "those"
        )
