"""`/api` says of runs, checkpoints and arrays what the commands, zarr-python and the files say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
import zarr

from tests.serve.sample import HOSTILE_RUN, RUN, RUN_ID, arrays_of, make_sample
from zstore import journal
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.tools.ls import ls_command
from zstore.tools.opening import Common

FIRST, LAST = "step-00000060", "step-00000300"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; not to be changed."""
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def client(sample: Path) -> Iterator[httpx.Client]:
    with serving(Settings(roots=(Root.parse(str(sample)),), port=0)) as base, httpx.Client(base_url=base) as client:
        yield client


def get(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_path(run: str) -> str:
    return f"/api/runs/{quote(run, safe='')}"


def test_runs_are_listed_by_their_journals_and_checkpoints(client: httpx.Client) -> None:
    hostile, run = get(client, "/api/runs")["runs"]
    assert (hostile["name"], run["name"]) == (HOSTILE_RUN, RUN)
    assert (run["state"], run["run_id"], run["step"], run["total_steps"]) == ("done", RUN_ID, 300, 1000)
    assert (run["num_checkpoints"], run["newest"]["checkpoint"]) == (5, LAST)
    assert (hostile["newest"]["checkpoint"], hostile["newest"]["step"]) == ("checkpoint-40/step-00000040", 40)


def test_a_run_has_its_sessions_and_saves(client: httpx.Client) -> None:
    detail = get(client, run_path(RUN))
    killed, ended = detail["sessions"]
    assert (killed["ended_at"], killed["first_step"]) == (None, 0)
    assert ended["ended_at"] is not None
    assert ended["first_step"] == 120
    assert [(save["step"], save["state"]) for save in detail["saves"]] == [
        *((step, "committed") for step in (60, 120, 180, 240, 300)),
        (300, "failed"),
    ]
    assert detail["summary"]["failed_save"].startswith("step 300: ")


def test_steps_are_those_of_the_journal(client: httpx.Client, sample: Path) -> None:
    expected = journal.steps(journal.read(sample / RUN))
    found = get(client, f"{run_path(RUN)}/steps")
    assert found["columns"]["step"] == list(range(1, 301))
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "stall_s", "rate/disk read", "memory/host"):
        assert found["columns"][name] == pytest.approx(expected[name]), name
    few = get(client, f"{run_path(RUN)}/steps?points=30&after=150")["columns"]
    assert few["step"] == list(range(155, 301, 5))
    assert few["loss"] == [expected["loss"][int(step) - 1] for step in few["step"]]
    assert get(client, f"{run_path(RUN)}/steps?after=300")["columns"]["step"] == []
    assert get(client, f"{run_path(RUN)}/steps?after=297")["columns"]["step"] == [298, 299, 300]


def test_placement_has_the_tier_of_every_array(client: httpx.Client) -> None:
    placement = get(client, f"{run_path(RUN)}/placement")
    kinds = {("host", "parameters"), ("disk", "optimizer state"), ("device", "buffers")}
    assert {(array["tier"], array["kind"]) for array in placement["arrays"]} == kinds
    assert {array["name"]: array["nbytes"] for array in placement["arrays"]} == {
        n: a.nbytes for n, a in arrays_of().items()
    }
    assert (placement["host_budget_bytes"], placement["device_bytes"]) == (64 * 2**20, 256 * 2**20)


@pytest.mark.parametrize("run", [RUN, HOSTILE_RUN])
def test_checkpoints_take_share_and_free_what_ls_says(
    client: httpx.Client, sample: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ls_command(str(sample / run), Common(json=True))
    expected = json.loads(capsys.readouterr().out)["checkpoints"]
    found = get(client, f"{run_path(run)}/checkpoints")
    names = ("step", "size_bytes", "shared_bytes", "freed_bytes")
    assert [(one["checkpoint"], *(one[name] for name in names)) for one in found["checkpoints"]] == [
        (one["tag"], *(one[name] for name in names)) for one in expected
    ]
    assert all(one["shared_bytes"] > 0 and one["metrics"]["loss"] > 0 for one in found["checkpoints"])


def test_what_is_no_checkpoint_is_named_and_each_file_counts_once(client: httpx.Client, sample: Path) -> None:
    found = get(client, f"{run_path(RUN)}/checkpoints")
    assert [refused["name"] for refused in found["refused"]] == ["step-00000001"]
    folders = [sample / RUN / one["checkpoint"] for one in found["checkpoints"]]
    stats = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert found["total_bytes"] == sum({(s.st_dev, s.st_ino): s.st_size for s in stats}.values())


def test_a_checkpoint_and_its_arrays_are_what_zarr_opens(client: httpx.Client) -> None:
    detail = get(client, f"{run_path(RUN)}/checkpoints/latest")
    assert (detail["entry"]["checkpoint"], detail["state"]["client_state"]) == (LAST, {"epoch": 3})
    arrays = get(client, f"{run_path(RUN)}/checkpoints/{LAST}/arrays")["arrays"]
    assert len(arrays) == detail["num_arrays"]
    assert sum(array["nbytes"] for array in arrays) == detail["array_bytes"]
    names = [array["name"] for array in arrays]
    assert names.index("model/h.2.attn.weight") < names.index("model/h.10.attn.weight")
    for array in (arrays[0], arrays[-1]):
        stored = zarr.open_array(f"{client.base_url}/{array['url']}", mode="r")
        assert (str(stored.dtype), list(stored.shape)) == (array["dtype"], array["shape"])
    nested = f"{run_path(HOSTILE_RUN)}/checkpoints/checkpoint-40/step-00000040"
    assert get(client, nested)["entry"]["step"] == 40
    assert get(client, f"{nested}/arrays")["arrays"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/none", 404, f"runs that are served: {HOSTILE_RUN}"),
        (f"/api/runs/{RUN}/checkpoints/none", 404, "the newest are: "),
        (f"/api/runs/{RUN}/steps?points=0", 400, "query.points: Input should be greater than or equal to 1"),
        (f"/api/runs/{RUN}/steps?after=x", 400, "query.after: Input should be a valid integer"),
        ("/api/none", 404, "see /api/docs"),
    ],
)
def test_a_wrong_question_is_told_what_was_expected(client: httpx.Client, path: str, status: int, text: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert text in unquote(answer.json()["error"])


def test_a_run_in_a_bucket_is_shown_too(sample: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(sample / RUN), "/bucket/far", recursive=True)
    try:
        with (
            serving(Settings(roots=(Root.parse("memory://bucket/far"),), port=0)) as base,
            httpx.Client(base_url=base) as client,
        ):
            (run,) = get(client, "/api/runs")["runs"]
            assert (run["name"], run["step"], run["num_checkpoints"]) == ("far", 300, 5)
            assert get(client, "/api/runs/far/steps")["columns"]["step"][-1] == 300
            stored = zarr.open_group(f"{base}/zarr/far/latest", mode="r")["model/wte.weight"]
            local = zarr.open_group(sample / RUN / LAST, mode="r")["model/wte.weight"]
            assert (stored[:] == local[:]).all()  # type: ignore[index, union-attr]
    finally:
        memory.rm("/bucket", recursive=True)
