"""A Hugging Face folder of safetensors files, read as arrays under `model/`. No torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ..arrays import ArraySpec, numpy_dtype
from ..checkpoint import ArraySource, Record, StoredArray, tag_text
from ..checkpoint.names import array_path, step_tag
from ..errors import UsageError
from ..io import Priority
from ..partition import make_grid
from ..shardio import IoResources
from ..weights import WeightsReader


class HuggingFaceSource(ArraySource):
    """The weights in `folder`; raises what `WeightsReader` raises.

    Tensors that the model ties are there once, under the name that the files give them.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        self._weights = WeightsReader(folder)
        record = Record(
            id="",
            tag=_tag(folder),
            step=0,
            world_size=1,
            training_world_size=1,
            metadata_sha256="",
            manifest_sha256=(),
        )
        super().__init__(str(folder), record.tag, record, resources)
        self._cleanup.callback(self._weights.close)
        self._lock = threading.Lock()
        self._read_bytes = 0
        for weight in self._weights.weights.values():
            spec = ArraySpec(name=f"model/{weight.name}", shape=weight.shape, dtype=weight.dtype)
            grid = make_grid(spec.stored_shape, 1)
            self.arrays[spec.name] = StoredArray(spec=spec, grid=grid, folder=array_path(spec.name))

    @property
    def read_bytes(self) -> int:
        """See `ArraySource.read_bytes`."""
        with self._lock:
            return self._read_bytes

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return nothing: the folder has weights alone."""
        return {}

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any], priority: Priority = Priority.READ) -> None:
        """See `ArraySource.read`. The files have no checksums: what is read is what is there."""
        room = self.room_for(name, first, stop, out)
        if first == stop:
            return
        target = room.view(numpy_dtype(self.array(name).spec.dtype))
        self._weights.read_into(self._weights.weights[name.partition("/")[2]], first, target)
        with self._lock:
            self._read_bytes += target.nbytes


def _tag(folder: Path) -> str:
    try:
        return tag_text(folder.resolve().name)
    except UsageError:
        return step_tag(0)
