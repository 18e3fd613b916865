"""`zstore serve`: checkpoints and runs over HTTP, with a page that shows them."""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zstore.errors import UsageError
from zstore.sizes import format_bytes

from .options import AUDIT_VARIABLE, StorageOption, size_option

if TYPE_CHECKING:
    from zstore.serve.settings import Settings

_TOKEN_VARIABLE = "ZSTORE_TOKEN"
_WEBHOOK_SECRET = "ZSTORE_WEBHOOK_SECRET"
_UPSTREAM_TOKEN = "ZSTORE_UPSTREAM_TOKEN"
EPILOG = (
    "Tokens of a file are made by `zstore serve token`, and so are links to a run: see `zstore serve token --help`."
)


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where the service listens, and whom it trusts."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach needs a token.", metavar="ADDRESS")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8700
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the token; without it the variable {_TOKEN_VARIABLE}.", metavar="FILE"),
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens with names, roles and runs, which `zstore serve token` edits while the service runs.",
            metavar="FILE",
        ),
    ] = None
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions", help="Take uploads, and save, stop, verify, tag and prune when asked; needs a token."
        ),
    ] = False
    upload_folder: Annotated[
        Path | None,
        typer.Option(
            help="Take uploads to runs behind URLs, too: they are put together in this folder, then sent there.",
            metavar="DIR",
        ),
    ] = None
    keep_last: Annotated[
        int | None,
        typer.Option(
            help="After an upload, remove all but the newest N checkpoints of its run, though its client would keep more; what "
            "the client keeps by step, metric or tag stays.",
            min=1,
            metavar="N",
        ),
    ] = None
    run_quota: Annotated[
        int | None,
        size_option("Refuse uploads by which a run's folder would hold more bytes than these, as 500GB."),
    ] = None
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).", metavar="FILE")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key (PEM).", metavar="FILE")] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer requests to this host name too, as that of a proxy; repeat it for more.", metavar="NAME"
        ),
    ] = None
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a proxy, whose X-Forwarded-For is believed; repeat it for more.", metavar="ADDRESS"
        ),
    ] = None
    access_log: Annotated[
        Path | None, typer.Option(help="Append a line for each request to this file.", metavar="FILE")
    ] = None
    webhook: Annotated[
        list[str] | None,
        typer.Option(
            help="URL to POST to when a run fails, stalls, is killed or done, has numbers that are not finite, or cannot save, "
            f"and when a drive is nearly full; repeat it for more. The variable {_WEBHOOK_SECRET} signs what is sent.",
            metavar="URL",
        ),
    ] = None
    stalled_after: Annotated[
        float, typer.Option(help="Seconds without a step after which a run stalls.", min=1.0, metavar="SECONDS")
    ] = 900.0
    audit: Annotated[
        Path | None,
        typer.Option(
            help="Append a line of JSON to this file for each upload, action, sign-in and refused token.",
            metavar="FILE",
            envvar=AUDIT_VARIABLE,
        ),
    ] = None
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Serve the runs of this other service too; the variable {_UPSTREAM_TOKEN} has its token. Repeat it for more.",
            metavar="URL",
        ),
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep files of them, and weights that were cast, in this folder.", metavar="FOLDER"),
    ] = None
    cache_size: Annotated[
        int | None, size_option("Most bytes that are kept, as 500GB: the least recently used files go.")
    ] = None
    uploads: Annotated[
        bool, typer.Option("--uploads", help="List uploads that are not committed, and end without serving.")
    ] = False
    remove_upload: Annotated[
        list[str] | None,
        typer.Option(help="Remove the upload of this id, and end without serving; repeat it for more.", metavar="ID"),
    ] = None
    storage_option: StorageOption = None

    @property
    def token(self) -> str | None:
        """The token, None if none was given. Raises UsageError for a file that cannot be read, or is empty."""
        if self.token_file is not None:
            return _read_token(self.token_file)
        return os.environ.get(_TOKEN_VARIABLE) or None


DEFAULTS = Listening()


def _read_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the token file {file}: {reason}") from error
    if not token:
        raise UsageError(f"the token file {file} is empty: expected one line with the token")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: others can read the token file {file}: run chmod 600 {file}", file=sys.stderr)
    return token


def _list_uploads(settings: Settings, remove: Collection[str]) -> int:
    """Remove uploads by their ids, and print the others."""
    from zstore.serve.inbox.inbox import Inbox
    from zstore.serve.jobs import Jobs
    from zstore.serve.runs import Runs

    inbox = Inbox(Runs(settings), Jobs(), settings)
    for upload_id in remove:
        inbox.remove(inbox.get(upload_id))
    for upload in inbox.all():
        came = sum(path.stat().st_size for path in upload.path.rglob("*") if path.is_file())
        size, silent_s = format_bytes(came), time.time() - upload.active_at
        print(f"{upload.id}  {upload.offer.run}/{upload.record.tag}  {size} came, silent for {silent_s:.0f} s")
    return 0


def serve_command(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]PATH_OR_URL...",
            help="A run's folder of checkpoints, or a folder of such folders; URLs work too.",
            show_default=False,
        ),
    ] = None,
    listening: Listening = DEFAULTS,
) -> int:
    """Serve the runs in `places` until a signal ends it."""
    try:
        from zstore.serve.audit import append_to
        from zstore.serve.server import run
        from zstore.serve.settings import Root, Settings
    except ImportError as error:
        raise UsageError(f"zstore serve needs the package {error.name}: pip install 'zstore[serve]'") from error
    from zstore.io import is_url
    from zstore.remote.url import parse_options

    settings = Settings(
        roots=tuple(Root.parse(place) for place in places or ()),
        upstreams=tuple(listening.upstream or ()),
        cache=listening.cache,
        cache_bytes=listening.cache_size,
        host=listening.host,
        port=listening.port,
        token=listening.token,
        tokens=listening.tokens,
        allow_actions=listening.allow_actions,
        upload_folder=listening.upload_folder,
        keep_last=listening.keep_last,
        run_quota=listening.run_quota,
        tls_certificate=listening.tls_certificate,
        tls_key=listening.tls_key,
        hosts=tuple(listening.allow_host or ()),
        trusted_proxies=tuple(listening.trust_proxy or ()),
        webhooks=tuple(listening.webhook or ()),
        webhook_secret=os.environ.get(_WEBHOOK_SECRET) or None,
        stalled_s=listening.stalled_after,
        storage_options=parse_options(listening.storage_option or ()),
    )
    for root in settings.roots:
        if not is_url(root.location) and not os.path.isdir(root.location):
            print(f"warning: there is no folder {root.location}: what is made there later is served", file=sys.stderr)
    if listening.uploads or listening.remove_upload:
        return _list_uploads(settings, listening.remove_upload or ())
    if listening.access_log is not None:
        append_to(listening.access_log, logging.getLogger("zstore.serve.access"))
    if listening.audit is not None:
        append_to(listening.audit)
    run(settings, lambda url: print(f"serving on {url}", file=sys.stderr, flush=True))
    return 0
