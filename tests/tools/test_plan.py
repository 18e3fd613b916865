"""`zstore plan`: against engines, torch's own count of what a backward keeps, optimizers of torch, and the command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.engine.plan.budgets import kept_by_autograd
from zstore.engine.config.config import load_config
from zstore.engine.plan.costs import Costs, apply_changes
from zstore.engine.plan.run import native_types, plan_run
from zstore.errors import ConfigError, UsageError, format_bytes
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks
from zstore.tools.plan import PlanOptions, headline, make_run, plan_command, slots_of_module
from zstore.tools.sample import build_model, on_meta

GB = 10**9
SEQ = 16
BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
NOT_SLOTS = ("parameters", "gradients", "master", "buffers")


def options(folder: Path | None = None, config: dict[str, Any] | None = None, **more: Any) -> PlanOptions:
    given: dict[str, Any] = {"model": "gpt-tiny", "gpus": 1, "gpu_memory": GB, "memory": GB, "seq_length": SEQ}
    if folder is not None:
        (folder / "ds.json").write_text(json.dumps(config))
        given["config"] = folder / "ds.json"
    return PlanOptions(**{**given, **more})


def weighed(chosen: PlanOptions) -> Costs:
    run, config = make_run(chosen)
    return run.estimate(config)


def ladder(chosen: PlanOptions, folder: str = "/nvme") -> list[Costs]:
    run, config = make_run(chosen)
    return [run.estimate(config), *run.ladder(config, folder)]


def found_json(capsys: pytest.CaptureFixture[str], chosen: PlanOptions, code: int) -> dict[str, Any]:
    assert plan_command(chosen, json=True) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _counted(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What engines count in their second step: in the first one the order of units is recorded."""
    found = []
    for config in configs:
        torch.manual_seed(0)
        engine, *_ = zstore.initialize(model=build_model("gpt-tiny", SEQ), config=config)
        with engine:
            ids = torch.zeros(engine.train_micro_batch_size_per_gpu(), SEQ, dtype=torch.long)
            for _ in range(2):
                engine.training_state.update.wait()
                before = engine.statistics().store
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(engine(ids, labels=ids))
                    gradients = engine.statistics().held.gradients
                    engine.step()
            engine.training_state.update.wait()
            held, store = engine.statistics().held, engine.statistics().store
        state = store.device_bytes + store.host_bytes + store.disk_bytes - held.resting
        counted = {"parameters": held.parameters + held.resting, "gradients": gradients}
        counted |= {"optimizer state": held.optimizer_state, "state in the store": state, "on disk": store.disk_bytes}
        found.append(counted | {"written": store.disk_write_bytes - before.disk_write_bytes})
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_ladders_figures_are_those_that_its_configs_give_in_an_engine(world_size: int, tmp_path: Path) -> None:
    found = ladder(options(gpus=world_size, memory=10**7, micro_batch=2), str(tmp_path))
    titles = [
        "this config", "micro-batch 1", "activation checkpointing", "ZeRO-2", "optimizer to CPU", "ZeRO-3",
        "parameters to CPU", "optimizer to NVMe", "parameters to NVMe",
    ]  # fmt: skip
    assert [one.title for one in found] == [title for title in titles if world_size > 1 or "ZeRO" not in title]
    assert found[-1].plan.held_total.disk > 0
    # In bf16 of one micro-batch, in fp32 of two.
    assert found[1].plan.held["gradients"].total == 2 * found[0].plan.held["gradients"].total
    configs = [dict(one.config) for one in found]
    counted = _counted(0, configs) if world_size == 1 else run_ranks(_counted, world_size, configs)[0]
    for one, theirs in zip(found, counted, strict=True):
        held = one.plan.held
        state = sum(each.total for kind, each in held.items() if kind not in ("parameters", "gradients", "buffers"))
        assert theirs == {
            "parameters": held["parameters"].total,
            "gradients": held["gradients"].total - held["gradients"].disk,
            "optimizer state": state,
            "state in the store": state + held["gradients"].disk,
            "on disk": one.plan.held_total.disk,
            "written": one.plan.written_bytes,
        }, one.title


def test_a_ratio_that_fills_the_device_fits_and_is_as_the_engine_takes_it(tmp_path: Path) -> None:
    shares = {}
    for gpu_memory in (95_000_000, 105_000_000, GB):
        zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
        chosen = options(tmp_path, BASE | {"zero_optimization": zero}, gpu_memory=gpu_memory, seq_length=1024)
        run, config = make_run(chosen)
        mine = run.estimate(config)
        assert not mine.lacking
        ratio = shares[gpu_memory] = mine.plan.settings.ratio
        resolved = run.resolved(config)
        with on_meta():
            model = build_model("gpt-tiny", 1024)
        slots = slots_of_module(model, resolved.settings.optimizer, 1)
        engines = plan_run(model, resolved, World.current(), slots, None, device_is_host=False, device_bytes=gpu_memory)
        assert engines.placements == mine.plan.placements
        # As much as possible, in whole parameters: a tenth more of the state would not fit.
        more = apply_changes(config, {"zero_optimization.offload_optimizer.ratio": max(0.0, ratio - 0.1)})
        assert ratio == 0 or run.estimate(more).lacking
    assert 1 > shares[95_000_000] > shares[105_000_000] > shares[GB] == 0


@pytest.mark.parametrize(("name", "dtype"), [("gpt-tiny", torch.float32), ("gpt-small", torch.bfloat16)])
def test_activations_are_within_a_tenth_of_what_autograd_keeps(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    samples, tokens = 2, 128
    model = build_model(name, tokens).to(dtype)
    ids = torch.zeros(samples, tokens, dtype=torch.long)
    found = kept_by_autograd(model, lambda: model(ids, labels=ids))
    config = {"train_micro_batch_size_per_gpu": samples, "bf16": {"enabled": dtype is torch.bfloat16}}
    chosen = options(tmp_path, config, model=name, seq_length=tokens)
    assert found <= weighed(chosen).activations_bytes <= 1.1 * found


def test_activations_are_where_the_config_says(tmp_path: Path) -> None:
    def of(**own: Any) -> Costs:
        return weighed(options(tmp_path, BASE | {"zstore": own}, gpu_memory=100 * GB))

    plain, kept = of(), of(gradient_checkpointing=True)
    host, disk = of(activations="host"), of(activations="disk", activations_path=str(tmp_path))
    moved = plain.needed.device - host.needed.device
    assert moved == host.needed.host - plain.needed.host == disk.needed.disk - plain.needed.disk > 0
    assert disk.needed.device == host.needed.device
    assert kept.activations_bytes < plain.activations_bytes


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Adam", {"amsgrad": True}), ("AdamW", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}), ("NAdam", {}), ("Adamax", {}), ("Adadelta", {}), ("ASGD", {}),
        ("Rprop", {}), ("Adafactor", {}),
    ],
)  # fmt: skip
def test_the_plan_counts_what_torchs_class_keeps(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    model = build_model("gpt-tiny", SEQ)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **params)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    numel = sum(value.numel() for value in kept if isinstance(value, torch.Tensor) and value.dim())
    chosen = options(tmp_path, BASE | {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}})
    held = weighed(chosen).plan.held
    assert sum(one.total for kind, one in held.items() if kind not in NOT_SLOTS) == 4 * numel


def test_the_plan_counts_what_lion_lamb_and_muon_keep(tmp_path: Path) -> None:
    shapes = {name: one.shape for name, one in build_model("gpt-tiny", SEQ).named_parameters()}
    whole = 4 * sum(map(math.prod, shapes.values()))
    hidden = 4 * sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and ".h." in name)
    muon = {"momentum_buffer": hidden, "exp_avg": whole - hidden, "exp_avg_sq": whole - hidden}
    lamb = {"exp_avg": whole, "exp_avg_sq": whole}
    for kind, expected in {"Lion": {"exp_avg": whole}, "Lamb": lamb, "Muon": muon}.items():
        run, config = make_run(options(tmp_path, BASE | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}))
        held = run.estimate(config).plan.held
        assert {name: held[name].total for name in held if name not in NOT_SLOTS} == expected
        assert f", {kind}, " in headline(run, config)


def test_a_rung_that_the_configs_other_keys_refuse_is_left_out(tmp_path: Path) -> None:
    one_bit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0}}
    found = ladder(options(tmp_path, BASE | one_bit, gpus=2, gpu_memory=10**6))
    assert [one.title for one in found] == ["this config", "micro-batch 1", "activation checkpointing"]


def test_gradients_are_in_transit_unless_they_stay_as_autograd_made_them(tmp_path: Path) -> None:
    def beside(samples: int, precision: str) -> tuple[int, int]:
        config = BASE | {"train_batch_size": samples, "zero_optimization": {}, "bf16": {"enabled": precision == "bf16"}}
        run, config = make_run(options(tmp_path, config))
        found, sizes = run.estimate(config), {one.name: math.prod(one.shape) for one in run.shapes}
        unit_numel = max(sum(sizes[name] for name in unit) for unit in run.units_of(10**9))
        return found.needed.device - found.plan.held_total.device - found.activations_bytes, unit_numel

    assert beside(4, "bf16")[0] == beside(8, "fp32")[0] == 0
    more, unit_numel = beside(8, "bf16")  # a sum in fp32
    assert more == 2 * unit_numel


def test_what_lacks_is_named_with_both_numbers() -> None:
    first = ladder(options(gpu_memory=10**7))[0]
    assert first.lacking == (f"device: {format_bytes(first.needed.device)} needed, 9.00 MB usable",)
    on_disk = ladder(options(disk=1000, memory=10**8, model="gpt-small"))[-1]
    assert on_disk.needed.disk > 1000
    assert "disk: " in on_disk.lacking[-1]


def test_with_state_on_disk_memory_is_used_as_far_as_a_budget_goes(tmp_path: Path) -> None:
    for memory in (10**9, 2 * 10**9):
        last = ladder(options(model="gpt-base", memory=memory))[-1]
        assert last.config["zstore"]["host_budget_bytes"] == memory * 60 // 100
        assert memory * 55 // 100 < last.needed.host <= memory * 60 // 100
        assert not last.lacking
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    run, config = make_run(options(tmp_path, BASE | {"zero_optimization": zero, "zstore": {"host_budget_bytes": 1000}}))
    assert run.estimate(config).lacking[0].startswith("host budget: ")


@pytest.mark.parametrize(
    ("params", "hidden", "layers"), [(7 * 10**9, 4096, 32), (13 * 10**8, 2048, 24), (10**12, 25600, 128)]
)
def test_numbers_give_a_model_of_that_size(params: int, hidden: int, layers: int) -> None:
    numbers = {"model": None, "hidden": hidden, "layers": layers, "vocab": 50257}
    run, config = make_run(options(**numbers, params=params))
    assert run.num_parameters == pytest.approx(params, rel=1e-3)
    assert (run.dims.hidden, run.dims.num_layers, run.dims.vocab_size) == (hidden, layers, 50257)
    held = run.estimate(config).plan.held
    assert {held[slot].total for slot in ("master", "exp_avg", "exp_avg_sq")} == {4 * run.num_parameters}
    with pytest.raises(ConfigError, match="have more than"):
        make_run(options(**numbers, params=10**8))
    with pytest.raises(UsageError, match="use --model instead"):
        run.estimate(config | {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}})


def test_a_transformers_config_is_planned_without_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    run, _ = make_run(options(model=str(tmp_path)))
    real = transformers.LlamaForCausalLM(config)
    assert run.num_parameters == sum(parameter.numel() for parameter in real.parameters())
    assert (run.dims.hidden, run.dims.num_layers, run.dims.vocab_size) == (64, 3, 300)


def test_the_command_prints_a_config_to_copy_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(model="gpt-base", memory=2 * GB, disk=10 * GB)
    assert plan_command(chosen) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert next(line for line in lines if line.startswith("│")).startswith("│ use: optimizer to CPU ")
    assert "use optimizer to CPU, with this config:" in lines
    config, _ = json.JSONDecoder().raw_decode(printed.out[printed.out.index("{\n") :])
    assert load_config(config).settings.zero_optimization.stage >= 1
    assert all(len(line) <= 100 for line in lines)
    assert "no: device" in printed.out
    assert "estimates" in printed.err
    found = found_json(capsys, chosen, 0)
    first = next(one for one in found["ladder"] if not one["lacking"])
    assert (found["fits"], first["title"], first["config"]) == ("optimizer to CPU", "optimizer to CPU", config)
    assert first["plan"].startswith("placement of the state on rank 0 of 1:")
    found = found_json(capsys, options(gpus=2, memory=10**7), 1)
    last, told = found["ladder"][-1], found["ladder"][-1]["plan"].splitlines()
    assert told[0] == "placement of the state on rank 0 of 2:"
    assert f"their files take {format_bytes(last['needed']['disk'])}, " in told[-2]


def test_of_a_config_it_says_that_it_fits_or_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_json(capsys, options(tmp_path, BASE), 0)
    assert (found["fits"], len(found["ladder"])) == ("this config", 1)
    config = BASE | {"zero_optimization": {"stage": 0}, "steps_per_print": 3}
    chosen = options(tmp_path, config, gpu_memory=20_000_000)
    found = found_json(capsys, chosen, 1)
    assert found["ladder"][0]["lacking"][0].startswith("device: ")
    fitting = next(one for one in found["ladder"] if one["title"] == found["fits"])
    assert load_config(fitting["config"]).settings.steps_per_print == 3
    assert fitting["config"] == apply_changes(config, fitting["changes"])
    assert fitting["config"]["gradient_accumulation_steps"] == 8
    assert plan_command(chosen) == 1
    said = capsys.readouterr().out
    assert "it does not fit: device: " in said
    assert "  train_micro_batch_size_per_gpu: 1\n" in said
    assert plan_command(options(tmp_path, config, gpu_memory=1000, memory=1000)) == 1
    assert "none of these configs fits" in capsys.readouterr().err


def test_auto_is_what_the_engine_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A device that is here but is not planned for has no say: it computes what the CPU does not.
    on_cpu = native_types(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: "bf16" not in on_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 0))
    chosen = options(gpus=0, gpu_memory=None)
    run, config = make_run(chosen)
    precision = run.resolved(config).precision
    assert precision == ("bf16" if "bf16" in on_cpu else "fp32")
    assert plan_command(chosen) == 0
    assert f'"auto" selects {precision}, since this CPU' in capsys.readouterr().err
    elsewhere, config = make_run(options(gpus=2))
    assert elsewhere.resolved(config).precision == "bf16"


def test_what_cannot_be_planned_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt-huge'"):
        make_run(PlanOptions(model="gpt-huge"))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--gpu-memory"):
            make_run(PlanOptions(model="gpt-tiny", gpus=2))
    run, config = make_run(options(tmp_path, {"bf16": {"enabled": "auto"}}, micro_batch=3))
    assert run.resolved(config).batch.micro_batch_size == 3
