"""Signals and exit codes of `zstore train`, what starts it, and the examples for schedulers; ranks that come and go."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.process import free_port
from tests import warm
from tests.tools.train_runs import config_file, rows
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.tools.train import launch

PYTHON = [sys.executable, "-c"]


@contextmanager
def training(command: list[str], tmp_path: Path, text: Path, *more: object) -> Iterator[warm.Popen]:
    """A run of very many steps that saves often; the block begins when it has saved."""
    words = ["train", "--config", config_file(tmp_path), "--data", text, "--model", "gpt-tiny", "--seq-len", 16]
    words += ["--steps", 10**6, "--save", tmp_path / "run", "--save-every", 10, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with warm.Popen(
        [*command, *map(str, words)], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            seen = []
            for line in process.stderr:
                seen.append(line)
                if "the save stalled" in line:
                    break
            else:
                raise AssertionError("".join(seen))
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def finish(process: warm.Popen) -> tuple[int, str]:
    rest = process.stderr.read()
    return process.wait(200), rest


ZSTORE = [sys.executable, "-m", "zstore"]


def test_a_signal_saves_and_ends_with_75(tmp_path: Path, text: Path) -> None:
    with training(ZSTORE, tmp_path, text, "--nproc", 2, "--metrics", tmp_path / "m.jsonl") as process:
        process.send_signal(signal.SIGTERM)
        code, rest = finish(process)
    assert code == 75, rest
    assert "Traceback" not in rest, rest
    with open_checkpoint(tmp_path / "run") as reader:
        assert verify_checkpoint(reader) == []
        assert reader.record.step == rows(tmp_path / "m.jsonl")[-1]["step"]


def test_no_rank_outlives_its_launcher(tmp_path: Path, text: Path) -> None:
    with training(ZSTORE, tmp_path, text, "--nproc", 2) as process:
        process.kill()
        code, rest = finish(process)  # the pipe ends when the last rank did
    assert code == -signal.SIGKILL
    assert "SIGTERM: will stop after this step" in rest, rest


def test_ranks_that_stopped_are_no_failure() -> None:
    with pytest.raises(SystemExit) as caught:
        launch([*PYTHON, "import os, sys; sys.exit(75 * int(os.environ['RANK']))"], 2)
    assert caught.value.code == 75


def test_a_second_signal_reaches_the_ranks_too(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (signal.signal(signal.SIGUSR1, signal.SIG_DFL),\n"
        "    os.kill(os.getppid(), signal.SIGUSR1)))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "while True: time.sleep(0.1)"
    )
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as caught:
        launch([*PYTHON, code], 1)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before


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
    slurm = {"NTASKS": "2", "TASKS_PER_NODE": "2(x1)", "JOB_NODELIST": "node1", "JOB_ID": "7"}
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TEST_FOLDER": str(tmp_path)}
    variables |= {f"SLURM_{name}": value for name, value in slurm.items()}

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


SCRIPT = Path(__file__).parent.parent / "scripts" / "elastic.py"
STEPS = 12
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 5, "micro_batch_sizes": [1, 2]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 0,
}
# Torch's agents share a store that one that joins later does not find: https://github.com/pytorch/pytorch/issues/135712
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def prepare(folder: Path, gate: int) -> Path:
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "gate").write_text(str(gate))
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """Every whole line, in the order of steps."""
    texts = [path.read_text().splitlines(keepends=True) for path in folder.glob("steps-*.jsonl")]
    found = [json.loads(line) for text in texts for line in text if line.endswith("\n")]
    return sorted(found, key=lambda line: (line["step"], line["rank"]))


def steps_of(folder: Path) -> list[tuple[int, list[int], float]]:
    found = []
    for step in range(STEPS):
        here = [line for line in lines(folder) if line["step"] == step]
        assert len({line["world"] for line in here}) == 1, f"step {step} was taken twice: {here}"
        numbers = sorted(number for line in here for number in line["numbers"])
        found.append((here[0]["batch"], numbers, sum(line["loss"] for line in here) / len(here)))
    return found


def wait_for(what: Callable[[], bool], why: str) -> None:
    # A guard: what is awaited is progress. On a busy machine agents miss heartbeats, and meet again after some rounds.
    deadline = time.monotonic() + 800
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


def torchrun(tmp_path: Path, port: int, *words: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    # A loaded machine may keep an agent from its heartbeat for seconds; one that is taken for dead never comes back.
    command += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=15"]
    command += ["--monitor-interval", "0.1"]
    return [*command, "--log-dir", str(tmp_path / "logs"), *words]


@contextmanager
def agents(command: list[str]) -> Iterator[Callable[[], Any]]:
    """Give what starts an agent by `command`; all are killed at the end of the block."""
    started: list[Any] = []

    def starts() -> Any:
        started.append(warm.Popen(command, env=ENVIRONMENT, start_new_session=True))
        return started[-1]

    try:
        yield starts
    finally:
        for agent in started:
            agent.kill()


@pytest.mark.timeout(1200)
def test_a_run_goes_on_with_one_rank_and_with_two_again(tmp_path: Path) -> None:
    whole, run = prepare(tmp_path / "whole", STEPS), prepare(tmp_path / "run", 0)
    alone = warm.run([sys.executable, str(SCRIPT), str(whole), str(STEPS)], check=False, env=ENVIRONMENT, timeout=800)
    assert alone.returncode == 0
    port = free_port()
    command = torchrun(tmp_path, port, str(SCRIPT), str(run), str(STEPS))

    def worlds(step: int) -> set[int]:
        return {line["world"] for line in lines(run) if line["step"] == step}

    with agents(command) as starts:
        first = starts()
        wait_for(lambda: is_there(port), "the first agent does not listen")
        second = starts()
        # The first may have begun alone, if the second took long.
        wait_for(lambda: any(run.glob("steps-2-*")), "no run of two ranks began")
        (run / "gate").write_text("4")
        wait_for(lambda: worlds(3) == {2}, "the run did not begin with two ranks")
        wait_for((run / "saved" / "step-00000004").is_dir, "its step was not saved")
        # An agent's end is a machine's: its rank goes with it.
        second.kill()
        os.kill(next(line["pid"] for line in lines(run) if line["agent"] == second.pid), signal.SIGKILL)
        (run / "gate").write_text("8")
        wait_for(lambda: worlds(7) == {1}, "the run did not go on with one rank")
        of_two = set(run.glob("steps-2-*"))
        third = starts()
        wait_for(lambda: set(run.glob("steps-2-*")) > of_two, "no rank joined")
        (run / "gate").write_text(str(STEPS))
        assert [agent.wait(800) for agent in (first, third)] == [0, 0]
    assert [sorted(worlds(step)) for step in (0, 4, STEPS - 1)] == [[2], [1], [2]]
    for (batch, numbers, loss), (_, same, expected) in zip(steps_of(run), steps_of(whole), strict=True):
        assert batch == 4
        assert numbers == same
        assert loss == pytest.approx(expected, rel=1e-4)
    used = [number for _, numbers, _ in steps_of(run)[:10] for number in numbers]
    assert sorted(used) == list(range(40))  # an epoch


def is_there(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
