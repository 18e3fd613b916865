"""Tiny transformers models with random weights: one for each kind of architecture, and their data."""

from __future__ import annotations

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
    """A causal model's: the labels are the inputs."""
    ids = torch.randint(2, VOCAB, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _masked(generator: torch.Generator) -> Batch:
    """A masked model's: labels at some places, and padding."""
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


def _gpt_neo() -> nn.Module:
    config = transformers.GPTNeoConfig(
        hidden_size=WIDTH,
        num_layers=LAYERS,
        attention_types=[[["global", "local"], 1]],
        num_heads=HEADS,
        window_size=4,
        max_position_embeddings=32,
        vocab_size=VOCAB,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    return transformers.GPTNeoForCausalLM(config)


_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))


def _mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_LLAMA, sliding_window=4))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **_LLAMA, num_local_experts=8, num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=0.1
    )
    return transformers.MixtralForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        vocab_size=VOCAB,
        decoder_start_token_id=PAD,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bert() -> nn.Module:
    """With a pooler that no loss uses."""
    config = transformers.BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=32,
        vocab_size=VOCAB,
    )
    model = transformers.BertForMaskedLM(config)
    model.bert = transformers.BertModel(config, add_pooling_layer=True)
    model.tie_weights()
    return model


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        dropout=0.0,
        max_source_positions=12,
        max_target_positions=16,
        pad_token_id=PAD,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=2,
    )
    return transformers.WhisperForConditionalGeneration(config)


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


ARCHITECTURES = {
    "GPT-Neo": Architecture(_gpt_neo, batch_of_ids),
    "Llama": Architecture(_llama, batch_of_ids),
    "Mistral": Architecture(_mistral, batch_of_ids),
    "Mixtral": Architecture(_mixtral, batch_of_ids),
    "T5": Architecture(_t5, _translation),
    "BERT": Architecture(_bert, _masked),
    "ViT": Architecture(_vit, _image),
    "Whisper": Architecture(_whisper, _speech),
}


def build(name: str) -> nn.Module:
    """Return the model in fp32 with the same random values in every call."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make()
    model.train()
    return model


def batch_for(name: str, step: int, rank: int, dtype: torch.dtype) -> Batch:
    """Return a batch; what is floating is of `dtype`, as the model's parameters are."""
    batch = ARCHITECTURES[name].batch(torch.Generator().manual_seed(100 * step + rank))
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return what transformers calls the loss."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def checkpoint_layers(model: Any, reentrant: bool) -> None:
    """Let transformers checkpoint the activations of each layer."""
    options = {"use_reentrant": reentrant}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# How their layers are checkpointed by transformers itself: whether reentrant.
REENTRANT = {"Llama": False, "T5": False, "Whisper": True, "GPT-Neo": True, "Mixtral": False}

WRITERS = ("GPT-Neo", "Llama", "Mixtral", "T5")
