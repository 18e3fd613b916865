"""`zstore serve token`: the tokens of a service, and links to one run or one file of weights, in a file that it reads."""

from __future__ import annotations

import re
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from zstore.errors import UsageError
from zstore.io import user_path
from zstore.serve.audit import recording
from zstore.serve.tokens import Link, Role, Token, TokenFile, digest_of, edit_tokens, read_tokens, sign
from zstore.sizes import format_bytes

from .options import AUDIT_VARIABLE, size_option

_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

app = typer.Typer(
    help="Add, list and remove tokens of a service, and make links to a run; a service that runs with --tokens FILE goes by "
    "them at once.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _parse_seconds(text: str | int) -> int:
    if isinstance(text, int):  # a default
        return text
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text)
    if found is None or int(found[1]) == 0:
        raise typer.BadParameter(f"expected a time like 30m, 12h, 30d or 4w, got {text!r}")
    return int(found[1]) * _UNITS_S[found[2]]


FileOption = Annotated[Path, typer.Option("--file", parser=user_path, help="The file of tokens.", metavar="FILE")]
AuditOption = Annotated[
    Path | None,
    typer.Option("--audit", help="Append a line of JSON about it to this file.", metavar="FILE", envvar=AUDIT_VARIABLE),
]


@app.command("add")
def _add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is, for lists and the audit log.")],
    role: Annotated[
        Role,
        typer.Option(help="write may upload too, and act may also save, stop, verify and prune.", show_choices=True),
    ],
    file: FileOption,
    runs: Annotated[
        str, typer.Option(help="Patterns of the names of runs that it is for, as 'gpt-*,bert'.", metavar="PATTERNS")
    ] = "*",
    expires: Annotated[
        int | None,
        typer.Option(
            help="How long it is valid, as 12h or 30d; without it, always.", metavar="TIME", parser=_parse_seconds
        ),
    ] = None,
    quota: Annotated[
        int | None, size_option("Bytes of its uploads that may be there, as 200GB; without it, any.")
    ] = None,
    audit: AuditOption = None,
) -> None:
    """Print a new token, once: the file has its hash alone."""
    shown, now = secrets.token_urlsafe(32), int(time.time())
    patterns = tuple(pattern.strip() for pattern in runs.split(","))
    if not re.fullmatch(r"[A-Za-z0-9_.@-]{1,64}", name) or not all(patterns):
        raise UsageError(
            f"expected a name of up to 64 letters, digits and `_.@-`, and runs like 'gpt-*,bert', got {name!r} and {runs!r}"
        )
    ends, sha256 = None if expires is None else now + expires, digest_of(shown.encode())
    token = Token(name=name, role=role, runs=patterns, created=now, expires=ends, quota=quota, sha256=sha256)

    def add(content: TokenFile) -> TokenFile:
        if any(one.name == name for one in content.tokens):
            raise UsageError(f"{file} has a token {name!r}: remove it first, or choose another name")
        return content.model_copy(update={"tokens": (*content.tokens, token)})

    with recording(audit, what="token added", token=name):
        edit_tokens(file, add)
    print(shown)


@app.command("list")
def _list(file: FileOption) -> None:
    """Print name, role, runs, end and quota of each token."""
    for token in read_tokens(file).tokens:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(token.expires or 0))
        end = f"{'expired' if token.has_expired else 'until'} {at}" if token.expires else "does not expire"
        quota = "" if token.quota is None else f"  quota {format_bytes(token.quota)}"
        print(f"{token.name}  {token.role}  {','.join(token.runs)}  {end}{quota}")


@app.command("remove")
def _remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")],
    file: FileOption,
    audit: AuditOption = None,
) -> None:
    """Remove a token, and end all sessions that began with it."""

    def remove(content: TokenFile) -> TokenFile:
        kept = tuple(one for one in content.tokens if one.name != name)
        if len(kept) == len(content.tokens):
            there = ", ".join(one.name for one in content.tokens) or "none"
            raise UsageError(f"{file} has no token {name!r}; it has: {there}")
        return content.model_copy(update={"tokens": kept})

    with recording(audit, what="token removed", token=name):
        edit_tokens(file, remove)


@app.command("share")
def _share(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    file: FileOption,
    weights: Annotated[
        str,
        typer.Option(
            help="Of its weights this file alone, as latest/model.safetensors; the rest of the run stays closed.",
            metavar="CHECKPOINT/FILE",
        ),
    ] = "",
    expires: Annotated[
        int,
        typer.Option(
            help="How long it is valid, as 12h or 30d.", metavar="TIME", parser=_parse_seconds, show_default="7d"
        ),
    ] = 7 * 86400,
    audit: AuditOption = None,
) -> None:
    """Print the path of a link that lets whoever has it read a run."""
    if weights and "/" not in weights.strip("/"):
        raise UsageError(f"--weights {weights}: expected checkpoint and file, as latest/model.safetensors")

    def with_key(content: TokenFile) -> TokenFile:
        return content if content.link_key else content.model_copy(update={"link_key": secrets.token_hex(32)})

    link = Link(run=run, weights=weights.strip("/"), expires=int(time.time()) + expires)
    path = f"/weights/{quote(run, safe='')}/{quote(link.weights)}" if weights else f"/run/{quote(run, safe='')}"
    with recording(audit, what="link made", run=run, path=path):
        text = sign(edit_tokens(file, with_key).link_key, link)
    print(f"{path}?share={text}")


@app.command("unshare")
def _unshare(file: FileOption, audit: AuditOption = None) -> None:
    """End all links: the key that they are signed with is removed."""
    read_tokens(file)
    with recording(audit, what="links ended"):
        edit_tokens(file, lambda content: content.model_copy(update={"link_key": ""}))
    print("all links have ended", file=sys.stderr)
