"""What memory a process may have: faked systems of both versions of control groups, and a real group where there can be one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.children import limited_memory
from zstore.io import read_host_memory

GB = 2**30
MIB = 2**20
NO_LIMIT = 9223372036854771712

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(root: Path, *, groups: str, mounts: str) -> None:
    """A machine of 64 GiB, 40 of them available, and 2 GiB of swap space."""
    lines = [f"MemTotal: {64 * GB // 1024} kB", f"MemAvailable: {40 * GB // 1024} kB", "HugePages_Total: 0"]
    put(root / "proc/meminfo", "\n".join([*lines, f"SwapTotal: {2 * GB // 1024} kB", ""]))
    put(root / "proc/self/cgroup", groups)
    put(root / "proc/self/mountinfo", mounts)
    put(root / "proc/sys/kernel/random/boot_id", "a-boot\n")


def group(folder: Path, limit: int | str, used: int, cached: int = 0, *, version: int = 1) -> None:
    names = ("limit_in_bytes", "usage_in_bytes", "total_") if version == 1 else ("max", "current", "")
    put(folder / f"memory.{names[0]}", f"{limit}\n")
    put(folder / f"memory.{names[1]}", f"{used}\n")
    put(folder / "memory.stat", f"cache 1\n{names[2]}inactive_file {cached}\n{names[2]}active_file 0\n")


FIRST = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
SECOND = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    system(tmp_path, groups="", mounts="1 0 8:1 / / rw - ext4 /dev/sda rw\n")
    found = read_host_memory(tmp_path)
    assert (found.total_bytes, found.available_bytes, found.swap_bytes) == (64 * GB, 40 * GB, 2 * GB)
    assert (found.limit_bytes, found.usable_bytes, found.machine) == (None, 64 * GB, "a-boot")


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_counts_and_the_page_cache_does_not(version: int, tmp_path: Path) -> None:
    if version == 1:
        system(tmp_path, groups="4:cpu,memory:/jobs/mine\n0::/\n", mounts=FIRST)
        top, without = tmp_path / "sys/fs/cgroup/memory", str(NO_LIMIT)
    else:
        system(tmp_path, groups="0::/jobs/mine\n", mounts=SECOND)
        top, without = tmp_path / "sys/fs/cgroup", "max"
    group(top, without, 20 * GB, version=version)
    group(top / "jobs", 16 * GB, 15 * GB, 4 * GB, version=version)
    group(top / "jobs/mine", 12 * GB, 3 * GB, GB, version=version)
    found = read_host_memory(tmp_path)
    assert (found.limit_bytes, found.usable_bytes) == (12 * GB, 12 * GB)
    assert found.available_bytes == 5 * GB  # of the outer group, which others use too
    assert len({group.key for group in found.groups}) == 2


@pytest.mark.parametrize("name", ["/docker/0123", "/"])
def test_in_a_container_the_place_shows_the_processs_own_group(name: str, tmp_path: Path) -> None:
    mounts = "35 31 0:32 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    system(tmp_path, groups=f"4:memory:{name}\n", mounts=mounts)
    group(tmp_path / "sys/fs/cgroup/memory", 8 * GB, GB)
    found = read_host_memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (8 * GB, 7 * GB)


def test_a_machine_with_both_versions(tmp_path: Path) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    system(tmp_path, groups="4:memory:/a b\n0::/\n", mounts=FIRST.replace("/memory", r"/of\040memory", 1) + unified)
    group(tmp_path / "sys/fs/cgroup/of memory/a b", 8 * GB, 9 * GB)
    found = read_host_memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (8 * GB, 0)


@linux
def test_memory_of_this_machine_is_found() -> None:
    found = read_host_memory()
    assert found.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.available_bytes is not None
    assert 0 < found.available_bytes <= found.total_bytes


_IN_GROUP = """
import json, sys, torch
import zstore
from torch import nn
from zstore.errors import BudgetError
from zstore.io.machine import read_host_memory
torch.set_num_threads(1)

def config(zero):
    return {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, "steps_per_print": 0,
            "zstore": {"host_budget_bytes": "auto"} if zero["stage"] else {}}

found = read_host_memory()
engine, *_ = zstore.initialize(model=nn.Linear(8, 8), config=config(
    {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": sys.argv[1]}}))
with engine:
    budget = engine.training_state.plan.settings.budget_bytes
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(20)])  # 320 MiB, and a gradient and two moments
error = None
try:
    zstore.initialize(model=model, config=config({"stage": 0}))
except BudgetError as raised:
    error = str(raised)
print(json.dumps([found.limit_bytes, found.usable_bytes, found.available_bytes, budget, error]))
"""


@linux
def test_in_a_group_auto_and_the_plan_keep_to_its_limit(tmp_path: Path) -> None:
    limit_bytes = 1000 * MIB
    with limited_memory(limit_bytes) as limit:
        if limit.how.startswith("not limited"):
            pytest.skip(limit.how)
        command = [*limit.prefix, sys.executable, "-c", _IN_GROUP, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found, planned, available, budget, error = json.loads(done.stdout)
    assert (found, planned) == (limit_bytes, limit_bytes)
    assert 0 < available < limit_bytes
    assert limit_bytes // 10 < budget < limit_bytes * 6 // 10
    if read_host_memory().swap_bytes == 0:
        assert "1.05 GB of memory" in error
        assert "1.34 GB of this rank" in error
