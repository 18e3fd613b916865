"""The sample text and models, and the demo."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.engine.runs import make_config, start, step
from zstore.errors import ConfigError
from zstore.serve.runs import Root, RunTable, Settings
from zstore.tools import cli
from zstore.tools.sample import Corpus, Gpt, GptConfig, build_model, open_corpus


def make_folder(root: Path, sizes: list[int]) -> tuple[Corpus, bytes]:
    random = np.random.default_rng(7)
    contents = [random.bytes(size) for size in sizes]
    for i, content in enumerate(contents):
        file = root / f"part{i % 2}" / f"{i:03}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return open_corpus(root), b"".join(contents[0::2] + contents[1::2])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_range_is_read_across_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    corpus, whole = make_folder(tmp_path_factory.mktemp("corpus"), sizes)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(0, len(whole) - start))
    assert corpus.read(start, count) == whole[start : start + count]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_corpus(tmp_path / "missing")
    (tmp_path / ".hidden").write_text("no")
    with pytest.raises(ConfigError, match=r"no text \(0 files"):
        open_corpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"no text \(1 files, 0 bytes\)"):
        open_corpus(tmp_path / "empty")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="expected plain text, got a file of records"):
        open_corpus(tmp_path / "rows.parquet")
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="has 3 bytes, but one sample takes 4"):
        open_corpus(tmp_path / "short").sample(0, 4, seed=0)


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


SIZES = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
NEO = SIZES | {"model_type": "gpt_neo", "attention_types": [[["global"], 2]], "bos_token_id": 1, "eos_token_id": 1}


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
    torch.testing.assert_close(output.loss, expected)


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


def test_what_the_demo_says_to_type_next_works(tmp_path: Path) -> None:
    with start(make_config()) as engine:
        for tag in (20, 40):
            step(engine)
            engine.save_checkpoint(str(tmp_path / "run"), f"step-{tag:08d}")
    config = tmp_path / "zero1-memory.json"
    config.write_text(json.dumps(make_config(1)))
    first = ["--config", str(config), "--model", "gpt-tiny", "--steps", "1", "--seq-len", "16"]
    made = CliRunner().invoke(cli.app, ["train", *first, "--save", str(tmp_path / "run-1")])
    assert made.exit_code == 0, made.output
    script = (Path(__file__).parents[2] / "examples/demo.sh").read_text()
    script = script.replace("$folder", str(tmp_path)).replace("$model", "gpt-tiny")
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^  \$(zstore .*)", script, re.MULTILINE)]
    names = []
    for program, *words in commands:
        assert Path(program).name == "zstore"
        names.append(words[0])
        if words[0] == "serve":
            roots = tuple(Root.parse(place) for place in words[1:])
            assert list(RunTable(Settings(roots=roots)).all()) == ["run", "run-1"]
            continue
        if words[0] == "train":
            assert words[words.index("--steps") + 1] == "60"
            words[words.index("--steps") + 1] = "2"
        done = CliRunner().invoke(cli.app, words)
        assert done.exit_code == (1 if words[0] == "diff" else 0), (words, done.output)
    assert names == ["serve", "ls", "inspect", "diff", "train", "doctor", "plan"]
    assert (tmp_path / "run-1/step-00000002").is_dir()
