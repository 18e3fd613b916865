"""Who may act."""

from __future__ import annotations

import hmac

from starlette.exceptions import HTTPException
from starlette.requests import Request

from .service import service_of


def require_action(request: Request) -> None:
    """Raise HTTPException unless the request shows the token and the service allows actions."""
    settings = service_of(request).settings
    expected = f"Bearer {settings.token}"
    if settings.token is None or not hmac.compare_digest(
        request.headers.get("authorization", "").encode(), expected.encode()
    ):
        raise HTTPException(401, "this needs the token")
    if not settings.allow_actions:
        raise HTTPException(403, "start the service with --allow-actions to allow this")
