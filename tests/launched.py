"""Python programs as users start them, alone or as ranks under torch's launcher."""

import os
import sys
import tempfile
from pathlib import Path

from tests import warm


def run(
    *words: object, world_size: int = 1, code: int = 0, anew: bool = False, cwd: Path | None = None, **variables: str
) -> tuple[list[str], str]:
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"} | variables
    with tempfile.TemporaryDirectory() as logs:
        launcher = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        launcher += ["--local-addr=127.0.0.1", f"--nproc-per-node={world_size}", "--redirects=1", f"--log-dir={logs}"]
        command = [sys.executable, *(launcher if world_size > 1 else ()), *map(str, words)]
        done = warm.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=cwd, anew=anew)
        printed = [done.stdout, *(path.read_text() for path in Path(logs).rglob("stdout.log"))]
    assert done.returncode == code, "".join(printed) + done.stderr
    return list(warm.without_gloo("".join(printed).splitlines())), done.stderr
