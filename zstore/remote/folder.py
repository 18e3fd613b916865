"""Opening the folder that a URL names, whatever is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fsspec_folder import open_fsspec_folder
from .retries import Retries
from .url_folder import UrlFolder


def open_folder(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
) -> UrlFolder:
    """Return the folder at `url`: that of a service if `zstore serve` answers there, which an HTTP server is asked;
    otherwise see `open_fsspec_folder`. For a service
    `storage_options` are `token` and `ca_certs`; see `ServiceConnection`.

    Raises UsageError if nothing opens the URL or the options make no sense, StorageError if no server answers.
    """
    if url.startswith(("http://", "https://")):
        from .service_folder import open_service_folder

        found = open_service_folder(url, storage_options, retries=retries)
        if found is not None:
            return found
    return open_fsspec_folder(url, storage_options, retries=retries)
