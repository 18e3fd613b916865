"""Loads of a part of a checkpoint, in another precision, or by links: what comes, what stays, and how training goes on."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import engine_digests
from tests.engine.models import Net, make_net
from tests.engine.runs import make_config, start, state_of, step
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.checkpoint.record import resumed_batch
from zstore.engine.config.resolve import BatchSizes
from zstore.errors import CheckpointMismatchError, CorruptionError, UsageError
from zstore.testing.ranks import run_ranks

OWN_LR = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    with start() as engine:
        for _ in range(3):
            step(engine)
        engine.save_checkpoint(str(tmp_path / "ckpt"), "base", {"note": 1})
        return tmp_path / "ckpt", held(engine)


def held(engine: Engine) -> dict[str, Any]:
    training = engine.training_state
    digests = engine_digests(engine)
    return {
        "weights": {name: value for name, value in digests.items() if not name.startswith("optimizer/")},
        "slots": {name: value for name, value in digests.items() if name.startswith("optimizer/")},
        "scalars": {record.name: dict(scalars) for record, scalars in training.state.scalars.items()},
        "counters": (engine.global_steps, engine.micro_steps),
        "lr": engine.get_lr(),
        "schedule": engine.lr_scheduler.state_dict(),
        "run": training.run_id,
        "generator": torch.get_rng_state().tolist(),
    }


def other(**keys: Any) -> Engine:
    return start(make_config(1, "cpu", scheduler=OWN_LR, **keys), make_net(seed=5))


@pytest.mark.parametrize(
    ("options", "loaded"),
    [
        ({}, {"weights", "slots", "scalars", "counters", "schedule", "run", "generator"}),
        ({"load_module_only": True}, {"weights"}),
        ({"load_optimizer_states": False}, {"weights", "counters", "schedule", "generator"}),
        ({"load_lr_scheduler_states": False}, {"weights", "slots", "scalars", "counters", "generator"}),
        (
            {"load_optimizer_states": False, "load_lr_scheduler_states": False, "load_module_strict": False},
            {"weights", "counters", "generator"},
        ),
    ],
)
def test_what_is_loaded(saved: tuple[Path, dict[str, Any]], options: dict[str, bool], loaded: set[str]) -> None:
    folder, theirs = saved
    with other() as engine:
        torch.manual_seed(77)
        mine = held(engine)
        path, state = engine.load_checkpoint(str(folder), **options)
        assert (path, state) == (str(folder / "base"), {"note": 1})
        after = held(engine)
        # Where the schedule is loaded, the learning rate is that of this config's schedule at the saved position.
        assert (after.pop("lr") != mine.pop("lr")) == ("schedule" in loaded)
        for name, value in after.items():
            assert value == (theirs if name in loaded else mine)[name], name
        step(engine)


class Grown(nn.Module):
    """The saved model with another head beside it, and without one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        base = make_net(seed=5)
        for name, child in base.named_children():
            if name != "unused":
                self.add_module(name, child)
        self.start, self.mix = base.start, base.mix
        self.register_buffer("shift", base.shift)
        self.register_buffer("extra", torch.full((3,), 2.0))
        self.score = nn.Linear(56, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.blocks[0](self.embed(ids) + self.start)).float().square().mean()


def test_a_model_that_differs(saved: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    folder, theirs = saved
    with start(make_config(1, "cpu"), Grown()) as engine:
        mine = engine_digests(engine)
        with pytest.raises(CheckpointMismatchError) as caught:
            engine.load_checkpoint(str(folder), load_module_only=True)
        for line in ("missing: model/score.weight", "missing: buffer/extra", "optimizer: model/unused.weight"):
            assert line in str(caught.value)
        assert "optimizer/exp_avg" not in str(caught.value)  # not asked for, so no difference
        assert engine_digests(engine) == mine
        with caplog.at_level(logging.WARNING):
            engine.load_checkpoint(str(folder), load_module_strict=False)
        assert "is loaded partially:" in caplog.text
        assert "missing: optimizer/exp_avg/score.bias" in caplog.text
        after, both = engine_digests(engine), theirs["weights"] | theirs["slots"]
        for name in after:
            assert after[name] == (mine if "score" in name else both)[name]
        scalars = {record.name: dict(s) for record, s in engine.training_state.state.scalars.items()}
        assert scalars["score.weight"] == {"step": 0.0}
        assert scalars["embed.weight"] == {"step": 3.0}
        assert engine.module.extra.tolist() == [2.0, 2.0, 2.0]
        step(engine)
    with (
        start(make_config(1, "cpu"), make_net(vocab=1100)) as engine,
        pytest.raises(CheckpointMismatchError, match=r"model/embed.weight: shape \(1203, 56\) in the checkpoint"),
    ):
        engine.load_checkpoint(str(folder), load_module_strict=False)


def _fine_tune(rank: int, folder: str) -> list[Any]:
    with start(make_config(3, gradient_accumulation_steps=1), make_net(seed=5)) as engine:
        with pytest.raises(CheckpointMismatchError, match="cannot be kept at world size 3"):
            engine.load_checkpoint(folder)
        engine.load_checkpoint(folder, load_module_only=True)
        values = [engine.get_full_parameter(name) for name in ("embed.weight", "frozen.weight", "blocks.0.gain")]
        step(engine)
        return [None if value is None else value.float().sum().item() for value in values]


def test_weights_load_where_the_batch_cannot_be_kept(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    with start() as engine:
        engine.load_checkpoint(str(folder))
        names = ("embed.weight", "frozen.weight", "blocks.0.gain")
        expected = [value.float().sum().item() for n in names if (value := engine.get_full_parameter(n)) is not None]
    assert run_ranks(_fine_tune, 3, str(folder)) == [expected] * 3


def test_the_batch_to_choose_is_named() -> None:
    accumulation = SimpleNamespace(
        boundary_override=None, batch=BatchSizes(train_batch_size=16, micro_batch_size=8, accumulation_steps=1)
    )
    training: Any = SimpleNamespace(world=SimpleNamespace(world_size=2), accumulation=accumulation)
    micro, trainer = '"train_micro_batch_size_per_gpu": 4 .1 per step. to keep it', "accumulation_steps must be 4"
    with pytest.raises(CheckpointMismatchError, match=f"{micro}.*{trainer}"):
        resumed_batch(training, {"train_batch_size": 8}, saved_world_size=1)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVED_SCALE, OWN_SCALE = 2.0**7, 2.0**10


def precise(precision: str, stage: int, tier: str, nvme: Path, scale: float = OWN_SCALE) -> dict[str, Any]:
    keys: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}}
    if precision == "fp16":
        keys["fp16"] = {"enabled": True, "initial_scale_power": int(scale).bit_length() - 1}
    return make_config(stage, tier, nvme, **keys)


def values_of(engine: Engine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor | None] = {}
    for record in engine.training_state.state.records:
        found[record.name] = engine.get_full_parameter(record.name)
        if record.group is not None:
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"{slot} of {record.name}"] = engine.get_optimizer_state(record.name, slot)
    return {name: value.clone() for name, value in found.items() if value is not None}


@pytest.fixture(scope="module")
def saved_in_each(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("precisions")
    values = {}
    for precision in DTYPES:
        with start(precise(precision, 1, "cpu", folder, SAVED_SCALE)) as engine:
            for _ in range(2):
                step(engine)
            engine.save_checkpoint(str(folder), precision)
            values[precision] = values_of(engine)
    return folder, values


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_every_precision_loads_in_every_other(
    saved_in_each: tuple[Path, dict[str, dict[str, torch.Tensor]]], of: str, into: str, tmp_path: Path
) -> None:
    folder, values = saved_in_each
    number = list(DTYPES).index(of) + list(DTYPES).index(into)
    stage, tier = [(3, "nvme"), (1, "none"), (2, "cpu")][number % 3]
    with start(precise(into, stage, tier, tmp_path), make_net(1)) as engine:
        engine.load_checkpoint(str(folder), of)
        expected, found = values[of], values_of(engine)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            frozen = name.startswith("frozen.")
            wanted = value.to(DTYPES[into]).to(found[name].dtype) if frozen else value
            assert frozen or found[name].dtype == value.dtype == torch.float32
            assert torch.equal(found[name].view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), name
        assert {parameter.dtype for parameter in engine.module.parameters()} == {DTYPES[into]}
        expected_scale = 1.0 if into != "fp16" else SAVED_SCALE if of == "fp16" else OWN_SCALE
        assert engine.loss_scale == expected_scale
        step(engine)
        assert engine.was_step_applied()
        assert engine.global_steps == 3


def linked_config(nvme: Path, *, stage: int = 3, params: bool = False) -> dict[str, Any]:
    return make_config(stage, "nvme", nvme, "nvme" if params else "none")


def net(seed: int = 0) -> Net:
    """A model of which several parameters are large enough to rest on disk."""
    return make_net(seed, width=112)


def moved(engine: Engine) -> tuple[int, int]:
    found = engine.statistics().store
    return found.disk_read_bytes, found.disk_write_bytes


def arrays_on_disk(engine: Engine) -> dict[str, int]:
    store = engine.training_state.state.store
    return {
        name: store.local(name).nbytes
        for name in store.names()
        if store.tier(name).name == "disk" and name.startswith(("model/", "optimizer/"))
    }


@pytest.mark.parametrize("params", [False, True])
def test_a_resume_links_what_is_on_disk_and_keeps_the_bits(tmp_path: Path, nvme: Path, params: bool) -> None:
    ckpt = str(tmp_path / "ckpt")
    with start(linked_config(nvme, params=params), net()) as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(ckpt)
        step(engine)
        step(engine)
        expected = state_of(engine)
    with start(linked_config(nvme, params=params), net(seed=3)) as engine:
        on_disk = arrays_on_disk(engine)
        assert len(on_disk) >= 6
        before = moved(engine)
        engine.load_checkpoint(ckpt)
        read, written = (now - then for now, then in zip(moved(engine), before, strict=True))
        report = engine.load_report
        assert report.linked_bytes >= sum(on_disk.values())
        # What is small rests in memory, and is read; so are the masters of which parameters are cast.
        masters = sum(nbytes for name, nbytes in on_disk.items() if name.startswith("model/"))
        assert report.read_bytes < 0.25 * sum(on_disk.values())  # of small arrays much is index and padding
        assert masters <= read < 1.1 * masters + 0.25 * sum(on_disk.values())
        # Written are, if anything, the parameters' own rows.
        assert written < 0.6 * max(masters, 1) + 1
        run_files = {path.stat().st_ino for path in nvme.rglob("*.shard")}
        linked = [path for path in Path(ckpt).rglob("c.*") if path.stat().st_ino in run_files]
        assert len(linked) == len(on_disk)
        kept = {path: path.read_bytes() for path in linked}
        step(engine)
        # At once, while a part of what is held was linked and never changed since.
        engine.save_checkpoint(ckpt, "again")
        step(engine)
        assert state_of(engine) == expected
        assert {path: path.read_bytes() for path in linked} == kept
    for tag in ("step-00000002", "again"):
        with open_checkpoint(ckpt, tag) as reader:
            assert verify_checkpoint(reader) == []


def _run(rank: int, folder: str, tag: str | None) -> tuple[dict[str, str], int]:
    with start(linked_config(Path(folder) / "nvme"), net(seed=rank)) as engine:
        if tag is not None:
            engine.load_checkpoint(f"{folder}/ckpt", tag)
        step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", f"after-{engine.global_steps}-{engine.world_size}")
        return engine_digests(engine), 0 if engine.load_report is None else engine.load_report.linked_bytes


def test_ranks_link_their_own_shards_and_another_layout_is_read(tmp_path: Path, nvme: Path) -> None:
    run_ranks(_run, 2, str(tmp_path), None)
    linked = run_ranks(_run, 2, str(tmp_path), "after-1-2")
    assert all(nbytes > 100_000 for _, nbytes in linked)
    with open_checkpoint(tmp_path / "ckpt", "after-2-2") as one:
        assert verify_checkpoint(one) == []
    # 4 samples of a global batch of 8, which one rank cannot take: only the weights count here.
    alone = run_ranks(_read_alone, 1, str(tmp_path))[0]
    assert alone == 0


def _read_alone(rank: int, folder: str) -> int:
    with start(linked_config(Path(folder) / "nvme"), net(seed=5)) as engine:
        engine.load_checkpoint(f"{folder}/ckpt", "after-2-2", load_module_only=True)
        return engine.load_report.linked_bytes


def two_steps(engine: Engine) -> None:
    """In mode `forward`, the step after asks what became of a step's update."""
    step(engine)
    step(engine)


def damage(ckpt: Path, array: str, offset: int) -> Path:
    file = next((ckpt / array).glob("c.*"))
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    return file


def test_a_damaged_chunk_is_an_error_when_training_first_reads_it(tmp_path: Path, nvme: Path) -> None:
    ckpt = tmp_path / "ckpt"
    with start(linked_config(nvme), net()) as engine:
        step(engine)
        engine.save_checkpoint(str(ckpt), "good")
        step(engine)
        engine.save_checkpoint(str(ckpt), "bad")
        step(engine)
        expected = state_of(engine)
    file = damage(ckpt / "bad", "optimizer/exp_avg/embed.weight", 70_000)
    with start(linked_config(nvme), net(seed=3)) as engine:
        engine.load_checkpoint(str(ckpt), "bad")
        with pytest.raises(CorruptionError, match="crc32c") as caught:
            two_steps(engine)
        assert str(file) in str(caught.value)
        with pytest.raises(UsageError, match="load a checkpoint"):
            engine.save_checkpoint(str(ckpt), "worse")
        engine.load_checkpoint(str(ckpt), "good")
        step(engine)
        step(engine)
        assert state_of(engine) == expected


def test_a_file_that_was_swapped_is_noticed(tmp_path: Path, nvme: Path) -> None:
    ckpt = tmp_path / "ckpt"
    with start(linked_config(nvme), net()) as engine:
        for tag in ("one", "two"):
            step(engine)
            engine.save_checkpoint(str(ckpt), tag)
    name = "optimizer/exp_avg/embed.weight/c.0.0"
    (ckpt / "two" / name).unlink()
    (ckpt / "two" / name).hardlink_to(ckpt / "one" / name)
    with start(linked_config(nvme), net(seed=3)) as engine:
        engine.load_checkpoint(str(ckpt), "two")
        with pytest.raises(CorruptionError, match="not the one that the manifest names"):
            two_steps(engine)
