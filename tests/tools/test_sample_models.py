"""The shipped models: sizes, tying, causality, loss, sampling; and transformers models by configuration."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from zstore.errors import ConfigError
from zstore.tools.sample.models import Gpt, GptConfig, build_model, loss_of

SMALL = GptConfig(hidden=32, num_layers=2, num_heads=2, max_positions=24)


def small_model(config: GptConfig = SMALL) -> Gpt:
    torch.manual_seed(0)
    return Gpt(config)


@pytest.mark.parametrize(
    ("name", "millions", "within"), [("gpt-tiny", 1, 0.1), ("gpt-small", 10, 0.1), ("gpt-base", 110, 0.02)]
)
def test_sizes_are_what_the_names_promise(name: str, millions: float, within: float) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_model(name, seq_len=128).parameters())
    assert count == pytest.approx(millions * 1e6, rel=within)


def test_the_loss_is_the_next_tokens_cross_entropy() -> None:
    model = small_model()
    ids = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    log_p = model(ids).detach().double().log_softmax(-1)  # [batch, tokens, vocab_size]
    expected = -sum(log_p[b, t, ids[b, t + 1]] for b in range(3) for t in range(15)) / (3 * 15)
    assert model(ids, labels=ids).item() == pytest.approx(float(expected), rel=1e-6)


def test_a_few_steps_learn_a_text_by_heart_and_generate_it() -> None:
    text = b"the quick brown fox jumps"
    model = small_model(GptConfig(hidden=64, num_layers=2, num_heads=2, max_positions=32))
    ids = torch.tensor([list(text)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        model(ids, labels=ids).backward()
        optimizer.step()
    out = model.generate(ids[:, :4], max_new_tokens=len(text) - 4, temperature=0)
    assert bytes(out[0].tolist()) == text


NEO = {
    "model_type": "gpt_neo",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global"], 2]],
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**NEO, **changes}))
    return path


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_transformers_config_gives_a_model_with_the_same_calls(tmp_path: Path, as_folder: bool) -> None:
    path = write_config(tmp_path / "neo", torch_dtype="float16")
    model = build_model(str(path.parent if as_folder else path), seq_len=32)
    assert isinstance(model, transformers.GPTNeoForCausalLM)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss_of(output), expected)
    with pytest.raises(ConfigError, match="no loss for labels but CausalLMOutput"):
        loss_of(model(input_ids=ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"max_position_embeddings": 16}, "max_position_embeddings is 16"),
        ({"model_type": "no_such"}, "cannot build a causal language model"),
        ({"model_type": "vit"}, "cannot build a causal language model"),
        (
            {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}, "model_type": "x"},
            "cannot build",
        ),
    ],
)
def test_configs_that_cannot_serve_are_refused(tmp_path: Path, changes: Mapping[str, object], message: str) -> None:
    path = write_config(tmp_path / "bad", **changes)
    with pytest.raises(ConfigError, match=message):
        build_model(str(path), seq_len=32)


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    for name in ("gpt-smal", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"unknown model.*gpt-tiny, gpt-small, gpt-base.*config\.json"):
            build_model(name, seq_len=32)


def test_without_transformers_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path / "neo")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"zstore\[hf\]"):
        build_model(str(path), seq_len=32)
