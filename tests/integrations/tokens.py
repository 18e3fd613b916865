"""A tokenizer of a few words, made on the spot, and the data that the Trainers of trl and sentence-transformers take."""

from pathlib import Path
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
    names = ["<pad>", "<eos>", "<unk>", *_WORDS]
    made = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **marks)


def texts(samples: int, words: int = 6) -> Any:
    lines = [" ".join(_WORDS[(3 * r + 5 * n) % len(_WORDS)] for n in range(words + r % 3)) for r in range(samples)]
    return datasets.Dataset.from_dict({"text": lines})


def preferences(samples: int) -> Any:
    rows = [line.split() for line in texts(samples, 8)["text"]]
    return datasets.Dataset.from_dict(
        {
            "prompt": [" ".join(row[:3]) for row in rows],
            "chosen": [" " + " ".join(row[3:6]) for row in rows],
            "rejected": [" " + " ".join(row[6:]) for row in rows],
        }
    )


SENTENCES = ["the cat sat", "dog ran on", "bird flew", "red house tree", "small mat", "big blue bird"]


def sentences() -> Any:
    scores = [0.1, 0.5, 0.9, 0.2, 0.4, 0.7]
    return datasets.Dataset.from_dict({"a": SENTENCES, "b": SENTENCES[::-1], "score": scores})


def write_bert(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    words = tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **shape))
    bert.save_pretrained(folder)
    words.save_pretrained(folder)
