"""`zstore.Init`: models built in shards have the plain model's values, in little memory; test_bits.py trains them."""

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zstore
from tests.engine.init_models import (
    Handmade,
    Stack,
    config_of,
    differences,
    files_in,
    grown_bytes,
    num_released,
    seeded,
)
from tests.engine.models import make_net
from tests.engine.runs import state_of, step
from tests.engine.transformers_models import ARCHITECTURES
from zstore.engine.build.builder import Builder, open_blocks
from zstore.errors import ConfigError, DiskFullError, RankError, RunFolderError, UsageError
from zstore.testing.ranks import run_ranks

MODELS: dict[str, Callable[[], nn.Module]] = {
    "handmade": Handmade,
    "net": make_net,
    **{name: ARCHITECTURES[name].make for name in ("GPT-Neo", "Llama", "T5", "Mixtral", "BERT")},
}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("live_bytes", [0, 100_000])
def test_values_are_the_plain_models(name: str, live_bytes: int, tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path), live_bytes=live_bytes) as init:
        model = seeded(MODELS[name])
    drawn = torch.get_rng_state()
    assert num_released(model) > 3
    assert init.statistics().live_bytes == 0
    with init:
        found = values_of(model)
    plain = seeded(MODELS[name])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert differences(found, values_of(plain)) == []
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in plain.named_parameters()
    ]


def _build_on_ranks(rank: int, folder: str, names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        with zstore.Init(config=config_of(folder), live_bytes=0) as init:
            model = seeded(MODELS[name])
        with init:
            found += [f"{name}: {other}" for other in differences(values_of(model), values_of(seeded(MODELS[name])))]
        if num_released(model) < 3:
            found.append(f"{name}: nothing was released")
        del model
        init.close()
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_values_are_the_plain_models_on_every_rank(world_size: int, tmp_path: Path) -> None:
    names = ["handmade", "Llama", "T5"]
    assert run_ranks(_build_on_ranks, world_size, str(tmp_path), names) == [[]] * world_size


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_stay_in_the_files_that_they_were_built_in(precision: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, bf16={"enabled": precision == "bf16"})
    with zstore.Init(config=config) as init:
        model = make_net()
    on_disk = sum(p.numel() for p in model.parameters() if p.nbytes >= 64 * 1024)
    assert files_in(tmp_path)[0].startswith("building")
    with zstore.initialize(model=model, config=config)[0] as engine:
        assert init.statistics().stored_bytes == 0
        # Once as it was built, in fp32, and the halves; in whole blocks, so a little more.
        expected = on_disk * (6 if precision == "bf16" else 4)
        assert expected <= engine.statistics().store.disk_write_bytes < 1.1 * expected
        assert not any(name.startswith("building") for name in files_in(tmp_path))
        step(engine)
        whole = [engine.get_full_parameter(name) for name, _ in model.named_parameters()]
        assert num_released(engine.hand_back(config)) > 3
    with zstore.gather(model):
        assert all(map(torch.equal, model.parameters(), whole))


def test_a_model_may_be_released_after_it_was_built_and_after_an_engine(tmp_path: Path) -> None:
    config, model = config_of(tmp_path), make_net()
    zstore.Init(module=model, config=config)
    assert num_released(model) > 3
    with zstore.initialize(model=model, config=config)[0] as engine:
        step(engine)
        found = state_of(engine)
        whole = [engine.get_full_parameter(name) for name, _ in model.named_parameters()]
        # Of a part: what the next engine does not have would be lost with its store.
        zstore.initialize(model=model.blocks, config=config)[0].hand_back()
    assert all(map(torch.equal, model.parameters(), whole))
    zstore.Init(module=model, config=config)
    assert num_released(model) > 3
    with zstore.initialize(model=make_net(), config=config)[0] as engine:
        step(engine)
        assert found == state_of(engine)


def test_a_failed_hand_back_may_be_called_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, 0, "none", "none", bf16={"enabled": False})
    full = patch.object(Builder, "agree_on_values", side_effect=DiskFullError("no room", path="x"))
    with zstore.initialize(model=make_net(), config=config)[0] as engine:
        whole = [engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()]
        with full, pytest.raises(DiskFullError):
            engine.hand_back(config_of(tmp_path))
        assert all(map(torch.equal, engine.hand_back().parameters(), whole))


@pytest.mark.parametrize("place", [(0, "none", "none"), (3, "none", "none"), (1, "none", "none")])
def test_where_nothing_is_gained_nothing_is_done(place: tuple[int, str, str], tmp_path: Path) -> None:
    blocks = zstore.Init(config=config_of(tmp_path, *place)), zstore.Init(config=config_of(tmp_path), enabled=False)
    for init in (*blocks, zstore.Init()):
        with init:
            model = make_net()
        assert num_released(model) == 0
    with zstore.initialize(model=model, config=config_of(tmp_path))[0] as engine:
        step(engine)


def test_dtype_is_the_default_of_the_block(tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path), dtype=torch.bfloat16) as init:
        model = seeded(Stack)
    assert torch.get_default_dtype() == torch.float32
    with init:
        found = values_of(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        expected = values_of(seeded(Stack))
    finally:
        torch.set_default_dtype(torch.float32)
    assert differences(found, expected) == []
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


_WIDE = """
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1536, 1536) for _ in range(32)])
        self.apply(self._start)
    def _start(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()
config["zero_optimization"]["offload_optimizer"]["buffer_count"] = 4
with zstore.Init(config=config, live_bytes=0):
    small = nn.Linear(1536, 1536)  # whatever the first use brings in
before = peak()
with zstore.Init(config=config, live_bytes=16 << 20):
    model = Wide()
"""


def test_the_process_stays_small_while_a_large_model_is_built(tmp_path: Path) -> None:
    assert grown_bytes(_WIDE, tmp_path) < 130e6, "302 MB of parameters, 64 MiB of buffers"
    assert files_in(tmp_path) == []


def test_a_model_that_was_not_given_to_the_engine_says_what_to_do(tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path)) as init:
        model = seeded(Stack)
    assert model.layers[0].weight.isnan().all()
    with pytest.raises(RuntimeError), torch.no_grad():
        model.layers[0].weight.add_(1)
    plain = seeded(Stack).state_dict()
    for call in (lambda: model(torch.zeros(2, 128)), model.state_dict, lambda: model.load_state_dict(plain)):
        with pytest.raises(UsageError, match=r"built within zstore.Init.*pass the model to zstore.initialize\(\)"):
            call()
    with init:
        model.load_state_dict(seeded(Stack, 7).state_dict())
        assert model(torch.ones(2, 128)).item() == seeded(Stack, 7)(torch.ones(2, 128)).item()
    with init:
        assert not torch.stack(type("Weights", (list,), {})([model.layers[0].weight])).isnan().any()
        assert differences(values_of(model), values_of(seeded(Stack, 7))) == []


def test_gather_works_before_there_is_an_engine(tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path)):
        model = seeded(Stack)
    first, second = model.layers[0].weight, model.layers[1].weight
    with zstore.gather(model):
        assert differences(values_of(model), values_of(seeded(Stack))) == []
    with zstore.gather([first], modifier_rank=0):
        with torch.no_grad():
            first.fill_(2.0)
        assert second.isnan().all()
    assert first.isnan().all()

    def change() -> None:
        with zstore.gather(second), torch.no_grad():
            second.fill_(3.0)

    def fail() -> None:
        with zstore.gather(second, modifier_rank=0), torch.no_grad():
            second.fill_(3.0)
            raise ZeroDivisionError

    with pytest.raises(UsageError, match="is read-only"):
        change()
    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(UsageError, match="there are ranks 0 to 0"), zstore.gather(second, modifier_rank=1):
        pass
    with zstore.gather(model):
        assert first.eq(2.0).all()
        assert torch.equal(second, seeded(Stack).layers[1].weight)
    with zstore.initialize(model=model, config=config_of(tmp_path))[0], zstore.gather(first):
        assert first.eq(2.0).all()


def _changed_by_rank_1(rank: int, stage: int) -> list[list[float]]:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            with zstore.gather(self.linear.weight, modifier_rank=1), torch.no_grad():
                self.linear.weight.fill_(rank + 3.0)

    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    with zstore.Init(config=config):
        torch.manual_seed(0)
        model = nn.ModuleList([Small(), nn.Linear(4, 4)])
    with zstore.gather(model, modifier_rank=1), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank + 1.0)
    with suppress(ZeroDivisionError), zstore.gather(model[1].bias, modifier_rank=1):
        with torch.no_grad():
            model[1].bias.fill_(9.0)
        raise ZeroDivisionError
    plain = model[1].bias.flatten().tolist()
    with zstore.initialize(model=model, config=config)[0], zstore.gather(model):
        return [plain, *(value.flatten().tolist() for value in model.parameters())]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_gather_takes_one_ranks_values_of_small_parameters(stage: int) -> None:
    torch.manual_seed(0)
    small, large = nn.Linear(3, 2), nn.Linear(4, 4)
    wanted = [[6.0] * 6, *((p + 2.0).flatten().tolist() for p in (small.bias, large.weight, large.bias))]
    assert run_ranks(_changed_by_rank_1, 2, stage) == [[wanted[-1], *wanted]] * 2


def test_a_model_that_is_gone_leaves_no_files(tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path)) as init:
        model = seeded(Stack)
        again = seeded(Stack)
    assert len(files_in(tmp_path)) == 32  # biases stay in memory
    del again
    gc.collect()
    assert init.statistics().stored_bytes == sum(p.nbytes for p in model.parameters())
    assert len(files_in(tmp_path)) == 16
    del init, model
    gc.collect()
    assert files_in(tmp_path) == []


def test_two_blocks_share_the_run_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with zstore.Init(config=config):
        first = seeded(Stack)
    with zstore.Init(config=config):
        second, other = seeded(Stack, 1), seeded(Stack, 2)
    with zstore.initialize(model=nn.Sequential(first, second), config=config)[0] as engine:
        found = engine.get_full_parameter("1.layers.3.weight")
        assert torch.equal(found, seeded(Stack, 1).layers[3].weight)
    with zstore.gather(other):
        assert differences(values_of(other), values_of(seeded(Stack, 2))) == []
    zstore.initialize(model=other, config=config)[0].close()


def test_a_block_within_a_block_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(UsageError, match=r"zstore.Init blocks cannot be nested"), zstore.Init(config=config):
        zstore.Init(config=config).__enter__()
    with zstore.Init(config=config):
        pass


def test_an_engine_made_within_the_block_trains_as_from_a_plain_model(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    found = []
    with zstore.Init(config=config, live_bytes=0) as init:
        model = make_net()
        with zstore.initialize(model=model, config=config)[0] as engine:
            outer = nn.Sequential(model)  # as a wrapper of an engine's model is made
            step(engine)
            other = make_net()
            assert num_released(other) > 3
            assert num_released(outer) == 0
            step(engine)
            found.append(state_of(engine))
        assert init in open_blocks
    with zstore.initialize(model=other, config=config)[0] as engine:
        for _ in range(2):
            step(engine)
        found.append(state_of(engine))
    with zstore.initialize(model=make_net(), config=config)[0] as engine:
        for _ in range(2):
            step(engine)
        assert found == [state_of(engine)] * 2
    assert files_in(tmp_path) == []


def test_parameters_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    init, layers = zstore.Init(config=config_of(tmp_path)), []
    init.__enter__()
    layers += [nn.Linear(32, 32), nn.Linear(32, 32, device="meta")]
    with pytest.raises(UsageError, match=r"'weight' of a Linear is on the meta device.*from_pretrained"):
        init.__exit__(None, None, None)
    with zstore.Init(config=config_of(tmp_path)):
        pass
    assert files_in(tmp_path) == []


def test_an_error_in_the_block_leaves_nothing_behind(tmp_path: Path) -> None:
    models = []

    def build() -> None:
        with zstore.Init(config=config_of(tmp_path), dtype=torch.float64, live_bytes=0):
            models.append(seeded(Stack))
            assert len(files_in(tmp_path)) > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert files_in(tmp_path) == []
    assert torch.get_default_dtype() == torch.float32
    plain = seeded(Stack)  # no hook is left
    assert num_released(plain) == 0
    assert plain(torch.ones(2, 128)).item() > 0
    with pytest.raises(UsageError, match="build it again"):
        zstore.initialize(model=models[0], config=config_of(tmp_path))


@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: setattr(m.layers[0].weight, "data", torch.ones(128, 128))]
)
def test_a_change_after_the_block_is_refused(change: Callable[[Any], object], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with zstore.Init(config=config):
        model = seeded(Stack)
    change(model)
    with pytest.raises(UsageError, match=r"'layers.0.weight' was built within zstore.Init and was changed"):
        zstore.initialize(model=model, config=config)


def test_another_use_of_the_same_run_folder_is_refused(tmp_path: Path) -> None:
    with zstore.Init(config=config_of(tmp_path)):
        model = make_net()
    other = config_of(tmp_path, aio={"block_size": 65536})
    with pytest.raises(UsageError, match="Pass the same config to both"):
        zstore.initialize(model=model, config=other)
    with zstore.initialize(model=model, config=config_of(tmp_path))[0] as engine:
        step(engine)


def test_two_configs_and_those_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="different configs"):
        zstore.Init(config={"a": 1}, config_dict_or_path={"a": 2})
    (tmp_path / "file").touch()
    for kind, config in ((ConfigError, {"nothing": 1}), (RunFolderError, config_of(tmp_path / "file/below"))):
        with pytest.raises(kind), zstore.Init(config=config):
            pass
    with zstore.Init(config=config_of(tmp_path)):
        pass


def _parted(rank: int, folder: str) -> list[str]:
    """What is raised where ranks have seeds of their own, where one fails, and where they run other code."""

    def seeds() -> nn.Module:
        return seeded(Handmade, seed=rank)

    def failure() -> nn.Module:
        model = seeded(Stack)
        if rank == 1:
            raise DiskFullError("no room", path="x")
        model.layers[0].weight.data.mul_(2)
        return model

    def code() -> nn.Module:
        model = seeded(Stack)
        model.layers[rank].weight.data.mul_(2)
        return model

    messages, models = [], []
    for build in (seeds, failure, code):
        try:
            with zstore.Init(config=config_of(folder), live_bytes=0):
                models.append(build())
        except (UsageError, RankError, DiskFullError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_ranks_that_build_otherwise_or_fail_are_told_so(tmp_path: Path) -> None:
    first, second = run_ranks(_parted, 2, str(tmp_path))
    for seeds, _, code in (first, second):
        assert re.search("rank 1 built different values from rank 0's, first 'weight' of a Embedding.*same seed", seeds)
        assert re.search(r"made different ones: rank 0: zstore.Init at .*; rank 1: .*Run the same code on", code)
    assert first[1].startswith("RankError: rank 1 of 2 failed in zstore.Init at the end of the block; rank 0 is")
    assert "DiskFullError: no room" in first[1]
    assert second[1].startswith("DiskFullError")
    assert files_in(tmp_path) == []
