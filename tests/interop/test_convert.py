"""`zstore convert`: every kind into every other, each read by the software that it is for; whole folders of models."""

import enum
import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

import zstore.dcp
from tests.integrations.tokens import tokenizer
from tests.pages import blocks, text_of
from tests.tools.commands import done
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CorruptionError, UsageError
from zstore.io.shards import open_resources
from zstore.open.sources import open_source
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.reshard import reshard_command

alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def convert(src: Path, out: Path, to: str = "zstore", **options: Any) -> None:
    assert convert_command(src, out, to=to, **options) == 0


def values() -> dict[str, Any]:
    return {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "name": "run",
        "raw": b"\x00\x01",
        "many": [1, 2, None],
        "inf": float("inf"),
    }


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(300, 70)
    return {
        "model": {
            "a.weight": weight,
            "a.bias": torch.randn(70).bfloat16(),
            "t.weight": torch.randn(40, 30).t(),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "none": torch.empty(0, 5),
            "flags": torch.rand(17) < 0.5,
            "deep": torch.randn(3, 4, 5, dtype=torch.float64),
        },
        "optim": {"state": {"a.weight": {"exp_avg": torch.randn(300, 70), "step": torch.tensor(4.0)}}},
        "extra": {"count": torch.arange(5), "values": values()},
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "step-30"
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def edited(folder: Path, change: Callable[[Any], Any]) -> Path:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
    return folder


def _chunk(metadata: Any, **fields: Any) -> None:
    vars(metadata.state_dict_metadata["model.a.weight"].chunks[0]).update(fields)


def _elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../a/__0_0.distcp"


HOSTILE: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda _: Trap(), CheckpointMismatchError, "system"),
    (lambda _: {}, CorruptionError, "is not a valid `.metadata` .* or is damaged"),
    (_elsewhere, CorruptionError, "not a file of the folder"),
    (lambda m: _chunk(m, sizes=torch.Size([299, 70])), CorruptionError, "do not cover its 21000 elements"),
    (lambda m: _chunk(m, offsets=torch.Size([1, 0])), CorruptionError, "is not in a tensor of shape"),
    (
        lambda m: setattr(m.state_dict_metadata["model.a.weight"].properties, "dtype", torch.int32),
        CorruptionError,
        "expected int32",
    ),
]


def test_hostile_metadata_is_refused(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (change, error, words) in enumerate(HOSTILE):
        folder = edited(Path(shutil.copytree(theirs, tmp_path / f"{number}/a")), change)
        with pytest.raises(error, match=words), open_source(folder) as source:
            source.read_array("model/a.weight")
    (folder / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CorruptionError, match=r"\.metadata"):
        open_source(folder)
    assert not (tmp_path / "trapped").exists()


@alone
def test_blocks_that_overlap_as_much_as_they_leave_out_are_refused(tmp_path: Path) -> None:
    """Their elements are as many as the tensor has; a read would leave what nobody filled."""
    parts = torch.arange(1024.0).reshape(4, 16, 16)
    blocks = {f"w{number}": part.clone() for number, part in enumerate(parts)}
    dcp.save(blocks, checkpoint_id=tmp_path / "blocks", no_dist=True)

    def joined(metadata: Any) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        blocks = [tensors.pop(f"w{number}").chunks[0] for number in range(4)]
        for number, block in enumerate(blocks):
            (index,) = [index for index in places if index.fqn == f"w{number}"]
            block.offsets = torch.Size([16 * number, 0])
            places[MetadataIndex("w", block.offsets)] = places.pop(index)
        tensors["w"] = TensorStorageMetadata(TensorProperties(), torch.Size([64, 16]), blocks)
        metadata.planner_data = {"w": ("w",)}

    def twice(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        chunks[2].offsets = chunks[1].offsets

    with open_source(edited(tmp_path / "blocks", joined)) as source:
        assert source.read_array("model/w").reshape(-1).tolist() == list(range(1024))
    with pytest.raises(CorruptionError, match="blocks of 'w' do not cover its 1024 elements exactly once"):
        open_source(edited(tmp_path / "blocks", twice))


def test_a_file_that_is_cut_or_missing_is_said_and_nothing_is_left(theirs: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(theirs, tmp_path / "a")) / "__0_0.distcp"
    os.truncate(data, 5000)
    for to in ("zstore", "torch", "safetensors"):
        with pytest.raises(CorruptionError, match=r"__0_0\.distcp"):
            convert(tmp_path / "a", tmp_path / f"out-{to}", to)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path / "a"]
    assert left == []
    data.unlink()
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        open_source(tmp_path / "a")  # with values that are read as it is opened
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b", no_dist=True)
    (tmp_path / "b/__0_0.distcp").unlink()
    with open_source(tmp_path / "b") as source, pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        source.read_array("model/w")


@alone
def test_bytes_and_pickles_are_read_in_ranges_and_not_held(tmp_path: Path) -> None:
    """Entries of each kind, of which some have a megabyte."""
    raw = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()
    large = [float(n) for n in range(300_000)]
    state = {f"raw{n}": raw for n in range(8)} | {"odd": {raw}, "large": large, "empty": b"", "few": {"a": (1, b"x")}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    with open_resources(pool_bytes=4096, num_threads=1) as resources:
        open_source(tmp_path / "a", resources=resources).close()
        tracemalloc.start()
        try:
            with open_source(tmp_path / "a", resources=resources) as source:
                held, _ = tracemalloc.get_traced_memory()
                assert source.read_array("client/raw3").tobytes() == raw
                part = np.empty(100, np.uint8)
                source.read("client/raw3", 70_000, 70_100, part)
                assert part.tobytes() == raw[70_000:70_100]
                document = source.record.state["dcp"]
                assert document["values"] == [[["few", "a"], {"$tuple": [1, {"$bytes": "eA=="}]}]]
                kinds = {key.removeprefix("client/"): kind for key, kind in document["opaque"].items()}
                assert kinds == dict.fromkeys([*(f"raw{n}" for n in range(8)), "empty"], "bytes") | {
                    "odd": "pickle",
                    "large": "pickle",
                }
                for name, value in (("odd", {raw}), ("large", large)):
                    path = tmp_path / name
                    path.write_bytes(source.read_array(f"client/{name}").tobytes())
                    assert torch.load(path, weights_only=False) == value
        finally:
            tracemalloc.stop()
    assert held < 2**20


def test_metadata_of_an_early_python_is_read(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(theirs, tmp_path / "a")
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))  # up to 3.11.3
    edited(tmp_path / "a", lambda _: None)
    convert(tmp_path / "a", tmp_path / "out")


def test_torch_loads_the_weights_with_weights_only(theirs: Path, tmp_path: Path) -> None:
    convert(theirs, tmp_path / "model.pt", "torch")
    for mmap in (False, True):
        found = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
        torch.testing.assert_close(found, state()["model"], rtol=0, atol=0)
    convert(theirs, tmp_path / "half.pt", "torch", dtype="fp16")
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    assert torch.equal(half["a.weight"], state()["model"]["a.weight"].half())
    assert half["flags"].dtype == torch.bool
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["half.pt", "model.pt"]


@alone
@pytest.mark.parametrize("kind", ["stage1-bf16-3", "stage2-fp16-1", "stage3-fp32-3", "universal-stage3-2"])
def test_a_deepspeed_folder_becomes_all_others(kind: str, tmp_path: Path) -> None:
    theirs = Path(__file__).parents[1] / "data/deepspeed" / kind
    convert(theirs, tmp_path / "ours", world_size=2)
    convert(theirs, tmp_path / "model.pt", "torch")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    with open_source(theirs) as source, open_checkpoint(tmp_path / "ours") as reader:
        assert verify_checkpoint(reader) == []
        assert source.arrays.keys() == reader.arrays.keys()
        assert dict(reader.record.state) == dict(source.record.state)
        names = {name.partition("/")[2]: name for name in source.arrays if name.startswith(("model/", "buffer/"))}
        assert weights.keys() >= names.keys()
        target = {"model": {name: torch.zeros_like(weights[name]) for name in names}}
        dcp.load(target, storage_reader=zstore.dcp.Reader(tmp_path / "ours"), no_dist=True)
        for name, array in names.items():
            expected = source.read_array(array)
            for found in (weights[name], target["model"][name]):
                assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()
        for name in source.arrays:
            assert reader.read_array(name).tobytes() == source.read_array(name).tobytes()


def test_what_is_there_is_never_replaced_and_odd_options_are_refused(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for to in ("torch", "safetensors"):
        with pytest.raises(CheckpointExistsError, match="out exists"):
            convert(theirs, tmp_path / "out", to)
    convert(theirs, tmp_path / "ours", world_size=2)
    with pytest.raises(CheckpointExistsError, match="already has a checkpoint 'step-30'"):
        convert(theirs, tmp_path / "ours")
    assert (tmp_path / "out").read_text() == "mine"
    assert [(info.tag, info.record.step, info.record.world_size) for info in tags(tmp_path / "ours")] == [
        ("step-30", 30, 2)
    ]
    for options in ({"to": "onnx"}, {"dtype": "fp16"}, {"to": "dcp"}, {"to": "torch", "world_size": 2}):
        with pytest.raises(UsageError, match="--"):
            convert_command(tmp_path, tmp_path / "odd", **options)  # type: ignore[arg-type]


@alone
def test_the_example_of_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("docs/dcp.md")
    exec(block, {})
    for line in ("zstore inspect ckpt", "zstore verify ckpt", "zstore consolidate ckpt out"):
        assert f"`{line}`" in text_of("docs/dcp.md")
        done(line)
    assert load_file("out/model.safetensors")["weight"].shape == (4, 16)


@alone
def test_the_examples_of_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(100, 30)
    dcp.save({"model": {"w": weight}, "step": 30}, checkpoint_id="theirs/step-30", no_dist=True)
    block = blocks("docs/checkpoints.md", "sh")[1]
    for line in block.splitlines():
        done(line)
    assert torch.equal(torch.load("model.pt", weights_only=True)["w"], weight)
    assert torch.equal(load_file("hf/model.safetensors")["w"], weight.bfloat16())
    target = {"model": {"w": torch.zeros(100, 30)}, "step": 0}
    dcp.load(target, storage_reader=zstore.dcp.Reader("again"), no_dist=True)
    assert target["step"] == 30
    assert torch.equal(target["model"]["w"], weight)


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
    (left,) = {line.partition("were not copied: ")[2] for line in said.splitlines() if "were not copied: " in line}
    for name in ("notes.txt (a link to a missing file)", "added_tokens.json (not a file)", "pytorch_model.bin",
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
    names = {one: f"diffusion_pytorch_model{variant}-{n:05d}-of-00003.safetensors" for n, one in enumerate(weights, 1)}
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
