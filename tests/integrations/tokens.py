"""A tokenizer of a few words, made on the spot, and the data that trl's Trainers take."""

from __future__ import annotations

from typing import Any

import datasets
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

datasets.disable_progress_bars()

_WORDS = ["the", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "a", "mat", "house", "tree", "and"]
_WORDS += ["then", "red", "blue", "small", "big"]


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    names = ["<pad>", "<eos>", "<unk>", *_WORDS]
    made = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def texts(samples: int, words: int = 6) -> Any:
    """Sentences of different lengths."""
    lines = [
        " ".join(_WORDS[(3 * row + 5 * n) % len(_WORDS)] for n in range(words + row % 3)) for row in range(samples)
    ]
    return datasets.Dataset.from_dict({"text": lines})


def preferences(samples: int) -> Any:
    """Prompts with a better and a worse answer."""
    rows = [line.split() for line in texts(samples, 8)["text"]]
    return datasets.Dataset.from_dict(
        {
            "prompt": [" ".join(row[:3]) for row in rows],
            "chosen": [" " + " ".join(row[3:6]) for row in rows],
            "rejected": [" " + " ".join(row[6:]) for row in rows],
        }
    )
