"""`zstore tag`: tags that move, holds and notes on the checkpoints of a folder, and marks on the run. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from zstore.checkpoint import Folder, Marks, change_marks, change_run_marks, list_tags, read_marks, resolve, tag_text
from zstore.open.sources import folder_of

from .listing import check_listing, check_records
from .opening import DEFAULTS, Common, reporting
from .options import FolderLocation
from .printing import cell, make_console, make_table


@dataclass(frozen=True, kw_only=True)
class Said:
    """Words about a checkpoint or the run; None leaves those that are there."""

    note: Annotated[
        str | None,
        typer.Option(help="A line about the checkpoint, without NAME about the run; '' removes it.", metavar="TEXT"),
    ] = None
    run_tags: Annotated[
        str | None,
        typer.Option(help="Tags of the run, with commas between them, in place of those that it has.", metavar="TAGS"),
    ] = None
    group: Annotated[str | None, typer.Option(help="The group of the run; '' takes it out.", metavar="GROUP")] = None

    @property
    def of_run(self) -> dict[str, Any]:
        """Tags, group and note of a run, as `change_run_marks` takes them."""
        tags = None if self.run_tags is None else self.run_tags.replace(",", " ").split()
        return {"tags": tags, "group": self.group, "note": self.note}


_NOTHING = Said()


def tag_command(
    folder: FolderLocation,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The tag to move, as best or prod; or a checkpoint to hold or note."),
    ] = None,
    ckpt: Annotated[
        str | None, typer.Argument(metavar="CKPT", help="The checkpoint that NAME shall point at: its tag or its step.")
    ] = None,
    *,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the moving tag NAME; the checkpoint stays.")] = False,
    hold: Annotated[
        bool | None,
        typer.Option("--hold/--release", help="Keep the checkpoint whatever retention and prune say, or not."),
    ] = None,
    given: Said = _NOTHING,
    common: Common = DEFAULTS,
) -> int:
    """List the marks in `folder`; before that, point the moving tag `name` at `ckpt` or remove it, and hold or note the
    checkpoint, or give the run tags, a group or a note. `folder` may be a URL, of a service that takes actions too.

    With `json`, one object: `path`, `tags`, `held`, `notes`, `run` as in the file, `dangling` (moving tags whose checkpoint is
    gone), and `ProgressBar.summary`.
    """
    note = given.note
    marks_it = hold is not None or note is not None
    if remove and (name is None or ckpt is not None or marks_it):
        raise typer.BadParameter("--remove takes the NAME of a moving tag, and nothing else")
    if name is not None and (given.run_tags, given.group) != (None, None):
        raise typer.BadParameter("--run-tags and --group are of the run: leave NAME out")
    if (name is None and hold is not None) or (name is not None and not (ckpt or marks_it or remove)):
        raise typer.BadParameter(
            "say what NAME shall point at, or --remove; or --hold, --release or --note of a checkpoint"
        )
    place = folder_of(folder, common.storage_options)
    with reporting(f"tag {place}", common) as progress:
        check_listing(place, common)
        if name is not None:
            target = None if remove else ckpt or name
            _change(
                place,
                "tags",
                {"checkpoint": target, "tag": name if remove or ckpt else None, "held": hold, "note": note},
            )
        elif any(value is not None for value in given.of_run.values()):
            _change(place, "marks", given.of_run)
        marks, infos = read_marks(place), list_tags(place).tags
        progress.advance(check_records(place, infos, common))
        progress.document |= {
            "path": place.location,
            **asdict(marks),
            "dangling": marks.dangling([info.tag for info in infos]),
        }
    if not common.json:
        _print(marks, [info.tag for info in infos])
    return 0


def _change(place: Folder, what: Literal["tags", "marks"], change: dict[str, Any]) -> None:
    """Change marks as the service does at `/api/runs/{run}/tags` and `/marks`; of a service, have it do so."""
    if not place.is_local:
        from zstore.remote.service_folder import ServiceFolder

        if isinstance(place, ServiceFolder):
            place.connection.ask("POST", f"/api/runs/{quote(place.url.run, safe='')}/{what}", change)
            return
    if what == "marks":
        change_run_marks(place, **change)
        return
    checkpoint = change.pop("checkpoint")
    found = None if checkpoint is None else resolve(place, tag_text(checkpoint)).tag
    change_marks(place, found, **change)


def _print(marks: Marks, present: list[str]) -> None:
    run = {"tags": ", ".join(marks.run.tags), "group": marks.run.group, "note": marks.run.note}
    for what, text in run.items():
        if text:
            make_console().print(cell(f"{what} of the run: {text}"))
    table = make_table(("checkpoint", "tags that move", "held", "note"))
    marked = {*marks.tags.values(), *marks.held, *marks.notes}
    for checkpoint in [*(tag for tag in present if tag in marked), *sorted(marked.difference(present))]:
        shown = checkpoint if checkpoint in present else f"{checkpoint} (gone)"
        held = "held" if checkpoint in marks.held else ""
        table.add_row(cell(shown), ", ".join(marks.tags_of(checkpoint)), held, cell(marks.notes.get(checkpoint, "")))
    make_console().print(table)
