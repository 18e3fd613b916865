"""JSON as people write it in configs: with comments (`//`, `#`, `/* */`), trailing commas and a byte order mark.

And Hjson, which DeepSpeed reads, if the package `hjson` is installed.
"""

import json
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from zstore.errors import ConfigError

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=[ \t\r\n]*[\]}}])")


def load_jsonc(text: str, source: str) -> dict[str, Any]:
    """Return the object that `text` holds; `source` names it in errors.

    Raises ConfigError with source, line and column for what is not JSON, and for a key given twice, a number that is too
    large, and if the outermost value is not an object.
    """
    plain = _COMMENT.sub(_without_comment, text.removeprefix("\ufeff"))
    plain = _TRAILING_COMMA.sub(lambda found: " " if found.group() == "," else found.group(), plain)
    try:
        value = json.loads(plain, object_pairs_hook=_object, parse_float=_number, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        if plain.lstrip()[:1] == "{" and (value := _hjson(plain)) is not None:
            return value
        following = plain[error.pos :].split(maxsplit=1)
        found = f"got {following[0][:20]!r}" if following else "got the end of the text"
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: {error.msg}, {found}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep for a config") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{source}: expected an object, starting with "{{", got {type(value).__name__}')
    return value


def _hjson(text: str) -> dict[str, Any] | None:
    """Return the object that `text` holds as Hjson; None if it holds none, or nothing reads it."""
    if find_spec("hjson") is None:
        return None
    try:
        value = import_module("hjson").loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _without_comment(found: re.Match[str]) -> str:
    """Return a string as it is, and a comment as white space of its length."""
    text = found.group()
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{twice}" is given twice in one object; keep one')
    return members


def _number(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {literal} is too large")
    return value


def _not_finite(literal: str) -> NoReturn:
    raise ValueError(f"expected a number, got {literal}")
