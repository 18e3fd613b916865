"""Text out of files, made safe to print: a checkpoint's names may be a stranger's."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return `text` with line feeds as they are and other control characters as `\x1b`: they would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))
