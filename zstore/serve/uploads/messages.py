"""Messages between clients and the service about uploads, under `/api/uploads`. See [Note: an upload] in `upload`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ...checkpoint.retention import Keep

OFFER_FILE = "upload.json"
ALIVE_S = 15 * 60.0
"""An upload counts as going on for this long after its client's last request."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExtraFile(_Message):
    """A file at the top of a checkpoint that a program left there, such as `config.json`."""

    bytes: int
    sha256: str


class UploadOffer(_Message):
    """Body of `POST /api/uploads`."""

    run: str
    """Name that the run has, or gets, in the service."""
    record: str
    """The checkpoint's `zstore.json`."""
    documents: dict[str, int]
    """Bytes of the root's `zarr.json`, and of each rank's manifest by its path."""
    extras: dict[str, ExtraFile] = {}
    overwrite: bool = False
    """Replace a committed checkpoint of the same tag, whatever run saved it."""
    replaces_own: bool = False
    """Replace one of the same run."""
    keep: Keep | None = None
    """Which checkpoints of the run stay after the commit."""


class UploadFile(_Message):
    """A file of an upload."""

    path: str
    bytes: int
    received: int
    """Equal to `bytes`: the file is complete and was checked."""
    candidate: bool = False
    """A committed checkpoint has a file with the same checksums: show its SHA-256 before sending it."""


class UploadState(_Message):
    """Answer to `POST /api/uploads`, `GET /api/uploads/{id}?rank=` and `POST /api/uploads/{id}/plan`."""

    id: str
    run: str
    tag: str
    run_id: str
    state: Literal["begun", "planned", "committed"]
    """begun: metadata and manifests are to be sent, then a plan asked for."""
    files: list[UploadFile]
    """Begun: metadata and manifests. Planned: those that are not whole yet, of the rank that was asked for, else of all."""


class UploadList(_Message):
    """`GET /api/uploads?run=`: those that are not committed, of one run or all; `files` is empty."""

    uploads: list[UploadState]


class Claims(_Message):
    """Body of `POST /api/uploads/{id}/claims`: the SHA-256 of candidates, by path."""

    files: dict[str, str]


class Linked(_Message):
    """Answer to it: those that need not be sent."""

    linked: list[str]


class Committed(_Message):
    """Answer to `POST /api/uploads/{id}/commit`."""

    tag: str
    committed_ns: int
    linked_bytes: int
    """Bytes of files that are links to those of another checkpoint."""
    messages: list[str]
    """Messages for the user: checkpoints that could not be removed."""


class JournalSize(_Message):
    """Answer to `GET` and `POST /api/runs/{run}/journals/{run_id}`."""

    bytes: int
    """Of the whole lines that are there."""
