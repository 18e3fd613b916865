"""Live events of a run, as Server-Sent Events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..service import run_of, service_of
from .hub import Cursor, Hub, first_cursor
from .operations import Operation, Values

_HEARTBEAT_S = 15.0
_RETRY_MS = 2000


async def _events(request: Request, values: Values) -> Response:
    run = await anyio.to_thread.run_sync(run_of, request)
    service = service_of(request)
    hubs: dict[str, Hub] = request.app.state.hubs
    hub = hubs.get(run.folder.location) or hubs.setdefault(run.folder.location, Hub(service, run))
    seen = Cursor.parse(request.headers.get("last-event-id", ""))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(hub, seen), media_type="text/event-stream", headers=headers)


async def _stream(hub: Hub, seen: Cursor | None) -> AsyncIterator[str]:
    yield f"retry: {_RETRY_MS}\n\n"
    async with hub.listening():
        now = await hub.now()
        # Jobs are of this process: one that comes back gets all that are kept.
        cursor = first_cursor(now) if seen is None else replace(seen, jobs=0)
        while True:
            news = await hub.news(cursor)
            cursor = news.cursor
            for name, data in news.events:
                yield f"event: {name}\nid: {cursor.text}\ndata: {data}\n\n"
            if not await hub.changed(cursor, _HEARTBEAT_S):
                yield ": still here\n\n"


OPERATIONS = (
    Operation(
        path="/api/runs/{run}/events",
        summary="What happens to a run, as it happens",
        answer=None,
        media="text/event-stream",
        handle=_events,
        problems=(404,),
    ),
)
