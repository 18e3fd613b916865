"""Commands that several ranks carry out together: the same bytes and words as one process, one commit, one end."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import warm
from tests.checkpoint.checkpoints import save_arrays
from tests.interop.deepspeed_data import root_of
from zstore.checkpoint.commit import new_folder_of
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointError, RankError, ZstoreError
from zstore.io.shards import open_resources
from zstore.ranks import incident
from zstore.ranks.division import shares_of
from zstore.ranks.team import ALONE, Team
from zstore.ranks.world import World
from zstore.testing.faults import DeadlyFiles
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import ConvertOptions, convert_command
from zstore.tools.diff import diff_command
from zstore.tools.opening import Common
from zstore.tools.reshard import reshard_command
from zstore.tools.verify import verify_command
from zstore.weights.file import BLOCK_BYTES
from zstore.weights.from_checkpoint import list_weights, write_weights
from zstore.weights.layout import Weight, parts_of, plan_files

DEEPSPEED = str(root_of("stage2-bf16-groups-2"))
ITEMS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), max_size=30)


@given(items=ITEMS, world_size=st.integers(1, 70))
@settings(max_examples=150)
def test_every_unit_is_one_ranks_and_ranks_differ_by_less_than_a_unit(
    items: list[tuple[int, int]], world_size: int
) -> None:
    parts = [shares_of(items, rank, world_size) for rank in range(world_size)]
    found = [(share.item, unit) for part in parts for share in part for unit in range(share.first, share.stop)]
    assert found == [(item, unit) for item, (units, _) in enumerate(items) for unit in range(units)]
    mean = sum(units * max(1, nbytes) for units, nbytes in items) / world_size
    largest = max((max(1, nbytes) for units, nbytes in items if units), default=0)
    for part in parts:
        took = sum((share.stop - share.first) * max(1, items[share.item][1]) for share in part)
        assert abs(took - mean) < largest + 1


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30_000), st.sampled_from(["float32", "float16", "uint8", "int64"]))),
    world_size=st.integers(1, 9),
)
@settings(max_examples=60)
def test_every_element_of_the_weights_lies_in_one_part_of_a_file(sizes: list[tuple[int, str]], world_size: int) -> None:
    weights = [
        Weight(name=f"w{number}", array=f"model/w{number}", shape=(numel,), dtype=dtype)
        for number, (numel, dtype) in enumerate(sizes)
    ]
    layouts = plan_files(weights, 50_000)
    parts = [part for rank in range(world_size) for part in parts_of(layouts, 8192, rank, world_size)]
    for layout in layouts:
        bounds = [(part.start, part.stop) for part in parts if part.layout is layout]
        assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), layout.file_bytes]
    elements: dict[str, list[int]] = {weight.array: [] for weight in weights}
    for array, first, stop in (found for part in parts for found in part.ranges()):
        elements[array] += range(first, stop)
    assert elements == {weight.array: list(range(weight.numel)) for weight in weights}


# -- what is written, and what is said ------------------------------------------------------------------------------------


def make_arrays(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "model/h.0.w": rng.standard_normal((3000, 700), dtype=np.float32),
        "model/h.1.w": rng.standard_normal((500, 700)).astype(np.float16),
        "model/b": np.arange(77.0),
        "model/none": np.zeros((0, 3), np.float32),
        "optimizer/exp_avg/h.0.w": rng.standard_normal((3000, 700), dtype=np.float32),
        "buffer/mask": rng.random(9) < 0.5,
    }


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def arrays_of(path: Path) -> dict[str, bytes]:
    with open_checkpoint(path) as reader:
        assert verify_checkpoint(reader) == []
        return {name: reader.read_array(name).tobytes() for name in reader.arrays}


def commands(base: Path, out: Path, common: Common) -> dict[str, Any]:
    """Carry out each command; return its exit code and what it printed on stdout."""
    run, other, bad = base / "run", base / "other", base / "bad"
    calls = {
        "verify": lambda: verify_command(str(run), common),
        "verify bad": lambda: verify_command(str(bad), common),
        "diff": lambda: diff_command(str(run), str(other), values=True, common=common),
        "consolidate": lambda: consolidate_command(str(run), out / "weights", "bf16", 4_000_000, common=common),
        "consolidate one": lambda: consolidate_command(str(run), out / "one", "fp32", common=common),
        "reshard 1": lambda: reshard_command(str(run), out / "r1", 1, common=common),
        "reshard 5": lambda: reshard_command(str(run), out / "r5", 5, common=common),
        "reshard zstd": lambda: reshard_command(str(run), out / "zstd", codec="zstd", common=common),
        "convert": lambda: convert_command(str(run), out / "back", ConvertOptions(world_size=2), common=common),
        "convert dcp": lambda: convert_command(str(run), out / "dcp", ConvertOptions(to="dcp"), common=common),
        "convert pt": lambda: convert_command(str(run), out / "it.pt", ConvertOptions(to="torch"), common=common),
        "convert st": lambda: convert_command(str(run), out / "st", ConvertOptions(to="safetensors"), common=common),
        "convert ds": lambda: convert_command(DEEPSPEED, out / "ds", ConvertOptions(to="deepspeed"), common=common),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as said:
            code = call()
        found[name] = code, json.loads(printed.getvalue()), said.getvalue()
    return found


@contextlib.contextmanager
def watched() -> Iterator[Team]:
    incident.ABSENT_S = 0.5  # nobody needs long to answer here
    world = World.current()
    world.begin_watch(45.0)
    try:
        with world.calling("verify"):
            yield Team(world)
    finally:
        world.end_watch()


def _on_ranks(rank: int, base: str, out: str) -> dict[str, Any]:
    with watched() as team:
        return commands(Path(base), Path(out), Common(json=True, team=team))


def spoil(tag: Path) -> None:
    """Flip bits of two shards, cut one and remove one."""
    shards = sorted(path for path in tag.rglob("c.*") if path.stat().st_size > 10_000)
    for path in shards:
        path.chmod(0o600)
    for path in shards[:2]:
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    shards[2].write_bytes(shards[2].read_bytes()[:-4096])
    shards[3].unlink()


def test_ranks_write_and_say_what_one_process_does(tmp_path: Path) -> None:
    base, alone, several = tmp_path, tmp_path / "alone", tmp_path / "several"
    arrays = make_arrays()
    save_arrays(base / "run", arrays, world_size=3)
    changed = arrays["model/h.0.w"].copy()
    changed[2000:, 5] += 0.5
    save_arrays(base / "other", arrays | {"model/h.0.w": changed}, world_size=2)
    spoil(save_arrays(base / "bad", arrays, world_size=3))
    alone.mkdir()
    several.mkdir()
    one = commands(base, alone, Common(json=True))
    ranks = run_ranks(_on_ranks, 3, str(base), str(several))
    rates = {"seconds", "gb_per_s", "path", "read_bytes"}
    for name, (code, told, said) in one.items():
        plain = {key: value for key, value in told.items() if key not in rates}
        assert {rank[name][0] for rank in ranks} == {code}, name
        document = ranks[0][name][1]
        files = {"files"} if name == "convert dcp" else set()
        assert {key: document[key] for key in plain if key not in files} == {
            key: plain[key] for key in plain if key not in files
        }, name
        first, theirs = (re.sub(r" in \d.*", "", text.splitlines()[0]) for text in (said, ranks[0][name][2]))
        assert theirs == first.replace("/alone/", "/several/"), name
    assert one["verify bad"][0] == 1
    assert len(one["verify bad"][1]["faults"]) == 4
    assert one["diff"][1]["arrays"][0]["changed"] == 1000
    for name in ("weights", "one", "st", "ds"):
        assert files_of(alone / name) == files_of(several / name), name
    assert len(files_of(alone / "weights")) > 3
    assert (alone / "it.pt").read_bytes() == (several / "it.pt").read_bytes()
    for name in ("r1", "r5", "zstd", "back"):
        assert arrays_of(several / name) == arrays_of(alone / name), name
        shards = [{k: v for k, v in files_of(each / name).items() if "/c" in k} for each in (alone, several)]
        assert shards[0] == shards[1], name
    assert len(list((several / "dcp").glob("__*_0.distcp"))) == 3
    assert diff_command(str(alone / "dcp"), str(several / "dcp")) == 0
    assert {path.name for path in several.iterdir()} == {path.name for path in alone.iterdir()}


# -- one end for all --------------------------------------------------------------------------------------------------


def _fail(rank: int, base: str, out: str) -> str:
    with watched() as team, open_checkpoint(f"{base}/run") as source:
        layouts = plan_files(list_weights(source, None), 10**9)
        seen = []
        try:
            with new_folder_of(team, source.resources.files, Path(out)) as folder:
                write_weights(source, layouts, folder, overflow="error", advance=lambda _: None, team=team)
                if rank == 1:
                    raise CheckpointError("what only rank 1 sees")
        except ZstoreError as error:
            seen.append(f"{type(error).__name__}: {error}")
        try:  # the team works on
            with new_folder_of(team, source.resources.files, Path(f"{out}-{rank}")) as folder:
                write_weights(source, layouts, folder, overflow="error", advance=lambda _: None, team=team)
        except ZstoreError as error:
            seen.append(f"{type(error).__name__}: {error}")
    return "\n".join(seen)


def test_an_error_on_one_rank_is_everyones_and_nothing_is_written(tmp_path: Path) -> None:
    save_arrays(tmp_path / "run", {"model/w": np.ones((900, 700), np.float32)})
    (tmp_path / "out-0").mkdir()
    told = run_ranks(_fail, 2, str(tmp_path), str(tmp_path / "out"))
    assert "what only rank 1 sees" in told[0]
    assert told[0].startswith("RankError: rank 1 of 2 failed")
    assert told[1].startswith("CheckpointError: what only rank 1 sees")
    assert "CheckpointExistsError" in told[0].splitlines()[-1] or "exists" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-0", "run"]


def write(kind: str, base: Path, out: Path, team: Team, files: Any = None) -> None:
    with open_resources(files=files) as resources, open_checkpoint(base / "run", resources=resources) as source:
        if kind == "reshard":
            reshard_checkpoint(source, out, 3, team=team)
            return
        layouts = plan_files(list_weights(source, None), 10**9)
        with new_folder_of(team, source.resources.files, out) as folder:
            write_weights(source, layouts, folder, overflow="error", advance=lambda _: None, team=team)


def _die(rank: int, kind: str, base: str, out: str, who: int, point: int) -> tuple[str, int]:
    files = DeadlyFiles(point if rank == who else None)
    try:
        with watched() as team:
            write(kind, Path(base), Path(out), team, files)
    except RankError as error:
        return str(error), len(files.operations)
    return "", len(files.operations)


def kill_and_look(kind: str, base: Path, out: Path, who: int, point: int) -> bool:
    """Kill a rank at its file operation number `point`; return whether it was killed, and check what is left."""
    (told, _), *_ = found = [each or (None, 0) for each in _killed(kind, base, out, who, point)]
    killed = found[who][0] is None
    if killed:
        survivor = found[1 - who][0]
        assert survivor == "" or f"rank {who} " in survivor, (told, survivor)
    target = out if kind == "weights" else out / "step-00000001"
    expected = base / "expected" if kind == "weights" else base / "reshard/step-00000001"
    was_committed = target.exists()
    if not was_committed:
        assert killed
        if who:  # rank 0 removed what it began
            assert not list(out.parent.glob(f"{out.name}.*")) + list(out.glob("step*"))
        write(kind, base, out, ALONE)
    if kind == "weights":
        assert files_of(target) == files_of(expected)
    else:
        assert arrays_of(target) == arrays_of(expected)
    left = list(out.parent.glob(f"{out.name}.*"))
    # Rank 0 may die between the commit and giving back its lock, a small file that the next command removes.
    is_lock = [path.name.startswith(f"{out.name}.lock-") and path.stat().st_size < 100 for path in left]
    assert not left or (was_committed and who == 0 and is_lock == [True])
    return killed


def _killed(kind: str, base: Path, out: Path, who: int, point: int) -> list[Any]:
    found: list[Any] = run_ranks(_die, 2, kind, str(base), str(out), who, point, may_die=[who])
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    rows = np.arange(3 * BLOCK_BYTES // 4, dtype=np.float32).reshape(-1, 1024)
    save_arrays(folder / "run", {"model/w": rows, "optimizer/m/w": rows[:100], "model/b": np.ones(9)}, world_size=2)
    write("weights", folder, folder / "expected", ALONE)
    write("reshard", folder, folder / "reshard", ALONE)
    return folder


@pytest.mark.parametrize(
    ("kind", "who", "point"),
    [
        pytest.param("weights", 1, 3, marks=pytest.mark.soak),
        ("weights", 0, 12),
        pytest.param("reshard", 1, 9, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_ends_all_with_its_name_and_nothing_half_written(
    kind: str, who: int, point: int, base: Path, tmp_path: Path
) -> None:
    assert kill_and_look(kind, base, tmp_path / "out", who, point)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["weights", "reshard"])
@pytest.mark.parametrize("who", [0, 1])
def test_no_kill_at_any_operation_leaves_anything_half_written(kind: str, who: int, base: Path, tmp_path: Path) -> None:
    point, killed = 0, 0
    while kill_and_look(kind, base, tmp_path / f"out-{point}", who, point):
        point, killed = point + 1, killed + 1
    assert killed > 5
    for _ in range(40):  # the order of operations is not always the same
        kill_and_look(kind, base, tmp_path / f"again-{random.random()}", who, random.randrange(point))


PROGRAM = "import sys; from zstore.tools.cli import main; sys.argv[0] = 'zstore'; main()"


def launched(*words: str) -> Any:
    command = [sys.executable, "-c", warm.LAUNCH, "2", PROGRAM, *words]
    return warm.run(command, capture_output=True, text=True, timeout=100)


def test_a_launcher_sees_one_output_and_one_exit_code(tmp_path: Path) -> None:
    spoil(save_arrays(tmp_path / "run", make_arrays(), world_size=3))
    done = launched("verify", str(tmp_path / "run"))
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 4, done.stdout
    assert len(re.findall("^verify ", done.stderr, re.MULTILINE)) == 1, done.stderr
    done = launched("reshard", str(tmp_path / "run"), "--to", "s3://a/b")
    assert done.returncode == 1  # of the launcher of `zstore train`, which says that ranks failed
    assert done.stderr.count("is for one process") == 1, done.stderr
    done = launched("consolidate", str(tmp_path / "run"), "--dtype", "fp17")
    assert done.stderr.count("fp17") == 1, done.stderr


_LAUNCHED = """
import os, signal, threading
from zstore.tools.ranks import _ending_with_the_launcher
reading, writing = os.pipe()
if (launcher := os.fork()) == 0:
    if os.fork() == 0:
        with _ending_with_the_launcher():
            os.write(writing, b"meeting")
            threading.Event().wait(200)
    os.close(writing)
    signal.pause()
os.close(writing)
os.read(reading, 7)
os.kill(launcher, signal.SIGKILL)
print(os.read(reading, 1))  # nothing, once the rank is gone too
"""


def test_a_rank_that_waits_for_others_ends_with_its_launcher() -> None:
    done = subprocess.run([sys.executable, "-c", _LAUNCHED], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "b''\n", done.stderr
