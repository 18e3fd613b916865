"""Machines that share no folder, for ranks each in a network namespace of its own, or by its folders alone."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm
from tests.scripts.switch import enter

ROOT = Path(__file__).parents[1]
DELAY_S = 0.010
BITS_PER_S = 200_000_000
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18


def go_to_machine() -> None:
    """Move this process to the machine that its variables name: to its network, and to empty folders for what it writes.

    Not to an empty /tmp: Python's own packages may be in a folder there.
    """
    if namespace := os.environ.get("TEST_NAMESPACE"):
        enter(f"/run/netns/{namespace}")
        libc = ctypes.CDLL(None, use_errno=True)
        own = libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        places = (os.environ["TMPDIR"].encode(), b"/dev/shm")
        if own or any(libc.mount(b"tmpfs", path, b"tmpfs", 0, None) for path in places):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.makedirs(os.environ["HOME"], exist_ok=True)
    os.chdir(os.environ["HOME"])


@dataclass(kw_only=True)
class Machines:
    """So many machines, and one more with an S3 server."""

    options: dict[str, Any]
    """Storage options that reach the server from all of them."""
    namespaces: list[str] = field(default_factory=list)
    """Of each, the server's last; empty: they have one network."""
    folder: Path
    switch: Any = None

    def start(self, machine: int, program: str, *words: str, **variables: str) -> Any:
        """Start Python code on a machine, -1 being the server's; its output is piped."""
        own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        home = self.folder / f"machine-{machine}"
        own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
        own |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        if self.namespaces:
            own |= {"TMPDIR": str(self.folder), "TEST_NAMESPACE": self.namespaces[machine]}
            own |= {"GLOO_SOCKET_IFNAME": "wire", "MASTER_ADDR": "10.78.0.1"}
        own.pop("XDG_CACHE_HOME", None)
        code = f"from tests.machines import go_to_machine\ngo_to_machine()\n{program}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return warm.Popen([sys.executable, "-c", code, *words], env=own | variables, **pipes)

    def tell_switch(self, word: str, machine: int) -> None:
        self.switch.stdin.write(f"{word} {machine}\n")
        self.switch.stdin.flush()


def why_no_namespaces() -> str:
    """Return why this process cannot make machines with a network each; empty if it can."""
    if os.geteuid():
        return "network namespaces are root's to make"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"zstore-{os.getpid()}-probe"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, text=True)
    except FileNotFoundError:
        return "there is no program `ip`"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


@contextmanager
def machines(count: int, folder: Path, *, network: bool) -> Iterator[Machines]:
    keys = {"key": "testing", "secret": "testing"}
    with ExitStack() as stack:
        if not network:
            from tests.checkpoint.s3_server import s3_server

            yield Machines(options=stack.enter_context(s3_server()), folder=folder)
            return
        names = [f"zstore-{os.getpid()}-{number}" for number in range(count + 1)]
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        words = [sys.executable, str(ROOT / "tests/scripts/switch.py"), str(DELAY_S), str(BITS_PER_S), *names]
        switch = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, switch)
        assert switch.stdout.readline() == "ready\n"
        for number, name in enumerate(names):
            for words in (
                ["link", "set", "lo", "up"],
                ["link", "set", "wire", "address", f"02:00:00:00:00:{number:02x}", "mtu", "9000"],
                ["addr", "add", f"10.78.0.{number + 1}/24", "dev", "wire"],
                ["link", "set", "wire", "up"],
            ):
                subprocess.run(["ip", "-n", name, *words], check=True)
        address = f"10.78.0.{count + 1}"
        options = keys | {"client_kwargs": {"endpoint_url": f"http://{address}:5000"}}
        found = Machines(options=options, namespaces=names, folder=folder, switch=switch)
        serve = f"import sys\nfrom moto.server import main\nmain(['-H', '{address}', '-p', '5000'])"
        server = found.start(-1, serve)
        stack.callback(_end, server)
        said = [""]
        while not re.search("Running on", said[-1]):
            said.append(server.stderr.readline())
            assert said[-1], f"the server ended before it listened: {''.join(said)}"
        threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()
        yield found


def _end(process: Any) -> None:
    process.kill()
    process.communicate()
