"""The pages of the documentation, and the code that they print."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    """Return the text of a page, like "docs/access.md"."""
    return (ROOT / page).read_text(encoding="utf-8")


def code_of(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code, in order."""
    return [(language, textwrap.dedent(code)) for language, code in _BLOCK.findall(text_of(page))]


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks in `language`, in order. tests/tools/test_docs.py checks that a test reads those of each page."""
    return [code for found, code in code_of(page) if found == language]
