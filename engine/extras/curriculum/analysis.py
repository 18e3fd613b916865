"""Metrics of samples, by which `data_efficiency` draws them: made from a data set and written as a .npy file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zstore.errors import UsageError

Metric = Callable[[Any], float]
"""The metric of one sample."""
_NAMED = ("seqlen", "vocabularyrarity")


def analyze(dataset: Any, metric: str | Metric, path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Write the metric of each sample of `dataset` to `path`, a .npy file, and return it as an array mapped from there.

    `dataset` has a length and an index, as `training_data` of `initialize()`. `metric` is a function of a sample, whose
    result is kept as float64, or one of DeepSpeed's, as int64: "seqlen", the tokens of the sample; "vocabularyrarity", the
    sum over its tokens of -log of their share of all tokens, in hundredths, rounded down, for which the data set is read
    twice. A sample's tokens are itself, its "input_ids", or its first item. Name the file in the config as
    `sample_to_metric_path`. Memory: none for the samples, a counter for each token of the vocabulary.
    """
    place = Path(path)
    if place.suffix != ".npy":
        raise UsageError(f"analyze(path=...): expected a name that ends with .npy, got {place}")
    if isinstance(metric, str) and metric not in _NAMED:
        raise UsageError(f"analyze(metric=...): expected a function, or one of {', '.join(_NAMED)}; got {metric!r}")
    measure, dtype = (_named(metric, dataset), np.int64) if isinstance(metric, str) else (metric, np.float64)
    written = place.with_name(f".{place.name}.tmp.npy")
    values = np.lib.format.open_memmap(written, "w+", dtype=dtype, shape=(len(dataset),))
    try:
        for number in range(len(dataset)):
            values[number] = measure(dataset[number])
        values.flush()
        written.replace(place)
    finally:
        written.unlink(missing_ok=True)
    return values


def _named(name: str, dataset: Any) -> Metric:
    if name == "seqlen":
        return lambda sample: tokens_of(sample).size
    counts: Counter[int] = Counter()
    for number in range(len(dataset)):
        found, times = np.unique(tokens_of(dataset[number]), return_counts=True)
        counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
    total = counts.total()
    return lambda sample: int(100 * sum(-np.log(counts[token] / total) for token in tokens_of(sample).tolist()))


def tokens_of(sample: Any) -> npt.NDArray[Any]:
    """Return the tokens of a sample, 1-D."""
    while isinstance(sample, Mapping | tuple):
        if isinstance(sample, Mapping):
            if "input_ids" not in sample:
                raise UsageError(
                    f'a sample has no "input_ids" but {", ".join(map(str, sample))}: pass a function as metric'
                )
            sample = sample["input_ids"]
        else:
            sample = sample[0]
    return np.asarray(sample).reshape(-1)
