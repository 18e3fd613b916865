"""What `zstore train` reads, evaluates on and resumes from, and what `zstore generate` makes of it."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tools.train_runs import config_file, options, rows
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.journal.reader import read
from zstore.testing.ranks import run_ranks
from zstore.tools.generate import GenerateOptions, generate_command
from zstore.tools.sample.data import DataOptions, open_data, validation_samples
from zstore.tools.sample.loading import fill, shipped_of
from zstore.tools.sample.models import build_model
from zstore.tools.sample.order import Permutation
from zstore.tools.sample.packing import BYTES, PackedRows
from zstore.tools.sample.rows import JsonlRows, open_rows
from zstore.tools.train.command import train_command

torch.set_num_threads(1)

TEXTS = [f"row {i}: " + "the quick brown fox " * (i % 4) for i in range(150)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder of two JSONL files."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, part in (("a.jsonl", TEXTS[:140]), ("b.jsonl", TEXTS[140:])):
        (folder / name).write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in part))
    return folder


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100])
def test_orders_are_permutations_by_their_key(size: int) -> None:
    one = [Permutation(size, "rows", 3, 0)[i] for i in range(size)]
    assert sorted(one) == list(range(size))
    assert one == [Permutation(size, "rows", 3, 0)[i] for i in range(size)]
    assert size < 7 or one != [Permutation(size, "rows", 3, 1)[i] for i in range(size)]


def test_rows_are_read_in_place(lines: Path) -> None:
    found = open_rows(lines)
    assert found is not None
    assert [found.content(i, "text") for i in range(len(found))] == TEXTS
    with pytest.raises(ConfigError, match=r"row 3: expected a text under 'body'.*the row has 'text', 'id'.*--text-key"):
        found.content(2, "body")
    (lines / "c.jsonl").write_text('{"input_ids": [5, 6]}\n\n{"text": 1')
    found = open_rows(lines)
    assert found is not None
    assert [found.content(150, "text"), found.content(151, "text")] == [[5, 6], []]
    with pytest.raises(ConfigError, match=r"c.jsonl, line 3: expected a JSON object"):
        found.content(152, "text")
    (lines / "notes.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"holds both a\.jsonl and notes\.txt"):
        open_rows(lines)


def test_an_epoch_packs_every_token_once_on_any_number_of_ranks(lines: Path) -> None:
    found = JsonlRows(sorted(lines.iterdir()), "rows")
    whole = Counter(b"\0".join(text.encode() for text in TEXTS) + b"\0")
    total = sum(whole.values())

    def packed() -> PackedRows:
        made = PackedRows(found, range(len(found)), "text", BYTES)
        made.begin(4)
        return made

    one = packed()
    one.begin(1)
    used = Counter(token for n in range(total // 5) for token in one.sample(n, 5, 1)[0].tolist())
    assert used <= whole
    assert (whole - used).total() < 5
    alone = packed()
    epoch = [alone.sample(n, 5, 1)[0].tolist() for n in range(60)]
    ranks = [packed(), packed()]
    for n in range(40):
        assert ranks[n % 4 // 2].sample(n, 5, 1)[0].tolist() == epoch[n]
    resumed = packed()
    resumed.begin(3, 40, ranks[0].all_positions(one.positions() for one in ranks))
    assert resumed.num_lanes == 4
    assert [resumed.sample(n, 5, 1)[0].tolist() for n in range(40, 60)] == epoch[40:60]


def test_a_run_on_rows_evaluates_without_changing_a_bit_and_resumes_anywhere(lines: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, zstore={"keep": {"last": 1, "best": "eval_loss:min"}}, csv_monitor={
        "enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"})  # fmt: skip
    plain = config_file(tmp_path / "..", csv_monitor={"enabled": False})
    given = {"steps": 6, "seq_len": 24, "micro_batch": 2, "validation": lines / "a.jsonl", "eval_samples": 5}
    run = tmp_path / "run"
    train_command(
        options(
            tmp_path, lines / "b.jsonl", config, save=run, save_every=2, eval_every=2, metrics=tmp_path / "m", **given
        )
    )
    without = {"steps": 6, "seq_len": 24, "micro_batch": 2, "metrics": tmp_path / "n"}
    train_command(options(tmp_path, lines / "b.jsonl", plain, **without))
    evaluated, other = rows(tmp_path / "m"), rows(tmp_path / "n")
    assert [row["loss"] for row in evaluated] == [row["loss"] for row in other]
    assert [row["step"] for row in evaluated if "eval_loss" in row] == [2, 4, 6]
    assert evaluated[-1]["perplexity"] == pytest.approx(math.exp(evaluated[-1]["eval_loss"]))
    with open_checkpoint(run) as reader:
        assert reader.record.state["metrics"]["eval_loss"] == evaluated[-1]["eval_loss"]
        lanes = reader.record.state["client_state"]["zstore_train"]["lanes"]
    assert len(lanes) == 4
    told = [record["loss"] for record in read(run) if record["kind"] == "eval"]
    assert told == [row["eval_loss"] for row in evaluated if "eval_loss" in row]
    assert (tmp_path / "csv" / "run" / "Train_Samples_eval_loss.csv").read_text().count("\n") == 4

    model = build_model("gpt-tiny", 24).bfloat16()
    with open_checkpoint(run) as reader:
        fill(model, reader)
    samples = validation_samples(open_data(DataOptions(data=lines / "a.jsonl", model="gpt-tiny")).train, 5, 24)
    with torch.no_grad():
        expected = sum(float(model(ids[None], labels=ids[None])) for ids in samples) / 5
    assert evaluated[-1]["eval_loss"] == pytest.approx(expected, abs=1e-2)


def _resumed(rank: int, words: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train_command(options(words["path"], words["data"], words["config"], **words["given"]))


def test_two_ranks_go_on_with_the_rows_of_one(lines: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, zero_optimization={"stage": 3})
    given = {"steps": 4, "seq_len": 24, "micro_batch": 1, "validation_split": 0.1, "eval_samples": 3}
    run = tmp_path / "run"
    train_command(options(tmp_path, lines, config, save=run, save_every=2, metrics=tmp_path / "m", **given))
    again = given | {
        "resume": f"{run}:step-00000002",
        "metrics": tmp_path / "n",
        "seq_len": None,
        "validation_split": None,
    }
    words = {"path": tmp_path, "data": lines, "config": config, "given": again | {"save": tmp_path / "two"}}
    run_ranks(_resumed, 2, words, timeout_s=120)
    one, two = rows(tmp_path / "m"), rows(tmp_path / "n")
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one[2:]], abs=0.01)
    assert two[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], abs=0.01)
    states = []
    for folder in (run, tmp_path / "two"):
        with open_checkpoint(folder) as reader:
            states.append(reader.record.state["client_state"]["zstore_train"])
    assert states[0] == states[1]
    with pytest.raises(CheckpointMismatchError, match=r"--validation-split 0.2: the checkpoint was trained with 0.1"):
        train_command(options(tmp_path, lines, config, **again | {"validation_split": 0.2}))


def test_data_sets_of_hugging_face_are_rows(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"body": TEXTS[:8]})
    whole.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    whole.to_parquet(str(tmp_path / "parquet" / "train-0.parquet"))
    for name in ("saved", "parquet"):
        found = open_rows(tmp_path / name)
        assert found is not None
        assert [found.content(i, "body") for i in range(len(found))] == TEXTS[:8]
    datasets.DatasetDict({"test": whole}).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(ConfigError, match="has splits test and no 'train'"):
        open_rows(tmp_path / "dict")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"validation_split": 1.5}, "between 0 and 1"),
        ({"validation_split": 0.1, "validation": Path("x")}, "give one of them"),
        ({"eval_every": 2}, "--eval-every needs"),
    ],
)
def test_what_cannot_be_evaluated_is_told(given: dict[str, Any], message: str, lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train_command(options(tmp_path, lines, config_file(tmp_path), **given))


def test_a_part_of_plain_text_is_held_out(text: Path) -> None:
    data = open_data(DataOptions(data=text, model="gpt-tiny", validation_split=0.25))
    held = validation_samples(data.validation, 9, 16)  # type: ignore[arg-type]
    end = text.read_bytes()[-(text.stat().st_size // 4) :]
    assert all(bytes(ids.tolist()) in end for ids in held)
    assert data.train.num_bytes == text.stat().st_size - len(end)  # type: ignore[attr-defined]


# -- generation ---------------------------------------------------------------------------------------------------------


def generated(capsys: pytest.CaptureFixture[str], ckpt: str, **given: Any) -> str:
    capsys.readouterr()
    generate_command(ckpt, GenerateOptions(**given))
    return capsys.readouterr().out


def test_a_trained_model_continues_a_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train_command(options(tmp_path, text, config_file(tmp_path), save=run, steps=2))
    greedy = generated(capsys, f"{run}:step-00000002", prompt="line ", max_new_tokens=12, temperature=0.0)
    with open_checkpoint(run) as reader:
        model = shipped_of(reader, torch.bfloat16)
        fill(model, reader)
    prompt = torch.tensor([list(b"line ")])
    expected = bytes(model.generate(prompt, 12, temperature=0)[0, 5:].tolist()).decode(errors="replace")
    assert greedy == expected + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("line "))
    sampled = {"max_new_tokens": 12, "top_k": 40, "top_p": 0.9, "seed": 3, "dtype": "fp32"}
    again = generated(capsys, str(run), prompt="line ", **sampled)
    assert generated(capsys, str(run), **sampled) == again != greedy
    with pytest.raises(UsageError, match="--device nowhere"):
        generated(capsys, str(run), prompt="x", device="nowhere")


def test_a_transformers_model_speaks_by_its_own_tokenizer(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=128, special_tokens=["<unk>", "<s>"]))
    folder, run = tmp_path / "model", tmp_path / "run"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=128,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)
    train_command(options(tmp_path, text, config_file(tmp_path), model=str(folder), save=run, steps=1))
    said = generated(capsys, str(run), prompt="line 7", max_new_tokens=10, temperature=0.0, dtype="fp32")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with open_checkpoint(run) as reader:
        fill(model, reader)
    ids = fast("line 7", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert said == fast.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n"
    other = tmp_path / "other"
    transformers.LlamaConfig(**config.to_dict() | {"hidden_size": 16}).save_pretrained(other)
    with pytest.raises(CheckpointMismatchError, match="the model has another shape of"):
        generated(capsys, str(run), prompt="x", model=other)
