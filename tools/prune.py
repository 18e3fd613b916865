"""`zstore prune`: removes the checkpoints in a folder that no rule keeps, and prints how much that frees. No torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zstore.checkpoint import Keep, TagInfo, joined_files, plan_lines, remove_each, stored_files, weigh
from zstore.errors import UsageError
from zstore.open.sources import folder_of
from zstore.remote.target import remover

from .options import DEFAULTS, FolderLocation, Listing, reporting
from .printing import printable


def prune_command(
    folder: FolderLocation,
    *,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep the newest N (the newest is always kept).", min=1, metavar="N")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep those whose step is a multiple of K.", min=1, metavar="K")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            help="Keep the one with the lowest or highest value of a metric in save_checkpoint(metrics=...) or client_state.",
            metavar="METRIC:min|max",
        ),
    ] = None,
    keep_tag: Annotated[
        list[str] | None,
        typer.Option(help="Keep this tag, or tags matching a pattern; may be repeated.", metavar="TAG"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")] = False,
    common: Listing = DEFAULTS,
) -> int:
    """Print which checkpoints in `folder`, which may be a URL, are kept and which are removed, and the bytes freed; then
    remove them.

    With `json`, the plan goes to stderr, and one object is printed: `path`, `dry_run`, `freed_bytes`, `checkpoints` with
    `tag`, `step`, `size_bytes` and `reasons` to keep it (empty if it is removed), `removed`, `messages`, and
    `ProgressBar.summary` of the removal. Returns the exit code, 1 if anything could not be removed. Raises
    CheckpointNotFoundError if there are no checkpoints, or none has the metric.
    """
    if (keep_last, keep_every, keep_best, keep_tag or None) == (None, None, None, None):
        raise typer.BadParameter("specify what to keep with --keep-last, --keep-every, --keep-best or --keep-tag")
    try:
        keep = Keep(last=keep_last or 1, every=keep_every, best=keep_best, tags=tuple(keep_tag or ()))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    place = folder_of(folder, common.storage_options)
    fates = weigh(place, keep)
    to_remove = {fate.info.location: fate for fate in fates if not fate.reasons}
    freed_bytes = joined_files(stored_files(fate.info.folder) for fate in to_remove.values()).freed_bytes
    for line in plan_lines(fates, freed_bytes, dry_run=dry_run):
        print(printable(line), file=sys.stderr if common.json else sys.stdout, flush=True)
    removed: list[str] = []
    remove_one = remover(place)
    with reporting(
        f"prune {place}", common, total_bytes=sum(fate.size_bytes for fate in to_remove.values())
    ) as progress:

        def remove(info: TagInfo) -> None:
            remove_one(info)
            removed.append(info.tag)
            progress.advance(to_remove[info.location].size_bytes)

        messages = [] if dry_run else remove_each([fate.info for fate in to_remove.values()], remove)
        for message in messages:
            progress.print_line(f"zstore: {message}")
        progress.document |= {
            "path": place.location,
            "dry_run": dry_run,
            "freed_bytes": freed_bytes,
            "checkpoints": [
                {
                    "tag": fate.info.tag,
                    "path": fate.info.location,
                    "step": fate.info.record.step,
                    "size_bytes": fate.size_bytes,
                    "reasons": list(fate.reasons),
                }
                for fate in fates
            ],
            "removed": removed,
            "messages": messages,
        }
    return 1 if messages else 0
