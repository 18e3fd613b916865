"""Scripts that import deepspeed, run by `python -m zstore.as_deepspeed`; what a process sees of it, and its names."""

import base64
import json
import math
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine.schedule_cases import OWN_LR, adam
from tests.launched import run
from zstore.engine.access import safe_access
from zstore.engine.adapters.deepspeed import optimizers
from zstore.engine.adapters.deepspeed.engine import initialize
from zstore.engine.adapters.deepspeed.names import (
    ALL_MODULES,
    LEAF_FUNCTIONS,
    MODULES,
    SAFE_ACCESSORS,
    SCHEDULES,
    TORCH_COMM,
    UNSUPPORTED,
    StandInModule,
    populate,
    unsupported,
)
from zstore.engine.adapters.deepspeed.utils import raw_config, without_ignored_keys
from zstore.errors import ConfigError, UsageError
from zstore.journal import run_of
from zstore.tools.as_deepspeed import install

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
AS_DEEPSPEED = ("-m", "zstore.as_deepspeed")
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2},
}


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.match(r"rank 0 step \d+ loss (\S+)", line))]


def plain_losses(steps: int) -> list[float]:
    found, _ = run("-c", PLAIN, SCRIPTS / "deepspeed" / "gpt.py", steps)
    return [float(line) for line in found]


PLAIN = """
import runpy, sys
import torch
from zstore.tools.as_deepspeed import install_finder
install_finder()
script = runpy.run_path(sys.argv[1])
torch.manual_seed(1234)
model, data = script["GPT"](), script["Tokens"]()
decayed = [p for n, p in model.named_parameters() if "norm" not in n]
plain = [p for n, p in model.named_parameters() if "norm" in n]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
for step in range(2 * int(sys.argv[2])):
    batch = torch.stack([data[(8 * step + i) % len(data)] for i in range(8)])
    loss = model(batch[:, :-1], batch[:, 1:])
    (loss / 2).backward()
    if step % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(repr(loss.item()))
"""


def test_a_gpt_script_trains_as_the_plain_loop_and_goes_on_at_another_world_size(tmp_path: Path) -> None:
    script = SCRIPTS / "deepspeed" / "gpt.py"
    (tmp_path / "nvme").mkdir()
    save = ("--save", tmp_path / "ckpt")
    disk = ("--zero_stage", 3, "--nvme_path", tmp_path / "nvme")
    first, errors = run(*AS_DEEPSPEED, script, "--steps", 4, *save, *disk, world_size=2)
    expected = plain_losses(8)
    assert losses(first) == pytest.approx(expected[:8], rel=1e-5)
    assert re.match(r"rank 0 saved \['global_step4', 'journal-\w+.jsonl', 'latest', 'zero_to_fp32.py'\] sum", first[-1])
    assert errors.count("started together") == 1
    again, _ = run(*AS_DEEPSPEED, script, "--load", tmp_path / "ckpt")
    assert losses(again) == pytest.approx(expected[8:], rel=1e-5)


def unmodified(script: str, folder: Path) -> Path:
    text = (SCRIPTS / f"{script}.py").read_text()
    assert text.count("\nimport zstore as deepspeed\n") == 1
    path = folder / f"{script}.py"
    path.write_text(text.replace("\nimport zstore as deepspeed\n", "\nimport deepspeed\n"))
    return path


def test_a_script_prints_what_it_prints_with_zstore_imported(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    words = ("--deepspeed", "--deepspeed_config", config, "--steps", 6)
    ours, _ = run(SCRIPTS / "getting_started.py", *words)
    theirs, _ = run(*AS_DEEPSPEED, unmodified("getting_started", tmp_path), *words)
    assert theirs == ours
    assert len(losses(ours)) == 6


def test_the_example_runs(tmp_path: Path) -> None:
    lines, errors = run(*AS_DEEPSPEED, ROOT / "examples" / "deepspeed_script.py", "--out", tmp_path)
    found = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(found) == 4
    assert found[-1] < 0.5 * found[0]
    assert f"saved {tmp_path}" in errors
    assert (tmp_path / "global_step20").is_dir()


def test_names_that_are_there_and_names_that_are_not(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own = 'own'\n")
    lines, errors = run(*AS_DEEPSPEED, SCRIPTS / "deepspeed" / "names.py", PYTHONPATH=str(tmp_path))
    told = dict(line.split(" ", 1) for line in lines if not line.startswith("missing"))
    assert re.fullmatch(r"0\.19\.8\+zstore\.\S+", told["version"])
    assert told["spawned"] == told["version"]
    # The environment's own sitecustomize is not lost.
    assert re.fullmatch(r"ModuleSpec\(name='deepspeed'.*zstore\.as_deepspeed.*\) own", told["started"])
    assert told["elsewhere"] == "None None"
    lacking = [line for line in lines if line.startswith("missing")]
    assert len(lacking) == 7
    assert all("`import deepspeed` imports zstore in this run (--as-deepspeed)" in line for line in lacking)
    assert "deepspeed.pipe.PipelineModule is not available" in lacking[1]
    assert "ZeRO stage 3" in lacking[1]
    assert "deepspeed.init_inference is not available" in lacking[2]
    assert "zstore consolidate" in lacking[2]
    assert "is installed; this run" not in errors


NOTEBOOK = """
import sys
for name in ("accelerate.utils", "transformers.integrations.deepspeed", "transformers.trainer"):
    sys.modules.pop(name, None)  # where a process has them from its start
import zstore.as_deepspeed
import deepspeed, torch
deepspeed.init_distributed()
print(torch.distributed.get_world_size(), torch.distributed.get_rank())
net = torch.nn.Linear(4, 2)
sections = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sections)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
print(engine.global_steps)
"""


def test_a_notebook_is_one_rank() -> None:
    assert run("-c", NOTEBOOK)[0] == ["1 0", "1"]


def test_a_deepspeed_that_is_installed_is_not_used_and_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('the other one')\n")
    (tmp_path / "deepspeed-0.15.0.dist-info").mkdir()
    (tmp_path / "deepspeed-0.15.0.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.15.0\n")
    (tmp_path / "script.py").write_text(
        "import sys, importlib.metadata\nimport deepspeed\n"
        "print(__name__, __file__, sys.argv[1:], sys.path[0])\n"
        "print(importlib.metadata.version('deepspeed') == deepspeed.__version__)\n"
    )
    script = tmp_path / "script.py"
    lines, errors = run(*AS_DEEPSPEED, "--local_rank", script, "a", PYTHONPATH=str(tmp_path))
    assert lines == [f"__main__ {script} ['--local_rank=0', 'a'] {tmp_path}", "True"]
    assert errors.count("DeepSpeed 0.15.0 is installed; this run") == 1
    lines, _ = run(*AS_DEEPSPEED, "-m", "script", "b", PYTHONPATH=str(tmp_path))
    assert lines[0].startswith(f"__main__ {script} ['b'] ")


@pytest.mark.parametrize("words", [(), ("--stage",), ("missing.py",)])
def test_a_call_without_a_script_is_refused(words: tuple[str, ...]) -> None:
    _, errors = run(*AS_DEEPSPEED, *words, code=2)
    assert "usage: python -m zstore.as_deepspeed" in errors or "can't open 'missing.py'" in errors


@pytest.mark.parametrize("name", ["deepspeed", "accelerate.utils", "transformers.trainer"])
def test_installing_too_late_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("accelerate.utils", "transformers.trainer", "transformers.integrations.deepspeed"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    before = list(sys.meta_path)
    with pytest.raises(UsageError, match="was already imported"):
        install()
    assert sys.meta_path == before


def test_configs_are_read_as_deepspeed_is_given_them(tmp_path: Path) -> None:
    config: Any = {"steps_per_print": math.inf, "zero_optimization.reduce_bucket_size": 1, "zero_optimization": {}}
    assert without_ignored_keys(config) == {"steps_per_print": 0, "zero_optimization": {}}
    assert "zero_optimization.reduce_bucket_size" in config
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4} // as it was')
    assert raw_config(str(tmp_path / "ds.json")) == {"train_batch_size": 4}
    assert raw_config(base64.urlsafe_b64encode(b'{"train_batch_size": 2}').decode()) == {"train_batch_size": 2}


def test_what_deepspeed_has_and_zstore_has_not_is_refused_where_it_is_asked_for() -> None:
    from zstore.engine.adapters.deepspeed import optimizers, utils, zero
    from zstore.engine.adapters.deepspeed.engine import initialize
    from zstore.optim import Lion

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    for call in (
        lambda: optimizers.FusedLamb(parameters, amsgrad=True),
        lambda: optimizers.FusedLamb(parameters, max_grad_norm=1.0),
        lambda: optimizers.DeepSpeedCPUAdagrad(parameters, amsgrad=True),
        lambda: zero.Init(zero_quantized_weights=True),
        lambda: zero.Init(param_swapper=object()),
        lambda: initialize(model=torch.nn.Linear(1, 1), config={}, mesh_param=(1, 1)),
        lambda: utils.set_z3_leaf_modules(torch.nn.Linear(1, 1), ["Expert"]),
    ):
        with pytest.raises(UsageError):
            call()
    assert type(optimizers.DeepSpeedCPUAdam(parameters)) is torch.optim.AdamW
    assert type(optimizers.DeepSpeedCPUAdam(parameters, adamw_mode=False)) is torch.optim.Adam
    assert type(optimizers.FusedAdam(parameters, adam_w_mode=False)) is torch.optim.Adam
    assert type(optimizers.DeepSpeedCPUAdagrad(parameters)) is torch.optim.Adagrad
    assert optimizers.FusedAdam(parameters, bias_correction=False).param_groups[0]["bias_correction"] is False
    assert optimizers.DeepSpeedCPUAdam(parameters, amsgrad=True).param_groups[0]["amsgrad"] is True
    assert type(optimizers.FusedLion(parameters)) is type(optimizers.DeepSpeedCPULion(parameters)) is Lion
    assert optimizers.FusedLamb(parameters, max_coeff=2.0).param_groups[0]["max_coeff"] == 2.0
    assert utils.get_local_rank() == int(os.environ.get("LOCAL_RANK", "-1"))
    with utils.OnDevice(torch.bfloat16, device="meta"):
        made = torch.nn.Linear(2, 2)
    assert made.weight.is_meta
    assert made.weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def test_schedules_take_deepspeeds_order_of_arguments_and_a_first_step() -> None:
    from zstore.engine.adapters.deepspeed import optimizers

    optimizer = adam()
    schedule: Any = optimizers.WarmupLR(optimizer, 0.1, 1.1, 4, "log", 1)
    assert optimizer.param_groups[0]["lr"] == OWN_LR
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.892481250361)
    with pytest.raises(ConfigError, match=r"warmup_num_steps.*at least 0"):
        optimizers.WarmupLR(optimizer, warmup_num_steps=-1)
    with pytest.raises(UsageError, match="at most once"):
        optimizers.WarmupLR(optimizer, 0.1, warmup_min_lr=0.1)


def test_the_engine_has_what_scripts_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from zstore.engine.adapters.deepspeed import engine as engines
    from zstore.engine.adapters.deepspeed import optimizers, utils, zero
    from zstore.engine.adapters.deepspeed.names import VALUES
    from zstore.engine.adapters.deepspeed.zero import ZeroParamStatus
    from zstore.tools import zero_to_fp32

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 8},
    }
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = optimizers.WarmupLR(client, warmup_max_lr=0.1, warmup_num_steps=4)
    engine, optimizer, loader, scheduler = engines.initialize(
        model=model, optimizer=lambda _: client, config=config, lr_scheduler=schedule
    )
    with engine:
        assert isinstance(engine, engines.DeepSpeedEngine)
        assert (engine.optimizer, loader, scheduler) == (optimizer, None, schedule)
        assert engine.config == config
        assert optimizer.optimizer is engine.client_optimizer is engine.basic_optimizer is client
        assert (engine.optimizer_name(), engine.scheduler_name(), engine.dynamic_loss_scale()) == ("sgd", None, True)
        assert (engine.dp_world_size, engine.mp_world_size) == (1, 1)
        assert engine.zero_offload_param() == {"device": "cpu"}
        assert (engine.zero_offload_optimizer(), engine.zero_cpu_offload()) == (None, False)
        assert not engine.zero_gather_16bit_weights_on_model_save()
        groups = VALUES["deepspeed.utils.groups"]
        kinds = ("get_data_parallel_world_size", "_get_sequence_parallel_world_size", "get_model_parallel_rank")
        assert [groups[name]() for name in kinds] == [1, 1, 0]
        weight: Any = model.weight
        bias: Any = model.bias
        assert (weight.ds_shape, weight.ds_numel, bias.ds_id) == (weight.shape, 16, weight.ds_id + 1)
        assert (weight.ds_status, bias.ds_status) == (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE)
        with zero.GatheredParameters({bias, weight, torch.zeros(1)}, modifier_rank=0):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
            weight.data.fill_(1)
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        with pytest.raises(AttributeError, match=r"engine\.allreduce_gradients is not available.*engine\.step"):
            engine.allreduce_gradients()
        with pytest.raises(UsageError, match="lr_kwargs"):
            engine.step(lr_kwargs={"epoch": 1})
        overflows = []
        for _ in range(20):
            engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)).float().pow(2).mean() * 256)
            engine.step()
            overflows.append(optimizer.overflow)
            if not optimizer.overflow:
                break
        assert len(overflows) > 1
        assert overflows == [True] * (len(overflows) - 1) + [False]
        for _ in range(2):
            engine.save_checkpoint(str(tmp_path))
        named = sorted(path.name for path in tmp_path.iterdir() if run_of(path.name) is None)
        assert named == [f"global_step{len(overflows)}", "latest", "zero_to_fp32.py"]
        run(tmp_path / "zero_to_fp32.py", ".", "weights", "--safe_serialization", cwd=tmp_path)
        saved = load_file(tmp_path / "weights" / "model.safetensors")["weight"]
        assert saved.dtype is torch.float32
        assert torch.equal(saved, engine.get_full_parameter("weight"))
        _, errors = run(tmp_path / "zero_to_fp32.py", ".", "weights", cwd=tmp_path, code=1)
        assert "zero_to_fp32.py: " in errors.splitlines()[-1]
        path, _ = engine.load_checkpoint(str(tmp_path), None, True, True, True)
        assert path is not None
        with pytest.raises(UsageError, match="custom_load_fn"):
            engine.load_checkpoint(str(tmp_path), custom_load_fn=print)
        whole = engine._zero3_consolidated_16bit_state_dict()
        assert whole["weight"].dtype is torch.float16
        assert model.state_dict()["weight"] is whole["weight"]  # as long as it is kept
        del whole
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        assert shapes == {"weight": (0,), "bias": tuple(bias.shape)}
        assert "sharded parameters as empty tensors, as in DeepSpeed" in caplog.text
        weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        assert torch.equal(weights["weight"], engine.get_full_parameter("weight"))
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path / "out"))
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], weights["weight"])
        utils.see_memory_usage("here", force=True)
        with pytest.raises(UsageError, match="outside a forward"):
            utils.clone_tensors_for_torch_save({"a": [weight]})
        with zero.GatheredParameters([weight]):
            assert torch.equal(utils.clone_tensors_for_torch_save({"a": [weight]})["a"][0], weight)
    batches = utils.RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_a_reference_model_is_built_by_the_config_of_training_and_initialized_by_another(tmp_path: Path) -> None:
    from zstore.engine.adapters.deepspeed import engine as engines
    from zstore.engine.adapters.deepspeed import zero

    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    whole: dict[str, Any] = {"stage": 3, "offload_param": disk, "stage3_param_persistence_threshold": 0}
    torch.manual_seed(0)
    plain = torch.nn.Linear(32, 32)
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path={"zero_optimization": whole | {"offload_optimizer": disk}}):
        model = torch.nn.Linear(32, 32)
    engine, *_ = engines.initialize(model=model, config={"zero_optimization": whole})
    with engine, torch.no_grad():
        assert torch.equal(engine(torch.ones(1, 32)), plain(torch.ones(1, 32)))


def test_the_page_lists_the_names_that_are_there() -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    table = page.partition("| module | supported names |")[2].partition("\n\n")[0]
    known = {"AdamW", "Adam", "Adagrad", "activation_checkpointing", "zstore.optim"}
    listed = set(re.findall(r"`([^`]+)`", table)) - known
    there = {name for homes in MODULES.values() for names in homes.values() for name in names}
    modules = {dotted.rpartition(".")[2] for dotted in ALL_MODULES} | ALL_MODULES
    assert {name.rpartition(".")[2] for name in listed if name not in modules} <= there | {"__version__"}
    plain = there - set(f"{TORCH_COMM} {SCHEDULES} {LEAF_FUNCTIONS} {SAFE_ACCESSORS}".split())
    unlisted = plain - {name.rpartition(".")[2] for name in listed}
    assert unlisted == {"zero_wrapper_for_fp_tensor_constructor"}


STEP = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


@pytest.mark.parametrize("dotted", sorted(f"{module}.{n}" for module, names in UNSUPPORTED.items() for n in names))
def test_what_is_not_built_raises_when_it_is_used(dotted: str) -> None:
    kind = unsupported(dotted)
    derived = type("Derived", (kind,), {})
    assert not isinstance(nn.Linear(1, 1), kind)
    for each in (kind, derived):
        with pytest.raises(UsageError, match=dotted):
            each()


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_names(module: str) -> None:
    filled = StandInModule(module)
    populate(filled)
    assert {name for names in MODULES[module].values() for name in names} <= set(vars(filled))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engines_state_is_seen_and_set_by_deepspeeds_names(stage: int) -> None:
    model = _model()
    config: dict[str, Any] = {**STEP, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine, optimizer, *_ = initialize(model=model, config=config)
    with engine:
        weight, plain = next(model.parameters()), next(_model().parameters())
        adam = torch.optim.Adam([plain], lr=0.1)
        for factor in (0.25, -1.0):
            engine.backward(engine(torch.ones(1, 8)).sum())
            safe_access.safe_set_full_grad(weight, torch.full((8, 8), factor / 2))
            rows = safe_access.safe_get_local_grad(weight)
            safe_access.safe_set_local_grad(weight, rows * 2)
            plain.grad = torch.full((8, 8), factor)
            engine.step()
            adam.step()
        torch.testing.assert_close(safe_access.safe_get_full_fp32_param(weight), plain.data, rtol=1e-6, atol=1e-6)
        safe_access.safe_set_local_optimizer_state(weight, torch.arange(64.0), "exp_avg")
        safe_access.safe_set_local_fp32_param(weight, torch.arange(64.0))
        assert torch.equal(weight.data.flatten(), torch.arange(64.0))
        for found in (
            safe_access.safe_get_local_optimizer_state(weight, "exp_avg"),
            safe_access.safe_get_local_fp32_param(weight),
        ):
            assert torch.equal(found, torch.arange(64.0))
        assert isinstance(optimizer, optimizers.FusedAdam)
        assert not isinstance(optimizer, optimizers.FusedLion)
        assert int(optimizer.state[weight]["step"]) == 2
        if stage == 3:
            assert weight.ds_tensor.shape == (64,)


def test_a_gradient_is_set_where_there_is_one_and_it_is_complete() -> None:
    config = {**STEP, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        weight = next(engine.module.parameters())
        values = torch.ones(8, 8)
        with pytest.raises(UsageError, match="no gradient"):
            safe_access.safe_set_full_grad(weight, values)
        engine.backward(engine(torch.ones(1, 8)).sum())
        with pytest.raises(UsageError, match="last backward"):
            safe_access.safe_set_full_grad(weight, values)
