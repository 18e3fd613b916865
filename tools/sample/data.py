"""Data of `zstore train`: the text to train on, and the samples that it evaluates on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .corpus import Text, open_corpus
from .tokens import with_tokenizer

_SEED = 0
"""Of the samples to evaluate on, which are the same in every run."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Text to train on, and text to evaluate on, None if there is none."""

    train: Text
    validation: Text | None


def open_data(
    path: Path | None, model: str, *, validation: Path | None = None, validation_split: float = 0.0
) -> TrainingData:
    """Return the text at `path` as the model's tokenizer sees it, and the text to evaluate on: that at `validation`, or the
    last part of the other. Raises ConfigError for text that cannot be read."""
    corpus = open_corpus(path)
    parts = list(corpus.split(validation_split)) if validation_split else [corpus]
    parts += [] if validation is None else [open_corpus(validation)]
    texts = [with_tokenizer(part, model) for part in parts]
    return TrainingData(train=texts[0], validation=texts[-1] if texts[1:] else None)


def validation_samples(text: Text, count: int, seq_len: int) -> Tensor:
    """Return at most `count` samples of `text` to evaluate on, int64 [samples, seq_len]. Raises ConfigError if there is not
    one."""
    text.require(seq_len)
    return text.batch(range(max(1, min(count, text.num_bytes // seq_len))), seq_len, _SEED)[0]
