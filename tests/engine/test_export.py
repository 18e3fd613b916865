"""Weights written from a run, against consolidate and transformers; and other software that reads what the engine saved."""

import itertools
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
from safetensors.torch import load_file

import zstore
from tests.engine.runs import make_config, start, step
from tests.integrations.tokens import tokenizer
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.access import module_state
from zstore.errors import CheckpointError, CheckpointExistsError, CorruptionError, DiskFullError, RankError, UsageError
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


def test_what_is_written_and_consolidated_loads_in_transformers_with_its_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
        engine.save_16bit_model(tmp_path / "written", max_file_bytes=20_000)
        expected = engine.module_state_dict()
    assert "not in the checkpoint" not in caplog.text  # the config is the model's own
    consolidate_command(tmp_path / "ckpt", tmp_path / "out", "bf16", LARGE)
    for folder in ("out", "written"):
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]]
        assert type(loaded) is type(model)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
        assert folder == "written" or loaded.generation_config.max_new_tokens == 7
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
        with pytest.raises(CheckpointError, match=r"nothing was written. Pass dtype=\"bf16\":\n  mix: 336"):
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


CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
}
ARRAYS = ("model/0.weight", "model/2.weight", "optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/2.bias")


def make_engine(folder: Path) -> zstore.engine.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 301), torch.nn.Tanh(), torch.nn.Linear(301, 7))
    (folder / "nvme").mkdir(exist_ok=True)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "nvme")}}
    return zstore.initialize(model=model, config=CONFIG | {"zero_optimization": zero})[0]


def train_and_save(rank: int, folder: str) -> dict[str, list[float]]:
    with make_engine(Path(folder)) as engine:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            loss = engine(torch.randn(2, 150, generator=generator).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(str(Path(folder) / "ckpt"), tag="two")
        store = engine.training_state.state.store
        return {name: store.read(name).wait().tolist() for name in ARRAYS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("readers")
    ranks = run_ranks(train_and_save, 2, str(folder))
    values = {name: np.array(ranks[0][name] + ranks[1][name], dtype=np.float32) for name in ARRAYS}
    return folder / "ckpt" / "two", values


def read_by_zarr(checkpoint: Path, name: str) -> subprocess.CompletedProcess[bytes]:
    """Read in a process that imports zarr and numpy; of zstore only the data type that its entry point registers."""
    program = (
        "import sys, zarr\n"
        "values = zarr.open_array(sys.argv[1], mode='r')[:]\n"
        "assert not {'torch', 'zstore.checkpoint', 'zstore.io.shards'} & set(sys.modules)\n"
        "sys.stdout.buffer.write(values.tobytes())\n"
    )
    command = [sys.executable, "-c", program, str(checkpoint / name)]
    return subprocess.run(command, capture_output=True, timeout=200, check=False, cwd=checkpoint)


def read_by_tensorstore(checkpoint: Path, name: str) -> np.ndarray:
    path = str(checkpoint / name) + "/"
    opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, read=True).result()
    values: np.ndarray = opened.read().result()
    return values


@pytest.mark.parametrize("name", ARRAYS)
def test_zarr_and_tensorstore_give_the_engines_values(saved: tuple[Path, dict[str, np.ndarray]], name: str) -> None:
    checkpoint, values = saved
    assert np.any(values[name])
    found = read_by_zarr(checkpoint, name)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout == values[name].tobytes()
    assert read_by_tensorstore(checkpoint, name).tobytes() == values[name].tobytes()


def test_a_flipped_byte_is_refused_by_all(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    checkpoint, _ = saved
    name = "model/0.weight"
    file = checkpoint / name / "c.1.0"
    mode = stat.S_IMODE(file.stat().st_mode)
    assert mode & 0o222 == 0, "published files are read-only"
    os.chmod(file, 0o644)
    data = bytearray(file.read_bytes())
    data[4096 + 100] ^= 1
    file.write_bytes(data)
    try:
        assert b"crc32c" in read_by_zarr(checkpoint, name).stderr.lower()
        with pytest.raises(ValueError, match=r"(?i)crc|checksum|digest"):
            read_by_tensorstore(checkpoint, name)
        command = [sys.executable, "-m", "zstore", "verify", str(checkpoint)]
        verified = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert verified.returncode == 1
        assert "model/0.weight" in verified.stdout + verified.stderr
        assert "c.1.0" in verified.stdout + verified.stderr
        with make_engine(tmp_path) as engine, pytest.raises(CorruptionError, match=r"0\.weight"):
            engine.load_checkpoint(str(checkpoint.parent), "two")
    finally:
        data[4096 + 100] ^= 1
        file.write_bytes(data)
        os.chmod(file, mode)
