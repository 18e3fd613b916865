"""Rules by the names of the optimizers."""

from __future__ import annotations

from collections.abc import Callable

from zstore.errors import UsageError

from .adam import OneBitAdam
from .lamb import OneBitLamb
from .rule import Rule
from .zero_one import ZeroOneAdam

_RULES: dict[str, Callable[[], Rule]] = {
    "OneBitAdam": OneBitAdam,
    "ZeroOneAdam": ZeroOneAdam,
    "OneBitLamb": OneBitLamb,
}


def rule_for(kind: str) -> Rule:
    """Return the rule of the optimizer of that name, that of its class. Raises UsageError for any other."""
    if kind not in _RULES:
        raise UsageError(f"{kind!r} does not send signs; expected one of {', '.join(_RULES)}")
    return _RULES[kind]()
