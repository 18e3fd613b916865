"""The answers under `/api`, as pydantic models: the page, other tools and the OpenAPI document go by them.

Times are seconds since 1970 (`_at`) or durations in seconds (`_s`); sizes are bytes. A number that is not known, or is not
finite, is null. `checkpoint` is the path of a tag's folder inside the run's, as in URLs: `step-00000060`, or for
loops that make a folder for each save `checkpoint-60/step-00000060`; `latest` means the newest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

Tier = Literal["device", "host", "disk"]
State = Literal["training", "done", "failed", "killed", "lost", "unknown"]
Text = Annotated[str, BeforeValidator(lambda value: value[:4096] if isinstance(value, str) else value)]
"""Cut to what a page shows."""


class Answer(BaseModel):
    """A response of the service."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")


class ServiceInfo(Answer):
    """`GET /api`, which needs no token."""

    service: Literal["zstore"] = "zstore"
    version: str
    protocol: int = 1
    """Raised when an older client could not go on."""
    needs_token: bool
    """Whether reading needs one."""
    takes_uploads: bool


class Newest(Answer):
    """The newest checkpoint of a run."""

    checkpoint: str
    tag: str
    step: int
    committed_at: float


class RunSummary(Answer):
    """A run in the list of all."""

    name: str
    location: str
    state: State
    """From the journal; unknown without one. killed: its process on this machine ended without an entry; lost: no
    entry arrived from another machine for long, and no end."""
    error: str | None = None
    """The error of a run that failed."""
    not_finite_step: int | None = None
    """The last step with a loss, a norm or a metric that is NaN or infinite."""
    failed_save: str | None = None
    """Step and error of the last save, if it failed."""
    run_id: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    updated_at: float | None = None
    """Of the last line of the journal, or the last commit."""
    num_checkpoints: int = 0
    newest: Newest | None = None
    problem: str | None = None
    """Why the folder cannot be read."""


class RunList(Answer):
    """`GET /api/runs`."""

    runs: list[RunSummary]


class Session(Answer):
    """One process of training that wrote a journal: from a start to its end. Made of a line `start`."""

    run_id: Text = Field("", validation_alias=AliasChoices("run", "run_id"))
    started_at: float = Field(0.0, validation_alias=AliasChoices("at", "started_at"))
    ended_at: float | None = None
    """None: it is running, or was killed."""
    first_step: int = Field(0, validation_alias=AliasChoices("step", "first_step"))
    total_steps: int | None = None
    world_size: int = 0
    host: Text = ""
    pid: int = 0
    versions: dict[str, Any] = {}
    config: dict[str, Any] = {}


class SaveEvent(Answer):
    """A save of the run that ended. Made of a line `save`."""

    at: float = 0.0
    step: int = 0
    tag: Text = ""
    state: Literal["committed", "uploaded", "failed"]
    stall_s: float | None = None
    elapsed_s: float | None = None
    linked_bytes: int | None = None
    written_bytes: int | None = None
    problem: Text | None = None


class NotFinite(Answer):
    """Numbers of a step that are NaN or infinite."""

    at: float = 0.0
    step: int
    values: dict[str, str] = Field(validation_alias=AliasChoices("not_finite", "values"))
    """nan, inf or -inf, by name."""


class RunDetail(Answer):
    """`GET /api/runs/{run}`: the newest 20 sessions, 200 saves and 100 of the others, oldest first."""

    summary: RunSummary
    sessions: list[Session]
    saves: list[SaveEvent]
    not_finite: list[NotFinite]


class Steps(Answer):
    """`GET /api/runs/{run}/steps?after=&points=`: columns over the steps; of more than `points`, every n-th."""

    columns: dict[str, list[float | None]]
    """step, at, loss, lr, grad_norm, tokens_per_s, step_s, forward_s, backward_s, optimizer_s, stall_s, mfu if it is
    known, and with a `/`: memory/<device|host|disk|buffers|process|cuda>, rate/<link> (bytes per second),
    stall/<cause>, metric/<name>."""
    epoch: int
    """Changes when rows sent before may have changed: then request all of them again."""


class PlacedArray(Answer):
    """An array of rank 0 and its tier; gradients, and buffers of transfers, are one."""

    name: str
    tier: Tier
    kind: str
    """parameters, gradients, master weights, optimizer state, buffers."""
    nbytes: int


class Placement(Answer):
    """`GET /api/runs/{run}/placement`: the tier of every byte."""

    host_budget_bytes: int | None
    device_bytes: int | None
    """Memory of the device."""
    arrays: list[PlacedArray]


class CheckpointEntry(Answer):
    """A committed checkpoint of a run."""

    checkpoint: str
    tag: str
    step: int
    run_id: str
    world_size: int
    committed_at: float
    size_bytes: int
    """All its files."""
    shared_bytes: int
    """Of these, the files that other checkpoints of the run also have."""
    freed_bytes: int
    """Bytes that removing only it would free."""
    num_files: int
    metrics: dict[str, float]


class RefusedFolder(Answer):
    """A folder that looks like a checkpoint and is not."""

    name: str
    reason: str


class CheckpointList(Answer):
    """`GET /api/runs/{run}/checkpoints`: oldest first."""

    checkpoints: list[CheckpointEntry]
    refused: list[RefusedFolder]
    total_bytes: int
    """All files, each once."""


class CheckpointDetail(Answer):
    """`GET /api/runs/{run}/checkpoints/{checkpoint}`."""

    entry: CheckpointEntry
    location: str
    id: str
    training_world_size: int
    num_arrays: int
    array_bytes: int
    state: dict[str, Any]
    """The record's state; values beyond 64 KiB are cut."""


class ArrayEntry(Answer):
    """An array of a checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    num_shards: int
    url: str
    """Of its Zarr array, relative to the service's own: `zarr/...`."""


class ArrayList(Answer):
    """`GET /api/runs/{run}/checkpoints/{checkpoint}/arrays`: all of them, in natural order."""

    arrays: list[ArrayEntry]


class WeightsFile(Answer):
    """A file of a model."""

    name: str
    size: int
    etag: str | None
    """Changes with the file's bytes: for `If-Range` of resumed downloads."""


class WeightsFolder(Answer):
    """`GET /weights/{run}/{checkpoint}/?dtype=bf16&max_shard_size=5GB&overflow=error`: files to download, with that query."""

    checkpoint: str
    """Its own name, even if `latest` was requested."""
    files: list[WeightsFile]
