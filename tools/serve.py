"""`zstore serve`: serves checkpoints and runs over HTTP, with a web page."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from zstore.errors import UsageError

from .options import StorageOption, parse_options

_TOKEN, _READ_TOKEN = "ZSTORE_TOKEN", "ZSTORE_READ_TOKEN"


def serve_command(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]PATH_OR_URL",
            help="A run's folder of checkpoints, or a folder of such folders; URLs work too.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; one reachable from other machines needs a token.", metavar="ADDRESS"),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 selects a free one.", min=0, max=65535)] = 8700,
    storage_option: StorageOption = None,
) -> int:
    """Serve the runs in `places` until a signal stops it.

    The environment variable ZSTORE_TOKEN has the token for reading and uploading, ZSTORE_READ_TOKEN one for reading only.
    Without a token, only this machine is served, and uploads are disabled.
    """
    try:
        from zstore.serve.app import run
        from zstore.serve.runs import Root, Settings
    except ImportError as error:
        raise UsageError(f"zstore serve needs the package {error.name}: pip install 'zstore[serve]'") from error
    from zstore.io import is_url

    settings = Settings(
        roots=tuple(Root.parse(place) for place in places),
        host=host,
        port=port,
        token=os.environ.get(_TOKEN) or None,
        read_token=os.environ.get(_READ_TOKEN) or None,
        storage_options=parse_options(storage_option or ()),
    )
    for root in settings.roots:
        if not is_url(root.location) and not os.path.isdir(root.location):
            print(
                f"warning: folder {root.location} does not exist; runs created in it later will be served",
                file=sys.stderr,
            )
    run(settings, lambda url: print(f"serving on {url}", file=sys.stderr, flush=True))
    return 0
