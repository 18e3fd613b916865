"""What whoever runs the service asks it: `/healthz`, and `/metrics` for Prometheus."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ...io import resident_bytes
from ..auth import require_token
from ..service import Service, service_of


def routes() -> list[Route]:
    """Return the routes; they come before those with a run's name."""
    return [Route("/healthz", _healthy), Route("/metrics", _metrics)]


async def _healthy(request: Request) -> Response:
    """Answer, to anybody, once the event loop and a thread have a turn."""
    await run_in_threadpool(lambda: None)
    return PlainTextResponse("ok\n", headers={"Cache-Control": "no-store"})


async def _metrics(request: Request) -> Response:
    if "*" not in require_token(request).runs:
        raise HTTPException(403, "this counts all runs: it needs a token that is for all of them")
    service = service_of(request)
    lines = service.metrics.lines(await run_in_threadpool(_gauges, service))
    body = "".join(f"{line}\n" for line in lines)
    return PlainTextResponse(body, headers={"Cache-Control": "no-store"}, media_type="text/plain; version=0.0.4")


def _gauges(service: Service) -> dict[str, float]:
    return {
        "zstore_runs": len(service.runs.all()),
        "zstore_uploads": len(service.inbox.all()),
        "zstore_jobs_running": sum(job.state == "running" for job in service.jobs.all().jobs),
        "process_resident_memory_bytes": resident_bytes(),
    }
