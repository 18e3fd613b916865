"""The routes below `/api`, from the table of operations."""

from __future__ import annotations

from starlette.routing import Route

from . import queries
from .operations import Operation

OPERATIONS: tuple[Operation, ...] = queries.OPERATIONS


def routes() -> list[Route]:
    """Return all routes, in the order in which paths are tried."""
    return [operation.route() for operation in OPERATIONS]
