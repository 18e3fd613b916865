"""The files of a DeepSpeed checkpoint, and which checkpoint a path refers to.

[Note: the folders]
`<root>/latest` has the tag, `<root>/<tag>/` the files: model states, one file at stages 0 to 2 and one per rank at stage 3;
optimizer states, one file per rank, none at stage 0 (except with bf16); `offloaded_tensors/rank<NN>/`, tensors from NVMe;
`zero/<parameter>/fp32.pt` and similar files in a universal checkpoint (then the root has `latest_universal`). A trainer's
`checkpoint-<N>/` is such a root.
Source: deepspeed/runtime/engine.py and deepspeed/checkpoint/ds_to_universal.py of 0.19.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.layout import natural_key, tag_text
from ...errors import CheckpointMismatchError, CheckpointNotFoundError, CorruptionError, UsageError, listed

_MODEL = re.compile(r"\A(?:zero_pp_rank_(\d+)_)?mp_rank_\d+_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"\A(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_?optim_states\.pt\Z")
_PARALLEL = {
    "pipeline parallel": re.compile(r"\Alayer_\d+-model_.*model_states\.pt\Z"),
    "expert parallel (a mixture of experts)": re.compile(
        r"\A(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt\Z|\Aexpp_rank_\d+_.*\.pt\Z"
    ),
    "tensor or pipeline parallel": re.compile(r"\A.*mp_rank_0*[1-9]\d*_.*states\.pt\Z"),
}
_KINDS = (_MODEL, _OPTIMIZER, *_PARALLEL.values())
MODEL_STATES = "mp_rank_00_model_states.pt"
"""The file with all model states, at stages 1 and 2."""
_MAX_HINT_BYTES = 4096
_MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The files of a checkpoint. See [Note: the folders]."""

    path: Path
    model: dict[int, Path]
    """Model states by rank; only rank 0's at stages 0 to 2."""
    optimizer: dict[int, Path]
    """Optimizer states by rank."""
    universal: dict[str, Path]
    """In a universal checkpoint, the folder of each parameter, and `optimizer_state.pt`."""
    offloaded: dict[int, dict[str, Path]]
    """Files of tensors from NVMe, by rank and name."""


def find(location: Path, tag: str | None) -> CheckpointFiles | None:
    """Return the checkpoint that `location` (a tag's folder, or the root) and `tag` select; None if it is not DeepSpeed's.

    Without a tag, `latest` or `latest_universal` names it, else it has the highest step. Raises CheckpointNotFoundError
    naming the existing tags, CheckpointMismatchError for unsupported parallel layouts, CorruptionError.
    """
    if _is_checkpoint(location):
        return _files(location) if tag in (None, location.name) else None
    tags = sorted((name for name in _names(location) if _is_checkpoint(location / name)), key=natural_key)
    if not tags:
        return None
    selected = tag or _tag_in_latest(location) or tags[-1]
    if selected not in tags:
        source = "" if tag is not None else ", which `latest` names"
        existing = ", ".join(map(repr, tags[-_MAX_LISTED:]))
        raise CheckpointNotFoundError(
            f"{location} has no checkpoint with the tag {selected!r}{source}; it has the DeepSpeed tags {existing}"
        )
    return _files(location / selected)


def _is_checkpoint(path: Path) -> bool:
    return any(kind.match(name) for name in _names(path) for kind in _KINDS)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _tag_in_latest(root: Path) -> str | None:
    """Return the tag in the root's file `latest` or `latest_universal`, if there is one."""
    path = next((path for path in (root / "latest", root / "latest_universal") if path.is_file()), None)
    if path is None:
        return None
    with path.open("rb") as file:
        text = file.read(_MAX_HINT_BYTES)
    try:
        return tag_text(text.decode().strip())
    except (UnicodeDecodeError, UsageError) as error:
        raise CorruptionError(
            f"{path} does not name a tag, but has {text[:60]!r}: pass the tag's folder instead"
        ) from error


def _files(path: Path) -> CheckpointFiles:
    names = _names(path)
    for description, kind in _PARALLEL.items():
        if matching := [name for name in names if kind.match(name)]:
            raise refusal(path, description, f"{matching[0]} and {len(matching) - 1} more files of that kind")
    universal = {name: path / "zero" / name for name in _names(path / "zero")}
    if universal and MODEL_STATES in names:  # stage 3 has one more file, with the same content except for weights
        names = [name for name in names if name == MODEL_STATES or not _MODEL.match(name)]
    ranks: dict[int, dict[str, Path]] = {}
    for folder in (path / "offloaded_tensors").glob("rank*"):
        if (digits := folder.name.removeprefix("rank")).isdecimal():
            ranks[int(digits)] = {name: folder / name for name in _names(folder)}
    return CheckpointFiles(
        path=path,
        model=_by_rank(path, names, _MODEL),
        optimizer=_by_rank(path, names, _OPTIMIZER),
        universal=universal,
        offloaded=ranks,
    )


def _by_rank(path: Path, names: list[str], kind: re.Pattern[str]) -> dict[int, Path]:
    files: dict[int, Path] = {}
    for name in names:
        if (match := kind.match(name)) is None:
            continue
        if (rank := int(match[1] or 0)) in files:
            raise CorruptionError(
                f"{path} has two files of rank {rank}, {files[rank].name} and {name}: two runs saved to it; remove the "
                "files of one"
            )
        files[rank] = path / name
    return files


def refusal(label: str | Path, description: str, why: str) -> CheckpointMismatchError:
    """Return the error for a parallel layout, in which no single file describes a whole tensor."""
    return CheckpointMismatchError(
        f"{label} is a {description} checkpoint of DeepSpeed ({why}), which is not supported: the ranks have parts of tensors, "
        "and only the training program knows how they fit together. Export its weights with that program, as Hugging Face "
        "safetensors, and start from those"
    )


def check_ranks(folder: CheckpointFiles, files: dict[int, Path], world_size: int, description: str) -> None:
    """Raise CorruptionError unless there is one file per rank."""
    missing = [str(rank) for rank in range(min(world_size, 2**20)) if rank not in files]
    if missing:
        raise CorruptionError(
            f"{folder.path}: {description} of {len(missing)} of {world_size} ranks are missing (ranks "
            f"{listed(missing, _MAX_LISTED)}): not every rank saved, or their files are on other machines; copy them here"
        )
    if len(files) > world_size:
        raise CorruptionError(
            f"{folder.path} has {description} of {len(files)} ranks, but {world_size} trained: some are from another save; "
            "remove those"
        )
