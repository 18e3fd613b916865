"""Something that happens in the middle of other code: after each of its instructions, or before each of its lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@contextmanager
def between(event: str, is_meant: Callable[[CodeType], bool], happens: Callable[[], None]) -> Iterator[None]:
    """Call `happens` in this thread at each `event`, "opcode" or "line", of functions whose code `is_meant`: whatever another
    thread does there, it may do. From Python 3.13 on the first call under "opcode" of a function passes unseen."""

    def within(frame: FrameType, what: str, argument: object) -> Any:
        if what == event:
            happens()
        return within

    def enters(frame: FrameType, what: str, argument: object) -> Any:
        if not is_meant(frame.f_code):
            return None
        frame.f_trace_opcodes = event == "opcode"
        return within

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = (
        event == "opcode"
    )  # Python 3.12 asks when tracing begins whether any frame wants them
    sys.settrace(enters)
    try:
        yield
    finally:
        sys.settrace(before)
