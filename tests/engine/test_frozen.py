"""Engines without an optimizer: the plain model's losses and text, 16-bit weights alone, beside an engine that trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, state_of, step
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.store.options import RUN_FOLDER
from zstore.testing.ranks import run_ranks

BIG = {"vocab": 3001, "width": 48}
"""So that its embedding rests on disk, on two ranks too."""


def config_of(nvme: Path, tier: str, stage: int = 3, **keys: Any) -> dict[str, Any]:
    config = make_config(stage, tier if stage else "none", nvme, tier if stage == 3 else "none")
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    del config["gradient_accumulation_steps"], config["steps_per_print"]
    params = {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    config["scheduler"] = {"type": "WarmupLR", "params": params}
    return config | keys


def frozen(model: nn.Module, config: dict[str, Any], **kwargs: Any) -> Engine:
    engine, optimizer, _, scheduler = zstore.initialize(model=model, config=config, frozen=True, **kwargs)
    assert (optimizer, scheduler, engine.optimizer, engine.lr_scheduler) == (None, None, None, None)
    return engine


def check_memory(engine: Engine) -> None:
    """Nothing is planned and nothing is held but this rank's rows of the parameters, in their own type."""
    state, plan, found = engine.training_state.state, engine.training_state.plan, engine.statistics()
    assert (plan.held["gradients"].total, plan.held["master"].total, plan.written_bytes) == (0, 0, 0)
    assert set(plan.held) == {"parameters", "gradients", "master", "buffers"}
    assert (found.held.gradients, found.held.optimizer_state) == (0, 0)
    arrays = state.store.names()
    assert all(name.startswith("model/") for name in arrays)
    assert sum(state.store.local(name).nbytes for name in arrays) == sum(2 * r.owned_numel for r in state.records)
    tiers = found.store.device_bytes + found.store.host_bytes + found.store.disk_bytes
    assert tiers == sum(2 * record.owned_numel for record in state.records)


SETUPS = [("none", 0), ("cpu", 1), ("nvme", 2), ("none", 3), ("cpu", 3), ("nvme", 3)]
ON_RANKS = [("nvme", 2), ("none", 3), ("nvme", 3)]


def check_setups(rank: int, world_size: int, folder: str) -> None:
    plain = make_net(**BIG).bfloat16()
    data = [batch(0, micro, rank) for micro in range(2)]
    with torch.no_grad():
        expected = [plain(*each) for each in data]
    for tier, stage in SETUPS if world_size == 1 else ON_RANKS:
        nvme = Path(folder) / f"{tier}{stage}"
        nvme.mkdir(exist_ok=True)
        # Alone both ways of building; on two ranks each once.
        for built in (False, True) if world_size == 1 else (tier == "nvme",):
            config = config_of(nvme, tier, stage)
            with zstore.Init(config=config, enabled=built):
                model = make_net(**BIG)
            with frozen(model, config) as engine:
                check_memory(engine)
                assert not any(p.requires_grad for p in model.parameters())
                with torch.no_grad():
                    assert [engine(*each) for each in data] == expected
                assert not engine(*data[0]).requires_grad
                assert [engine(*each) for each in data] == expected
                mean = engine.eval_batch(iter(data), 2)
                for name in ("embed.weight", "frozen.bias", "blocks.1.gain"):
                    whole = engine.get_full_parameter(name)
                    assert torch.equal(whole, plain.get_parameter(name))
                engine.set_full_parameter("norm.weight", torch.full((48,), 2.0))
                assert float(engine.eval_batch(iter(data), 2)) != float(mean)
                if (tier, stage, world_size) == ("nvme", 3, 1):
                    on_disk, resting = sum(p.stat().st_size for p in nvme.rglob("*.shard")), engine.statistics().store
                    assert 250_000 < resting.disk_bytes <= on_disk < 1.2 * resting.disk_bytes


def test_a_frozen_engine_gives_the_plain_losses_and_holds_16_bit_weights_alone(tmp_path: Path) -> None:
    check_setups(0, 1, str(tmp_path))


def llama() -> nn.Module:
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1200, **shape)).eval()


def check_ranks(rank: int, world_size: int, folder: str) -> None:
    check_setups(rank, world_size, folder)
    check_beside(rank, world_size, folder)


def check_beside(rank: int, world_size: int, folder: str) -> None:
    """Frozen engines beside one that trains, on one `nvme_path`."""
    nvme = Path(folder) / "nvme"
    nvme.mkdir(exist_ok=True)
    config = config_of(nvme, "nvme") | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"zstore": {}, "optimizer": make_config()["optimizer"], "scheduler": None, "gradient_clipping": 1.0}
    with start(config, make_net(**BIG)) as alone:
        for _ in range(2):
            step(alone)
        expected = state_of(alone)
    with start(config, make_net(**BIG)) as policy:
        step(policy)
        model = zstore.from_pretrained(transformers.LlamaForCausalLM, Path(folder) / "llama", config=config)
        with frozen(model, config) as other, frozen(make_net(5, **BIG), config) as reference:
            step(policy)
            assert state_of(policy) == expected
            check_text(other, rank)
            ids = batch(9, 0, rank)
            assert float(policy(*ids).detach()) != float(reference(*ids))
            policy.save_checkpoint(folder, "step", {"note": 3})
            assert reference.load_checkpoint(folder, "step")[1] == {"note": 3}
            assert float(policy(*ids).detach()) == float(reference(*ids))
            assert reference.global_steps == 0
            check_memory(reference)
            reference.save_16bit_model(f"{folder}/weights{world_size}")
            reference.save_checkpoint(f"{folder}/frozen{world_size}", "as it is", {"note": 4})
            held = engine_digests(reference)
        with frozen(make_net(6, **BIG), config) as other:
            assert other.load_checkpoint(f"{folder}/frozen{world_size}")[1] == {"note": 4}
            assert engine_digests(other) == held
            assert float(policy(*ids).detach()) == float(other(*ids))
    mine = f"rank-{rank:05d}"
    assert [path.name for path in (nvme / RUN_FOLDER).glob(f"{mine}*")] == [mine]
    assert [path.name for path in (nvme / RUN_FOLDER / mine).iterdir()] == ["owner"]


def check_text(engine: Engine, rank: int) -> None:
    plain = llama().bfloat16()
    prompts = torch.randint(2, 1200, (2, 5), generator=torch.Generator().manual_seed(rank))
    chosen = {"max_new_tokens": 4 + rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        expected = plain.generate(prompts, **chosen)  # type: ignore[operator]
        assert torch.equal(engine.generate(prompts, **chosen), expected)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_frozen_engines_run_beside_one_that_trains(tmp_path: Path, world_size: int) -> None:
    llama().bfloat16().save_pretrained(tmp_path / "llama")
    if world_size == 1:
        check_beside(0, 1, str(tmp_path))
    else:
        run_ranks(check_ranks, world_size, world_size, str(tmp_path))


def test_what_needs_an_optimizer_is_refused_and_the_way_out_named(tmp_path: Path) -> None:
    with frozen(make_net(), config_of(tmp_path, "none", 0)) as engine:
        ids = batch(0, 0, 0)
        loss = engine(*ids)
        for call in (
            lambda: engine.backward(loss),
            engine.step,
            lambda: engine.train_batch(iter([ids])),
            lambda: engine.save_on_signal(str(tmp_path)),
            lambda: engine.set_train_batch_size(4),
        ):
            with pytest.raises(UsageError, match=r"has no optimizer.* call initialize\(\) without frozen=True, with"):
                call()
        assert engine.get_lr() == []
        assert engine.get_gradient("norm.weight") is None
        with pytest.raises(UsageError, match="is not trained"):
            engine.get_optimizer_state("norm.weight", "exp_avg")
    net = make_net()
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(UsageError, match="omit optimizer and lr_scheduler"):
        zstore.initialize(model=net, optimizer=adam, config=config_of(tmp_path, "none", 0), frozen=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_of_a_model_alone_saves_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int) -> None:
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    plain = make_net().state_dict()
    engine, optimizer, _, scheduler = zstore.initialize(model=make_net(), config=config)
    with engine:
        assert (optimizer, scheduler) == (None, None)
        assert "names no optimizer: the engine can evaluate, load and save" in caplog.text
        engine.save_checkpoint(str(tmp_path), client_state={"epoch": 2})
    with zstore.open_checkpoint(tmp_path) as opened:
        saved = opened.load_state_dict()
    assert saved.keys() <= plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in saved)
    with zstore.initialize(model=make_net(5), config=config)[0] as other:
        assert other.load_checkpoint(str(tmp_path))[1] == {"epoch": 2}
        found = other.module_state_dict()
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    with start(make_config(stage), make_net(5)) as trains:
        with pytest.raises(CheckpointMismatchError, match="missing: optimizer/exp_avg/"):
            trains.load_checkpoint(str(tmp_path))
        trains.load_checkpoint(str(tmp_path), load_module_only=True)
        assert torch.equal(trains.get_full_parameter("norm.weight"), plain["norm.weight"])


def test_batch_sizes_that_are_known_are_used(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    for given, found in (({}, (1, 1, 1)), (sizes, (12, 4, 3)), (sizes | {"train_batch_size": 9}, (4, 4, 1))):
        with frozen(make_net(), config_of(tmp_path, "none", 0, zstore={"moments": "bf16"}) | given) as engine:
            batch = engine.training_state.accumulation.batch
            assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps) == found
