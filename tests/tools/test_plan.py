"""`zstore plan`: against engines, torch's own count of what a backward keeps, and transformers; and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import zstore
from tests.engine.plan.budgets import kept_by_autograd
from tests.tools.commands import run
from zstore.engine.config.config import load_config
from zstore.engine.plan.rates import MatmulRates, measure_rates
from zstore.engine.plan.run import shapes_of_model, units_of_model
from zstore.errors import ConfigError, UsageError
from zstore.sizes import format_bytes
from zstore.testing.ranks import run_ranks
from zstore.tools import cli
from zstore.tools.drive import BLOCK_BYTES
from zstore.tools.plan.choices import Costs, activations_of, all_choices, ladder, plan_of, step_seconds
from zstore.tools.plan.command import plan_command
from zstore.tools.plan.job import Choice, PlannedJob, make_job
from zstore.tools.plan.machine import (
    PlannedMachine,
    Rates,
    find_precision,
    host_memory_bytes,
    measured_rates,
)
from zstore.tools.plan.model import shape_of_model, shape_of_numbers, slots_of, slots_of_module
from zstore.tools.plan.options import PlanOptions
from zstore.tools.sample.models import SHIPPED, Gpt, GptConfig, build_model, loss_of

GB = 10**9
SEQ = 16


def make(
    *, gpus: int = 0, gpu: int = 80 * GB, memory: int = 64 * GB, disk: int | None = None, model: str = "gpt-tiny",
    micro: int = 4, nvme: str = "/nvme",
) -> PlannedJob:  # fmt: skip
    rates = Rates(disk_read=2e9, disk_write=1e9, flops=1e12)
    return PlannedJob(
        model=shape_of_model(model, "bf16", SEQ),
        machine=PlannedMachine(gpus=gpus, gpu_bytes=gpu, memory_bytes=memory, disk_bytes=disk, rates=rates),
        micro_batch=micro,
        seq_length=SEQ,
        precision="bf16",
        nvme_path=PurePosixPath(nvme),
    )


def first_that_fits(job: PlannedJob) -> Costs | None:
    return next((rung for rung in ladder(job) if rung.fits), None)


# -- the figures of state are the engine's ------------------------------------------------------------------------------


def _counted(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What engines count in their second step: in the first one the order of units is recorded."""
    found = []
    for config in configs:
        torch.manual_seed(0)
        engine, *_ = zstore.initialize(model=build_model("gpt-tiny", SEQ), config=config)
        with engine:
            ids = torch.zeros(engine.train_micro_batch_size_per_gpu(), SEQ, dtype=torch.long)
            for _ in range(2):
                engine.training_state.pending.complete()
                before = engine.statistics().store
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(loss_of(engine(ids, labels=ids)))
                    gradients = engine.statistics().held.gradients
                    engine.step()
            engine.training_state.pending.complete()
            held, store = engine.statistics().held, engine.statistics().store
        state = store.device_bytes + store.host_bytes + store.disk_bytes - held.resting
        counted = {"parameters": held.parameters + held.resting, "gradients": gradients}
        counted |= {"optimizer state": held.optimizer_state, "state in the store": state, "on disk": store.disk_bytes}
        counted |= {"read": store.disk_read_bytes - before.disk_read_bytes}
        counted |= {"written": store.disk_write_bytes - before.disk_write_bytes}
        found.append(counted)
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_ladders_figures_are_those_that_its_configs_give_in_an_engine(world_size: int, tmp_path: Path) -> None:
    job = make(gpus=world_size, micro=2, memory=10**7, nvme=str(tmp_path))
    rungs = ladder(job)
    assert [rung.title for rung in rungs] == [
        "as asked, stage 0", "micro-batch 1", "activation checkpointing", "ZeRO-2", "optimizer to CPU", "ZeRO-3",
        "parameters to CPU", "both to NVMe",
    ]  # fmt: skip
    assert rungs[-1].plan.held_total.disk > 0
    # In bf16 of one micro-batch, in fp32 of two.
    assert rungs[1].plan.held["gradients"].total == 2 * rungs[0].plan.held["gradients"].total
    configs = [rung.config for rung in rungs]
    counted = _counted(0, configs) if world_size == 1 else run_ranks(_counted, world_size, configs)[0]
    for rung, found in zip(rungs, counted, strict=True):
        held = rung.plan.held
        state = sum(one.total for kind, one in held.items() if kind not in ("parameters", "gradients", "buffers"))
        moved = rung.plan.traffic_total
        assert found == {
            "parameters": held["parameters"].total,
            "gradients": held["gradients"].total - held["gradients"].disk,
            "optimizer state": state,
            "state in the store": state + held["gradients"].disk,
            "on disk": rung.plan.held_total.disk,
            "read": moved.read,
            "written": moved.written,
        }, rung.title


def test_every_config_loads_and_gives_the_plan_that_was_shown(tmp_path: Path) -> None:
    for job in (make(gpus=4), make(memory=4 * GB, nvme=str(tmp_path))):
        for one in [*all_choices(job), *ladder(job)]:
            copied = json.loads(json.dumps(one.config))
            assert plan_of(job, copied) == one.plan
            config = load_config(copied)
            assert config.settings.zero_optimization.stage == one.choice.stage
            assert config.settings.zero_optimization.offload_optimizer.device == one.choice.optimizer


# -- what fits ----------------------------------------------------------------------------------------------------------


def test_moments_in_fewer_bits_take_less_and_the_config_asks_for_them() -> None:
    state = {}
    for moments in ("fp32", "bf16"):
        shown = next(one for one in all_choices(replace(make(), moments=moments)) if one.choice.stage == 1)
        state[moments] = sum(shown.plan.held[kind].total for kind in ("exp_avg", "exp_avg_sq"))
        assert shown.config.get("zstore", {}).get("moments", "fp32") == moments
    assert state["bf16"] == state["fp32"] / 2


def test_with_room_for_all_nothing_has_to_be_climbed() -> None:
    rung = first_that_fits(make(gpus=1))
    assert rung is not None
    assert rung.title == "as asked, stage 0"


def test_less_memory_climbs_higher_and_ends_with_nothing() -> None:
    titles = [rung.title for rung in ladder(make(gpus=4, model="gpt-base"))]
    found = []
    for gpu, memory in (
        (80 * GB, 64),
        (19 * GB // 10, 64),
        (GB, 64),
        (4 * GB // 10, 64),
        (4 * GB // 10, 2),
        (GB // 10, 1),
    ):
        rung = first_that_fits(make(gpus=4, gpu=gpu, memory=memory * GB, model="gpt-base"))
        found.append(len(titles) if rung is None else titles.index(rung.title))
    assert found == sorted(found)
    assert found[0] == 0
    assert len(set(found)) >= 4
    assert found[-1] == len(titles)


def test_what_lacks_is_named_with_both_numbers() -> None:
    job = make(gpus=1, gpu=10**7)
    rung = ladder(job)[0]
    assert rung.lacking == (f"device: {format_bytes(rung.device_bytes)} needed, 9.00 MB usable",)
    job = make(gpus=1, disk=1000, memory=10**8, model="gpt-small")
    nvme = next(one for one in all_choices(job) if one.choice.optimizer == "nvme")
    assert nvme.disk_bytes > 1000
    assert "disk: " in nvme.lacking[-1]


def test_under_a_budget_nvme_takes_what_memory_there_is() -> None:
    for memory in (10**9, 2 * 10**9):
        job = make(gpus=1, model="gpt-base", memory=memory)
        rung = ladder(job)[-1]
        assert rung.config["zstore"]["host_budget_bytes"] == memory * 60 // 100
        assert memory * 55 // 100 < rung.host_bytes <= memory * 60 // 100
        assert rung.fits


def test_on_a_cpu_the_device_is_the_host() -> None:
    rung = ladder(make())[0]
    assert rung.device_bytes == 0
    held = rung.plan.held_total
    assert rung.host_bytes == held.device + held.host + rung.transit_bytes + rung.activations_bytes


# -- estimates ----------------------------------------------------------------------------------------------------------


def test_a_model_from_numbers_loads_no_compiler() -> None:
    code = "import sys; from zstore.tools.plan.model import shape_of_numbers as of; of(10**9, 1024, 24, 32000, 'bf16').module"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch._dynamo' in sys.modules)"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(("name", "dtype"), [("gpt-tiny", torch.float32), ("gpt-small", torch.bfloat16)])
def test_activations_are_within_a_tenth_of_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    samples, tokens = 2, 128
    model = build_model(name, tokens).to(dtype)
    ids = torch.zeros(samples, tokens, dtype=torch.long)
    found = kept_by_autograd(model, lambda: loss_of(model(ids, labels=ids)))
    job = replace(make(model=name), seq_length=tokens, precision="fp32" if dtype is torch.float32 else "bf16")
    estimate = activations_of(job, Choice(stage=0, micro_batch=samples)).total_bytes
    assert found <= estimate <= 1.1 * found


def test_checkpointing_keeps_less_and_computes_more() -> None:
    without, with_it = ladder(make())[1:3]
    assert with_it.activations_bytes < without.activations_bytes
    assert with_it.seconds.compute == pytest.approx(without.seconds.compute * 8 / 6)


def test_seconds_follow_from_the_rates() -> None:
    job = make(gpus=2, model="gpt-small", memory=10**8)
    rung = ladder(job)[-1]
    moved = rung.plan.traffic_total
    seconds = step_seconds(job, replace(rung.choice, checkpointing=False), rung.plan)
    assert seconds.disk == pytest.approx(2 * (moved.read / 2e9 + moved.written / 1e9))
    assert moved.total > 0
    assert seconds.compute == pytest.approx(6 * job.model.num_parameters * 4 * SEQ / 1e12)
    assert seconds.overlapped == max(seconds.compute, seconds.disk, seconds.copies, seconds.host_update)
    assert seconds.in_turn == sum(asdict(seconds).values())
    unknown = replace(job, machine=replace(job.machine, rates=Rates()))
    assumed = step_seconds(unknown, replace(rung.choice, checkpointing=False), rung.plan)
    assert assumed.disk == pytest.approx(2 * (moved.read / 3e9 + moved.written / 2e9))
    assert assumed.compute == pytest.approx(6 * job.model.num_parameters * 4 * SEQ / 1e14)


def test_seconds_of_rates_that_are_not_known_are_there_and_called_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = PlanOptions(model="gpt-base", gpus=1, gpu_memory=GB, memory=2 * GB, disk=10 * GB, disk_read=GB)
    assert plan_command(options, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(0 < one["seconds"]["overlapped"] <= one["seconds"]["in_turn"] for one in found["choices"])
    (note,) = [one for one in found["notes"] if "assume" in one]
    others = "--link 2.5e+10, --host-update 6e+10, --device-update 1.5e+12"
    assert f"seconds per step assume --disk-write 2e+09, --flops 1e+14, {others}:" in note


def test_rates_that_are_not_given_are_measured(tmp_path: Path) -> None:
    rates, free_bytes = measured_rates(tmp_path, Rates(disk_write=5.0, flops=7.0), rate_bytes=2 * BLOCK_BYTES)
    assert (rates.disk_write, rates.flops) == (5.0, 7.0)
    assert rates.disk_read is not None
    assert 1e5 < rates.disk_read < 1e12
    assert free_bytes > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPUs of this machine")
def test_the_rates_of_a_cpu_are_not_taken_for_those_of_gpus_elsewhere(tmp_path: Path) -> None:
    options = PlanOptions(model="gpt-tiny", gpus=2, gpu_memory=GB, measure=tmp_path, disk_read=10, disk_write=10)
    assert make_job(options).machine.rates.flops is None


# -- models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "hidden", "layers"), [(7 * 10**9, 4096, 32), (13 * 10**8, 2048, 24), (10**12, 25600, 128)]
)
def test_four_numbers_give_a_model_of_that_size(params: int, hidden: int, layers: int) -> None:
    model = shape_of_numbers(params, hidden, layers, 50257, "bf16")
    assert model.num_parameters == pytest.approx(params, rel=1e-3)
    assert sum(len(unit) for unit in model.units) == len(model.shapes)


def test_four_numbers_that_are_a_gpts_give_its_shapes() -> None:
    real = Gpt(GptConfig(hidden=64, num_layers=3, num_heads=4, vocab_size=999, max_positions=1))
    params = sum(p.numel() for p in real.parameters()) + 999 * 64 - 64  # a head of its own, and no positions
    model = shape_of_numbers(params, 64, 3, 999, "bf16")
    theirs = {name.removeprefix("transformer."): tuple(p.shape) for name, p in real.named_parameters()}
    ours = {one.name: one.shape for one in model.shapes}
    assert ours.pop("lm_head.weight") == theirs["wte.weight"]
    del theirs["wpe.weight"]
    assert ours == theirs
    assert (model.shapes, model.units) == (shapes_of_model(model.module, "bf16"), units_of_model(model.module))


def test_four_numbers_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="have at least"):
        shape_of_numbers(10**8, 4096, 32, 32000, "bf16")


def test_a_transformers_config_is_planned_without_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    model = shape_of_model(str(tmp_path), "bf16", 32)
    real = transformers.LlamaForCausalLM(config)
    assert {one.name: one.shape for one in model.shapes} == {n: tuple(p.shape) for n, p in real.named_parameters()}
    assert (model.width.hidden, model.width.num_layers, model.width.vocab_size) == (64, 3, 300)
    assert len(model.units) == 3 + 3  # blocks; embedding, norm, head


# -- the command --------------------------------------------------------------------------------------------------------


def test_the_command_prints_json(tmp_path: Path) -> None:
    words = ["--gpus", "2", "--gpu-memory", "24GB", "--memory", "64GB", "--disk", "1TB", "--seq-length", "64"]
    done = run("plan", "--params", "7e9", "--hidden", "4096", "--layers", "32", *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["num_parameters"] == pytest.approx(7e9, rel=1e-3)
    assert found["machine"]["gpus"] == 2
    assert len(found["choices"]) == 14
    fitting = [rung["title"] for rung in found["ladder"] if rung["fits"]]
    assert found["first_that_fits"] == fitting[0]
    load_config(found["config"])
    assert found["ladder"][0]["rank_0"]["held"]["parameters"]["device"] == 2 * found["model"]["num_parameters"]


def test_the_command_prints_tables_and_a_config_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    options = PlanOptions(
        model="gpt-base", gpus=1, gpu_memory=GB, memory=2 * GB, disk=10 * GB, disk_read=GB, disk_write=GB, flops=10**12
    )
    assert plan_command(options, json=False) == 0
    printed = capsys.readouterr()
    for text in ("what fits where", "the ladder", "both to NVMe", "<- the first that fits", "no: device: "):
        assert text in printed.out
    assert "estimates" in printed.err
    config = json.loads(printed.out[printed.out.index("{\n") :])
    assert load_config(config).settings.zero_optimization.stage >= 2


def test_where_nothing_fits_the_command_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = PlanOptions(model="gpt-base", gpus=1, gpu_memory=10**6, memory=10**6, disk=10**6)
    assert plan_command(options, json=True) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["config"] is None
    assert "no configuration fits" in printed.err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", "gpt-tiny", "--params", "7e9"],
        ["--params", "7e9", "--hidden", "4096"],
        ["--params", "seven", "--hidden", "4096", "--layers", "32"],
        ["--model", "gpt-tiny", "--gpus", "-1"],
        ["--model", "gpt-tiny", "--memory", "huge"],
        ["--model", "gpt-tiny", "--precision", "fp8"],
        ["--model", "gpt-tiny", "--micro-batch", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    done = CliRunner().invoke(cli.app, ["plan", *words])
    assert done.exit_code == 2, done.output
    assert "Usage" in done.output
    assert "Error" in done.output


def test_what_cannot_be_planned_is_one_message() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt-huge'"):
        make_job(PlanOptions(model="gpt-huge"))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--gpu-memory"):
            make_job(PlanOptions(model="gpt-tiny", gpus=2))
    with pytest.raises(ConfigError, match="existing folder"):
        make_job(PlanOptions(model="gpt-tiny", gpus=0, measure=Path("/no/such/folder")))


def test_defaults_are_this_machines() -> None:
    job = make_job(PlanOptions(model="gpt-tiny", gpus=0))
    assert job.machine.memory_bytes == host_memory_bytes() > 10**8
    assert job.model.num_parameters == sum(p.numel() for p in Gpt(SHIPPED["gpt-tiny"]).parameters())


# -- precision ----------------------------------------------------------------------------------------------------------


def test_auto_is_what_the_engine_takes_here_and_the_config_says_auto(capsys: pytest.CaptureFixture[str]) -> None:
    rates = measure_rates(torch.device("cpu"))
    job = make_job(PlanOptions(model="gpt-tiny", gpus=0))
    assert job.precision == ("bf16" if "bf16" in rates.native else "fp32")
    assert job.machine.rates.flops == rates.flops[job.precision] * torch.get_num_threads()
    rung = first_that_fits(job)
    assert rung is not None
    assert rung.config["bf16"] == {"enabled": "auto"}
    assert rung.seconds.compute == pytest.approx(
        6 * job.model.num_parameters * job.seq_length / job.machine.rates.flops
    )
    with zstore.initialize(model=build_model("gpt-tiny", SEQ), config=rung.config)[0] as engine:
        assert engine.training_state.config.precision == job.precision
    assert plan_command(PlanOptions(model="gpt-tiny", gpus=0), json=False) == 0
    assert f'"auto" takes {job.precision}, since this CPU' in capsys.readouterr().err


def test_a_slow_cpu_is_planned_in_fp32_and_a_demanded_type_gets_a_note() -> None:
    slow = MatmulRates(kind="cpu", flops={"fp32": 20e9, "bf16": 0.4e9, "fp16": 0.5e9})
    assert find_precision("auto", slow).name == "fp32"
    demanded = find_precision("bf16", slow)
    assert (demanded.name, demanded.is_auto) == ("bf16", False)
    assert demanded.note is not None
    assert "50 times slower than in fp32" in demanded.note
    old_gpu = MatmulRates(kind="cuda", flops={"fp32": 8e12, "bf16": 7e12, "fp16": 25e12}, emulated=("bf16",))
    assert find_precision("auto", old_gpu).name == "fp16"
    assert old_gpu.of_device("fp16") == 25e12


def test_auto_for_gpus_that_are_not_here_is_bf16() -> None:
    job = make_job(PlanOptions(model="gpt-tiny", gpus=2, gpu_memory=GB))
    assert (job.precision, job.machine.rates.flops) == ("bf16", None)
    assert ladder(job)[0].config["bf16"] == {"enabled": True}


def test_a_plan_by_numbers_is_made_without_torchs_compiler() -> None:
    """What imports it takes more processor time than the plan; shapes and slots are those of torch's own modules."""
    program = """
import sys
from zstore.tools.plan.choices import all_choices, ladder
from zstore.tools.plan.job import make_job
from zstore.tools.plan.options import PlanOptions

for named in ({"params": 2_000_000, "hidden": 64, "layers": 2, "vocab": 1000}, {"model": "gpt-tiny"}):
    job = make_job(PlanOptions(gpus=1, gpu_memory=10**9, memory=10**9, disk=10**9, **named))
    all_choices(job), ladder(job)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    plain = build_model("gpt-tiny", SEQ)  # filled, on the CPU
    optimizer = torch.optim.AdamW(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shape = shape_of_model("gpt-tiny", "fp32", SEQ)
    assert {one.name: one.shape for one in shape.shapes} == {n: tuple(p.shape) for n, p in plain.named_parameters()}
    planned = slots_of(shape, None)
    held = {n: set(optimizer.state[p]) - {"step"} for n, p in plain.named_parameters()}
    assert {name: set(slots) for name, slots in planned.items()} == held
    assert planned == slots_of_module(shape.module, None)
