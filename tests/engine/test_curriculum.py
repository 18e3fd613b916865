"""Curricula: sequences that grow, samples that become harder, and where a resumed run goes on."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import zstore
from zstore.data import analyze
from zstore.engine.config.config import load_config
from zstore.engine.extras.curriculum.metrics import Metric
from zstore.engine.extras.curriculum.schedule import Difficulty
from zstore.engine.extras.curriculum.section import CurriculumSection, MetricSection
from zstore.engine.extras.curriculum.sequences import cut
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.testing.ranks import run_ranks

torch.set_num_threads(1)

LINEAR = {
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}
BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": 0,
}


class Lengths(nn.Module):
    """Notes the shapes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.seen: list[dict[str, list[int]]] = []

    def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        told = {"input_ids": input_ids} | more
        self.seen.append({name: list(value.shape) for name, value in told.items()})
        return self.weight[input_ids].mean()


def section(kind: str, **config: Any) -> CurriculumSection:
    return CurriculumSection.model_validate(
        {"min_difficulty": 8, "max_difficulty": 100, "schedule_type": kind, "schedule_config": config}
    )


def test_schedules_follow_deepspeeds_formulas() -> None:
    root = Difficulty("seqlen", section("fixed_root", total_curriculum_step=50, difficulty_step=8, root_degree=2))
    linear = Difficulty("seqlen", section("fixed_linear", total_curriculum_step=50, difficulty_step=8))
    for step in range(1, 80):
        for found, degree in ((root, 2), (linear, 1)):
            level = math.floor((step / 50) ** (1.0 / degree) * (100 - 8) + 8)
            assert found.at(step) == min(level - level % 8, 100)
    listed = Difficulty("seqlen", section("fixed_discrete", difficulty=[8, 16, 100], max_step=[5, 10]))
    assert [listed.at(step) for step in (1, 5, 6, 10, 11, 99)] == [8, 8, 16, 16, 100, 100]


def test_what_has_the_length_of_the_sequence_is_cut() -> None:
    batch = {
        "input_ids": torch.zeros(2, 12, dtype=torch.long),
        "mask": torch.ones(2, 1, 12, 12),
        "embedded": torch.zeros(2, 12, 12),
        "positions": torch.arange(12),
        "classes": torch.zeros(2),
        "rope": torch.zeros(3, 2, 12, dtype=torch.long),
        "names": ["a", (torch.zeros(2, 12), 3)],
    }
    (found,), _ = cut(Lengths(), (batch,), {}, 8)
    shapes = {name: list(value.shape) for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "input_ids": [2, 8],
        "mask": [2, 1, 8, 8],
        "embedded": [2, 8, 12],
        "positions": [8],
        "classes": [2],
        "rope": [3, 2, 8],
    }
    assert list(found["names"][1][0].shape) == [2, 8]
    assert list(batch["input_ids"].shape) == [2, 12]


def test_the_engine_cuts_in_training_alone_and_a_resume_goes_on(tmp_path: Path) -> None:
    config = BASE | {"curriculum_learning": LINEAR | {"enabled": True}}
    ids = torch.zeros(4, 16, dtype=torch.long)

    def run(engine: Any, steps: int) -> list[int]:
        for _ in range(steps):
            engine.backward(engine(ids, labels=ids))
            engine.step()
        return [shapes["labels"][1] for shapes in engine.module.seen]

    with zstore.initialize(model=Lengths(), config=config)[0] as engine:
        first = run(engine, 3)
        engine.save_checkpoint(str(tmp_path))
        engine.eval()
        engine(ids)
        assert engine.module.seen.pop()["input_ids"] == [4, 16]
        engine.train()
        whole = run(engine, 4)
    assert whole == [4, 8, 8, 12, 12, 16, 16]  # floor(step / 6 * 12 + 4), down to a multiple of 4
    with zstore.initialize(model=Lengths(), config=config)[0] as engine:
        engine.load_checkpoint(str(tmp_path))
        assert engine.curriculum_difficulties() == {"seqlen": 12}
        assert first + run(engine, 4) == whole


class CutsItself(Lengths):
    """A model written for DeepSpeed, which takes the length."""

    def forward(self, input_ids: torch.Tensor, curriculum_seqlen: int = 0) -> torch.Tensor:  # type: ignore[override]
        self.seen.append({"input_ids": [*input_ids.shape, curriculum_seqlen]})
        return self.weight[input_ids].mean()


def test_a_model_that_takes_the_length_cuts_itself_and_a_function_may_say_it() -> None:
    custom = {"enabled": True, "min_difficulty": 1, "max_difficulty": 99, "schedule_type": "custom"}
    with zstore.initialize(model=CutsItself(), config=BASE | {"curriculum_learning": custom})[0] as engine:
        with pytest.raises(UsageError, match="set_custom_curriculum_learning_schedule"):
            engine(torch.zeros(4, 16, dtype=torch.long))
        with pytest.raises(UsageError, match=r"'depth'.*seqlen"):
            engine.set_custom_curriculum_learning_schedule({"depth": lambda step: step})
        engine.set_custom_curriculum_learning_schedule(lambda step: 5 * step)
        engine(torch.zeros(4, 16, dtype=torch.long))
        assert engine.module.seen == [{"input_ids": [4, 16, 5]}]


# -- samples ------------------------------------------------------------------------------------------------------------

VALUES = np.array([n % 10 + 1 for n in range(40)])


class Numbers(Dataset[torch.Tensor]):
    """A sample is its number."""

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Weighs(nn.Module):
    """Notes the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))
        self.seen: list[int] = []

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.seen += numbers.tolist()
        return self.weight[numbers].mean()


def efficiency(**metric: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": {"depth": metric}}
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": curriculum}}}


STEPS = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [2, 5, 10], "max_step": [3, 5]}}


def drawn(folder: str, values: str, start: int, stop: int, micro: int) -> list[list[int]]:
    """Return the samples of this rank in steps `start` to `stop`, resumed from `folder` if any step was before."""
    config = BASE | {"train_micro_batch_size_per_gpu": micro}
    config |= efficiency(min_difficulty=2, max_difficulty=10, sample_to_metric_path=values, **STEPS)
    model = Weighs()
    with zstore.initialize(model=model, config=config, training_data=Numbers())[0] as engine:
        if start:
            engine.load_checkpoint(folder, f"step-{start:08}")
        steps = []
        for _ in range(start, stop):
            engine.train_batch()
            steps.append(model.seen[:])
            model.seen.clear()
            if engine.global_steps == 4 and not start:
                engine.save_checkpoint(folder)
    return steps


def _on_ranks(rank: int, folder: str, values: str) -> list[list[int]]:
    torch.set_num_threads(1)
    return drawn(folder, values, 4, 12, 1)


def test_samples_are_drawn_within_the_difficulty_once_a_pass_at_any_world_size(tmp_path: Path) -> None:
    values = str(tmp_path / "depth.npy")
    np.save(values, VALUES)
    whole = drawn(str(tmp_path / "run"), values, 0, 12, 2)
    for step, samples in enumerate(whole, 1):
        limit = 2 if step <= 3 else 5 if step <= 5 else 10
        assert VALUES[samples].max() <= limit
    # Eight samples are within 2, and make the first pass; in the second, which sees 5 and then 10, each is drawn once.
    assert sorted(whole[0] + whole[1]) == sorted(np.flatnonzero(VALUES <= 2))
    again = [number for step in whole[2:] for number in step]
    assert max(Counter(again).values()) == 1
    assert len(again) == 40
    parts = run_ranks(_on_ranks, 2, str(tmp_path / "run"), values)
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(step) for step in whole[4:]]
    with (
        zstore.initialize(model=Weighs(), config=BASE, training_data=Numbers())[0] as engine,
        pytest.raises(CheckpointMismatchError, match="the checkpoint draws its samples by a curriculum"),
    ):
        engine.load_checkpoint(str(tmp_path / "run"))


def indexed(path: Path, rows: list[list[int]]) -> str:
    """Write rows as DeepSpeed's indexed data set has them, of int64."""
    sizes = [len(row) for row in rows]
    starts = [8 * sum(sizes[:row]) for row in range(len(rows))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, len(rows), 1)
    body = np.array(sizes, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.zeros(1, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    path.with_suffix(".bin").write_bytes(np.array([n for row in rows for n in row], "<i8").tobytes())
    return str(path)


def test_deepspeeds_index_files_and_percentiles(tmp_path: Path) -> None:
    levels = sorted(set(VALUES.tolist()))
    rows = [np.flatnonzero(level == VALUES).tolist() for level in levels]
    files = {
        "index_to_sample_path": indexed(tmp_path / "to_sample", rows),
        "index_to_metric_path": indexed(tmp_path / "to_metric", [[level] for level in levels]),
    }
    schedule = {"min_difficulty": 1, "max_difficulty": 100, "schedule_type": "custom"}
    by_value = Metric("depth", MetricSection.model_validate(schedule | files), 40)
    assert np.array_equal(by_value.allows(3), VALUES <= 3)
    part = Metric("depth", MetricSection.model_validate(schedule | files | {"difficulty_type": "percentile"}), 40)
    assert int(part.allows(100).sum()) == 40  # type: ignore[union-attr]
    parts = Metric(
        "depth",
        MetricSection.model_validate(schedule | files | {"difficulty_type": "percentile", "max_difficulty": 10}),
        40,
    )
    assert np.array_equal(parts.allows(3), VALUES <= 3)  # 40 samples // 10 parts, four of each value
    with pytest.raises(ConfigError, match="names sample 30, but the data set has 30"):
        Metric("depth", MetricSection.model_validate(schedule | files), 30)
    (tmp_path / "to_sample.idx").write_bytes(b"TNTIDX" + bytes(60))
    with pytest.raises(ConfigError, match="another kind or version"):
        Metric("depth", MetricSection.model_validate(schedule | files), 40)


def test_metrics_are_made_from_a_data_set(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.tensor([1] * n + [2])} for n in (1, 5, 2)]
    assert analyze(samples, "seqlen", tmp_path / "seqlen.npy").tolist() == [2, 6, 3]
    rarity = analyze(samples, "vocabularyrarity", tmp_path / "rarity.npy")
    rare, common = -math.log(3 / 11), -math.log(8 / 11)
    assert rarity.tolist() == [int(100 * (n * common + rare)) for n in (1, 5, 2)]
    assert analyze([3, 4], lambda sample: sample / 2, tmp_path / "own.npy").tolist() == [1.5, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.npy", "rarity.npy", "seqlen.npy"]
    with pytest.raises(UsageError, match="one of seqlen, vocabularyrarity"):
        analyze(samples, "sqlen", tmp_path / "x.npy")


def test_epochs_end_and_a_function_changes_micro_batches() -> None:
    told = []

    def post_process(batch: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        told.append(state)
        return batch

    metric = {"min_difficulty": 2, "max_difficulty": 10, "clustering_type": "single_cluster"} | STEPS
    config = BASE | efficiency(**metric)
    config["data_efficiency"]["data_sampling"] |= {"num_epochs": 2, "num_workers": 1}
    engine, _, loader, _ = zstore.initialize(model=Weighs(), config=config, training_data=Numbers())
    with engine:
        engine.set_data_post_process_func(post_process)
        assert loader is not None
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        assert [len(epoch) for epoch in epochs] == [10, 10, 0]
        assert sorted(n for batch in epochs[0] for n in batch) == list(range(40))
        assert [state["current_difficulties"]["depth"] for state in told[:7]] == [2, 2, 2, 5, 5, 10, 10]
        assert [state["consumed_samples"] for state in told[:3]] == [0, 4, 8]
        with pytest.raises(StopIteration):
            engine.train_batch()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.schedule_type: the key is missing"),
        (
            {"curriculum_learning": LINEAR | {"enabled": True, "min_difficulty": 3}},
            "min_difficulty: 3 is rounded down to a multiple of difficulty_step",
        ),
        (efficiency(min_difficulty=1, max_difficulty=2, schedule_type="custom"), "depth.index_to_sample_path"),
        (efficiency(min_dificulty=1), "depth.min_dificulty: unknown key; the keys there are min_difficulty"),
        (
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}},
            "data_routing",
        ),
    ],
)
def test_wrong_sections_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(BASE | keys)
    assert json.dumps(keys)
