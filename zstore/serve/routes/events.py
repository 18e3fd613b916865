"""Live events of a run, as Server-Sent Events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..auth import require_token
from ..service import run_of, service_of
from .broadcast import Broadcast, Cursor, first_cursor
from .operations import HEARTBEAT_S, Operation, Values

_RETRY_MS = 2000


async def _events(request: Request, values: Values) -> Response:
    run = await anyio.to_thread.run_sync(run_of, request)
    service = service_of(request)
    broadcasts: dict[str, Broadcast] = request.app.state.broadcasts
    place = run.folder.location
    broadcast = broadcasts.get(place) or broadcasts.setdefault(place, Broadcast(service, run))
    seen = Cursor.parse(request.headers.get("last-event-id", ""))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(request, broadcast, seen), media_type="text/event-stream", headers=headers)


async def _stream(request: Request, broadcast: Broadcast, seen: Cursor | None) -> AsyncIterator[str]:
    yield f"retry: {_RETRY_MS}\n\n"
    async with broadcast.listening():
        now = await broadcast.now()
        # Jobs belong to this process: a listener that comes back gets all that are kept.
        cursor = first_cursor(now) if seen is None else replace(seen, jobs=0)
        access, token = service_of(request).access, require_token(request)
        while access.current(token) == token:
            news = await broadcast.news(cursor)
            cursor = news.cursor
            for name, data in news.events:
                yield f"event: {name}\nid: {cursor.text}\ndata: {data}\n\n"
            if not await broadcast.changed(cursor, HEARTBEAT_S):
                yield ": still here\n\n"


OPERATIONS = (
    Operation(
        path="/api/runs/{run}/events",
        summary="What happens to a run, as it happens",
        answer=None,
        media="text/event-stream",
        handle=_events,
    ),
)
