"""A config that says "auto" wherever it may, and the precision that it takes with and without 16-bit instructions."""

import json
import logging
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.engine.models import make_net
from tests.engine.runs import make_config, start, state_of, step
from tests.pages import ROOT, blocks
from tests.tools.train_runs import rows
from zstore.engine import Engine
from zstore.engine.config.config import load_config, read_config
from zstore.engine.config.resolve import precision_note
from zstore.engine.plan import run
from zstore.engine.plan.run import agree_on_native_types, native_types
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks
from zstore.tools.train import TrainOptions, train_command

EVERYTHING = Path(__file__).parents[1] / "configs" / "zero3_nvme_everything.json"
PLACES = [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme"), (3, "cpu"), (3, "nvme")]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder for the monitors of the config, of which none calls home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "nvme").mkdir()
    return tmp_path


def everything(folder: Path, stage: int, tier: str, **keys: Any) -> dict[str, Any]:
    config = read_config(EVERYTHING)
    zero = config["zero_optimization"]
    zero["stage"] = stage
    for name in ("offload_optimizer", "offload_param"):
        zero[name] |= {"device": tier, "nvme_path": str(folder / "nvme")}
    return config | keys


def start_auto(config: Any, **keys: Any) -> Engine:
    return zstore.initialize(model=make_net(), config=config, **keys)[0]


@pytest.mark.parametrize(("stage", "tier"), PLACES)
def test_all_auto_trains_through_initialize(stage: int, tier: str, alone: Path) -> None:
    auto_values = {"optimizer": {"params": {"lr": 1e-2, "eps": 1e-6}}, "train_micro_batch_size_per_gpu": 2}
    more = {"scheduler.params.warmup_num_steps": 3, "bf16.enabled": True}
    with start_auto(everything(alone, stage, tier), auto=auto_values | more) as engine:
        for _ in range(2):
            step(engine)
        assert (engine.global_steps, engine.train_batch_size()) == (2, 2)
        group = engine.optimizer.param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-6, 0.0)
        assert group["lr"] == pytest.approx(1e-2 * 0.63, rel=0.01)
        answered = state_of(engine)
    # The same values, written.
    plain = everything(alone, stage, tier, train_batch_size=2, train_micro_batch_size_per_gpu=2)
    plain |= {"gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    plain["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0},
    }
    plain["scheduler"]["params"] = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    with start_auto(plain) as engine:
        for _ in range(2):
            step(engine)
        assert state_of(engine) == answered


def test_the_command_answers_what_its_options_say(alone: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    path, metrics, text = alone / "ds.json", alone / "m.jsonl", alone / "text.txt"
    path.write_text(json.dumps(config))
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    train_command(
        TrainOptions(config=path, model="gpt-tiny", steps=30, seq_len=4, data=text, metrics=metrics, micro_batch=3)
    )
    # A warm-up of three steps, a tenth; the fall ends with the run.
    rates = [row["lr"] for row in rows(metrics)]
    assert rates[0] == 0.0
    assert max(rates) == rates[3] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-4 / 27)
    assert rows(metrics)[0]["tokens_per_s"] * rows(metrics)[0]["step_s"] == pytest.approx(3 * 2 * 4)


NO_16_BITS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Makes torch take the paths of a CPU that has AVX2 and no 16-bit instructions."""
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="imitates a lesser x86 CPU")


def with_types(bf16: object, fp16: object = False) -> dict[str, object]:
    return {"train_batch_size": 2, "bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}


@x86
@pytest.mark.parametrize(
    ("flags", "native"), [("", ""), ("avx512_bf16", "bf16"), ("amx_bf16 amx_fp16", "bf16 fp16"), ("avx512_fp16", "")]
)
def test_a_cpu_is_asked_for_its_instructions(flags: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    found = {"architecture": "x86_64"} | {name: name in flags.split() for name in names}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert native_types(torch.device("cpu")) == set(native.split())


@pytest.mark.parametrize(
    ("config", "chosen", "line"),
    [
        (with_types("auto"), "fp32", 'precision: "auto" selects fp32, since this CPU has no fast bf16 arithmetic'),
        (with_types("auto", "auto"), "bf16", 'precision: "auto" selects bf16, since this CPU computes bf16 natively'),
        (with_types(True), "bf16", None),
        (with_types("auto", True), "fp16", None),
        (with_types(False), "fp32", None),
    ],
)
def test_the_line_says_what_auto_took_and_why(config: dict[str, object], chosen: str, line: str | None) -> None:
    note = precision_note(load_config(config).settings, chosen, ("bf16", "fp16"), "CPU")
    assert note == (None if line is None else (logging.INFO, line))


def _found_by_rank(rank: int) -> frozenset[str]:
    run.native_types = lambda device: frozenset({"bf16"} if rank == 0 else {"fp16"})
    return agree_on_native_types(World.current())


def test_the_types_of_rank_0_count_on_all_ranks() -> None:
    assert run_ranks(_found_by_rank, 2) == [{"bf16"}, {"bf16"}]


def python(code: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **env}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def quick_start(tmp_path: Path) -> str:
    (code,) = blocks("README.md")
    assert "/tmp" in code
    return code.replace("/tmp", str(tmp_path))


@x86
def test_the_quick_start_runs_again_and_goes_on_where_bf16_is_slow(tmp_path: Path) -> None:
    steps = "\nimport json; print(json.dumps([engine.global_steps, str(model[0].weight.dtype)]))"
    names: dict[str, object] = {}
    exec(quick_start(tmp_path), names)
    assert isinstance(names["engine"], zstore.engine.Engine)
    assert names["engine"].global_steps == 10
    again = python(quick_start(tmp_path) + steps, env=NO_16_BITS)
    assert json.loads(again.stdout) == [20, "torch.float32"]
    assert '"auto" selects fp32, since this CPU has no fast bf16 arithmetic' in again.stderr
    assert f"loaded {tmp_path}/ckpt/step-00000010; at step 10" in again.stderr
    exec(quick_start(tmp_path), names)
    assert names["engine"].global_steps == 30


DEMANDING = """
import sys, torch, zstore
from tests.engine.models import make_net
from tests.engine.runs import make_config
from tests.engine.bits import engine_digests
for enabled in (True, "auto"):
    with zstore.initialize(model=make_net(), config=make_config(bf16={"enabled": enabled}))[0] as engine:
        engine.load_checkpoint(sys.argv[1])
        arrays = {k: v for k, v in engine_digests(engine).items() if k.startswith(("model/", "optimizer/"))}
        print(engine.training_state.config.precision, sorted(arrays.items()))
"""


@x86
def test_a_slow_type_is_obeyed_with_one_warning_and_its_checkpoint_goes_on_in_fp32(tmp_path: Path) -> None:
    with start(make_config(bf16={"enabled": True}), make_net()) as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(str(tmp_path))
    done = python(DEMANDING, str(tmp_path), env=NO_16_BITS)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and "slower" in line]
    assert len(warnings) == 1
    assert "bf16.enabled: this CPU has no fast bf16 arithmetic" in warnings[0]
    assert 'set "bf16": {"enabled": "auto"}' in warnings[0]
    demanded, chosen = done.stdout.splitlines()
    assert demanded.startswith("bf16 ")
    assert chosen.startswith("fp32 ")
    assert demanded.removeprefix("bf16 ") == chosen.removeprefix("fp32 ")


def test_what_users_copy_says_auto() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.json"))]
    found = [one for page in pages for one in re.findall(r'"(?:bf16|fp16)": \{"enabled": ([^,}]+)', page.read_text())]
    assert len(found) >= 4
    assert set(found) == {'"auto"'}
