"""Activations off the device under other people's models and loops: transformers' checkpointing, its Trainer, compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.bits import engine_digests
from tests.engine.runs import make_config, start
from tests.engine.transformers_models import checkpoint_layers
from zstore.engine import Engine

LAYERS, HIDDEN, TOKENS = 3, 64, 160


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, **shape)
    ).train()


def _trained(engine: Engine) -> dict[str, Any]:
    for number in range(2):
        ids = torch.randint(64, (4, TOKENS), generator=torch.Generator().manual_seed(number))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine_digests(engine)


def _config(path: Path, stage: int = 3, **own: Any) -> dict[str, Any]:
    zero_keys = {"zstore": {"journal": False, **own}, "gradient_accumulation_steps": 1}
    chosen = make_config(stage, **zero_keys)
    if stage == 3:
        chosen["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(path)}
    return chosen


def test_layers_of_transformers_that_are_checkpointed_by_the_switch_or_by_themselves(tmp_path: Path) -> None:
    with start(_config(tmp_path), _llama()) as engine:
        expected = _trained(engine)
    own = _llama()
    checkpoint_layers(own, reentrant=False)
    for model, keys in ((_llama(), {"gradient_checkpointing": True}), (own, {})):
        with start(_config(tmp_path, activations="disk", **keys), model) as engine:
            assert _trained(engine) == expected
            found = engine.statistics().activations
            assert found is not None
            # The input of each layer, in bf16, and little else before them.
            least = 2 * LAYERS * 4 * TOKENS * HIDDEN * 2
            assert least <= found.kept_bytes < 2 * least
