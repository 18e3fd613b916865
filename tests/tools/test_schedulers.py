"""The examples for schedulers: what they say of signals and exit codes is what real processes do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests import warm
from tests.tools.commands import free_port
from tests.tools.train_runs import config_file
from tests.waiting import until
from zstore.checkpoint.reader import tags

EXAMPLES = Path(__file__).parents[2] / "examples"
SRUN = """
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=0"
words = sys.argv[2:]
count = int(os.environ["SLURM_NTASKS"])
tasks = [
    subprocess.Popen(words, env=os.environ | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}) for n in range(count)
]
signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
"""It passes signals on, and ends with the greatest code of its tasks, as Slurm's does."""
SCONTROL = """
import os, sys
if sys.argv[1] == "show":
    print("127.0.0.1")
else:
    open(os.environ["TEST_FOLDER"] + "/requeued", "a").write(" ".join(sys.argv[2:]) + "\\n")
"""


def jobset() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The set, its job and its container."""
    found = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())["spec"]
    job = found["replicatedJobs"][0]["template"]["spec"]
    return found, job, job["template"]["spec"]["containers"][0]


@contextmanager
def pods(tmp_path: Path, text: Path, port: int) -> Iterator[list[Any]]:
    """Two pods of the example, as its words and variables start them; the block begins when they have saved."""
    _, _, container = jobset()
    given = {"ds.json": config_file(tmp_path), "gpt-small": "gpt-tiny", "s3://bucket/run": tmp_path / "run", "100": 5}
    words = [str(given.get(word, word)) for word in container["command"][1:] + container["args"]]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    assert variables["MASTER_ADDR"] == "train-ranks-0-0.train"
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *words, "--data", str(text), "--seq-len", "16"]
    started = [
        warm.Popen(command, env=os.environ | variables | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        until(lambda: (tmp_path / "run").is_dir() and tags(tmp_path / "run"))
        yield started
    finally:
        for pod in started:
            pod.kill()
            pod.communicate()


def test_pods_that_get_a_signal_save_and_start_again_for_nothing(tmp_path: Path, text: Path) -> None:
    spec, job, container = jobset()
    stops = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    with pods(tmp_path, text, free_port()) as started:
        started[1].send_signal(signal.SIGTERM)
        codes = [pod.wait(200) for pod in started]
    assert codes == [75, 75]
    assert stops == {"containerName": container["name"], "operator": "In", "values": [75]}
    rule = spec["failurePolicy"]["rules"][0]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["completions"] == job["parallelism"] == int(container["env"][1]["value"])


STANDS_IN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
rank, folder = os.environ["RANK"], os.environ["TEST_FOLDER"]
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
assert [os.environ[name] for name in names] == ["2", rank, "2", "127.0.0.1"]
open(f"{folder}/up-{rank}", "w")
while not os.path.exists(f"{folder}/done"):
    time.sleep(0.02)
"""
"""Ends as `zstore train` does: with 75 after a signal, with 0 when all is done."""


def test_slurm_queues_a_stopped_run_again_until_it_is_done(tmp_path: Path) -> None:
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{program}")
        (tmp_path / name).chmod(0o700)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TEST_FOLDER": str(tmp_path),
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2(x1)",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_ID": "7",
    }

    def submit(code: str, restarts: int = 0) -> subprocess.Popen[str]:
        own = os.environ | variables | {"SLURM_RESTART_COUNT": str(restarts)}
        command = ["bash", str(EXAMPLES / "slurm.sh"), sys.executable, "-c", code]
        return subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True)

    def end(job: subprocess.Popen[str]) -> tuple[int, int]:
        """Its code, and how often a job was queued again so far."""
        _, said = job.communicate(timeout=200)
        assert "syntax" not in said
        queued = tmp_path / "requeued"
        return job.returncode, queued.read_text().count("7\n") if queued.exists() else 0

    job = submit(STANDS_IN)
    until(lambda: job.poll() is not None or len(list(tmp_path.glob("up-*"))) == 2)
    job.send_signal(signal.SIGTERM)
    assert end(job) == (75, 1)
    (tmp_path / "done").touch()
    assert end(submit(STANDS_IN)) == (0, 1)
    fails = "raise SystemExit(3)"
    assert end(submit(fails, restarts=19)) == (3, 2)
    assert end(submit(fails, restarts=20)) == (3, 2)
