"""Jobs of the service: under several threads, and after they waited."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from tests.waiting import until
from zstore.checkpoint.catalog import scan
from zstore.serve.jobs import Jobs, RunningJob
from zstore.serve.models import PruneRules
from zstore.serve.routes.pruning import prune
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
