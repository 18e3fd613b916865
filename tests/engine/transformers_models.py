"""Tiny transformers models with random weights: one for each kind of architecture, and their data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

WIDTH, LAYERS, HEADS, VOCAB, TOKENS, SAMPLES = 32, 2, 2, 96, 10, 2
PAD, EOS = 0, 1

Batch = dict[str, Any]

transformers.logging.set_verbosity_error()


def batch_of_ids(generator: torch.Generator) -> Batch:
    ids = torch.randint(2, VOCAB, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _masked(generator: torch.Generator) -> Batch:
    ids = torch.randint(2, VOCAB, (SAMPLES, TOKENS), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -100)
    labels[:, 0] = ids[:, 0]
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _translation(generator: torch.Generator) -> Batch:
    ids = torch.randint(2, VOCAB, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(2, VOCAB, (SAMPLES, 6), generator=generator)}


def _image(generator: torch.Generator) -> Batch:
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (SAMPLES,), generator=generator)}


def _speech(generator: torch.Generator) -> Batch:
    features = torch.randn(SAMPLES, 8, 24, generator=generator)
    return {"input_features": features, "labels": torch.randint(2, VOCAB, (SAMPLES, 6), generator=generator)}


_SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
_SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_ENDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
_LLAMA = _SIZES | _ENDS | {"num_key_value_heads": 1, "max_position_embeddings": 32}


def _made(name: str, **settings: Any) -> Callable[[], nn.Module]:
    base, _, kind = name.partition(" ")
    config = getattr(transformers, f"{base}Config")(**settings)
    return lambda: getattr(transformers, f"{base}For{kind}")(config)


def _bert() -> nn.Module:
    """With a pooler that no loss uses."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = _made("Bert MaskedLM", **_SIZES, **none, max_position_embeddings=32, vocab_size=VOCAB)()
    model.bert = transformers.BertModel(model.config, add_pooling_layer=True)
    model.tie_weights()  # type: ignore[operator]
    return model


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


_NEO = {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "max_position_embeddings": 32, "window_size": 4}
_MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
_VIT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 16, "patch_size": 4}
_WHISPER = {
    f"{part}_{what}": value
    for part in ("encoder", "decoder")
    for what, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 2 * WIDTH))
} | {"num_mel_bins": 8, "d_model": WIDTH, "max_source_positions": 12, "max_target_positions": 16}

ARCHITECTURES = {
    "GPT-Neo": Architecture(
        _made("GPTNeo CausalLM", **_NEO, **_ENDS, attention_types=[[["global", "local"], 1]]), batch_of_ids
    ),
    "Llama": Architecture(_made("Llama CausalLM", **_LLAMA), batch_of_ids),
    "Mistral": Architecture(_made("Mistral CausalLM", **_LLAMA, sliding_window=4), batch_of_ids),
    "Mixtral": Architecture(_made("Mixtral CausalLM", **_LLAMA, **_MIXTURE), batch_of_ids),
    "T5": Architecture(
        _made("T5 ConditionalGeneration", **_T5, dropout_rate=0.0, vocab_size=VOCAB, decoder_start_token_id=PAD),
        _translation,
    ),
    "BERT": Architecture(_bert, _masked),
    "ViT": Architecture(_made("ViT ImageClassification", **_SIZES, **_VIT, num_labels=10), _image),
    "Whisper": Architecture(
        _made("Whisper ConditionalGeneration", **_WHISPER, **_ENDS, dropout=0.0, decoder_start_token_id=2), _speech
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].make().train()


def batch_for(name: str, step: int, rank: int) -> Batch:
    return ARCHITECTURES[name].batch(torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return what transformers calls the loss; what is floating is of the parameters' type."""
    dtype = next(model.parameters()).dtype
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    loss: torch.Tensor = model(**cast).loss
    return loss


def checkpoint_layers(model: Any, reentrant: bool) -> None:
    options = {"use_reentrant": reentrant}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# How their layers are checkpointed by transformers itself: whether reentrant.
REENTRANT = {"Llama": False, "T5": False, "Whisper": True, "GPT-Neo": True, "Mixtral": False}

WRITERS = ("GPT-Neo", "Llama", "Mixtral", "T5")
