"""Folders of other software's models go through the commands whole: what they save is what their own loaders open."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from tests.integrations.tokens import tokenizer
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.reshard import reshard_command

CONFIG = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 16}
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
MODULE = "from transformers import GPT2LMHeadModel\n\n\nclass Own(GPT2LMHeadModel):\n    pass\n"


def _convert(source: Path, out: Path) -> None:
    assert convert_command(str(source), out, to="safetensors") == 0


def _by_a_checkpoint(source: Path, out: Path) -> None:
    assert convert_command(str(source), out.with_name("ours"), world_size=2) == 0
    assert reshard_command(out.with_name("ours"), out.with_name("three"), 3) == 0
    with open_checkpoint(out.with_name("three")) as reader:
        assert verify_checkpoint(reader) == []
    assert consolidate_command(out.with_name("three"), out, "fp32") == 0


WAYS = pytest.mark.parametrize("way", [_convert, _by_a_checkpoint])
Way = Callable[[Path, Path], None]


def gpt2(folder: Path, **options: Any) -> Any:
    """Save a model with all that belongs to it, and return it."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, **options)
    words = tokenizer()
    words.chat_template = {"default": TEMPLATE, "tools": TEMPLATE + "!"}
    words.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(MODULE)
    (folder / "README.md").write_text("A model.")
    return model


def in_the_hubs_cache(model: Path, hub: Path) -> Path:
    """Return a snapshot as huggingface_hub keeps it: links to blobs that have their digests as names."""
    snapshot = hub / "models--me--gpt/snapshots" / ("0" * 40)
    blobs = hub / "models--me--gpt/blobs"
    blobs.mkdir(parents=True)
    for path in (path for path in sorted(model.rglob("*")) if path.is_file()):
        data = path.read_bytes()
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / hashlib.sha256(data).hexdigest(), link.parent))
    return snapshot


def check(model: Any, out: Path) -> None:
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert transformers.GenerationConfig.from_pretrained(out).max_new_tokens == 7
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.get_vocab() == tokenizer().get_vocab()
    assert words.chat_template == {"default": TEMPLATE, "tools": TEMPLATE + "!"}
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    assert {"README.md", "modeling_own.py", "additional_chat_templates"} <= set(os.listdir(out))


@WAYS
@pytest.mark.parametrize("size", ["5GB", "30KB"])
def test_a_snapshot_of_the_hubs_cache(way: Way, size: str, tmp_path: Path) -> None:
    model = gpt2(tmp_path / "hf", max_shard_size=size)
    way(in_the_hubs_cache(tmp_path / "hf", tmp_path / "hub"), tmp_path / "out")
    check(model, tmp_path / "out")


@WAYS
def test_links_of_a_users_own_folder(way: Way, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt2(tmp_path / "hf")
    own = tmp_path / "own"
    own.mkdir()
    for path in (tmp_path / "hf").iterdir():  # files and a folder
        (own / path.name).symlink_to(path)
    (own / "notes.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(own / "added_tokens.json")
    (own / "loop").symlink_to(own)
    (own / "pytorch_model.bin").write_bytes(b"a pickle")
    (own / "checkpoint-5").mkdir()
    (own / "checkpoint-5/optimizer.pt").write_bytes(b"a pickle")
    way(own, tmp_path / "out")
    check(model, tmp_path / "out")
    said = capsys.readouterr().err
    assert f"config.json (a link to {tmp_path}/hf/config.json)" in said
    (left,) = {line.partition("left behind: ")[2] for line in said.splitlines() if "left behind: " in line}
    for name in ("notes.txt (a link to a file that is not there)", "added_tokens.json (not a file)", "pytorch_model.bin",
                 "checkpoint-5/", "loop/"):  # fmt: skip
        assert name in left.split(", ")
    assert not {"notes.txt", "added_tokens.json", "loop", "checkpoint-5"} & set(os.listdir(tmp_path / "out"))


@WAYS
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT by transformers
def test_an_adapter_of_peft(way: Way, tmp_path: Path) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    way(tmp_path / "adapter", tmp_path / "out")
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(fresh, tmp_path / "out")
    inputs = torch.arange(8)[None]
    assert torch.equal(again.eval()(inputs).logits, adapted.eval()(inputs).logits)


def test_an_adapter_is_one_file_whatever_size_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    weights = {f"base_model.model.{n}.lora_A.weight": torch.randn(64, 8) for n in range(4)}
    save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert consolidate_command(tmp_path / "adapter", tmp_path / "out", "fp32", 4096) == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "adapter_model.safetensors"]


def diffusers_folder(folder: Path, variant: str = "") -> dict[str, torch.Tensor]:
    """Write what diffusers' save_pretrained() writes of a model in several files."""
    folder.mkdir()
    weights = {f"blocks.{n}.weight": torch.randn(20, 30) for n in range(3)}
    names = {
        name: f"diffusion_pytorch_model{variant}-{n:05d}-of-00003.safetensors" for n, name in enumerate(weights, 1)
    }
    for name, file in names.items():
        save_file({name: weights[name]}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 7200}, "weight_map": names}
    (folder / f"diffusion_pytorch_model.safetensors.index{variant}.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"_class_name": "UNet2DModel", "_diffusers_version": "0.35.0"}')
    return weights


@WAYS
@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_several_files_of_diffusers(way: Way, variant: str, tmp_path: Path) -> None:
    weights = diffusers_folder(tmp_path / "unet", variant)
    way(tmp_path / "unet", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    found = load_file(tmp_path / "out/diffusion_pytorch_model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert consolidate_command(tmp_path / "unet", tmp_path / "cut", "fp32", 3000) == 0
    index = json.loads((tmp_path / "cut/diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {f"diffusion_pytorch_model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)}
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "cut" / file)[name], weights[name])


@WAYS
def test_modules_of_sentence_transformers(way: Way, tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=48)  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    words = Transformer(str(tmp_path / "bert"))
    model = SentenceTransformer(modules=[words, Pooling(32), Dense(32, 8)], device="cpu")
    model.save(str(tmp_path / "st"), create_model_card=False)
    way(tmp_path / "st", tmp_path / "out")
    again = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    text = ["one two", "three"]
    assert (again.encode(text) == model.encode(text)).all()


def test_two_models_in_one_folder_keep_their_own(tmp_path: Path) -> None:
    for name, size in (("small", 32), ("large", 64)):
        config = transformers.GPT2Config(**CONFIG | {"n_embd": size})
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        assert convert_command(str(tmp_path / name), tmp_path / "ours") == 0
    for name, size in (("small", 32), ("large", 64)):
        assert consolidate_command(f"{tmp_path}/ours@{name}", tmp_path / f"{name}-out", "fp32") == 0
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out").config.n_embd == size
