"""JSON as people write it in configs: with comments (`//`, `#`, `/* */`), trailing commas and a byte order mark.

And Hjson, which DeepSpeed reads: keys without quotes, the end of a line for a comma, strings in single quotes or, to the end
of the line, in none, and those of several lines in three quotes. A string without quotes that has a comma, quote or bracket
in it is an error here: more likely one was forgotten.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Never

from zstore.errors import ConfigError

_SKIP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9A-Za-z_.+-])")
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_LINES = re.compile(r"'''[ \t]*\r?\n?(.*?)'''", re.DOTALL)
_KEY = re.compile(r"[^\s,:\[\]{}\"'#/]+(?=\s*:)")
_REST = re.compile(r"[^\n\r,\[\]{}\"']+(?=\r?\n)")
"""A string without quotes."""
_END = re.compile(r"[ \t]*(?:[,\]}\r\n#]|//|/\*|\Z)")
"""The characters that may follow true, false or null."""
_WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_PLACEHOLDER = re.compile(r'\[[^\[\]{},"\n|]+(?:\|[^\[\]{},"\n|]+)+\]')
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64  # of nested objects and arrays; far more than a config has, far less than the interpreter's stack


class _Parser:
    """One pass over `text`; `at` is the position of the next character."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.at = 0

    def fail(self, message: str, at: int | None = None) -> Never:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        column = at - self.text.rfind("\n", 0, at)
        raise ConfigError(f"{self.source}:{line}:{column}: {message}")

    def peek(self) -> str:
        """Return the next character that is neither white space nor comment, "" at the end."""
        skipped = _SKIP.match(self.text, self.at)
        self.at = skipped.end() if skipped else self.at
        if self.text.startswith("/*", self.at):
            self.fail("comment without end: expected */")
        return self.text[self.at : self.at + 1]

    def describe_next(self) -> str:
        char = self.peek()
        return f"got {char!r}" if char else "got the end of the text"

    def string(self) -> str:
        lines = _LINES.match(self.text, self.at)
        if lines is not None:
            column = self.at - self.text.rfind("\n", 0, self.at) - 1
            self.at = lines.end()
            return "\n".join(_outdented(line, column) for line in lines.group(1).splitlines()).rstrip("\n ")
        quote = self.text[self.at]
        match = (_SINGLE if quote == "'" else _STRING).match(self.text, self.at)
        if match is None:
            self.fail(f"string without end: expected a closing {quote} on the same line")
        inner = match.group()[1:-1]
        if quote == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        try:
            value: str = json.loads(f'"{inner}"')
        except ValueError as error:
            self.fail(f"bad string {match.group()[:40]}: {error}")
        self.at = match.end()
        return value

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            self.fail(f"expected a number, got {self.text[self.at : self.at + 20].split(maxsplit=1)[0]!r}")
        literal = match.group()
        try:
            value = int(literal) if literal.lstrip("-").isdigit() else float(literal)
        except ValueError:
            self.fail(f"number of {len(literal)} digits is too long")
        if value in (float("inf"), float("-inf")):
            self.fail(f"number {literal} is too large")
        self.at = match.end()
        return value

    def word(self) -> bool | str | None:
        match, rest = _WORD.match(self.text, self.at), _REST.match(self.text, self.at)
        literal = match is not None and match.group().lower() in _WORDS and _END.match(self.text, match.end())
        if rest is not None and not literal:
            self.at = rest.end()
            return rest.group().strip()
        if match is None or match.group() not in _WORDS:
            found = match.group() if match else self.text[self.at]
            known = (
                ", ".join(word for word in _WORDS if word == found.lower()) or "true, false, null or a quoted string"
            )
            self.fail(f"expected {known}, got {found}")
        self.at = match.end()
        return _WORDS[match.group()]

    def items(self, closing: str) -> Iterator[None]:
        """Step over brackets and commas, of which the last item may have one too, and yield at each item."""
        self.at += 1
        while self.peek() != closing:
            yield
            end = self.at
            if self.peek() == ",":
                self.at += 1
            elif self.peek() != closing and (not self.peek() or "\n" not in self.text[end : self.at]):
                self.fail(f'expected "," or "{closing}", {self.describe_next()}')
        self.at += 1

    def array(self, depth: int) -> list[Any] | str:
        placeholder = _PLACEHOLDER.match(self.text, self.at)
        if placeholder:
            self.at = placeholder.end()
            return placeholder.group()
        return [self.value(depth) for _ in self.items("]")]

    def object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for _ in self.items("}"):
            start, line = self.at, self.text.count("\n", 0, self.at) + 1
            bare = _KEY.match(self.text, self.at)
            if bare is None and self.peek() not in ('"', "'"):
                self.fail(f'expected a key in double quotes or "}}", {self.describe_next()}')
            key = self.string() if bare is None else bare.group()
            self.at = self.at if bare is None else bare.end()
            if key in lines:
                self.fail(f'key "{key}" is given twice, on line {lines[key]} and on line {line}; keep one', start)
            lines[key] = line
            if self.peek() != ":":
                self.fail(f'expected ":" after key "{key}", {self.describe_next()}')
            self.at += 1
            members[key] = self.value(depth)
        return members

    def value(self, depth: int = 0) -> Any:
        char = self.peek()
        if depth >= _MAX_DEPTH:
            self.fail(f"nested more than {_MAX_DEPTH} deep")
        if char == "{":
            return self.object(depth + 1)
        if char == "[":
            return self.array(depth + 1)
        if char in ('"', "'"):
            return self.string()
        if not char:
            self.fail("expected a value, got the end of the text")
        return self.number() if char in "-0123456789." else self.word()


def _outdented(line: str, column: int) -> str:
    """Return a line without the white space before `column`."""
    return line[min(column, len(line) - len(line.lstrip())) :]


def load_jsonc(text: str, source: str) -> dict[str, Any]:
    """Return the object that `text` holds; `source` names it in errors.

    An array like `[0|1|2|3]`, as documentation shows choices, comes back as that string, so that the schema can name
    the key and the choices. Raises ConfigError with source, line and column for anything else that is not JSON, for a key
    given twice, and if the outermost value is not an object.
    """
    parser = _Parser(text.removeprefix("\ufeff"), source)
    if parser.peek() != "{":
        parser.fail(f'expected an object, starting with "{{", {parser.describe_next()}')
    value: dict[str, Any] = parser.value()
    if parser.peek():
        parser.fail(f"expected the end of the text, {parser.describe_next()}")
    return value
