"""A switch between network namespaces, each of whose links takes its time: SWITCH.py DELAY_S BITS_PER_S NAMESPACE...

Makes a device `wire` in each namespace and says "ready". Lines on stdin: `cut N` and `join N`, of a namespace's number. It is
a process, since a kernel need not have `tc netem`. The last byte of a device's MAC address is its namespace's number.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import selectors
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LONGEST = 65536


def enter(path: str) -> None:
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def device(namespace: str) -> int:
    """Return the far end of a new device in a namespace."""
    enter(f"/run/netns/{namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TAP | IFF_NO_PI))
    return fd


def main(delay_s: float, bytes_per_s: float, namespaces: list[str]) -> None:
    ports = [device(name) for name in namespaces]
    free_at = [0.0] * len(ports)
    cut: set[int] = set()
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    selector = selectors.DefaultSelector()
    for number, fd in enumerate(ports):
        selector.register(fd, selectors.EVENT_READ, number)
    selector.register(0, selectors.EVENT_READ)
    os.write(1, b"ready\n")
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(pause_s):
            if key.data is None:
                if not (words := os.read(0, 4096).split()):
                    return
                for word, port in zip(words[::2], words[1::2], strict=True):
                    (cut.add if word == b"cut" else cut.discard)(int(port))
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    frame, now = os.read(key.fd, LONGEST), time.monotonic()
                    # One link's frames go one after the other.
                    free_at[key.data] = max(now, free_at[key.data]) + len(frame) / bytes_per_s
                    to = range(len(ports)) if frame[0] & 1 else [frame[5]] if frame[5] < len(ports) else []
                    for port in to:
                        if port != key.data and not cut & {port, key.data}:
                            heapq.heappush(waiting, (free_at[key.data] + delay_s, next(numbers), port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, port, frame = heapq.heappop(waiting)
            if port not in cut:
                with contextlib.suppress(OSError):  # a full queue drops it, as a switch does
                    os.write(ports[port], frame)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]) / 8, sys.argv[3:])
