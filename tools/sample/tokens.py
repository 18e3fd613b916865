"""Text to train on as a model's own tokenizer sees it.

[Note: samples of tokens] Like a sample of bytes, sample n of a run with seed s begins at a place that depends on (s, n)
alone. The text from there on is tokenised until there are as many tokens as are needed, from the beginning again after
its end. So nothing is prepared or cached, and any number of ranks sees the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zstore.errors import ConfigError

from .corpus import Corpus, Text, start_of

_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_BYTES_PER_TOKEN = 6
"""More than a token has on average: one tokenisation is enough, mostly."""


@dataclass(frozen=True, kw_only=True)
class TokenCorpus(Text):
    """A corpus as tokens. `encode` gives the tokens of a text."""

    corpus: Corpus
    encode: Callable[[str], list[int]]

    @property
    def num_bytes(self) -> int:
        """See Text."""
        return self.corpus.num_bytes

    def require(self, seq_len: int) -> None:
        """Raise `ConfigError` unless samples of `seq_len` tokens can be made from the text."""
        super().require(seq_len)
        self.sample(0, seq_len, 0)

    def sample(self, number: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample `number` as `(input_ids, labels)`, int64 [seq_len] and equal. See [Note: samples of tokens]."""
        total = self.corpus.num_bytes
        start = start_of(number, seed, total)
        wanted = seq_len * _BYTES_PER_TOKEN
        while True:
            tokens = self.encode(self._text(start, wanted))
            if len(tokens) >= seq_len:
                ids = torch.tensor(tokens[:seq_len], dtype=torch.int64)
                return ids, ids.clone()
            if not tokens and wanted > total:
                raise ConfigError(f"the tokenizer makes no tokens of the text in {self.corpus.name}: give other text")
            wanted *= 2

    def _text(self, start: int, num_bytes: int) -> str:
        """The text of `num_bytes` from `start` on, from the beginning again after the end; characters cut apart are left
        out."""
        pieces, position = [], start
        while num_bytes > 0:
            size = min(num_bytes, self.corpus.num_bytes - position)
            pieces.append(self.corpus.read(position, size))
            num_bytes -= size
            position = 0
        return b"".join(pieces).decode("utf-8", errors="ignore")


def has_tokenizer(model: str) -> bool:
    """Return whether `model` is a folder with a tokenizer's files."""
    folder = Path(model).expanduser()
    return folder.is_dir() and any((folder / name).is_file() for name in _FILES)


def _tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer in a folder (extra `hf`)."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{folder} needs transformers, which is not installed: pip install 'zstore[hf]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers cannot read the tokenizer in {folder}: {error}") from error
    # A sample is longer than the model's window before it is cut, which is no mistake.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def with_tokenizer(corpus: Corpus, model: str) -> Text:
    """Return the corpus as the tokenizer in the folder `model` sees it; as bytes if that has none (extra `hf`)."""
    if not has_tokenizer(model):
        return corpus
    tokenizer = _tokenizer_in(Path(model).expanduser())
    return TokenCorpus(corpus=corpus, encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]))
