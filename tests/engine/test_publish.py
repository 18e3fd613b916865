"""Published weights are those that `zstore consolidate` gives, at every stage and tier, whatever happens between steps."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from safetensors.torch import load_file

from tests.engine.published import consolidated, in_folder, publishing, same, served, versions
from tests.engine.runs import start, step
from zstore.errors import CheckpointMismatchError, ConfigError, CorruptionError, UsageError
from zstore.interop.huggingface import WeightsReader
from zstore.publish import Receiver, pull
from zstore.testing.ranks import kill_ranks, run_ranks

STEPS = 4


def follow(rank: int, tmp_path: Path, config: dict[str, Any]) -> list[list[str]]:
    """Train and receive each version; return what each one consists of."""
    to, model = tmp_path / "weights", served()
    receiver = Receiver(model, to)
    with start(config) as engine:
        for number in range(1, STEPS + 1):
            step(engine)
            expected = consolidated(engine, tmp_path / "ckpt")
            if rank == 0:
                assert receiver.update() == receiver.version == number
                assert same(dict(model.state_dict()), expected), number
                assert pull(to, tmp_path / "hf").version == number
                assert same(in_folder(tmp_path / "hf"), expected), number
    return [[*one["deltas"], *(["full"] if one["weights"] else [])] for one in versions(to).values()]


CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, host": {"stage": 1, "tier": "cpu"},
    "stage 2, disk": {"stage": 2, "tier": "nvme"},
    "stage 3, behind": {"stage": 3, "tier": "nvme", "own": {"step_overlap": "forward"}},
    "stage 2, in the backward": {"stage": 2, "own": {"step_overlap": "backward"}, "gradient_clipping": 0.0},
    "stage 2, before the norm": {"stage": 2, "tier": "nvme", "own": {"step_overlap": "speculative"}},
    "split masters": {"stage": 2, "tier": "nvme", "own": {"split_master": True}},
    "moments in 8 bits": {"stage": 1, "tier": "nvme", "own": {"moments": "int8"}},
    "fp32": {"stage": 1, "bf16": {"enabled": False}},
    "averages": {"stage": 1, "own": {"ema": 0.9}},
    "another class": {"stage": 1, "optimizer": {"type": "Lion", "params": {"lr": 1e-6}}},
}


@pytest.mark.parametrize("name", CASES)
def test_each_version_is_what_consolidate_gives(name: str, tmp_path: Path) -> None:
    config = publishing(tmp_path / "weights", nvme=tmp_path / "nvme", publish={"full_every": 3}, **CASES[name])
    delta = "delta-00000.bin"
    assert follow(0, tmp_path, config) == [["full"], [delta], [delta], [delta, "full"]]


@pytest.mark.parametrize(("stage", "tier", "copies"), [(0, "none", 1), (1, "none", 1), (3, "nvme", 1), (2, "none", 2)])
def test_ranks_publish_their_own_rows(stage: int, tier: str, copies: int, tmp_path: Path) -> None:
    """Of several copies of the state, one."""
    config = publishing(tmp_path / "weights", stage, tier, nvme=tmp_path / "nvme")
    if copies > 1:
        config["zero_optimization"]["mics_shard_size"] = 2
    found, *_ = run_ranks(follow, 2 * copies, tmp_path, config)
    files = ["delta-00000.bin", "delta-00001.bin"] if stage else ["delta-00000.bin"]
    assert found == [["full"], *[files] * (STEPS - 1)]


def test_the_first_version_is_full_whatever_the_model_has(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = torch.nn.Linear(300, 200, bias=False), torch.ones(2, 300, dtype=torch.bfloat16)
    with start(publishing(tmp_path / "weights"), model) as engine:
        for _ in range(2):
            engine.backward(engine(data).sum())
            engine.step()
    assert [bool(one["weights"]) for one in versions(tmp_path / "weights").values()] == [True, False]


def test_checksums_of_a_full_version_are_made_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: Any) -> None:
        raise OSError("the drive does not read")

    monkeypatch.setattr(WeightsReader, "read_into", unreadable)
    model = torch.nn.Linear(1500, 1800)  # several blocks of a file
    model.register_buffer("shift", torch.ones(3))
    with start(publishing(tmp_path / "weights"), model) as engine:
        engine.backward(engine(torch.ones(2, 1500, dtype=torch.bfloat16)).sum())
        engine.step()
    written = load_file(tmp_path / "weights/weight_v000001/model.safetensors")
    expected = {name: crc32c(value.view(torch.uint8).numpy().tobytes()) for name, value in written.items()}
    assert versions(tmp_path / "weights")[1]["weights"] == expected


def test_a_skipped_step_publishes_nothing(tmp_path: Path) -> None:
    keys = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8}}
    with start(publishing(tmp_path / "weights", **keys)) as engine:
        step(engine)
        step(engine, factor=torch.inf)
        assert engine.skipped_steps == 1
        assert {number: one["step"] for number, one in versions(tmp_path / "weights").items()} == {1: 1}
        step(engine)
        assert {number: one["step"] for number, one in versions(tmp_path / "weights").items()} == {1: 1, 2: 3}


def test_every_few_steps_their_changes_are_one_version(tmp_path: Path) -> None:
    to, model = tmp_path / "weights", served()
    receiver = Receiver(model, to)
    with start(publishing(to, publish={"every": 3})) as engine:
        for number in range(9):
            step(engine)
            if number % 3 == 2:
                expected = consolidated(engine, tmp_path / "ckpt")
                receiver.update()
                assert same(dict(model.state_dict()), expected)
    assert [one["step"] for one in versions(to).values()] == [3, 6, 9]
    assert [bool(one["weights"]) for one in versions(to).values()] == [True, False, False]


def test_receivers_that_are_behind_take_all_changes_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, early, late, fresh = tmp_path / "weights", served(), served(), served()
    receiver = Receiver(early, to)
    with start(publishing(to)) as engine:
        step(engine)
        receiver.update()
        pull(to, tmp_path / "hf")
        for _ in range(4):
            step(engine)
        expected = consolidated(engine, tmp_path / "ckpt")
    assert receiver.update() == 5
    done = pull(to, tmp_path / "hf")
    assert (done.version, done.step, done.is_new) == (5, 5, True)
    assert done.read_bytes == sum(nbytes for one in versions(to).values() for nbytes, _ in one["deltas"].values())
    assert Receiver(fresh, to).update() == 5
    assert Receiver(late.float(), to).update() == 5
    late.to(torch.bfloat16).shift = late.shift.float()
    for model in (early, fresh, late):
        assert same(dict(model.state_dict()), expected)
    assert same(in_folder(tmp_path / "hf"), expected)
    assert not pull(to, tmp_path / "hf").is_new
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2, "the version before stays for its readers"


@pytest.mark.parametrize("event", ["script", "load", "buffer", "failure", "large"])
def test_weights_that_do_not_follow_by_changes_are_published_whole(
    event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to, model = tmp_path / "weights", served()
    receiver = Receiver(model, to)
    with start(publishing(to)) as engine:
        for _ in range(2):
            step(engine)
        receiver.update()
        engine.save_checkpoint(str(tmp_path / "load"))
        if event == "script":
            with torch.no_grad():
                engine.module.start.fill_(0.5)
        elif event == "load":
            step(engine)
            engine.load_checkpoint(str(tmp_path / "load"))
        elif event == "buffer":
            engine.module.shift += 1
        elif event == "failure":
            (to / ".weight_v000003").write_text("in the way")
        elif event == "large":
            engine.optimizer.param_groups[0] |= {"lr": 0.5, "weight_decay": 0.5}
        last = max(versions(to))
        step(engine)
        if event == "failure":
            assert "could not be published" in caplog.text
            assert max(versions(to)) == last
            (to / ".weight_v000003").unlink(missing_ok=True)
            step(engine)
        expected = consolidated(engine, tmp_path / "ckpt")
    found = versions(to)
    assert max(found) == last + 1
    assert not found[last + 1]["deltas"]
    assert found[last + 1]["weights"].keys() == expected.keys()
    receiver.update()
    assert same(dict(model.state_dict()), expected)


def test_steps_of_whole_tensors_publish_full_versions(tmp_path: Path) -> None:
    optimizer = {"type": "Muon", "params": {"lr": 1e-4}}
    config = publishing(tmp_path / "weights", optimizer=optimizer)
    assert follow(0, tmp_path, config) == [["full"]] * 2, "the last two"


def test_old_versions_are_removed_and_a_run_that_begins_anew_goes_on(tmp_path: Path) -> None:
    to, model = tmp_path / "weights", served()
    receiver = Receiver(model, to)
    with start(publishing(to, publish={"full_every": 2})) as engine:
        for number in range(1, 7):
            step(engine)
            if number == 1:
                receiver.update()
    assert list(versions(to)) == [3, 4, 5, 6]
    assert receiver.update() == 6, "of a removed version, by way of a full one"
    with start(publishing(to, publish={"full_every": 2})) as engine:
        step(engine)
        expected = consolidated(engine, tmp_path / "ckpt")
    assert receiver.update() == 7
    assert same(dict(model.state_dict()), expected)
    assert [path.name for path in to.iterdir() if path.name.startswith(".")] == []


def _hold(rank: int, to: Path) -> None:
    with start(publishing(to)) as engine:
        step(engine)
        os.kill(os.getpid(), signal.SIGKILL)


def test_one_run_publishes_to_a_folder(tmp_path: Path) -> None:
    to = tmp_path / "weights"
    assert kill_ranks(_hold, 1, to) == [False]
    assert (to / ".publishing").exists()
    with start(publishing(to)) as engine:
        step(engine)
        with pytest.raises(UsageError, match=rf'publishes its weights there already.*"pid": {os.getpid()}'):
            start(publishing(to))
        step(engine)
    with start(publishing(to)) as engine:
        step(engine)
    assert [bool(one["deltas"]) for one in versions(to).values()] == [False, False, True, False]
    assert [path.name for path in to.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of three steps."""
    to = tmp_path_factory.mktemp("trained")
    with start(publishing(to)) as engine:
        for _ in range(3):
            step(engine)
    return to


def _copied(source: Path, target: Path, newest: int) -> None:
    for number in range(1, newest + 1):
        name = f"weight_v{number:06d}"
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)


@pytest.mark.parametrize("file", ["delta-00000.bin", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", ["byte", "end", "gone"])
def test_a_damaged_version_is_refused_and_nothing_changes(
    file: str, damage: str, tmp_path: Path, trained: Path
) -> None:
    to, model = tmp_path / "weights", served()
    _copied(trained, to, 2)
    receiver = Receiver(model, to)
    receiver.update()
    pull(to, tmp_path / "hf")
    before, files = {n: v.clone() for n, v in model.state_dict().items()}, in_folder(tmp_path / "hf")
    _copied(trained, to, 3)
    path = to / "weight_v000003" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if file.endswith("bin") else 3] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "byte" else data[:-1])
    for attempt in (receiver.update, lambda: pull(to, tmp_path / "hf")):
        with pytest.raises((CorruptionError, FileNotFoundError)):
            attempt()
    assert receiver.version == 2
    assert same(dict(model.state_dict()), before)
    assert same(in_folder(tmp_path / "hf"), files)
    _copied(trained, to, 3)
    assert receiver.update() == 3
    assert pull(to, tmp_path / "hf").version == 3


def test_damaged_weights_of_a_full_version_are_refused(tmp_path: Path, trained: Path) -> None:
    _copied(trained, tmp_path / "weights", 2)
    path = tmp_path / "weights/weight_v000001/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    model = served()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(CorruptionError, match="differ"):
        Receiver(model, tmp_path / "weights").update()
    assert same(dict(model.state_dict()), before)
    with pytest.raises(CorruptionError, match="differ"):
        pull(tmp_path / "weights", tmp_path / "hf")
    assert list((tmp_path / "hf").glob("*.json")) == []


def test_weights_that_a_server_changed_itself_are_refused(tmp_path: Path, trained: Path) -> None:
    _copied(trained, tmp_path / "weights", 2)
    model = served()
    receiver = Receiver(model, tmp_path / "weights")
    receiver.update()
    with torch.no_grad():
        model.start[3] += 1
    before = {n: v.clone() for n, v in model.state_dict().items()}
    _copied(trained, tmp_path / "weights", 3)
    with pytest.raises(CorruptionError, match=r"'start': elements 0 to 56 .* not those of its base version"):
        receiver.update()
    assert same(dict(model.state_dict()), before)
    assert Receiver(model, tmp_path / "weights").update() == 3


def test_a_gap_leads_by_a_full_version_or_is_told(tmp_path: Path, trained: Path) -> None:
    to, model = tmp_path / "weights", served()
    _copied(trained, to, 1)
    receiver = Receiver(model, to)
    receiver.update()
    _copied(trained, to, 3)
    shutil.rmtree(to / "weight_v000002")
    with pytest.raises(FileNotFoundError, match="none is a full one or follows"):
        receiver.update()
    with pytest.raises(FileNotFoundError, match="expected folders like weight_v000001"):
        Receiver(model, tmp_path / "nothing").update()


def test_another_model_is_refused(tmp_path: Path, trained: Path) -> None:
    wide, tall, half = torch.nn.Linear(3, 3), served(), served()
    tall.start = torch.nn.Parameter(torch.zeros(57, dtype=torch.bfloat16))
    half.norm.half()
    more = served()
    more.extra = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    for model, said in (
        (wide, "the model has none"),
        (tall, r"'start' was published as \(56,\) in bfloat16, and the model has \(57,\)"),
        (half, "float16: expected the model that is trained, in bfloat16 or float32"),
        (more, "2 weights of the model are not published, as 'extra.weight'"),
    ):
        with pytest.raises(CheckpointMismatchError, match=said):
            Receiver(model, trained).update()
    sideways = served()
    sideways.mix = torch.nn.Parameter(torch.zeros(3, 2, 56, dtype=torch.bfloat16).transpose(0, 1))
    with pytest.raises(UsageError, match="'mix' is not contiguous"):
        Receiver(sideways, trained).update()


def test_a_folder_of_somebody_else_is_not_written_to(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"has model.safetensors, which is not of a pull"):
        pull(trained, tmp_path)


@pytest.mark.parametrize(
    ("to", "said"),
    [("relative/path", "expected an absolute path, or a URL"), ("memory://bucket/weights", "is no service of zstore")],
)
def test_places_that_weights_cannot_go_to(to: str, said: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=said):
        start(publishing(to))
