"""What `zstore train` reads: the text to train on, and the samples that it evaluates on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zstore.errors import ConfigError, UsageError

from .corpus import Corpus, Text, open_corpus
from .packing import Chosen, PackedRows
from .rows import Rows, open_rows
from .tokens import encoder_of, with_tokenizer

_SEED = 0
"""Of the samples to evaluate on, which are the same in every run."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where text is, and how it is taken. None: not given."""

    data: Path | None
    model: str
    text_key: str = "text"
    validation: Path | None = None
    validation_split: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Text to train on, and text to evaluate on, None where there is none."""

    train: Text
    validation: Text | None


def open_data(options: DataOptions) -> TrainingData:
    """Return the text of `options` as the model's tokenizer sees it. Raises ConfigError for what cannot be read."""
    source = _source(options.data)
    if isinstance(source, Corpus):
        parts = source.split(options.validation_split) if options.validation_split else (source,)
        texts: list[Text] = [with_tokenizer(part, options.model) for part in parts]
    else:
        held = _held_out(source, options.validation_split)
        chosen = (
            [Chosen(len(source), held, len(source)), Chosen(len(source), 0, held)] if held else [range(len(source))]
        )
        texts = [_packed(source, part, options) for part in chosen]
    if options.validation is not None:
        other = _source(options.validation)
        whole = with_tokenizer(other, options.model) if isinstance(other, Corpus) else None
        texts.append(whole or _packed(other, range(len(other)), options))  # type: ignore[arg-type]
    return TrainingData(train=texts[0], validation=texts[-1] if texts[1:] else None)


def _source(path: Path | None) -> Corpus | Rows:
    rows = None if path is None else open_rows(path.expanduser())
    return open_corpus(path) if rows is None else rows


def _held_out(rows: Rows, part: float) -> int:
    count = int(len(rows) * part)
    if part and not 0 < count < len(rows):
        raise ConfigError(
            f"--validation-split {part:g} of the {len(rows)} rows of {rows.name} leaves {count} to evaluate on: give more "
            "rows, another part, or --validation FILE"
        )
    return count


def _packed(rows: Rows, chosen: range | Chosen, options: DataOptions) -> PackedRows:
    return PackedRows(rows, chosen, options.text_key, encoder_of(options.model))


def validation_samples(text: Text, count: int, seq_len: int) -> Tensor:
    """Return at most `count` samples of `text` to evaluate on, int64 [samples, seq_len]: of packed rows the first ones of an
    epoch, else those that depend on their numbers alone. Raises ConfigError where there is not one."""
    text.require(seq_len)
    if isinstance(text, PackedRows):
        text.begin(1)
        found = []
        for number in range(count):
            ids, _ = text.sample(number, seq_len, _SEED)
            if text.positions()[0][2] >= [1, 0, 1]:  # the second epoch has begun
                break
            found.append(ids)
        if not found:
            raise UsageError(f"the text to evaluate on has less than one sample of {seq_len} tokens: give more of it")
        return torch.stack(found)
    corpus = text if isinstance(text, Corpus) else getattr(text, "corpus", None)
    most = count if corpus is None else max(1, min(count, corpus.num_bytes // seq_len))
    return text.batch(range(most), seq_len, _SEED)[0]
