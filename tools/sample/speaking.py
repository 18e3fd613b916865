"""Between text and a model's tokens, as they are generated: by its tokenizer, or as bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zstore.errors import ConfigError

from .tokens import tokenizer_of

_CUT = "\ufffd"
"""What a decoder gives for a part of a character."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """Turns text into tokens, and tokens into pieces of text as they come."""

    encode: Callable[[str], list[int]]
    """Returns one token at least."""
    texts: Callable[[Iterator[int]], Iterator[str]]
    """Takes tokens until one that ends a text."""


def speaker_of(model: nn.Module, folder: Path | None) -> Speaker:
    """Return what speaks the tokens of `model`: the tokenizer in `folder`, or bytes where there is none."""
    tokenizer = None if folder is None else tokenizer_of(str(folder))
    if tokenizer is None:
        return Speaker(encode=lambda text: list(text.encode()) or [ord("\n")], texts=_texts_of_bytes)
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}

    def encode(text: str) -> list[int]:
        ids = list(tokenizer(text)["input_ids"])
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if not ids and first is None:
            raise ConfigError(f"{folder}: the tokenizer has no token to begin with: give a --prompt")
        return ids or [first]

    return Speaker(encode=encode, texts=lambda tokens: _texts(tokenizer, ends, tokens))


def _texts(tokenizer: Any, ends: set[Any], tokens: Iterator[int]) -> Iterator[str]:
    """Yield what each token adds. Of long texts only the last tokens are decoded again."""
    held: list[int] = []
    said = ""
    for token in tokens:
        if token in ends:
            break
        held.append(token)
        text = tokenizer.decode(held, skip_special_tokens=True)
        if text.endswith(_CUT):
            continue
        yield text[len(said) :]
        said = text
        if text.endswith("\n"):  # what comes does not change how this is written
            held, said = [], ""
    yield tokenizer.decode(held, skip_special_tokens=True)[len(said) :]


def _texts_of_bytes(tokens: Iterator[int]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if token == 0:  # ends a text
            break
        yield decoder.decode(bytes([token]) if token < 256 else b"?")
    yield decoder.decode(b"", final=True)
