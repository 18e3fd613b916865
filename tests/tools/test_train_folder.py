"""`zstore train --model FOLDER`: the folder's weights and tokenizer, and what a finished run gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import zstore
from tests.tools.train_runs import config_file, options, rows
from zstore.errors import ConfigError
from zstore.tools.consolidate import consolidate_command
from zstore.tools.sample.corpus import TokenCorpus, open_corpus, with_tokenizer
from zstore.tools.sample.models import build_model, load_or_build
from zstore.tools.train.command import train_command

torch.set_num_threads(1)

WORDS = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: {WORDS}\n" for i in range(100)))
    return path


@pytest.fixture
def folder(tmp_path: Path, text: Path) -> Path:
    """A small Llama with weights and a tokenizer of 128 tokens, fewer than bytes need."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=128, special_tokens=["<unk>", "<s>"]))
    path = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>"
    ).save_pretrained(path)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def disk(tmp_path: Path) -> dict[str, Any]:
    nvme = tmp_path / "nvme"
    nvme.mkdir(exist_ok=True)
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    sections = {"offload_optimizer": offload, "offload_param": offload, "stage3_param_persistence_threshold": 100}
    return {"zero_optimization": {"stage": 3, **sections}}


def test_a_folder_trains_on_with_its_weights_and_its_tokenizer(folder: Path, text: Path, tmp_path: Path) -> None:
    config, metrics, run = config_file(tmp_path, **disk(tmp_path)), tmp_path / "m.jsonl", tmp_path / "run"
    train_command(options(tmp_path, text, config, model=str(folder), save=run, metrics=metrics))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    corpus = TokenCorpus(
        corpus=open_corpus(text), encode=lambda t: list(tokenizer(t, add_special_tokens=False)["input_ids"])
    )
    ids, labels = corpus.batch(range(4), 16, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert rows(metrics)[0]["loss"] == pytest.approx(model(ids, labels=labels).loss.item(), abs=1e-2)

    assert consolidate_command(run, tmp_path / "weights", "fp32", 10**9, "error") in (0, None)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert trained.config.vocab_size == 128
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "weights")(WORDS) == tokenizer(WORDS)
    moved = (
        (trained.lm_head.weight - transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight).abs().max()
    )
    assert 0 < moved < 0.01


def test_random_weights_are_built_in_shards_with_the_plain_values(folder: Path, tmp_path: Path) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **disk(tmp_path)}
    for name in ("gpt-tiny", str(folder / "config.json")):
        torch.manual_seed(1)
        model = load_or_build(name, 16, config)
        assert sum(bool(p.isnan().all()) for p in model.parameters()) > 4
        torch.manual_seed(1)
        plain = build_model(name, 16)
        with zstore.gather(model):
            for (key, value), (other, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert key == other
                assert torch.equal(value, expected), key
        del model


def test_samples_depend_on_seed_and_number_alone(folder: Path, text: Path) -> None:
    corpus = with_tokenizer(open_corpus(text), str(folder))
    corpus.require(16)
    batch, labels = corpus.batch(range(8), 16, 3)
    assert batch.shape == (8, 16)
    assert torch.equal(batch, labels)
    assert torch.equal(batch[5], corpus.batch([5], 16, 3)[0][0])
    assert len({tuple(row.tolist()) for row in batch}) == 8
    assert not torch.equal(batch, corpus.batch(range(8), 16, 4)[0])
    decoded = transformers.AutoTokenizer.from_pretrained(folder).decode(corpus.sample(1, 40, 0)[0])
    assert "quick" in decoded


def test_text_that_ends_goes_on_at_its_beginning(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the fox ")
    corpus = with_tokenizer(open_corpus(tmp_path / "short.txt"), str(folder))
    ids, _ = corpus.sample(0, 50, 0)
    decoded = transformers.AutoTokenizer.from_pretrained(folder).decode(ids)
    assert "the fox the fox the fox" in decoded


def test_a_folder_without_a_tokenizer_is_trained_on_bytes(folder: Path, text: Path) -> None:
    corpus = open_corpus(text)
    assert with_tokenizer(corpus, "gpt-tiny") is corpus
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert with_tokenizer(corpus, str(folder)) is corpus
    with pytest.raises(ConfigError, match="vocab_size is 128, but text is read as bytes"):
        load_or_build(str(folder), 16, {})


def test_what_makes_no_tokens_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    corpus = TokenCorpus(corpus=open_corpus(text), encode=lambda _: [])
    with pytest.raises(ConfigError, match="the tokenizer makes no tokens of the text"):
        corpus.require(16)
    with pytest.raises(ConfigError, match="2 tokens or more"):
        with_tokenizer(open_corpus(text), str(folder)).require(1)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        with_tokenizer(open_corpus(text), str(folder))


def test_a_folder_for_too_short_a_window_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings is 64"):
        load_or_build(str(folder), 65, {})
