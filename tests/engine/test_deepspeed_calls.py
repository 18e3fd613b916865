"""Names that scripts written for DeepSpeed call: each does what it says. One process, and two where ranks matter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import make_net
from zstore import zero
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.adapters.deepspeed.engine import initialize as stand_in
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command
from zstore.tools.inspect import inspect_command
from zstore.tools.options import Common


class Regression(nn.Module):
    def __init__(self, way: str = "alone") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)
        self.head = nn.Linear(3, 1)
        self.way = way

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (self.head(self.body(x)) - y).square().mean()
        return {"alone": loss, "dict": {"loss": loss}, "tuple": (loss, x)}[self.way]


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        return torch.arange(6.0) / 6 + number, torch.ones(1)


def start(model: Any = None, data: Any = None, initialize: Any = zstore.initialize, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99]}},
        "steps_per_print": 0,
    }
    engine: Engine
    engine, *_ = initialize(model=model or Regression(), config=config | changes, training_data=data)
    return engine


def batches(count: int = 100, shift: float = 0.0) -> Iterator[Any]:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(2, 6, generator=generator) + shift, torch.ones(2, 1)


def loop_step(engine: Engine, data: Iterator[Any]) -> float:
    losses = []
    for _ in range(2):
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return sum(losses) / 2


def test_train_batch_is_a_whole_step_and_returns_the_mean_loss() -> None:
    data, same = batches(), batches()
    with start() as engine, start() as loop:
        engine.eval()
        for _ in range(3):
            loss = engine.train_batch(data)
            assert engine.module.training
            assert loss.item() == pytest.approx(loop_step(loop, same))
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 12)
        assert engine_digests(engine) == engine_digests(loop)


def test_train_batch_goes_on_over_the_engines_own_loader(tmp_path: Path) -> None:
    """Twelve samples are three steps; the fourth is of the next epoch. A load moves the loader."""
    with start(data=Points()) as engine:
        losses = [engine.train_batch().item() for _ in range(4)]
        engine.save_checkpoint(str(tmp_path))
        losses += [engine.train_batch().item() for _ in range(3)]
        engine.load_checkpoint(str(tmp_path))
        assert [engine.train_batch().item() for _ in range(3)] == losses[4:]
    with start(data=Points()) as engine:
        loader = engine.training_dataloader
        found = []
        for _ in range(2):
            data = iter(loader)
            found += [loop_step(engine, data) for _ in range(3)]
        assert found == pytest.approx(losses[:6])


def test_what_train_batch_cannot_do_changes_nothing() -> None:
    with start() as engine:
        before = engine_digests(engine)
        with pytest.raises(StopIteration):
            engine.train_batch(batches(1))
        with pytest.raises(UsageError, match="without an iterator"):
            engine.train_batch()
        with pytest.raises(UsageError, match=r"got list: pass iter\(...\) of it"):
            engine.train_batch(list(batches(2)))  # type: ignore[arg-type]
        assert (engine_digests(engine), engine.micro_steps) == (before, 0)
        engine.backward(engine(*next(batches())))
        engine.step()
        with pytest.raises(UsageError, match="middle of an accumulation"):
            engine.train_batch(batches())


@pytest.mark.parametrize("way", ["dict", "tuple"])
def test_losses_and_batches_of_other_shapes(way: str) -> None:
    with start() as plain, start(Regression(way)) as engine:
        named = iter([{"x": x, "y": y} for x, y in batches(2)])
        assert torch.equal(engine.train_batch(named), plain.train_batch(batches()))


def test_eval_batch_changes_nothing_and_leaves_the_modes() -> None:
    with start() as engine:
        engine.module.body.eval()
        before = engine_digests(engine)
        expected = sum(float(engine(*batch).detach()) for batch in batches(2)) / 2
        loss = engine.eval_batch(batches())
        assert loss.item() == pytest.approx(expected)
        assert not loss.requires_grad
        three = sum(float(engine(*batch).detach()) for batch in batches(3)) / 3
        assert engine.eval_batch(batches(), num_micro_batches=3).item() == pytest.approx(three)
        assert (engine.training, engine.module.body.training, engine.module.head.training) == (True, False, True)
        assert (engine_digests(engine), engine.micro_steps) == (before, 0)


def on_rank(rank: int) -> list[float]:
    zstore.init_distributed()
    with start(zero_optimization={"stage": 2}) as engine:
        return [engine.train_batch(batches(shift=rank)).item(), engine.eval_batch(batches(shift=rank)).item()]


def test_batch_losses_are_means_over_ranks() -> None:
    first, second = run_ranks(on_rank, 2)
    assert first == second
    with start() as engine:
        each = [engine.eval_batch(batches(shift=rank)).item() for rank in range(2)]
    assert first[0] == pytest.approx(sum(each) / 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_config_under_deepspeeds_names(stage: int) -> None:
    zero = {"stage": stage}
    with start(None, None, stand_in, zero_optimization=zero, gradient_clipping=0.5, steps_per_print=7) as engine:
        assert engine.zero_optimization_stage() == stage
        assert engine.zero_optimization() == (stage > 0)
        assert engine.zero_optimization_partition_gradients() == (stage > 1)
        assert engine.zero_optimization_partition_weights() == (stage == 3)
        assert (engine.gradient_clipping(), engine.steps_per_print()) == (0.5, 7)
        assert (engine.dump_state(), engine.wall_clock_breakdown()) == (False, False)
        assert engine.get_batch_info() == (4, 2, 2)
        assert engine.get_mom() == [(0.8, 0.99)]
        assert not engine.monitor.enabled


def test_offload_at_stage_0_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with start(None, None, stand_in, zero_optimization=zero) as engine:
        assert not engine.zero_cpu_offload()
    assert "offload_optimizer ignored at stage 0" in caplog.text


def test_momentum_of_other_optimizers_and_the_end() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = stand_in(model=model, optimizer=optimizer, config={"train_batch_size": 2})
    assert (engine.get_mom(), engine.scale(optimizer)) == ([0.9], optimizer)
    engine.destroy()
    engine.destroy()
    assert engine.module.half().head.weight.dtype == torch.float16


def test_the_optimizers_scale_and_rate() -> None:
    with start(fp16={"enabled": True, "initial_scale_power": 4}) as engine:
        assert (engine.optimizer.loss_scale, engine.optimizer.cur_scale) == (16.0, 16.0)
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (True, False)
        engine.optimizer.set_lr(0.125)
        assert (engine.optimizer.get_lr(), engine.get_lr()) == (0.125, [0.125])
    with start(bf16={"enabled": True}) as engine:
        assert (engine.optimizer.cur_scale, engine.fp16_enabled(), engine.bfloat16_enabled()) == (1.0, False, True)


def test_the_monitor_takes_a_scripts_own_values(tmp_path: Path) -> None:
    with start(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"}) as engine:
        assert engine.monitor.enabled
        engine.train_batch(batches())
        engine.monitor.write_events([("Eval/loss", torch.tensor(0.5), engine.global_samples), ("Eval/acc", 1, 4)])
        with pytest.raises(UsageError, match="triples, got"):
            engine.monitor.write_events([("Eval/loss", "high", 4)])
    assert (tmp_path / "run" / "Eval_loss.csv").read_text().split() == ["step,loss", "4,0.5"]
    assert (tmp_path / "run" / "Eval_acc.csv").read_text().split() == ["step,acc", "4,1.0"]
    assert (tmp_path / "run" / "Train_Samples_train_loss.csv").exists()


def test_a_save_that_is_not_the_latest_is_loaded_by_its_tag_alone(tmp_path: Path) -> None:
    with start() as engine:
        engine.save_checkpoint(str(tmp_path), "main")
        engine.train_batch(batches())
        engine.save_checkpoint(str(tmp_path), "side", save_latest=False)
        assert (tmp_path / "latest").read_text() == "main\n"
        engine.load_checkpoint(str(tmp_path), "side")
        assert engine.global_steps == 1
        engine.load_checkpoint(str(tmp_path))
        assert engine.global_steps == 0
        assert [info.tag for info in tags(tmp_path)] == ["main", "side"]
        # Where there is no other, it is better than none.
        engine.save_checkpoint(str(tmp_path / "alone"), "side", save_latest=False)
        assert not (tmp_path / "alone" / "latest").exists()
        assert engine.load_checkpoint(str(tmp_path / "alone"))[0] is not None


def frozen_body() -> nn.Module:
    model = Regression()
    model.body.requires_grad_(False)
    return model


def test_frozen_parameters_may_be_left_out_of_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["body.weight", "body.bias"]
    with start(frozen_body()) as engine:
        engine.train_batch(batches())
        engine.save_checkpoint(str(tmp_path), "small", exclude_frozen_parameters=True)
        head = engine.get_full_parameter("head.weight")
        engine.save_checkpoint(str(tmp_path), "whole", save_latest=False)
    with open_checkpoint(tmp_path, "small") as reader, open_checkpoint(tmp_path, "whole") as whole:
        assert verify_checkpoint(reader) == []
        assert set(whole.arrays) - set(reader.arrays) == {f"model/{name}" for name in names}
        assert reader.record.absent_parameters == names

    other = frozen_body()
    with torch.no_grad():
        other.body.weight.fill_(0.25)
    with start(other) as engine:
        engine.load_checkpoint(str(tmp_path), "small")
        assert engine.load_report.missing == tuple(f"model/{name}" for name in names)
        assert "2 frozen parameters, omitted by the save, keep the model's values" in caplog.text
        assert "missing:" not in caplog.text
        assert torch.equal(engine.get_full_parameter("head.weight"), head)
        assert (engine.module.body.weight == 0.25).all()
        assert engine.global_steps == 1

    assert inspect_command(tmp_path / "small", Common(json=True)) in (0, None)
    assert json.loads(capsys.readouterr().out)["checkpoint"]["parameters_left_out"] == names
    consolidate_command(tmp_path / "small", tmp_path / "weights", "fp32", 10**9)
    assert "2 frozen parameters that were not saved, such as body.weight, body.bias" in capsys.readouterr().err
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == {"head.weight", "head.bias"}


def test_weights_under_the_names_that_scripts_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(frozen_body()) as engine:
        assert engine.save_16bit_model(tmp_path / "a", "pytorch_model.bin") == [tmp_path / "a" / "model.safetensors"]
        assert "writing model.safetensors instead of pytorch_model.bin" in caplog.text
        (named,) = engine.save_16bit_model(tmp_path / "b", save_filename="best.pt", exclude_frozen_parameters=True)
        assert named.name == "best.safetensors"
        assert set(load_file(named)) == {"head.weight", "head.bias"}
    with start(initialize=stand_in) as engine:
        (fp16,) = engine.save_fp16_model(str(tmp_path / "c"), "model.safetensors")
        assert set(load_file(fp16)) == set(dict(engine.module.named_parameters()))


def test_init_takes_deepspeeds_arguments(tmp_path: Path) -> None:
    plain = make_net()
    with zero.Init(remote_device="cpu", pin_memory=True, mpu=None, mem_efficient_linear=False):
        model = make_net()
    with zero.GatheredParameters(model):
        for value, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(value, expected)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    section = {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2, "zero_optimization": section}
    with zero.Init(remote_device="nvme", config_dict_or_path=config) as init:
        model = make_net()
    assert init.statistics().stored_bytes > 0
    with zero.GatheredParameters(model):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    init.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mpu": object()}, "model parallelism is not supported"),
        ({"remote_device": "nvme"}, "names no folder.*nvme_path"),
        ({"remote_device": "cuda:0"}, 'expected "cpu", "nvme" or None'),
    ],
)
def test_init_refuses_what_it_cannot_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message), zero.Init(**arguments):
        pass
