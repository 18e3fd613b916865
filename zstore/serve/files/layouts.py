"""How the weights of checkpoints are laid out in files: the layouts that were asked for last."""

from __future__ import annotations

from ...checkpoint.reader import CheckpointReader
from ...weights.from_checkpoint import DTYPES, list_weights
from ...weights.layout import FileLayout, plan_model
from ..cache import Cache

_MOST_LAYOUTS, _MOST_REFUSED = 8, 256


class Layouts:
    """Layouts by checkpoint, and which weights fit no type. Usable from any thread."""

    def __init__(self) -> None:
        self._layouts: Cache[tuple[str, str, int], list[FileLayout]] = Cache(_MOST_LAYOUTS)
        self._refused: Cache[tuple[str, str], str] = Cache(_MOST_REFUSED)

    def files(self, reader: CheckpointReader, dtype: str, max_file_bytes: int) -> list[FileLayout]:
        """Return the files of the model, as `zstore consolidate` writes them."""
        key = (reader.record.id, dtype, max_file_bytes)
        if (found := self._layouts.get(key)) is not None:
            return found
        weights = list_weights(reader, DTYPES[dtype])
        return self._layouts.put(key, plan_model(weights, max_file_bytes, reader.record.state))

    def refuse(self, reader: CheckpointReader, dtype: str, reason: str) -> None:
        """Remember why the weights cannot be written as `dtype`, which is found out on the way."""
        self._refused.put((reader.record.id, dtype), reason)

    def refused(self, reader: CheckpointReader, dtype: str) -> str | None:
        """Return why the weights cannot be written as `dtype`; None as far as is known."""
        return self._refused.get((reader.record.id, dtype))
