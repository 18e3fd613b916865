"""Sparse attention: layouts as their papers and DeepSpeed's section describe them, attention as dense attention under the
same mask, and the section at work in models."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zstore
from zstore.attention import Pattern, apply, attend, block_mask, dense_mask, pattern_of
from zstore.engine.config.config import load_config
from zstore.engine.extras.sparse_attention import layout_of
from zstore.errors import ConfigError, UsageError
from zstore.tools.sample import Attention, Gpt, GptConfig

CAUSAL: dict[str, Any] = {"attention": "unidirectional"}
PATTERNS = {
    "fixed": pattern_of("fixed", block=8),
    "fixed, causal, by head": pattern_of(
        "fixed", block=8, different_layout_per_head=True, num_different_global_patterns=4, **CAUSAL
    ),
    "fixed, horizontal": pattern_of(
        "fixed", block=8, num_local_blocks=6, num_global_blocks=2, horizontal_global_attention=True
    ),
    "variable": pattern_of("variable", local_window_blocks=[1, 2, 3], num_random_blocks=2, global_block_indices=[0, 5]),
    "variable, ranges": pattern_of(
        "variable",
        block=8,
        global_block_indices=[1, 7],
        global_block_end_indices=[3, 8],
        horizontal_global_attention=True,
    ),
    "bigbird": pattern_of("bigbird", block=8, different_layout_per_head=True),
    "bigbird, causal": pattern_of("bigbird", block=24, num_sliding_window_blocks=5, **CAUSAL),
    "bslongformer": pattern_of("bslongformer", block=8, num_sliding_window_blocks=5, global_block_indices=[0, 9]),
    "dense, causal": pattern_of("dense", **CAUSAL),
}


def attends(pattern: Pattern, head: int, row: int, column: int, blocks: int) -> bool:
    """What the modes without random blocks say of a pair of blocks."""
    value = pattern.argument
    if row == column or pattern.mode == "dense":
        return row == column or column < row or not pattern.is_causal
    if column > row and pattern.is_causal:
        return False
    if pattern.mode == "fixed":
        window, each = value("num_local_blocks"), value("num_global_blocks")
        place = window - (1 + head % value("num_different_global_patterns")) * each

        def is_global(block: int) -> bool:
            first = min(block // window * window + place, blocks - each)
            return bool(first <= block < first + each)

        across = value("horizontal_global_attention") and is_global(row)
        return row // window == column // window or is_global(column) or across
    starts = value("global_block_indices")
    ranges = list(zip(starts, value("global_block_end_indices") or [one + 1 for one in starts], strict=True))
    globals_ = {block for first, end in ranges for block in range(first, end)}
    if pattern.mode == "bslongformer":
        return abs(row - column) <= value("num_sliding_window_blocks") // 2 or bool({row, column} & globals_)
    windows = [n for n, size in enumerate([*value("local_window_blocks"), *[4] * blocks]) for _ in range(size)]
    across = value("horizontal_global_attention") and row in globals_
    return windows[row] == windows[column] or column in globals_ or across


@given(blocks=st.integers(1, 23), name=st.sampled_from([n for n in PATTERNS if "bigbird" not in n and n != "variable"]))
@settings(max_examples=60, deadline=None)
def test_layouts_are_what_their_sources_describe(blocks: int, name: str) -> None:
    layout = layout_of(PATTERNS[name], 4, blocks)
    for head in range(4):
        pairs = [[attends(PATTERNS[name], head, row, col, blocks) for col in range(blocks)] for row in range(blocks)]
        assert layout[head if len(layout) > 1 else 0].tolist() == pairs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [37, 256])
def test_attention_is_dense_attention_under_the_mask_and_flex_attention_the_same(name: str, tokens: int) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    pattern, heads = PATTERNS[name], 4
    layout = layout_of(pattern, heads, -(-tokens // pattern.block))
    mask = layout.repeat_interleave(pattern.block, 1).repeat_interleave(pattern.block, 2)[None, :, :tokens, :tokens]
    mask = mask.tril() if pattern.is_causal else mask
    query, key, value = torch.randn(3, 2, heads, tokens, 16, generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(tokens) < tokens - 5)[None, None, None]
    assert dense_mask(pattern, heads, tokens).expand_as(mask).equal(mask)
    for more in (None, padding, (mask & padding).expand(2, -1, -1, -1)):
        allowed = mask if more is None else mask & more
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        torch.testing.assert_close(attend(query, key, value, pattern, mask=more), expected, atol=2e-6, rtol=0)
    with torch.no_grad():
        mixed = flex_attention(query, key, value, block_mask=block_mask(pattern, heads, tokens))
    torch.testing.assert_close(mixed, attend(query, key, value, pattern), atol=2e-6, rtol=0)


def test_fewer_heads_of_keys_a_causal_call_and_a_cache_of_keys() -> None:
    pattern = pattern_of("fixed", block=4, **CAUSAL)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 50, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 50, 8, generator=generator)
    whole = attend(query, key, value, pattern)
    each = F.scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(pattern, 4, 50), enable_gqa=True)
    torch.testing.assert_close(whole, each, atol=2e-6, rtol=0)
    assert attend(query, key, value, pattern_of("fixed", block=4), is_causal=True).equal(whole)
    torch.testing.assert_close(attend(query[:, :, -3:], key, value, pattern), whole[:, :, -3:], atol=2e-6, rtol=0)
    with pytest.raises(UsageError, match=r"got \(1, 4, 50, 8\), \(1, 3, 50, 8\)"):
        attend(query, torch.zeros(1, 3, 50, 8), torch.zeros(1, 3, 50, 8), pattern)


SECTION: dict[str, Any] = {"mode": "fixed", "block": 4, "num_local_blocks": 2, "attention": "unidirectional"}


def _losses(model: nn.Module, tokens: torch.Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def _engine_losses(model: nn.Module, tokens: torch.Tensor, steps: int = 3) -> list[float]:
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "sparse_attention": SECTION,
        "zstore": {"journal": False},
    }
    engine, *_ = zstore.initialize(model=model, config=config)
    losses = []
    with engine:
        for _ in range(steps):
            loss = engine(tokens, labels=tokens)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def test_the_section_acts_on_the_shipped_models() -> None:
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))

    def build() -> Gpt:
        torch.manual_seed(0)
        return Gpt(GptConfig(hidden=32, num_layers=2, num_heads=2, max_positions=64))

    masked = build()
    mask = dense_mask(pattern_of(**SECTION), 2, 48)
    for module in masked.modules():
        if isinstance(module, Attention):
            module.use_attention(lambda q, k, v, is_causal: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    expected = _losses(masked, tokens)
    found = _engine_losses(build(), tokens)
    assert found == pytest.approx(expected, abs=1e-5)
    assert _losses(build(), tokens)[0] != pytest.approx(expected[0], abs=1e-5)


def test_the_section_acts_on_transformers_models() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}

    def build() -> Any:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**shape, **heads, attn_implementation="sdpa"))

    plain = build()
    mask = dense_mask(pattern_of(**SECTION), 4, 40)
    forward = plain.forward
    plain.forward = lambda ids, labels: forward(ids, attention_mask=mask.expand(2, 1, -1, -1), labels=labels)
    expected = _losses(plain, tokens)
    assert _engine_losses(build(), tokens) == pytest.approx(expected, abs=1e-5)
    # Padded tokens are not attended to.
    sparse, present = build(), torch.ones(2, 40, dtype=torch.int64)
    present[1, :7] = 0
    assert apply(sparse, pattern_of(**SECTION)) == 1
    with torch.no_grad():
        first = sparse(tokens, attention_mask=present).logits
        tokens[1, :7] = 3
        assert sparse(tokens, attention_mask=present).logits[1, 7:].equal(first[1, 7:])
        text = sparse.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=True)
        again = sparse.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=False)
    assert text.equal(again)


def test_a_model_without_exchangeable_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no attention that can be replaced"):
        apply(nn.Linear(2, 2), pattern_of("dense"))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mode": "strided"}, r"mode\D+choose one of"),
        ({"mode": "bigbird", "num_local_blocks": 2}, "num_local_blocks is not an argument of mode bigbird"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "must be a multiple of num_global_blocks"),
        ({"num_different_global_patterns": 2}, "set different_layout_per_head to true"),
        ({"attention": "unidirectional", "horizontal_global_attention": True}, "horizontal_global_attention needs"),
        ({"mode": "bslongformer", "global_block_indices": [1], "global_block_end_indices": [1]}, "after its start"),
        ({"mode": "variable", "global_block_indices": [1], "global_block_end_indices": [2, 3]}, "expected 1 ends"),
    ],
)
def test_a_section_that_cannot_be_is_an_error(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"train_batch_size": 1, "sparse_attention": section})
    with pytest.raises(ValueError, match=words):
        Pattern(**section)
