"""`zstore convert`: a checkpoint of one kind written as another, in bounded memory. Torch only for `--to dcp`.

[Note: directions]
Whatever `open_source` opens is read as arrays; so there is one reader, and a writer for each kind: zstore's own (the
same as `reshard`), DCP's folder with all that the checkpoint has, and the weights alone as safetensors or as a `.pt`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint.commit import new_folder, temporary_folder
from zstore.checkpoint.reader import CheckpointReader
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.source import ArraySource
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError
from zstore.sizes import format_bytes, format_count
from zstore.weights.from_checkpoint import DTYPES, list_weights, write_weights
from zstore.weights.layout import plan_files
from zstore.weights.writer import Lost, lost_text

from .companions import copy_companions
from .export import write_state_dict
from .opening import DEFAULTS, Common, no_overwriting, open_location, print_json, reading
from .progress import Progress

TARGETS = ("zstore", "dcp", "torch", "safetensors")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `zstore convert` is asked for beside source and target."""

    tag: str | None = None
    """Which checkpoint of a folder; None: the newest."""
    to: str = "zstore"
    world_size: int | None = None
    """Ranks that zstore's arrays are laid out for; None: as many as the source has."""
    dtype: str | None = None
    """One of `DTYPES`, for weights; None: as they are stored."""
    max_shard_size: int = 5 * 10**9
    """Bytes of the largest safetensors file."""

    def __post_init__(self) -> None:
        if self.to not in TARGETS:
            raise UsageError(f"--to {self.to}: expected one of {', '.join(TARGETS)}")
        if self.dtype is not None and (self.dtype not in DTYPES or self.to in ("zstore", "dcp")):
            raise UsageError(
                f"--dtype {self.dtype} with --to {self.to}: expected one of {', '.join(DTYPES)}, and --to torch or "
                "safetensors; a whole checkpoint keeps its types"
            )
        if self.world_size is not None and self.to != "zstore":
            raise UsageError(f"--world-size with --to {self.to}: only zstore's own checkpoints are laid out for ranks")


def convert_command(
    src: str | os.PathLike[str], out: Path, options: ConvertOptions, *, common: Common = DEFAULTS
) -> int:
    """Write the checkpoint `src` as `out`: a folder of zstore checkpoints, a new folder, or a new file (`--to torch`).

    Returns the exit code. Raises CheckpointExistsError where it is there already; nothing half written has its name.
    """
    with open_location(src, common, options.tag) as source:
        names = list(source.arrays)
        if options.to in ("torch", "safetensors"):
            names = [weight.array for weight in list_weights(source, None)]
        total = sum(source.arrays[name].spec.nbytes for name in names)
        with Progress(f"convert {source.location}", total) as progress:
            job = _Job(source, out, options, progress)
            progress.say(
                f"plan: {format_count(len(names), 'tensor')}, {format_bytes(total)}, from {source.kind} to {job.plan()}"
            )
            for note in source.notes:
                progress.say(f"not carried over: {note}")
            report = job.run() | reading(progress, source)
        if common.json:
            print_json({"from": source.kind, "to": options.to, **report, **progress.summary()})
    return 0


class _Job:
    """One conversion."""

    def __init__(self, source: ArraySource, out: Path, options: ConvertOptions, progress: Progress) -> None:
        self._source = source
        self._out = out
        self._options = options
        self._progress = progress
        self._files = source.resources.files

    def plan(self) -> str:
        """Return what is written, in words."""
        to = self._options.to
        if to == "zstore":
            return f"the checkpoint {self._source.tag!r} in {self._out}, for {format_count(self._world_size, 'rank')}"
        if self._out.exists() or self._out.is_symlink():
            raise CheckpointExistsError(f"{self._out} exists: remove it, or name another place to write")
        if to == "dcp":
            return f"{self._out}, for torch.distributed.checkpoint"
        what = "a plain torch state dict" if to == "torch" else "safetensors files"
        return f"{self._out}: the weights as {what}, in {self._options.dtype or 'the types that they have'}"

    @property
    def _world_size(self) -> int:
        return self._options.world_size or self._source.record.world_size

    def run(self) -> dict[str, Any]:
        """Convert; return what was written, as JSON."""
        runs = {"zstore": self._to_zstore, "dcp": self._to_dcp, "torch": self._to_torch}
        return runs.get(self._options.to, self._to_safetensors)()

    def _to_zstore(self) -> dict[str, Any]:
        with no_overwriting(self._out, self._source.tag):
            path = reshard_checkpoint(self._source, self._out, self._world_size, self._progress.advance)
        copied = self._copy_companions(self._out)
        self._progress.say(f"wrote {path}" + (f", with {copied} beside it" if copied else ""))
        return {"path": str(path), "world_size": self._world_size}

    def _to_dcp(self) -> dict[str, Any]:
        from .export_dcp import write_dcp

        with new_folder(self._files, self._out) as folder:
            names = write_dcp(self._source, folder, self._progress.advance)
        self._progress.say(f"wrote {self._out}")
        return {"path": str(self._out), "files": names}

    def _to_torch(self) -> dict[str, Any]:
        with temporary_folder(self._files, self._out.absolute().parent, self._out.name) as folder:
            part = folder / "state.pt"
            lost = write_state_dict(self._source, part, self._dtype, self._progress.advance)
            self._refuse(lost)
            if self._out.exists():
                raise CheckpointExistsError(f"{self._out} exists: remove it, or name another place to write")
            self._files.rename(part, self._out)
            self._files.sync_folder(self._out.absolute().parent)
        self._progress.say(f"wrote {self._out}")
        return {"path": str(self._out)}

    def _to_safetensors(self) -> dict[str, Any]:
        layouts = plan_files(list_weights(self._source, self._dtype), self._options.max_shard_size)
        with new_folder(self._files, self._out) as folder:
            advance = self._progress.advance
            self._refuse(write_weights(self._source, layouts, folder, overflow="error", advance=advance))
            copied = self._copy_companions(folder)
        self._progress.say(
            f"wrote {format_count(len(layouts), 'file')} to {self._out}" + (f", with {copied}" if copied else "")
        )
        return {"path": str(self._out), "files": [layout.name for layout in layouts]}

    @property
    def _dtype(self) -> str | None:
        return DTYPES[self._options.dtype] if self._options.dtype else None

    def _refuse(self, lost: Sequence[Lost]) -> None:
        if lost:
            raise CheckpointError(lost_text(lost, self._options.dtype or "", "Choose `--dtype bf16` or `fp32`"))

    def _copy_companions(self, folder: Path) -> str:
        """Copy config and tokenizer files that belong to the source; return their names."""
        source = self._source
        if isinstance(source, CheckpointReader):
            return ", ".join(copy_companions([source.folder.parent, source.folder], folder))
        # Ours lie beside the tag. What lies beside other software's folder may be anyone's.
        place = Path(source.location)
        return ", ".join(copy_companions([place], folder)) if place.is_dir() else ""
