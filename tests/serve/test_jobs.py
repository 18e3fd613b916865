"""Jobs of the service under several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from zstore.serve.jobs import Jobs

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
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "two threads wait for each other"
    assert job.now.done_bytes == 2 * _NUM_STEPS
