"""`zstore plan --config`: whether a config fits, and what is to be changed where it does not."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.plan.run import plan_run
from zstore.engine.plan.rungs import next_rung
from zstore.errors import UsageError
from zstore.ranks.world import World
from zstore.tools.plan.choices import Costs, activations_of, changed_config, ladder, plan_of, weigh_given
from zstore.tools.plan.command import plan_command
from zstore.tools.plan.job import Choice, make_job
from zstore.tools.plan.model import slots_of_module
from zstore.tools.plan.options import PlanOptions
from zstore.tools.plan.report import differences, headline
from zstore.tools.sample.models import build_model

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
GB = 10**9


def options(tmp_path: Path, config: dict[str, Any], **more: Any) -> PlanOptions:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return PlanOptions(config=path, **{"model": "gpt-tiny", "gpus": 1, "gpu_memory": GB, "memory": GB, **more})


def test_a_config_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(tmp_path, BASE, seq_length=16)
    job = make_job(chosen)
    assert (job.micro_batch, job.precision, job.machine.num_ranks) == (8, "bf16", 1)
    mine = weigh_given(job)
    assert mine.plan == plan_of(job, BASE)
    assert mine.choice == Choice(stage=1, optimizer="cpu", micro_batch=4)
    assert plan_command(chosen, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["mine"]["host_bytes"] == mine.host_bytes > 0
    assert (found["instead"], found["changes"]) == (None, [])
    assert plan_command(chosen) == 0
    assert "it fits" in capsys.readouterr().out


def test_a_ratio_that_fills_the_device_fits_and_is_as_the_engine_takes_it(tmp_path: Path) -> None:
    shares = {}
    for gpu_memory in (95_000_000, 105_000_000, GB):
        zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
        job = make_job(options(tmp_path, BASE | {"zero_optimization": zero}, gpu_memory=gpu_memory, seq_length=1024))
        mine = weigh_given(job)
        assert mine.fits
        shares[gpu_memory] = mine.plan.settings.ratio
        with torch.device("meta"):
            model = build_model("gpt-tiny", 1024)
        resolved = load_config(mine.config).resolve(ResolveContext(world_size=1))
        plan = plan_run(
            model,
            resolved,
            World.current(),
            slots_of_module(model, resolved.optimizer),
            None,
            device_is_host=False,
            device_bytes=gpu_memory,
        )
        assert plan.placements == mine.plan.placements
        # As much as possible, in whole parameters: a tenth more of the state would not fit.
        if 0 < mine.plan.settings.ratio < 1:
            more = copy.deepcopy(zero)
            more["offload_optimizer"]["ratio"] = max(0.0, mine.plan.settings.ratio - 0.1)
            assert not weigh_given(replace(job, base=BASE | {"zero_optimization": more})).fits
    assert 1 > shares[95_000_000] > shares[105_000_000] > shares[GB] == 0


def test_of_7_b_on_a_device_of_80_gb_the_cpu_updates_a_third_and_the_plan_says_how_long_that_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def weighed(ratio: float | str, rest: dict[str, Any], **more: Any) -> tuple[PlanOptions, Costs]:
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio}, **rest}
        config = BASE | {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        shape = {"model": None, "params": 7 * GB, "hidden": 4096, "layers": 32, "seq_length": 1024}
        rates = {"link": 50 * GB, "host_update": 57 * GB, "device_update": 2800 * GB, "flops": 300_000 * GB}
        machine = {"gpu_memory": 80 * GB, "memory": 200 * GB, **rates}
        chosen = options(tmp_path, config, **shape, **machine, **more)
        return chosen, weigh_given(make_job(chosen))

    away = {"offload_param": {"device": "cpu", "pin_memory": True}}
    chosen, filled = weighed("auto", away)
    assert filled.plan.settings.ratio == pytest.approx(1 / 3, abs=0.02)
    # 28 bytes a parameter: 3.4 s on the CPU alone, 1.1 of it is left. Parameters come twice, and gradients leave, for a third.
    assert filled.seconds.host_update == pytest.approx(28 * 7 / 57 * filled.plan.settings.ratio, rel=0.02)
    assert filled.seconds.device_update == pytest.approx(28 * 7 / 2800 * (1 - filled.plan.settings.ratio), rel=0.02)
    assert filled.seconds.copies == pytest.approx(4 * 7 / 50, rel=0.02)
    assert plan_command(chosen) == 0
    expected = f"expected of a step: computation 0.143 s, copies to and from the device {filled.seconds.copies:.3g} s"
    assert f"{expected}, the update on the CPU {filled.seconds.host_update:.3g} s" in capsys.readouterr().out
    _, whole = weighed(1.0, away)
    assert whole.seconds.host_update == pytest.approx(3.44, rel=0.02)
    assert whole.seconds.device_update == 0
    # Of parameters that stay, those that the CPU updated come once.
    _, stays = weighed("auto", {})
    assert stays.seconds.copies == pytest.approx(2 * 7 / 50 * stays.plan.settings.ratio, rel=0.02)
    assert stays.plan.settings.ratio > filled.plan.settings.ratio


def test_of_one_that_does_not_fit_it_says_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BASE | {"zero_optimization": {"stage": 0}, "steps_per_print": 3}
    chosen = options(tmp_path, config, gpu_memory=20_000_000, seq_length=16)
    assert plan_command(chosen, json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["mine"]["lacking"][0].startswith("device: ")
    assert found["instead"]["fits"]
    instead = found["instead"]["config"]
    load_config(instead)
    assert instead["steps_per_print"] == 3
    assert instead["train_micro_batch_size_per_gpu"] * instead["gradient_accumulation_steps"] == 8
    changed = {change["key"]: change["to"] for change in found["changes"]}
    assert changed["train_micro_batch_size_per_gpu"] == 1
    assert {key for key in changed if not key.startswith(("zero_optimization.", "train_", "gradient_acc"))} == set()
    assert plan_command(chosen) == 1
    assert "it does not fit: device: " in (said := capsys.readouterr()).out
    assert "train_micro_batch_size_per_gpu: 1 (is 4)" in said.out
    nothing = options(tmp_path, config, gpu_memory=1000, memory=1000)
    assert plan_command(nothing) == 1
    assert "nothing that was tried fits" in capsys.readouterr().err


def test_a_budget_that_is_too_small_is_what_is_lacking(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    job = make_job(options(tmp_path, BASE | {"zero_optimization": zero, "zstore": {"host_budget_bytes": 1000}}))
    assert weigh_given(job).lacking[0].startswith("host budget: ")
    assert job.machine.disk_bytes  # of the drive that the config names


def test_a_changed_config_keeps_the_samples_of_a_step_and_the_rest() -> None:
    choice = Choice(stage=3, optimizer="nvme", parameters="cpu", micro_batch=2)
    found = changed_config(BASE, choice, 8, "/drive", 10**6)
    assert {key: after for key, _, after in differences(BASE, found)} == {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer.device": "nvme",
        "zero_optimization.offload_optimizer.nvme_path": "/drive",
        "zero_optimization.offload_param.device": "cpu",
        "zstore.host_budget_bytes": 10**6,
    }  # fmt: skip
    older = BASE | {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert changed_config(older, Choice(stage=0, micro_batch=8), 8, "")["zero_optimization"] == {"stage": 0}
    load_config(changed_config(BASE | {"zero_optimization": True}, choice, 8, "/drive"))


# -- what optimizers keep -------------------------------------------------------------------------------------------------


def planned_state(tmp_path: Path, optimizer: dict[str, Any]) -> int:
    """Return the bytes that the plan has for what an optimizer keeps beside the master."""
    plan = weigh_given(make_job(options(tmp_path, BASE | {"optimizer": optimizer}))).plan
    return sum(
        held.total for kind, held in plan.held.items() if kind not in ("parameters", "gradients", "master", "buffers")
    )


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Adam", {"amsgrad": True}), ("AdamW", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}),
        ("RMSprop", {}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("NAdam", {}), ("Adamax", {}), ("RAdam", {}),
        ("Adadelta", {}), ("ASGD", {}), ("Rprop", {}), ("Adafactor", {}),
    ],
)  # fmt: skip
def test_the_plan_counts_what_torchs_class_keeps(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    model = build_model("gpt-tiny", 128)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **params)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    numel = sum(value.numel() for value in kept if isinstance(value, torch.Tensor) and value.dim())
    assert planned_state(tmp_path, {"type": name, "params": {"lr": 1e-3, **params}}) == 4 * numel


def test_the_plan_counts_what_lion_lamb_and_muon_keep(tmp_path: Path) -> None:
    model = build_model("gpt-tiny", 128)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert planned_state(tmp_path, {"type": "Lion", "params": {"lr": 1e-3}}) == 4 * numel
    assert planned_state(tmp_path, {"type": "Lamb", "params": {"lr": 1e-3}}) == 8 * numel
    # One buffer of the matrices in blocks, Adam's two of the rest.
    inner = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name)
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    assert 0 < planned_state(tmp_path, muon) == 4 * inner + 8 * (numel - inner)


def test_options_that_contradict_the_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gives the batch size"):
        make_job(options(tmp_path, BASE, micro_batch=3))
    with pytest.raises(UsageError, match="--precision"):
        options(tmp_path, BASE, precision="fp32")
    open_sizes = {"bf16": {"enabled": "auto"}}
    assert make_job(options(tmp_path, open_sizes, micro_batch=3)).micro_batch == 3


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "Lamb", "Adafactor", "Muon"])
def test_the_state_is_that_of_the_configs_optimizer(tmp_path: Path, kind: str) -> None:
    config = BASE | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
    job = make_job(options(tmp_path, config))
    held = {name: one.total for name, one in weigh_given(job).plan.held.items()}
    shapes = {one.name: one.shape for one in job.model.shapes}
    whole = 4 * sum(map(math.prod, shapes.values()))
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    hidden = 4 * sum(math.prod(shape) for name, shape in matrices.items() if ".h." in name)
    expected = {
        "AdamW": {"exp_avg": whole, "exp_avg_sq": whole},
        "SGD": {},
        "Lion": {"exp_avg": whole},
        "Lamb": {"exp_avg": whole, "exp_avg_sq": whole},
        "Adafactor": {
            "row_var": 4 * sum(rows for rows, _ in matrices.values()),
            "col_var": 4 * sum(columns for _, columns in matrices.values()),
            "variance": 4 * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1),
        },
        "Muon": {"momentum_buffer": hidden, "exp_avg": whole - hidden, "exp_avg_sq": whole - hidden},
    }[kind]
    assert {
        name: held[name] for name in held if name not in ("parameters", "gradients", "master", "buffers")
    } == expected
    assert f" {kind.partition(' ')[0]}, " in headline(job)


def test_activations_rest_where_the_config_says(tmp_path: Path) -> None:
    def weighed(**own: Any) -> Costs:
        return weigh_given(make_job(options(tmp_path, BASE | {"zstore": own}, gpu_memory=100 * GB)))

    plain, kept = weighed(), weighed(gradient_checkpointing=True)
    base = make_job(options(tmp_path, BASE))
    resting, kept_resting = (activations_of(base, one.choice).kept_bytes for one in (plain, kept))
    host, disk = weighed(activations="host"), weighed(activations="disk", activations_path=str(tmp_path))
    assert plain.device_bytes - host.device_bytes == host.host_bytes - plain.host_bytes == resting
    assert plain.device_bytes - disk.device_bytes == disk.disk_bytes - plain.disk_bytes == resting
    both = weighed(gradient_checkpointing=True, activations="host")
    assert kept.device_bytes - both.device_bytes == kept_resting < resting
    job = make_job(options(tmp_path, BASE | {"zstore": {"gradient_checkpointing": True}}))
    assert all(rung.choice.checkpointing for rung in ladder(job))


# -- when memory ran out ------------------------------------------------------------------------------------------------


def changed(config: dict[str, Any], rung: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(config)
    for key, value in rung.items():
        *sections, name = key.split(".")
        section = found
        for one in sections:
            section = section.setdefault(one, {})
        section[name] = value
    return found


@pytest.mark.parametrize("gpus", [0, 1])
def test_each_rung_that_is_told_takes_less_host_memory_in_the_plan(tmp_path: Path, gpus: int) -> None:
    config = BASE | {"train_batch_size": None, "gradient_accumulation_steps": 2}
    config["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}} if gpus else {"stage": 0}
    seen, sizes = [], []
    while True:
        size = {"memory": 100 * GB, "gpu_memory": 100 * GB, "seq_length": 1024, "model": "gpt-base"}
        job = make_job(options(tmp_path, config, gpus=gpus, **size))
        sizes.append(weigh_given(job).host_bytes)
        resolved = load_config(config).resolve(ResolveContext(world_size=1))
        if not (rung := next_rung(resolved, 1, device_is_host=not gpus)):
            break
        seen.append(list(rung))
        config = changed(config, rung)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes) > 1
    told = [keys[-1].rpartition(".")[2] for keys in seen]
    expected = ["gradient_accumulation_steps", "gradient_checkpointing", "offload_optimizer", "offload_param"]
    assert told == (expected[2:3] if gpus else expected)
