"""The log of collectives that the config asks for, and its table."""

from __future__ import annotations

import logging
from typing import Protocol

from zstore.errors import UsageError
from zstore.ranks.comms_log import CollectiveTimes, CommsLog, LoggedCollective, summary_text
from zstore.ranks.world import World

from ..config.sections import CommsLoggerSection

_log = logging.getLogger("zstore")


def open_comms_log(section: CommsLoggerSection, world: World) -> CommsLog:
    """Return a timer of the collectives of `world`, as the config asks for it."""
    return CommsLog(
        world_size=world.world_size,
        device=world.device,
        only=None if section.prof_all else frozenset(section.prof_ops),
        verbose=section.verbose and world.rank == 0,
        debug=section.debug,
    )


class HasWorld(Protocol):
    """An engine."""

    @property
    def world(self) -> World:
        """Its ranks."""


def comms_summary(engine: HasWorld, *, show_straggler: bool = False) -> str:
    """Return a table of this rank's collectives so far, a row for each operation and size, with `"comms_logger"` enabled.

    `show_straggler` adds the seconds beyond those of the rank that spent fewest; then all ranks call this. Raises UsageError
    if collectives are not timed.
    """
    world = engine.world
    if world.log is None:
        raise UsageError('collectives are not timed: set "comms_logger": {"enabled": true} in the config')
    times = world.log.times()
    if show_straggler:
        _compare_ranks(world, times)
    if not times:
        return "no collectives were timed"
    return summary_text(times, world.world_size)


def log_comms_summary(engine: HasWorld, *, show_straggler: bool = False) -> None:
    """Log the table of `comms_summary`, on rank 0; all ranks call it."""
    text = comms_summary(engine, show_straggler=show_straggler)
    if engine.world.rank == 0:
        _log.info("collectives of rank 0:\n%s", text)


def _compare_ranks(world: World, times: dict[LoggedCollective, CollectiveTimes]) -> None:
    """Set `straggler_s` of times that every rank has (all ranks)."""
    mine = {f"{one.operation} {one.purpose} {one.nbytes} {one.caller}": found for one, found in times.items()}
    everyone = world.all_gather_object({key: found.total_s for key, found in mine.items()})
    for key, found in mine.items():
        if all(key in totals for totals in everyone):
            found.straggler_s = found.total_s - min(totals[key] for totals in everyone)
