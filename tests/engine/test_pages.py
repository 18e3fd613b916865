"""Examples of pages run as they are printed, and tables of pages name what is there."""

import json
import operator
import os
import pkgutil
import re
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import zstore
from docs.config_docs import missing_keys, updated
from tests.engine.runs import make_config, one_step, start, start_linear
from tests.engine.transformers_models import ARCHITECTURES, REENTRANT, WRITERS, build
from tests.pages import blocks, text_of
from zstore.checkpoint import tags
from zstore.engine.checkpoint.record import LoadOptions
from zstore.errors import UsageError
from zstore.io.memory import PAGE_BYTES
from zstore.store.options import StoreStatistics
from zstore.testing.ranks import run_ranks

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
KINDS = {True: "reentrant", False: "non-reentrant", None: "no"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(page: str, heading: str) -> list[list[str]]:
    section = re.split(r"\n##+ ", text_of(f"docs/{page}.md").partition(f"# {heading}\n")[2], maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _access(rank: int, folder: str, examples: list[str]) -> list[str]:
    os.chdir(folder)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    with names["engine"] as engine:
        assert names["largest"] > 0
        master = engine.get_full_parameter("0.weight")
        written = load_file(names["files"][0])["0.weight"]
        assert torch.equal(written, master.to(names["x"].dtype))
        assert engine.global_steps == 3  # load_module_only leaves the counters
    return sorted(names["state"])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_examples_of_access_run(world_size: int, tmp_path: Path) -> None:
    assert len(blocks("docs/access.md")) == 9
    whole = ["0.bias", "0.weight", "2.bias", "2.weight"]
    first, *others = run_ranks(_access, world_size, str(tmp_path), blocks("docs/access.md"))
    assert first == whole
    assert others == [[]] * (world_size - 1)


def test_every_option_of_a_load_is_named() -> None:
    named = re.findall(r"^\| `(load_\w+|names)=", text_of("docs/access.md"), re.MULTILINE)
    assert set(named) == {field.name for field in fields(LoadOptions)}


def _large(rank: int, folder: str, examples: list[str]) -> tuple[int, bool, bool]:
    os.chdir(folder)
    names: dict[str, Any] = {"SWAP_FOLDER": str(Path(folder, "swap")), "MODEL_FOLDER": str(Path(folder, "model"))}
    building, others, loading = examples[:2], examples[2], examples[3]
    for example in building:
        exec(example, names)
    engine = names["engine"]
    weight = engine.get_full_parameter("layers.7.weight")
    engine.backward(engine(torch.ones(2, 512, dtype=engine.module.layers[0].weight.dtype)).float().square().mean())
    engine.step()
    torch.manual_seed(0)
    built = torch.equal(weight, names["Wide"]().layers[7].weight)
    exec(others, names)
    exec(loading, names)
    exec(examples[4], names)
    name = "model.layers.1.self_attn.q_proj.weight"
    with names["engine"] as engine:
        found = engine.get_full_parameter(name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(names["MODEL_FOLDER"])
    return engine.global_steps, built, torch.equal(found, plain.get_parameter(name))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_examples_of_large_models_run(world_size: int, tmp_path: Path) -> None:
    assert len(blocks("docs/large-models.md")) == 5
    (tmp_path / "swap").mkdir()
    config = transformers.LlamaConfig(  # wide enough for parameters that are sharded by default
        hidden_size=320, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert (
        run_ranks(_large, world_size, str(tmp_path), blocks("docs/large-models.md")) == [(0, True, True)] * world_size
    )


def test_the_table_says_what_buffers_take(nvme: Path) -> None:
    def held(section: str = "offload_param", **keys: int) -> StoreStatistics:
        config = make_config(3, "nvme", nvme)
        config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(nvme)}
        config["zero_optimization"][section] |= keys
        with start(config, torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])) as engine:
            return engine.statistics().store

    usual = held()
    state_bytes, parameter_bytes = 128 * 2**20, 20 * 2**20
    assert usual.pool_bytes == state_bytes + parameter_bytes
    rows = re.findall(
        r"^\| `(\w+)`: .* \| (\d+) x (\d+): ([\d,]+) bytes", text_of("docs/large-models.md"), re.MULTILINE
    )
    assert [section for section, *_ in rows] == ["offload_optimizer", "offload_param"]
    for section, count, size, told in rows:
        nbytes = int(told.replace(",", ""))
        # A request, and so each of the parameters' five buffers, is a twelfth of the state's.
        others = state_bytes if section == "offload_param" else 5 * (nbytes // 12)
        found = held(section, buffer_count=int(count), buffer_size=int(size)).pool_bytes
        assert 0 <= found - others - nbytes < PAGE_BYTES
    ((numel, told),) = re.findall(r"`max_in_cpu` .* \| (\d+): up to ([\d,]+) bytes", text_of("docs/large-models.md"))
    kept = held(max_in_cpu=int(numel))
    assert 0 < kept.host_bytes - usual.host_bytes <= int(told.replace(",", ""))
    assert usual.disk_bytes - kept.disk_bytes == kept.host_bytes - usual.host_bytes


def engine_of(model: nn.Module, **keys: Any) -> zstore.engine.Engine:
    engine: zstore.engine.Engine = zstore.initialize(model=model, config=CONFIG | keys)[0]
    return engine


class Loss(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def test_saving(folder: Path) -> None:
    later, killed, signal, watched = blocks("docs/saving.md")
    with engine_of(Loss(8, 8)) as engine:
        exec(later, {"engine": engine})
        exec(signal, {"engine": engine})
    assert [info.tag for info in tags(folder / "ckpt")] == ["step-00000000"]
    config: dict[str, Any] = {}
    exec(killed.partition("\n")[0], {"config": config})
    for steps in (2, 3):
        with engine_of(Loss(8, 8), **config) as engine:
            training = killed.replace("    ...\n", "    engine.backward(engine(batch))\n").replace("ckpt", "killed")
            exec(training, {"config": {}, "engine": engine, "batch": torch.ones(4, 8), "steps": steps, "epoch": 0})
        assert [info.tag for info in tags(folder / "killed")] == [f"step-{steps:08}"]
    with engine_of(Loss(8, 8)) as engine:
        exec(watched, {"engine": engine, "batches": [torch.ones(4, 8)] * 2})
        assert engine.global_steps == 2


def test_an_average_of_the_weights() -> None:
    (example,) = blocks("docs/optimizers.md")
    with engine_of(Loss(8, 8)) as engine:
        names: dict[str, Any] = {"engine": engine, "batches": [torch.ones(4, 8)] * 2}
        first = engine.get_full_parameter("weight").clone()
        exec(example, names)
        found, last = names["averaged"].module.weight, engine.get_full_parameter("weight")
        assert not torch.equal(last, first)
        assert (found - last).abs().max() < (first - last).abs().max()


def test_a_checkpointed_block() -> None:
    (example,) = blocks("docs/activations.md")
    names: dict[str, Any] = {"zstore": zstore, "block": nn.Linear(8, 8), "x": torch.ones(4, 8)}
    expected = names["block"](names["x"])
    exec(example, names)
    assert torch.equal(names["x"], expected)


def test_moving_from_deepspeed() -> None:
    moved, loaded = blocks("docs/deepspeed.md")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1}},
    }
    Path("ds_config.json").write_text(json.dumps(config))
    names: dict[str, Any] = {"args": Namespace(), "model": Loss(8, 8), "steps": 10}
    exec(moved, names)
    with names["engine"] as engine:
        assert (engine.train_micro_batch_size_per_gpu(), engine.global_steps) == (4, 0)
    config["train_micro_batch_size_per_gpu"] = 4
    config["optimizer"] = CONFIG["optimizer"]
    del config["scheduler"]
    Path("ds_config.json").write_text(json.dumps(config))
    names = {"zstore": zstore, "model": Loss(8, 8)}
    with engine_of(Loss(8, 8)) as engine:
        engine.save_checkpoint("runs/7b", client_state={"epoch": 1})
    exec(loaded, names)
    with names["engine"]:
        assert names["client_state"] == {"epoch": 1}


def test_block_sparse_attention() -> None:
    _, example, _ = blocks("docs/models.md")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["mixed"].shape == names["query"].shape


def test_generating_and_compiling() -> None:
    generated, _, compiled = blocks("docs/models.md")
    with engine_of(build("Llama")) as engine:
        names: dict[str, Any] = {"engine": engine, "input_ids": torch.ones(1, 3, dtype=torch.long)}
        exec(generated.replace("=50", "=2"), names)
        assert names["tokens"].shape == (1, 5)
    Path("ds_config.json").write_text(json.dumps(CONFIG))
    names = {"zstore": zstore, "model": Loss(8, 8)}
    exec(compiled.replace("compile()", 'compile(backend="eager")'), names)
    with names["engine"] as engine:
        assert one_step(engine) > 0


def told(cells: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", "|".join(cells))


def test_the_keys_that_do_not_act_are_up_to_date() -> None:
    page = text_of("docs/deepspeed.md")
    assert missing_keys() in page
    assert updated(page) == page, "run: python docs/config_docs.py"


def test_names_that_are_said_to_be_missing_are_missing() -> None:
    found = [name for row in rows("deepspeed", "Names") for name in told(row[:1])]
    assert len(found) > 50
    with start(make_config(0)) as engine:
        for name in found:
            of, _, rest = name.partition(".")
            if of == "engine":
                assert not hasattr(engine, rest), name
            elif of == "deepspeed" and rest:
                holder, _, last = rest.rpartition(".")
                if not holder:
                    assert not hasattr(zstore, last), name
                elif holder == "zero":
                    assert not hasattr(zstore.zero, last), name


def test_what_the_page_names_in_their_place_is_there() -> None:
    names = {name for row in rows("deepspeed", "Names") for name in told(row[1:])}
    with start(make_config(0)) as engine:
        checked = 0
        for name in names:
            path = name.partition("(")[0]
            if path.startswith("engine."):
                operator.attrgetter(path.removeprefix("engine."))(engine)
            elif path.startswith(("zstore.", "torch.")) and " " not in path:
                pkgutil.resolve_name(path)
            else:
                continue
            checked += 1
    assert checked > 15


def test_the_table_of_architectures_is_the_tests() -> None:
    found = {name: (kind, layers, writes) for name, kind, _, layers, writes in rows("models", "Architectures")}
    assert found == {
        name: (f"`{type(build(name)).__name__}`", KINDS[REENTRANT.get(name)], "yes" if name in WRITERS else "")
        for name in ARCHITECTURES
    }


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        module: nn.Module = torch.jit.script(nn.Linear(8, 8))
    return module


def turning() -> nn.Module:
    model = nn.Linear(8, 8)
    model.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return model


def compiled(in_place: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    if not in_place:
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    model[0].compile(backend="eager")
    return model


OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("make", "zero", "message"),
    [
        (lambda: nn.Sequential(scripted()), {"stage": 0}, "module '0' is scripted"),
        (turning, {"stage": 0}, "parameter 'turn' is torch.complex64"),
        (lambda: compiled(in_place=True), OFFLOADED, "module '0' is compiled"),
        (lambda: nn.Sequential(compiled(in_place=False)), OFFLOADED, "module '0' is compiled"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], nn.Module], zero: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        start_linear(make(), zero_optimization=zero)


def test_compiled_modules_train_where_parameters_stay() -> None:
    losses = []
    for make in (lambda: compiled(in_place=True), lambda: compiled(in_place=False)):
        with start_linear(make(), zero_optimization={"stage": 3}) as engine:
            losses.append([one_step(engine) for _ in range(3)])
    plain = compiled(in_place=True)
    plain[0]._compiled_call_impl = None  # type: ignore[index, union-attr]
    with start_linear(plain, zero_optimization={"stage": 3}) as engine:
        assert losses == 2 * [[one_step(engine) for _ in range(3)]]
