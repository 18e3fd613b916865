"""Machines for tests of `zstore run`: a program named ssh that starts on this one what it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SSH = """
import ctypes, os, shlex, subprocess, sys, threading
*_, host, command = sys.argv
change, folder, _, _, *words = shlex.split(command)
assert change == "cd"
os.chdir(folder)
if words[0] == "env":
    name, _, value = words[1].partition("=")
    os.environ[name] = value
    words = words[2:]
namespace = os.environ.get("TEST_NAMESPACE_" + host.replace(".", "_"))
if namespace:
    with open("/var/run/netns/" + namespace) as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) == 0
far = subprocess.Popen(words, stdin=subprocess.PIPE)
with open(os.path.join(os.environ["TEST_FOLDER"], "ssh-" + host), "w") as file:
    file.write(str(os.getpid()))
def forward():
    while chunk := os.read(0, 65536):
        os.write(far.stdin.fileno(), chunk)
    far.stdin.close()
threading.Thread(target=forward, daemon=True).start()
code = far.wait()
sys.stdout.flush()
os._exit(code if code >= 0 else 255)
"""
"""A connection: when it is killed, the far end sees its stdin end, and nothing else."""


def with_programs(folder: Path) -> dict[str, str]:
    """Return variables with which `ssh` is found in `folder`."""
    path = folder / "ssh"
    path.write_text(f"#!{sys.executable}\n{SSH}")
    path.chmod(0o700)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}


@contextmanager
def two_namespaces() -> Iterator[Mapping[str, str] | None]:
    """Two network namespaces joined by a cable, addresses 10.77.0.1 and 10.77.0.2: yield the variables by which `ssh` finds
    them, or None where this process may not make any."""
    names = [f"zstore-{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"z{os.getpid()}n{number}" for number in (1, 2)]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {cable[0]} netns {names[0]} type veth peer name {cable[1]} netns {names[1]}")
    for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
        commands.append(f"ip -n {name} link set lo up")
        commands.append(f"ip -n {name} link set {end} name cable")
        commands.append(f"ip -n {name} addr add 10.77.0.{number}/24 dev cable")
        commands.append(f"ip -n {name} link set cable up")
    try:
        done = subprocess.run(["sh", "-ec", "\n".join(commands)], capture_output=True, check=False, timeout=200)
        if done.returncode:
            yield None
        else:
            yield {f"TEST_NAMESPACE_10_77_0_{number}": name for number, name in enumerate(names, 1)}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=200)
