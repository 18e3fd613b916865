"""What a Trainer may ask of the strategy: settings, callbacks, loops of one's own; and what is refused, with the way out."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.nn import functional as F

import zstore
from tests.integrations.lightning_runs import SEED, Batches, LateNet, Net, fit, make_net, make_trainer, quiet
from zstore.engine.adapters.lightning.content import decode, encode
from zstore.engine.adapters.lightning.settings import for_trainer, read_source
from zstore.errors import CheckpointError, CheckpointMismatchError, ConfigError, UsageError
from zstore.journal import read, steps
from zstore.journal.names import run_of
from zstore.journal.reader import journals
from zstore.lightning import ZstoreStrategy, load_checkpoint
from zstore.optim import Offloaded
from zstore.serve.runs import RunTable
from zstore.serve.settings import Root, Settings
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command
from zstore.tools.ls import ls_command

# -- without a Trainer --------------------------------------------------------------------------------------------------


class Thing:
    """Something that is not plain."""

    def __init__(self, text: str) -> None:
        self.text = text


def test_lightnings_dict_comes_back_as_it_was_but_for_objects(caplog: pytest.LogCaptureFixture) -> None:
    plain = {
        "loops": {"state": [1, 2.5, None, True, float("inf")]},
        "milestones": Counter({30: 1}),
        "ordered": OrderedDict(b=1, a=(1, {2})),
        "$odd": {("a", 1): b"bytes"},
        "small": torch.tensor(0.25, dtype=torch.bfloat16),
        "large": torch.arange(5000),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "path": Path("a/b"),
    }
    state = encode({**plain, "mine": {"thing": Thing("x"), "number": 1}, "list": [1, Thing("y")]})
    assert sorted(state["arrays"]) == ["0000", "0001", "0002"]
    json.dumps(state["content"])
    found, left_out = decode(state, load_objects=False)
    assert left_out == ["mine.thing", "list"]
    assert found["mine"] == {"number": 1}
    for name, value in plain.items():
        if isinstance(value, torch.Tensor | np.ndarray):
            assert found[name].dtype == value.dtype
            assert (found[name] == value).all()
        else:
            assert (type(found[name]), found[name]) == (type(value), value)
    with pytest.raises(KeyError, match="load_objects"):
        found["list"]


def test_what_cannot_be_kept_or_read_is_named() -> None:
    with pytest.raises(UsageError, match=r"'mine\.call' is a function .* leave it out in on_save_checkpoint"):
        encode({"mine": {"call": lambda: None}})
    state = encode({"mine": {"thing": Thing("x")}})
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode({"content": {"x": {"$mystery": 1}}, "arrays": {}, "objects": []}, load_objects=False)
    state["arrays"]["0000"] = torch.frombuffer(bytearray(pickle.dumps(1)[:-2]), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        decode(state, load_objects=True)


@pytest.mark.parametrize(
    ("config", "precision", "accumulation", "clip", "expected"),
    [
        ({}, "bf16-mixed", 2, 0.5, {"bf16": {"enabled": True}, "gradient_clipping": 0.5}),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "16-mixed", 1, None,
         {"bf16": {"enabled": False}, "fp16": {"enabled": True}, "gradient_clipping": 0.0}),
        ({"bf16": {"enabled": True}}, "32-true", 1, None, {"bf16": {"enabled": True}, "gradient_clipping": 0.0}),
        ({"gradient_clipping": 1.0, "gradient_accumulation_steps": 4}, "32-true", 4, None, {"gradient_clipping": 1.0}),
        ({"gradient_clipping": "auto"}, "32-true", 4, None, {"gradient_clipping": 0.0}),
        ({"fp16": {"enabled": True}}, "bf16-mixed", 1, None, r'fp16.enabled is true, and Trainer\(precision="bf16-mixed"\)'),
        ({"bf16": {"enabled": False}}, "bf16-true", 1, None, "bf16.enabled is false"),
        ({"gradient_accumulation_steps": 4}, "32-true", 2, None, r"is 4, and Trainer\(accumulate_grad_batches=2\)"),
        ({"gradient_clipping": 1.0}, "32-true", 1, 0.5, r"is 1.0, and Trainer\(gradient_clip_val=0.5\)"),
    ],
)  # fmt: skip
def test_trainer_and_config_agree_or_it_is_an_error(
    config: dict[str, Any], precision: str, accumulation: int, clip: float | None, expected: Any
) -> None:
    source = read_source(config, None)
    values: dict[str, Any] = {"precision": precision, "accumulation_steps": accumulation, "clip_norm": clip}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            for_trainer(source, **values)
        return
    found = for_trainer(source, **values)
    assert found == {**config, **expected, "gradient_accumulation_steps": accumulation, "steps_per_print": 0}


def test_a_strategy_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        ZstoreStrategy({"zero_optimisation": {"stage": 2}})
    with pytest.raises(ConfigError, match=r"zstore.keep would .*save_top_k"):
        ZstoreStrategy({"zstore": {"keep": {"last": 2}}})
    with pytest.raises(ConfigError, match="write the stage into the config"):
        ZstoreStrategy({}, stage=3)
    with pytest.raises(UsageError, match="no option find_unused_parameters"):
        ZstoreStrategy(find_unused_parameters=True)
    with pytest.raises(UsageError, match=r"start_method 'spawn' .* stage 3"):
        ZstoreStrategy(stage=3, start_method="spawn")
    with pytest.raises(UsageError, match="precision '64-true'"):
        make_trainer("zstore", precision="64-true")
    monkeypatch.setenv("ZSTORE_CONFIG", str(tmp_path / "ds.json"))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}} // mine')
    assert ZstoreStrategy().source.settings.zero_optimization.stage == 1
    for text in ('{"zero_optimization": {"stage": 3}}', ""):  # JSON itself; nothing
        monkeypatch.setenv("ZSTORE_CONFIG", text)
        assert ZstoreStrategy().source.settings.zero_optimization.stage == (3 if text else 2)
    monkeypatch.delenv("ZSTORE_CONFIG")
    assert ZstoreStrategy().source.settings.zero_optimization.stage == 2


# -- one rank, many Trainers --------------------------------------------------------------------------------------------


class Manual(Net):
    """Steps by itself, after two backwards."""

    clip_norm = 0.0

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip_norm, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class Clipping(Manual):
    """Clips by itself, as Lightning's page on manual optimization does."""

    clip_norm = 0.05


class Configured(Net):
    """Leaves the optimizer to the config."""

    def configure_optimizers(self) -> None:
        return None


class Plateau(Net):
    """Keeps an object, and lowers its rate when the validation asks for it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": self.layers.parameters()}, {"params": [*self.head.parameters(), self.scale], "lr": 0.05}],
            lr=0.1, momentum=0.9,
        )  # fmt: skip
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["thing"] = Thing("kept")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.thing = checkpoint.get("thing")


def _trains_as_ddp(kind: Any, strategy: Any = "zstore", **options: Any) -> tuple[Any, Net]:
    """Compare a Trainer's losses with DDP's."""
    plain, ours = make_net(kind), make_net(kind)
    losses = fit(make_trainer("ddp", **options), plain, 0)
    trainer = make_trainer(strategy, **options)
    assert fit(trainer, ours, 0) == pytest.approx(losses, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    return trainer, ours


def _settings(rank: int, folder: str) -> None:
    base = Path(folder)
    _trains_as_ddp(Manual, accumulate_grad_batches=1, gradient_clip_val=None)
    clips = ZstoreStrategy({"gradient_clipping": 0.05})
    _trains_as_ddp(Clipping, clips, accumulate_grad_batches=1, gradient_clip_val=None)
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    _trains_as_ddp(Net, callbacks=[schedule], accumulate_grad_batches=1)

    # Groups, a schedule by validation, an object in the checkpoint; saved within an accumulation.
    options = {"enable_checkpointing": True, "val_check_interval": 2}
    saves = [ModelCheckpoint(base / "a", monitor="val", save_top_k=-1, save_last="link", filename="{epoch} {step}")]
    trainer, module = _trains_as_ddp(Plateau, **options, callbacks=saves)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1
    last = str(base / "a" / "last.ckpt")
    for load_objects in (False, True):
        other = make_net(Plateau)
        again = make_trainer(ZstoreStrategy(load_objects=load_objects), max_epochs=3)
        assert len(fit(again, other, 0, ckpt_path=last)) == 8
        assert isinstance(other.thing, Thing) == load_objects

    # A second fit goes on, and a save after it has all.
    trainer.fit_loop.max_epochs = 3
    assert len(fit(trainer, module, 0)) == 21
    trainer.save_checkpoint(base / "b" / "final.ckpt")
    weights = zstore.load_state_dict(base / "b" / "final.ckpt", dtype="fp32")
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    _reads_a_checkpoint(trainer, module, base / "b")

    # bf16, with the config's optimizer and schedule.
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
    }
    trainer = make_trainer(ZstoreStrategy(config), precision="bf16-mixed")
    module = make_net(Configured)
    assert all(0 < loss < 2 for loss in fit(trainer, module, 0))
    assert module.head.weight.dtype == torch.bfloat16
    assert trainer.strategy.engine.lr_scheduler.last_batch_iteration == 6 - 1
    assert trainer.strategy.engine.training_state.config.settings.scheduler.params.total_num_steps == 6


def _reads_a_checkpoint(trainer: Any, module: Net, folder: Path) -> None:
    """Compare what Lightning's own loaders make of a checkpoint with a file that Lightning itself writes of the module."""
    file = folder.with_name("plain.ckpt")
    plain = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "counted": module.counted}
    torch.save({**plain, "pytorch-lightning_version": L.__version__}, file)
    for kind in (Plateau, Net):
        ours = kind.load_from_checkpoint(folder / "final.ckpt", dropout=0.25)
        expected = kind.load_from_checkpoint(file, dropout=0.25)
        assert ours.hparams == expected.hparams
        assert ours.counted == expected.counted
        assert all(torch.equal(ours.state_dict()[name], value) for name, value in expected.state_dict().items())
    found = load_checkpoint(folder / "final.ckpt")
    assert found["global_step"] == trainer.global_step
    assert set(found["state_dict"]) == set(module.state_dict())
    assert "thing" not in found
    assert isinstance(load_checkpoint(folder / "final.ckpt", load_objects=True)["thing"], Thing)
    for wrong, error in (("absent.ckpt", FileNotFoundError), ("plain.ckpt", CheckpointMismatchError)):
        with pytest.raises(error):
            load_checkpoint(folder.parent / wrong)


def _threads(rank: int, folder: str) -> None:
    """Fit and drop Trainers, and keep their modules."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("zstore")}
    kept = []
    for stage in ("zstore_stage_1", "zstore_stage_2"):
        plain, module = make_net(), make_net()
        trainer = make_trainer(stage, max_epochs=1)
        fit(trainer, module, 0)
        fit(make_trainer("ddp", max_epochs=1), plain, 0)
        with quiet():
            trainer.test(module, Batches(0, 2, seed=1), verbose=False)
        assert module.trainer.global_step == trainer.global_step
        kept.append((plain, module))
    during = {thread for thread in threading.enumerate() if thread.name.startswith("zstore")}
    assert len(during) > len(before)
    del trainer
    gc.collect()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("zstore")} <= before
    for plain, module in kept:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_a_trainer_that_is_dropped_leaves_no_threads_and_a_whole_module(tmp_path: Path) -> None:
    run_ranks(_threads, 1, str(tmp_path))


def _sharded_threads(rank: int, folder: str) -> None:
    """Fit with parameters on disk, drop the Trainer, and then the module."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("zstore")}
    plain, module = make_net(), make_net()
    disk = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": disk, "offload_optimizer": disk}
    trainer = make_trainer(ZstoreStrategy({"zero_optimization": zero}), max_epochs=1)
    fit(trainer, module, 0)
    fit(make_trainer("ddp", max_epochs=1), plain, 0)
    gone = [weakref.ref(one) for one in (trainer, trainer.strategy.engine, module)]
    del trainer
    gc.collect()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with zstore.gather(module):
        torch.testing.assert_close(dict(module.state_dict()), expected, rtol=1e-4, atol=1e-6)
    del module
    for _ in range(3):  # what a finalizer touched is found in the next collection
        gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert {thread for thread in threading.enumerate() if thread.name.startswith("zstore")} <= before


def test_a_sharded_module_keeps_the_engine_until_it_is_dropped_too(tmp_path: Path) -> None:
    run_ranks(_sharded_threads, 1, str(tmp_path))


def _evaluation(rank: int, folder: str) -> None:
    """Evaluate before training, and after it."""
    data = Batches(0, 2, seed=1)
    plain, ours = make_net(), make_net()
    for precision in ("32-true", "bf16-true"):
        module = make_net(LateNet)
        trainer = make_trainer("zstore_stage_3", precision=precision)
        with quiet():
            scores = trainer.validate(module, data, verbose=False)
            expected = make_trainer("ddp").validate(plain, data, verbose=False)
            assert len(trainer.predict(module, data)) == 2
        assert scores[0]["val"] == pytest.approx(expected[0]["val"], rel=1e-6 if precision == "32-true" else 2e-2)
    with pytest.raises(UsageError, match="num_sanity_val_steps=-1"):
        fit(trainer, module, 0)
    trainer = make_trainer("zstore")
    with quiet():
        trainer.validate(ours, data, verbose=False)
    assert fit(trainer, ours, 0) == pytest.approx(fit(make_trainer("ddp"), plain, 0), rel=1e-6)


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()], []

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Gan(Net):
    """Two networks, whose optimizers step one after the other."""

    def __init__(self, makes: Any) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self._makes = makes

    def configure_optimizers(self) -> Any:
        return [self._makes(part.parameters()) for part in (self.layers, self.head)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        for optimizer, sign in ((critic, 1.0), (generator, -1.0)):
            self.toggle_optimizer(optimizer)
            loss = sign * F.mse_loss(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def _gan(rank: int, folder: str) -> list[list[float]]:
    """Train two networks with torch's optimizers and with offloaded ones, and resume each."""
    found = []
    for name, makes in {
        "plain": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        "ours": lambda params: Offloaded(torch.optim.AdamW, params, lr=1e-3, device="cpu"),
    }.items():
        path = Path(folder, name)
        options = {"plugins": [], "accumulate_grad_batches": 1, "gradient_clip_val": None}
        saves = ModelCheckpoint(path, every_n_train_steps=6, save_top_k=-1, filename="first")
        trainer = make_trainer("auto", callbacks=[saves], enable_checkpointing=True, **options)
        torch.manual_seed(SEED)
        whole = fit(trainer, Gan(makes), 0)
        torch.manual_seed(1)  # other weights, which the checkpoint replaces
        other, ckpt = Gan(makes), path / "first.ckpt"
        found.append([*whole, *fit(make_trainer("auto", **options), other, 0, ckpt_path=ckpt, weights_only=False)])
    return found


def test_two_optimizers_of_a_gan_are_offloaded_under_lightnings_own_strategy(tmp_path: Path) -> None:
    (found,) = run_ranks(_gan, 1, str(tmp_path))
    assert found[0] == found[1]
    assert len(found[0]) > 28


class Backward(Net):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Clips(Net):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.7)


def _refusals(rank: int, folder: str) -> None:
    base = Path(folder)

    def refused(error: type[Exception], match: str, kind: Any = Net, strategy: Any = "zstore", **options: Any) -> None:
        ckpt = {"ckpt_path": options.pop("ckpt_path")} if "ckpt_path" in options else {}
        with pytest.raises(error, match=match):
            fit(make_trainer(strategy, **options), make_net(kind), 0, **ckpt)

    one = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    refused(UsageError, "7 optimizers, .* parameter group .* a GAN.* zstore.optim.Offloaded", Two, **one)
    refused(UsageError, "backward.. is overridden", Backward)
    refused(
        UsageError, r"clip_gradients\(0.7, 'norm'\): .* \"gradient_clipping\": 0.7 into", Clips, gradient_clip_val=None
    )
    refused(UsageError, r"clip_gradients\(0.05, .* \"gradient_clipping\": 0.05 into the config of", Clipping, **one)
    refused(
        ConfigError,
        "per_gpu is 999, and .* is 4: change",
        strategy=ZstoreStrategy({"train_micro_batch_size_per_gpu": 999}),
    )
    refused(ConfigError, "is 12, that x accumulate_grad_b.* 3 x 1", strategy=ZstoreStrategy({"train_batch_size": 999}))
    refused(UsageError, '"value".*clips by the global norm', gradient_clip_algorithm="value")
    refused(
        UsageError, "StochasticWeightAveraging: it averages whole copies", callbacks=[StochasticWeightAveraging(0.1)]
    )
    refused(UsageError, "EMAWeightAveraging: it keeps a whole copy", callbacks=[EMAWeightAveraging()])
    refused(ConfigError, "returned None", Configured)
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": "auto"}}}
    refused(ConfigError, "params.lr is 0.5, there it is 0.01", strategy=ZstoreStrategy(adam))
    warmup = {"scheduler": {"type": "WarmupLR", "params": {}}}
    refused(ConfigError, "a schedule in the config", strategy=ZstoreStrategy(warmup))
    make_trainer("ddp").strategy.barrier()
    torch.save({}, base / "plain.ckpt")
    refused(CheckpointMismatchError, "is a file", ckpt_path=str(base / "plain.ckpt"))
    engine, *_ = zstore.initialize(
        model=make_net(), config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    )
    with engine:
        engine.save_checkpoint(str(base), "mine")
    refused(CheckpointMismatchError, "not saved by a Trainer", ckpt_path=str(base / "mine"))


def _folder_of_checkpoints(rank: int, folder: str) -> None:
    """Train, and resume: the folder has checkpoints alone, and the journal of both is in the newest one."""
    found, kept = [], []
    for max_epochs in (1, 2):
        saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, filename="{step}")
        trainer = make_trainer("zstore", callbacks=[saves], enable_checkpointing=True, max_epochs=max_epochs)
        fit(trainer, make_net(), rank, ckpt_path="last" if max_epochs == 2 else None)
        trainer.save_checkpoint(Path(folder, "end.ckpt"))
        kept.append({path.name for path in Path(folder).iterdir()})
        trainer.strategy.close()
        found.append(journals(folder))
    assert kept == [{f"step={step}.ckpt", "last.ckpt", "end.ckpt"} for step in (3, 6)]
    assert found[0] == found[1]
    assert found[0][0].startswith("end.ckpt/journal-")
    assert steps(read(folder))["step"] == [1, 2, 3, 4, 5, 6]
    assert zstore.open_checkpoint(folder, "end.ckpt").verify() == []
    zstore.load_state_dict(folder)


def test_the_folder_of_checkpoints_has_nothing_else(tmp_path: Path) -> None:
    run_ranks(_folder_of_checkpoints, 1, str(tmp_path))
    options = Settings(roots=(Root(name="runs", location=str(tmp_path)),))
    (run,) = RunTable(options).all().values()
    assert [run_of(name) for name in journals(run.folder)] == [run_of(name) for name in journals(tmp_path)]


def _weights_alone(rank: int, folder: str) -> None:
    """Save weights alone in 16 bits and at stage 3; load them into another module, and by Lightning's own strategy."""
    saves = ModelCheckpoint(folder, filename="weights", every_n_train_steps=3, save_weights_only=True)
    trainer = make_trainer(
        "zstore_stage_3", 2, precision="bf16-mixed", callbacks=[saves], enable_checkpointing=True, max_epochs=1
    )
    module = make_net(LateNet)
    fit(trainer, module, rank)
    path = Path(folder, "weights.ckpt")
    masters = {name: trainer.strategy.engine.get_full_parameter(name) for name, _ in module.named_parameters()}
    trainer.save_checkpoint(Path(folder, "whole.ckpt"))
    trainer.save_checkpoint(Path(folder, "whole.ckpt"), weights_only=True)  # in place of a folder
    data = Batches(0, 2, seed=1)
    with quiet():
        plain = make_trainer("ddp", 2).test(make_net(), data, ckpt_path=path, verbose=False, weights_only=False)
        strategy = ZstoreStrategy(load_objects=True)  # Net has a path in its dict
        ours = make_trainer(strategy, 2).test(make_net(), data, ckpt_path=path, verbose=False)
        with pytest.raises(CheckpointMismatchError, match="is a file"):
            fit(make_trainer("zstore", 2), make_net(), rank, ckpt_path=path)
    assert ours == [pytest.approx(scores, rel=1e-6) for scores in plain]
    for saved in (path, Path(folder, "whole.ckpt")):
        found = torch.load(saved, weights_only=False)
        assert "optimizer_states" not in found
        assert list(found["state_dict"]) == list(make_net().state_dict())
        assert all(torch.equal(found["state_dict"][name], value) for name, value in masters.items())
    loaded = Net.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(loaded.head.weight, masters["head.weight"])
    trainer.strategy.close()


def test_weights_alone_are_a_file_as_lightnings_own(tmp_path: Path) -> None:
    run_ranks(_weights_alone, 2, str(tmp_path))


def _one_after_the_other(rank: int, folder: str) -> int:
    logging.getLogger("zstore").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    _settings(rank, folder)
    _evaluation(rank, folder)
    _refusals(rank, folder)
    return sum(path.is_dir() for path in Path(folder, "a").iterdir())


def test_settings_of_a_trainer_and_evaluation_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved,) = run_ranks(_one_after_the_other, 1, str(tmp_path))
    # What was saved is there for the commands.
    assert ls_command(tmp_path / "a") == ls_command(tmp_path / "b") == 0
    shown = capsys.readouterr()
    assert shown.out.count("epoch=") == saved - 1  # links too, of which one is last.ckpt
    assert "last.ckpt" in shown.out
    assert "final.ckpt" in shown.out
    assert "is not a checkpoint" not in shown.err
    assert consolidate_command(tmp_path / "b" / "final.ckpt", tmp_path / "weights", "fp32") == 0
    assert (tmp_path / "weights" / "model.safetensors").is_file()
