"""Ray Train on several nodes of one machine: the example goes on with the workers that are left, and with those that come."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.service import open_folder

pytest.importorskip("ray", reason="extra test")

ROOT = Path(__file__).parents[2]


@pytest.mark.soak  # two to four minutes, and a cluster's processes
@pytest.mark.timeout(900)
def test_workers_that_are_lost_and_replaced_lose_no_step(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    own = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # It may take a node that was lost for one that is there.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "45",
    }
    command = [sys.executable, str(ROOT / "tests/scripts/ray_cluster.py"), str(tmp_path), url]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    steps, workers = zip(*found["saved"], strict=True)
    assert steps == tuple(range(1, len(steps) + 1))
    assert [size for size, before in zip(workers, (0, *workers), strict=False) if size != before] == [2, 1, 2]
    assert found["pointer"]["version"] == found["reported"][-1]["version"] == f"{url}/step-{steps[-1]:08}"
    # What was reported of a step that was saved; one may have been lost between the two.
    assert {(one["step"], one["workers"]) for one in found["reported"]} <= set(zip(steps, workers, strict=True))
    with open_checkpoint(open_folder(url)) as reader:
        assert verify_checkpoint(reader) == []
        assert reader.record.step == steps[-1]
