"""Progress on stderr: plain lines at most every 30 s, a bar in a terminal."""

import io

from zstore.tools.printing import ProgressBar


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_thirty_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("verify", 10**9, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now_s += 1
            progress.advance(10**7)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "verify: 300.00 MB of 1.00 GB (30 %), 0.01 GB/s",
        "verify: 600.00 MB of 1.00 GB (60 %), 0.01 GB/s",
        "verify: 900.00 MB of 1.00 GB (90 %), 0.01 GB/s",
        "verify: 1.00 GB in 100.0 s, 0.01 GB/s",
    ]


def test_a_terminal_gets_a_line_that_is_written_anew() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressBar("consolidate", 1000, stream=stream, clock=clock) as progress:
        for _ in range(2):
            clock.now_s += 1
            progress.advance(500)
        progress.say("a line above\x1b it")
    clear = "\r\x1b[K"
    assert stream.getvalue().split(clear)[1:] == [
        "consolidate: 500 bytes of 1.00 kB (50 %), 0.00 GB/s",
        "consolidate: 1.00 kB of 1.00 kB (100 %), 0.00 GB/s",
        "a line above\\x1b it\n",
        "consolidate: 1.00 kB in 2.0 s, 0.00 GB/s\n",
    ]
