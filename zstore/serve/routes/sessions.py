"""`/api/session`: a browser shows a token once, and has a cookie from then on."""

from __future__ import annotations

from pydantic import BaseModel, SecretStr, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...errors import UsageError
from ..auth import address_of, cookie_name, cookie_of, set_cookie
from ..service import service_of
from .operations import Exchange


class SignIn(BaseModel, extra="forbid", frozen=True):
    """Body of `POST /api/session`."""

    token: SecretStr


async def _begin(request: Request) -> Response:
    access = service_of(request).access
    try:
        shown = SignIn.model_validate_json(await request.body()).token.get_secret_value()
    except ValidationError:  # its text would repeat the body
        raise UsageError('expected the JSON object {"token": "..."}') from None
    if not access.has_token:
        raise HTTPException(403, "this service has no token: reading needs none, and nothing can act")
    token = await run_in_threadpool(access.of_token, shown.encode("utf-8", "replace"), address_of(request))
    if token is None:
        raise HTTPException(401, "this is no token of the service, or it has expired")
    request.scope["state"] |= {"token": token, "audit": "sign-in"}
    answer = Response(status_code=204, headers={"Cache-Control": "no-store"})
    set_cookie(request, answer, access.begin_session(token))
    return answer


async def _end(request: Request) -> Response:
    if (value := cookie_of(request)) is not None:
        service_of(request).access.end_session(value)
    answer = Response(status_code=204, headers={"Cache-Control": "no-store"})
    answer.delete_cookie(
        cookie_name(request), secure=request.scope["scheme"] == "https", httponly=True, samesite="strict"
    )
    return answer


OPERATIONS = (
    Exchange(
        path="/api/session",
        method="POST",
        summary="Show a token, and get a cookie in exchange",
        answer=None,
        handle=_begin,
        body=SignIn,
        status=204,
        problems=(403, 429),
        access="open",
    ),
    Exchange(
        path="/api/session",
        method="DELETE",
        summary="End the session of the cookie",
        answer=None,
        handle=_end,
        status=204,
        access="open",
    ),
)
