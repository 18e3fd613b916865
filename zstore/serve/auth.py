"""Who may do what: stand-in."""

from __future__ import annotations

from starlette.requests import Request


def is_authorized(request: Request) -> bool:
    """Return whether a request showed the token."""
    return False


def require_action(request: Request) -> None:
    """Raise unless a request may act."""
