"""`zstore.from_pretrained`: models from Hugging Face folders, streamed into shards."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import zstore
from tests.engine.init_models import config_of, differences, files_in, grown_bytes, num_released
from tests.engine.models import make_net
from tests.engine.runs import start, state_of, step
from tests.engine.transformers_models import batch_for, build, loss_of
from zstore.engine.build.pretrained import match_weights
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigError, UsageError
from zstore.interop.huggingface import WeightsReader
from zstore.testing.ranks import run_ranks

CLASSES: dict[str, Any] = {
    "Llama": transformers.LlamaForCausalLM,
    "GPT-Neo": transformers.GPTNeoForCausalLM,
    "T5": transformers.T5ForConditionalGeneration,
    "Whisper": transformers.WhisperForConditionalGeneration,
    "BERT": transformers.BertForMaskedLM,
}


def saved(name: str, folder: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    build(name).to(dtype).save_pretrained(folder, **options)
    return Path(folder)


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those too that no state dict has."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    with zstore.gather(model):
        return everything(model)


@pytest.mark.parametrize("name", ["Llama", "GPT-Neo", "T5", "Whisper"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_model_is_transformers_own(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model", max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    model = zstore.from_pretrained(CLASSES[name], folder, config=config_of(tmp_path), dtype=dtype)
    expected = CLASSES[name].from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    assert num_released(model) > 5
    assert differences(gathered(model), everything(expected)) == []
    assert type(model) is type(expected)
    assert model.training is False
    tied = [
        [n for n, p in m.named_parameters(remove_duplicate=False) if p is q]
        for m in (model, expected)
        for q in m.parameters()
    ]
    assert tied[: len(tied) // 2] == tied[len(tied) // 2 :]
    assert model.config.to_dict() == expected.config.to_dict()
    if expected.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_an_automatic_class_of_transformers(tmp_path: Path) -> None:
    folder = saved("GPT-Neo", tmp_path / "model")
    cls = transformers.AutoModelForCausalLM
    model = zstore.from_pretrained(cls, folder)
    assert num_released(model) == 0, "alone and without a config there is nowhere to put it"
    assert differences(everything(model), everything(cls.from_pretrained(folder))) == []
    with torch.no_grad():
        inputs = batch_for("GPT-Neo", 0, 0)
        assert loss_of(model, inputs).item() == loss_of(cls.from_pretrained(folder), inputs).item()


def test_a_function_builds_the_model(tmp_path: Path) -> None:
    plain = make_net()
    state = plain.state_dict()
    state.pop("head.weight")  # tied
    (tmp_path / "model").mkdir()
    save_file(state, tmp_path / "model" / "anything.safetensors")
    config = config_of(tmp_path)
    model = zstore.from_pretrained(lambda: make_net(seed=5), tmp_path / "model", config=config)
    assert differences(gathered(model), everything(plain)) == []
    assert model.head.weight is model.embed.weight
    assert not model.frozen.weight.requires_grad
    with start(config, model.train()) as engine:
        step(engine)
        found = state_of(engine)
    with start(config) as engine:
        step(engine)
        assert found == state_of(engine)


def test_a_base_model_is_loaded_under_a_head_and_the_other_way(tmp_path: Path) -> None:
    whole = build("BERT")
    whole.save_pretrained(tmp_path / "whole")
    whole.bert.save_pretrained(tmp_path / "base")
    base = zstore.from_pretrained(transformers.BertModel, tmp_path / "base")
    assert differences(everything(base), everything(whole.bert)) == []
    with pytest.raises(CheckpointMismatchError, match=r"missing in the files: cls\.predictions") as raised:
        zstore.from_pretrained(transformers.BertForMaskedLM, tmp_path / "base")
    assert "bert.encoder" not in str(raised.value)


def _load_on_ranks(rank: int, folder: str, swap: str) -> list[str]:
    config = config_of(swap)
    model = zstore.from_pretrained(transformers.LlamaForCausalLM, folder, config=config)
    found = differences(gathered(model), everything(transformers.LlamaForCausalLM.from_pretrained(folder)))
    with zstore.initialize(model=model.train(), config=config)[0] as engine:
        weight = engine.get_full_parameter("lm_head.weight")
    found += [] if torch.equal(weight, build("Llama").lm_head.weight) else ["lm_head.weight in the engine"]
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_every_rank_has_its_rows(world_size: int, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path / "model")
    assert run_ranks(_load_on_ranks, world_size, str(folder), str(tmp_path)) == [[]] * world_size


def _bytes_read(rank: int, folder: str, swap: str) -> tuple[int, int]:
    readers: list[WeightsReader] = []
    begin = WeightsReader.__init__

    def count(reader: WeightsReader, folder: Path) -> None:
        readers.append(reader)
        begin(reader, folder)

    WeightsReader.__init__ = count  # type: ignore[method-assign]
    model = zstore.from_pretrained(
        lambda: nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]), folder, config=config_of(swap)
    )
    return readers[-1].read_bytes, sum(p.numel() * 4 for p in model.parameters())


def test_a_rank_reads_its_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({f"{n}.weight": torch.randn(256, 256) for n in range(4)}, tmp_path / "model" / "model.safetensors")
    counts = run_ranks(_bytes_read, 2, str(tmp_path / "model"), str(tmp_path))
    assert [read * 2 for read, _ in counts] == [whole for _, whole in counts]


def test_transformers_itself_loads_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For architectures whose weights it lays out anew as it loads them."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    folder = saved("Mixtral", tmp_path / "model")
    refused = pytest.raises(CheckpointMismatchError, match=r"with zstore.Init\(config=config\)")
    with refused if transformers.__version__ >= "5" else nullcontext():
        zstore.from_pretrained(transformers.MixtralForCausalLM, folder)
    with zstore.Init(config=config_of(tmp_path)):
        model = transformers.MixtralForCausalLM.from_pretrained(folder)
    assert num_released(model) > 5
    assert differences(gathered(model), everything(build("Mixtral"))) == []


_LOADED = """
def layers(count):
    return lambda: nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)])
warm = zstore.from_pretrained(layers(1), folder + "/small", config=config)  # whatever the first use brings in
before = peak()
model = zstore.from_pretrained(layers(64), folder + "/large", config=config)
assert len(list(model.parameters())) == 64
"""


def test_the_process_stays_small_while_a_large_model_is_loaded(tmp_path: Path) -> None:
    for name, count in (("small", 1), ("large", 64)):
        (tmp_path / name).mkdir()
        save_file({f"{n}.weight": torch.zeros(1024, 1024) for n in range(count)}, tmp_path / name / "model.safetensors")
    assert grown_bytes(_LOADED, tmp_path) < 8 << 20, "268 MB of parameters, 4 MiB each"


def test_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["model.norm.extra"] = torch.ones(3)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # as older files have it
    state.pop("model.layers.1.mlp.up_proj.weight")
    state["lm_head.weight"] = torch.ones(7, 32)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointMismatchError) as raised:
        zstore.from_pretrained(transformers.LlamaForCausalLM, folder, config=config_of(tmp_path))
    message = str(raised.value)
    assert "1 missing in the files: model.layers.1.mlp.up_proj.weight\n" in message
    assert "1 unexpected in the files: model.norm.extra\n" in message
    assert "1 with a different shape: lm_head.weight (file: [7, 32], model: [96, 32])\n" in message
    assert "inv_freq" not in message
    assert files_in(tmp_path) == []


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no safetensors files"):
        zstore.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model.bin, a pickle.*save_pretrained"):
        zstore.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a folder"):
        zstore.from_pretrained(transformers.LlamaForCausalLM, tmp_path / "nowhere")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="finds no model"):
        zstore.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="it is unclear which belong together"):
        zstore.from_pretrained(transformers.LlamaForCausalLM, tmp_path)


def test_types_that_are_not_trained_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(16).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    reader = WeightsReader(tmp_path)
    with pytest.raises(UsageError, match=r"'weight' in .* is float8_e4m3fn, which cannot"):
        match_weights(nn.LayerNorm(16, bias=False), reader)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="which returned a list"):
        zstore.from_pretrained(list, tmp_path)
    with pytest.raises(UsageError, match=r"cannot be called within"), zstore.Init(config=config_of(tmp_path)):
        zstore.from_pretrained(list, tmp_path)


def test_a_buffer_without_values_is_an_error(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("halves", self.weight.detach() / 2, persistent=False)

    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="buffer 'halves' of a Odd has no values"):
        zstore.from_pretrained(Odd, tmp_path)
