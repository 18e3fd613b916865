"""Weights written from a run, against `zstore consolidate` on its checkpoint, and transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zstore
from tests.engine.runs import make_config, start, step
from tests.integrations.tokens import tokenizer
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.access import module_state
from zstore.errors import CheckpointError, CheckpointExistsError, DiskFullError, RankError, UsageError
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command

PRECISION = {"bf16": {}, "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 4}}}
LARGE = 5 * 10**9


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _save_both(rank: int, folder: str, cases: list[tuple[int, str, str]]) -> None:
    for number, (stage, tier, precision) in enumerate(cases):
        base = Path(folder) / str(number)
        (base / "run").mkdir(parents=True, exist_ok=True)
        with start(make_config(stage, tier, base / "run", **PRECISION[precision])) as engine:
            step(engine)
            small = engine.save_16bit_model(base / "small", max_file_bytes=100_000)
            assert [path.name for path in engine.save_16bit_model(base / "one")] == ["model.safetensors"]
            assert engine.save_16bit_model(base / "one", "other.safetensors", dtype="fp32")[0].is_file()
            assert small[-1].name == "model.safetensors.index.json"
            assert all(path.is_file() for path in small)
            engine.save_checkpoint(str(base / "ckpt"))


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [(0, "none", "bf16"), (3, "nvme", "fp16")]),
        (2, [(1, "cpu", "bf16"), (3, "none", "fp16")]),
        pytest.param(3, [(2, "none", "bf16"), (3, "nvme", "bf16")], marks=pytest.mark.soak),
    ],
)
def test_files_are_those_of_consolidate(tmp_path: Path, world_size: int, cases: list[Any]) -> None:
    run_ranks(_save_both, world_size, str(tmp_path), cases)
    for number, (_, _, precision) in enumerate(cases):
        base = tmp_path / str(number)
        consolidate_command(base / "ckpt", base / "small2", precision, 100_000)
        consolidate_command(base / "ckpt", base / "one2", precision, LARGE)
        consolidate_command(base / "ckpt", base / "fp32", "fp32", LARGE)
        assert len(files_of(base / "small")) > 3
        assert files_of(base / "small") == files_of(base / "small2")
        one = files_of(base / "one")
        assert one.pop("other.safetensors") == files_of(base / "fp32")["model.safetensors"]
        assert one == files_of(base / "one2")


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    with start(make_config(3), model) as engine:
        engine.save_16bit_model(tmp_path, max_file_bytes=20_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(loaded) is type(model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_consolidated_checkpoint_loads_in_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own, words = tmp_path / "own", tokenizer()
    words.save_pretrained(own)
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=len(words), n_positions=16)
    made = transformers.GPT2LMHeadModel(config)
    made.generation_config.max_new_tokens = 7
    made.save_pretrained(own)
    model = transformers.GPT2LMHeadModel.from_pretrained(own)
    with start(make_config(3, gradient_accumulation_steps=1), model) as engine:
        engine.backward(engine(torch.zeros(2, 8, dtype=torch.int64)).logits.float().square().mean())
        engine.step()
        engine.save_checkpoint(str(tmp_path / "ckpt"))
        expected = engine.module_state_dict()
    consolidate_command(tmp_path / "ckpt", tmp_path / "out", "bf16", LARGE)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert type(loaded) is type(model)
    assert loaded.generation_config.max_new_tokens == 7
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("the cat")["input_ids"] == words("the cat")["input_ids"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with start() as engine:
        engine.save_16bit_model(tmp_path / "out")
        before = files_of(tmp_path / "out")
        with pytest.raises(CheckpointExistsError, match=r"already has weights \(model.safetensors\): remove them"):
            engine.save_16bit_model(tmp_path / "out")
        with pytest.raises(UsageError, match=r"filename='model.h5'\): expected a name that ends with"):
            engine.save_16bit_model(tmp_path / "out", "model.h5")
        with pytest.raises(UsageError, match=r"dtype='int8'\): expected one of fp16, bf16, fp32"):
            engine.save_16bit_model(tmp_path / "out", dtype="int8")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(CheckpointExistsError, match="is not a folder"):
            engine.save_16bit_model(tmp_path / "file")
        engine.set_full_parameter("mix", torch.full((2, 3, 56), 1e6))
        with pytest.raises(
            CheckpointError, match=r"cannot hold; nothing was written. Pass dtype=\"bf16\":\n  mix: 336"
        ):
            engine.save_16bit_model(tmp_path / "out", "half.safetensors", dtype="fp16")
        assert files_of(tmp_path / "out") == before
        assert not list(tmp_path.glob("*tmp-*"))


def test_weights_are_replaced_on_request_and_former_files_go(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")  # as people link folders to a larger drive
    with start() as engine:
        assert len(engine.save_16bit_model(tmp_path / "out", max_file_bytes=4096, overwrite=True)) > 2
        (tmp_path / "out/mine.safetensors").write_text("mine")
        engine.set_full_parameter("mix", torch.full((2, 3, 56), 3.0))
        files = engine.save_16bit_model(tmp_path / "out", overwrite=True)
    assert torch.equal(load_file(files[0])["mix"], torch.full((2, 3, 56), 3.0, dtype=torch.bfloat16))
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["mine.safetensors", "model.safetensors"]


def _full_disk(rank: int, folder: str) -> None:
    target = Path(folder) / "out"
    for kind, new in itertools.product(("allocate", "write", "rename"), (True, False)):
        if not new:
            target.mkdir(exist_ok=True)
        files = FaultyFiles(faults=(Fault(kind=kind, pattern=f"{folder}/*", error_number=28),))
        module_state.Files = lambda files=files: files  # type: ignore[attr-defined]
        with start(make_config(2)) as engine:
            with pytest.raises(DiskFullError if rank == 0 else RankError, match="No space left"):
                engine.save_16bit_model(target)
            step(engine)
        if rank == 0 and not new:
            assert list(target.iterdir()) == []
            target.rmdir()


def test_a_full_disk_is_told_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(_full_disk, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Zeros(torch.nn.Module):
    """Many parameters, of which most of the memory is never touched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(2000, 4000)) for _ in range(8))


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    original = module_state.WeightsWriter

    class Watched(original):  # type: ignore[misc, valid-type]
        def put(self, array: str, first: int, values: Any) -> None:
            pieces.append(values.nbytes)
            super().put(array, first, values)

    monkeypatch.setattr(module_state, "WeightsWriter", Watched)
    config = make_config(0, optimizer={"type": "AdamW"}) | {"bf16": {"enabled": False}}
    engine: Engine = zstore.initialize(model=Zeros(), config=config)[0]  # 256 MB of masters
    with engine:
        engine.save_16bit_model(tmp_path / "out", dtype="bf16")
    assert max(pieces) <= 9 << 20
    assert sum(pieces) == 8 * 2000 * 4000 * 4
    assert not load_file(tmp_path / "out/model.safetensors")["layers.3"].any()


def _save_beside(rank: int, folder: str) -> None:
    config = make_config(3)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    with start(config) as engine:
        step(engine)
        engine.save_checkpoint(folder, "a", wait=False)
        step(engine)  # the weights are those of the save
        engine.wait_for_checkpoint()
        engine.load_checkpoint(folder, "a")


def test_weights_beside_every_checkpoint(tmp_path: Path) -> None:
    run_ranks(_save_beside, 2, str(tmp_path))
    with open_checkpoint(tmp_path, "a") as reader:
        assert verify_checkpoint(reader) == []
    consolidate_command(tmp_path, tmp_path / "out", "bf16", LARGE)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
