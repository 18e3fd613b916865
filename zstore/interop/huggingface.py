"""A Hugging Face folder of safetensors files, read as arrays under `model/`. No torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import CorruptionError
from ..format.arrays import ArraySpec, Bytes, model_array, numpy_dtype
from ..io.files import Files
from ..io.shards import IoResources
from ..weights.reader import WeightsReader
from .source import ForeignSource, record_of


class HuggingFaceSource(ForeignSource):
    """The weights in `folder`; raises the errors of `WeightsReader`.

    Tensors that the model ties are there once, under the name that the files give them.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        self._weights = WeightsReader(folder)
        try:
            specs = [
                ArraySpec(name=model_array(weight.name), shape=weight.shape, dtype=weight.dtype)
                for weight in self._weights.weights.values()
            ]
            super().__init__(folder, record_of(folder), specs, resources, Files(direct=False))
        except BaseException as error:
            self._weights.close()
            if isinstance(error, ValueError):
                raise CorruptionError(f"{folder}: {error}") from error
            raise
        self._cleanup.callback(self._weights.close)

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        target = out.view(numpy_dtype(self.array(name).spec.dtype))
        self._weights.read_into(self._weights.weights[name.partition("/")[2]], first, target)
