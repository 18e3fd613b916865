"""Jobs of the service: under several threads, after they waited, and after a restart."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.answers import TOKEN, Client
from tests.serve.browser import needs_chromium, new_context, open_browser, watch
from tests.waiting import until
from zstore.checkpoint.catalog import scan
from zstore.errors import DiskFullError
from zstore.io.files import Files
from zstore.serve.jobs import Jobs, RunningJob
from zstore.serve.models import PruneRules
from zstore.serve.routes.pruning import prune
from zstore.serve.server import serving
from zstore.serve.service import Service
from zstore.serve.settings import Root, Settings

_NUM_STEPS = 500


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """Jobs while threads take turns as often as they can."""
    pause_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Jobs() as made:
            yield made
    finally:
        sys.setswitchinterval(pause_s)


def test_progress_is_counted_while_others_look(jobs: Jobs) -> None:
    job = jobs.add("upload", "run")

    def advance() -> None:
        for _ in range(_NUM_STEPS):
            job.advance(1)

    def look() -> None:
        for _ in range(_NUM_STEPS):
            jobs.all()
            jobs.changed("run", 0)

    threads = [threading.Thread(target=work, daemon=True) for work in (advance, advance, look, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads), "two threads wait for each other"
    assert job.now.done_bytes == 2 * _NUM_STEPS


def test_a_checkpoint_that_took_the_name_of_a_pruned_one_stays(tmp_path: Path) -> None:
    arrays = {"model/a": np.ones(4, np.float32)}
    for tag in ("best", "last"):
        save_arrays(tmp_path, arrays, tag=tag)
    service, free = Service(Settings(roots=(Root.parse(str(tmp_path)),))), threading.Event()
    (run,) = service.runs.all().values()

    def wait(job: RunningJob) -> None:
        free.wait(200)

    with contextlib.closing(service):
        for other in ("one", "two"):
            service.jobs.start("verify", other, None, wait)
        plan = prune(service, run, PruneRules(keep_last=1)).plan
        job = prune(service, run, PruneRules(keep_last=1, plan=plan)).job
        assert job is not None
        save_arrays(tmp_path, {"model/a": np.zeros(4, np.float32)}, tag="best", overwrite=True)
        free.set()
        until(lambda: service.jobs.get(job).state != "running")
        found = service.jobs.get(job)
    assert {info.tag for info in scan(tmp_path).tags} == {"best", "last"}
    assert found.state == "failed"
    assert "another checkpoint was saved under its name" in str(found.problem)


# -- after a restart --------------------------------------------------------------------------------------------------

_KILLED = """
import sys, threading
from pathlib import Path
from zstore.serve.jobs import Jobs

jobs = Jobs(Path(sys.argv[1]))
ended = jobs.add("verify", "run", "step-1", total_bytes=7)
ended.advance(7)
ended.say("no faults")
ended.end()
jobs.start("prune", "run", None, lambda job: print("begun", flush=True) or threading.Event().wait())
"""


def test_jobs_of_a_killed_service_are_there_and_the_one_under_way_was_cut_short(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        with Jobs(tmp_path) as other:
            assert other.all().jobs == [], "the file is of one process at a time"
            other.add("verify", "elsewhere").end()
        process.kill()
    with Jobs(tmp_path) as jobs:
        verified, pruned = jobs.all().jobs
        assert (verified.state, verified.lines, verified.done_bytes) == ("done", ["no faults"], 7)
        assert (pruned.state, pruned.problem) == ("failed", "ended by a restart of the service")
        assert pruned.ended_at is None
        jobs.add("prune", "run").end()  # the run is free again
    with Jobs(tmp_path) as jobs:
        assert [job.kind for job in jobs.all().jobs] == ["verify", "prune", "prune"]


def test_jobs_that_a_stop_cuts_short_say_so_later(tmp_path: Path) -> None:
    begun, free = threading.Event(), threading.Event()

    def work(job: RunningJob) -> None:
        begun.set()
        free.wait(200)
        job.advance(1)

    with Jobs(tmp_path) as jobs:
        jobs.start("verify", "run", "step-1", work)
        begun.wait(200)
        closing = threading.Thread(target=jobs.close)
        closing.start()
        until(lambda: jobs.is_closed)
        free.set()
        closing.join(200)
    with Jobs(tmp_path) as jobs:
        (job,) = jobs.all().jobs
        assert job.problem == "ended by a restart of the service"
        assert job.ended_at is not None


@pytest.mark.parametrize("text", ["", "{", '{"jobs": 3}', '{"jobs": [{"id": 1}]}'])
def test_a_damaged_file_of_jobs_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".zstore-jobs.json").write_text(text)
    with Jobs(tmp_path) as jobs:
        assert jobs.all().jobs == []
        jobs.add("verify", "run").end()
    with Jobs(tmp_path) as jobs:
        assert len(jobs.all().jobs) == 1


class _Full(Files):
    """A drive without room."""

    def write_small(self, path: str | Path, data: bytes, *, sync: bool = True) -> None:
        raise DiskFullError("no room", path=str(path))


def test_jobs_go_on_if_their_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Jobs(tmp_path, _Full()) as jobs:
        for _ in range(2):
            jobs.add("verify", "run").end()
        assert len(jobs.all().jobs) == 2
    assert [record.getMessage()[:43] for record in caplog.records] == ["jobs will not be there after a restart: no "]


@needs_chromium
def test_a_verification_before_a_restart_is_asked_for_again_by_one_click(tmp_path: Path) -> None:
    save_arrays(tmp_path / "run", {"model/a": np.ones(4, np.float32)})
    settings = Settings(roots=(Root.parse(str(tmp_path)),), port=0, token=TOKEN, allow_actions=True)
    with serving(settings) as base:
        client = Client(base)
        first = client.post("/api/runs/run/checkpoints/latest/verify", status=202)["id"]
        until(lambda: client.get(f"/api/jobs/{first}")["state"] == "done")
    with serving(settings) as base, open_browser() as browser:
        (found,) = Client(base).get("/api/jobs")["jobs"]
        assert (found["id"], found["state"]) == (first, "done")
        assert found["lines"] == ["no faults: every chunk of 1 arrays matches its checksum"]
        page = watch(new_context(browser), base).page
        page.goto(f"{base}/jobs")
        page.fill("[data-test=token]", TOKEN)
        page.click("[data-test=sign-in]")
        page.click("[data-test=job-again]")
        page.locator("[data-test=job]").nth(1).wait_for()
        until(lambda: [job["state"] for job in Client(base).get("/api/jobs")["jobs"]] == ["done", "done"])
