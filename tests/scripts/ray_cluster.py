"""A cluster of Ray whose nodes come and go while examples/ray_train.py trains on it: RAY_CLUSTER.py FOLDER URL.

A node is lost once two workers saved step 3, another joins once one worker saved two more. When two workers saved again, the
run is let go to its end, and FOLDER/result.json has what Ray knows then.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray_train import trainer

from zstore.checkpoint.reader import tags
from zstore.errors import ZstoreError
from zstore.remote.service import open_folder

folder, url = Path(sys.argv[1]), sys.argv[2]
SMALL = {"object_store_memory": 80_000_000}


class Goal:
    """A number of steps that is told later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, steps: int) -> None:
        self.path.with_suffix(".part").write_text(str(steps))
        os.replace(self.path.with_suffix(".part"), self.path)

    def __gt__(self, step: int) -> bool:
        return int(self.path.read_text()) > step


def saved() -> list[tuple[int, int]]:
    try:
        return [(one.record.step, one.record.training_world_size) for one in tags(open_folder(url))]
    except ZstoreError:
        return []


def come_and_go(fitting: Future[Any]) -> None:
    def until(ready: Callable[[], bool]) -> None:
        while not fitting.done() and not ready():
            time.sleep(0.2)

    until(lambda: (3, 2) in saved())
    cluster.remove_node(nodes[1], allow_graceful=False)
    until(lambda: sum(workers == 1 for _, workers in saved()) >= 2)
    cluster.add_node(num_cpus=1, **SMALL)
    until(lambda: saved()[-1][1] == 2)
    goal.set(saved()[-1][0] + 5)


goal = Goal(folder / "goal")
goal.set(1_000_000)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
nodes = [cluster.add_node(num_cpus=1, **SMALL) for _ in range(2)]
ray.init(address=cluster.address)
run = trainer(url, goal, str(folder / "ray"))
run.scaling_config.elastic_resize_monitor_interval_s = 1.0
with ThreadPoolExecutor(1) as pool:  # nodes are started from the main thread alone
    fitting = pool.submit(run.fit)
    come_and_go(fitting)
    result = fitting.result()
with result.checkpoint.as_directory() as path:
    pointer = json.loads(Path(path, "version.json").read_text())
reported = [metrics for _, metrics in result.best_checkpoints]
(folder / "result.json").write_text(json.dumps({"reported": reported, "pointer": pointer, "saved": saved()}))
ray.shutdown()
cluster.shutdown()
