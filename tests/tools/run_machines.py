"""Machines for tests of `zstore run`: a program named ssh that starts on this one what it is asked to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SSH = """
import os, shlex, subprocess, sys, threading
*_, host, command = sys.argv
change, folder, _, _, *words = shlex.split(command)
assert change == "cd"
os.chdir(folder)
if words[0] == "env":
    name, _, value = words[1].partition("=")
    os.environ[name] = value
    words = words[2:]
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
