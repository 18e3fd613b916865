"""`deepspeed.checkpoint.model_3d_desc`: the parts that each rank gets if there are fewer pipeline, tensor and data parallel
ranks than before. Arithmetic only: zstore itself has data parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zstore.errors import UsageError


class ReshapeError(UsageError, AssertionError):
    """Impossible numbers of ranks, for which DeepSpeed has an assertion."""


@dataclass(frozen=True)
class RankMap:
    """The ranks that each place of a grid gets the parts of: `ranks` is [pp_degree, tp_degree, parts of a place]."""

    ranks: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def pp_degree(self) -> int:
        """Stages of the pipeline."""
        return int(self.ranks.shape[0])

    @property
    def tp_degree(self) -> int:
        """Ranks that share a tensor."""
        return int(self.ranks.shape[1])

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Return the ranks of one place, or of all places of a row or a column, in order."""
        for name, index, degree in (("pp", pp_index, self.pp_degree), ("tp", tp_index, self.tp_degree)):
            if index is not None and not 0 <= index < degree:
                raise ReshapeError(f"get_data({name}_index={index}): expected less than {degree}")
        rows = slice(None) if pp_index is None else slice(pp_index, pp_index + 1)
        columns = slice(None) if tp_index is None else slice(tp_index, tp_index + 1)
        found: list[int] = self.ranks[rows, columns].ravel().tolist()
        return found


@dataclass(frozen=True)
class model_3d_desc:  # noqa: N801 - DeepSpeed's name
    """Numbers of pipeline, tensor and data parallel ranks. Rank `(d * pp_degree + p) * tp_degree + t` is at (p, t, d)."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def get_desc(self) -> str:
        """Return the numbers as text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether there is such a rank, or else the error."""
        pairs = zip(self._named(), (pp_index, tp_index, dp_index), strict=True)
        wrong = [
            f"{name} indexing error: index {index} >= degree {degree}"
            for (name, degree), index in pairs
            if index >= degree
        ]
        return not wrong, wrong

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether the target has no more ranks of any kind, or else the error."""
        pairs = zip(self._named(), target_3d_desc._named(), strict=True)
        wrong = [
            f"Expansion reshape not supported - {name}: {old} ---> {new}"
            for (name, old), (_, new) in pairs
            if new > old
        ]
        return not wrong, wrong

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[RankMap]:
        """Return for each data parallel rank of the target which ranks of this one its places get the parts of.

        Raises ReshapeError if the target has more ranks of a kind, or the parts cannot be dealt out evenly.
        """
        target, (_, wrong) = target_3d_desc, self.can_reshape(target_3d_desc)
        together = self.tp_degree // target.tp_degree  # of each stage of the pipeline
        per_stage = self.pp_degree * together // target.pp_degree
        for what, parts, degree in (
            ("TP", self.tp_degree, target.tp_degree),
            ("PP", self.pp_degree * together, target.pp_degree),
            ("DP", per_stage * self.dp_degree, target.dp_degree),
        ):
            if not wrong and parts % degree:
                wrong.append(f"{what}: {parts} parts cannot be dealt out evenly to {degree}")
        if wrong:
            raise ReshapeError(", ".join(wrong))
        ranks = np.arange(self.world_size()).reshape(self.dp_degree, self.pp_degree, target.tp_degree, together)
        places = ranks.transpose(2, 1, 3, 0).reshape(target.tp_degree, target.pp_degree, target.dp_degree, -1)
        return [RankMap(places[:, :, index].swapaxes(0, 1)) for index in range(target.dp_degree)]

    def _named(self) -> list[tuple[str, int]]:
        return [("PP", self.pp_degree), ("TP", self.tp_degree), ("DP", self.dp_degree)]
