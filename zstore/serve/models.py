"""The answers under `/api`, as pydantic models: the page, other tools and the OpenAPI document go by them.

Times are seconds since 1970 (`_at`) or durations in seconds (`_s`); sizes are bytes. A number that is not known, or is not
finite, is null. `checkpoint` is the path of a tag's folder inside the run's, as in URLs: `step-00000060`, or for
loops that make a folder for each save `checkpoint-60/step-00000060`; `latest` means the newest, and moving tags theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from ..open.compare import Comparison
from .tokens import Role


def json_of(model: BaseModel) -> str:
    """Return a model as JSON in UTF-8, numbers that are not finite as null and characters that are not Unicode as `?`."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:  # a lone surrogate, from a journal or the name of a file
        return json.dumps(_encodable(model.model_dump()), separators=(",", ":"), ensure_ascii=False)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceInfo(_Model):
    """`GET /api`."""

    service: Literal["zstore"] = "zstore"
    version: str
    protocol: int = 1
    """Raised when an older client could not go on."""
    allows_actions: bool
    """Whether the service takes uploads and actions at all."""
    authorized: bool
    """Whether this request showed a token or a link."""
    role: Role | None = None
    """Role of that token; of a link, read."""
    needs_token: bool = False
    """Whether reading needs a token, and this request did not show it."""


class Newest(_Model):
    """The newest checkpoint of a run."""

    checkpoint: str
    tag: str
    step: int
    committed_at: float


class RunSummary(_Model):
    """A run in the list of all."""

    name: str
    location: str
    state: Literal["training", "done", "failed", "killed", "lost", "unknown"]
    """By the journal; unknown if there is none. killed: its process is gone from this machine without an end; lost: nothing
    came for long from another machine, and no end."""
    error: str | None = None
    """The error of a run that failed."""
    not_finite_step: int | None = None
    """The last step with a loss, a norm or a metric that is NaN or infinite."""
    failed_save: str | None = None
    """Step and error of the last save, if it failed."""
    run_id: str | None
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    updated_at: float | None
    """Of the last line of the journal, or the last commit."""
    num_checkpoints: int
    newest: Newest | None
    problem: str | None
    """Why the folder cannot be read."""
    tags: list[str] = []
    group: str = ""
    note: str = ""
    settings: str = Field("", exclude=True)
    """Config of the newest process as lines like `optimizer.params.lr=0.001`: for searching."""

    def has_words(self, words: str) -> bool:
        """Return whether each of the words is somewhere in its names, marks or settings; case does not count."""
        texts = (self.name, self.location, self.state, *self.tags, self.group, self.note, self.settings)
        whole = "\n".join(texts).lower()
        return all(word in whole for word in words.lower().split())


class RunList(_Model):
    """`GET /api/runs?q=`."""

    runs: list[RunSummary]
    num_runs: int
    """With those that the search left out."""


class Session(_Model):
    """One process of training that wrote a journal: from a start to its end."""

    run_id: str
    started_at: float
    ended_at: float | None
    """None: it is running, or was killed."""
    first_step: int
    loop: str
    """Whose loop: engine, train, trainer, lightning, offloaded."""
    world_size: int
    host: str
    pid: int
    pid_namespace: str = ""
    """In which `pid` counts, if that is known."""
    versions: dict[str, str]
    config: dict[str, Any]


class PlanPart(_Model):
    """Bytes of one kind of state on one tier."""

    tier: Literal["device", "host", "disk"]
    kind: str
    """parameters, gradients, master weights, optimizer state, buffers, activations."""
    planned_bytes: int | None
    measured_bytes: int | None


class PlacedArray(_Model):
    """An array and its tier, on rank 0."""

    name: str
    tier: Literal["device", "host", "disk"]
    kind: str
    nbytes: int


class Placement(_Model):
    """`GET /api/runs/{run}/placement`: the tier of every byte; the plan beside the measurement."""

    host_budget_bytes: int | None
    device_bytes: int | None
    """Memory of the device."""
    parts: list[PlanPart]
    arrays: list[PlacedArray]


class SaveEvent(_Model):
    """A save of the run."""

    at: float
    step: int
    tag: str
    state: Literal["begun", "committed", "uploaded", "failed"]
    stall_s: float | None
    elapsed_s: float | None
    linked_bytes: int | None
    written_bytes: int | None
    done_bytes: int | None
    """Of one under way."""
    problem: str | None


class ActionEvent(_Model):
    """A request to the run that it carried out, or refused."""

    at: float
    id: str
    """Of the answer to the request: `RunAction.id`."""
    action: Literal["save", "stop"]
    step: int | None
    """After which it was carried out: a save that was asked for has the same one."""
    problem: str | None
    """Why it was refused."""


class Warned(_Model):
    """A warning of the run."""

    at: float
    text: str


class NotFinite(_Model):
    """Numbers of a step that are NaN or infinite."""

    at: float
    step: int
    values: dict[str, str]
    """nan, inf or -inf, by name."""


class RunDetail(_Model):
    """`GET /api/runs/{run}?limit=&skip=`: of sessions and warnings `limit`, without the `skip` newest; the oldest first."""

    summary: RunSummary
    sessions: list[Session]
    """Texts are cut, and large configs left out: the journal has them."""
    num_sessions: int
    """On all pages: of each journal the newest 100."""
    saves: list[SaveEvent]
    """The last state of each of the newest 200, the oldest first."""
    actions: list[ActionEvent]
    """The newest 50, the oldest first."""
    warnings: list[Warned]
    num_warnings: int
    """On all pages: of each journal the newest 100."""
    not_finite: list[NotFinite]
    """The newest 100, the oldest first."""


class Steps(_Model):
    """`GET /api/runs/{run}/steps?after=&until=&points=`: columns over the steps; if there are more than `points`, each is
    the mean of some that follow each other, step and time those of the last."""

    columns: dict[str, list[float | None]]
    """step, at, tokens_seen (of all steps up to it), loss, loss_min, loss_max, lr, grad_norm, tokens_per_s, step_s, forward_s,
    backward_s, optimizer_s, stall_s, mfu if it is known, and with a `/`: memory/<device|host|disk|buffers|process|cuda>,
    rate/<link> (bytes per second), stall/<cause>, metric/<name>; not_finite counts numbers that are NaN or infinite."""
    last_step: int | None
    is_whole: bool
    """False while a long journal is being read: the steps are a sample, and it is well to ask again in a second."""


class Ended(_Model):
    """Event `end`: a run no longer trains."""

    step: int | None
    reason: str | None
    """done, stopped or failed; null if the run did not say, for instance when it was killed."""


class CheckpointsChanged(_Model):
    """Event `checkpoints`: the list of checkpoints, or of unfinished saves and uploads, changed."""

    num_checkpoints: int


class CheckpointEntry(_Model):
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
    """Of those, the files that other checkpoints of the run have too."""
    freed_bytes: int
    """Bytes that removing it alone would free."""
    num_files: int
    metrics: dict[str, float]
    moving_tags: list[str]
    """That point at it."""
    held: bool
    """Retention and prune leave it."""
    note: str | None


class Unfinished(_Model):
    """A save or upload that is not committed."""

    name: str
    state: Literal["under way", "interrupted"]
    nbytes: int


class RefusedFolder(_Model):
    """A folder that looks like a checkpoint and is not."""

    name: str
    reason: str


class CheckpointList(_Model):
    """`GET /api/runs/{run}/checkpoints`: the oldest first."""

    checkpoints: list[CheckpointEntry]
    refused: list[RefusedFolder]
    unfinished: list[Unfinished]
    dangling: dict[str, str]
    """Moving tags whose checkpoint is gone, and its name."""
    total_bytes: int
    """All files, each once."""


class CheckpointDetail(_Model):
    """`GET /api/runs/{run}/checkpoints/{checkpoint}`."""

    entry: CheckpointEntry
    location: str
    id: str
    training_world_size: int
    num_arrays: int
    array_bytes: int
    state: dict[str, Any]
    """The record's state; values beyond 64 KiB are cut."""


class ArrayEntry(_Model):
    """An array of a checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    num_shards: int
    url: str
    """Of its Zarr array, relative to the service's own: `zarr/...`."""


class ArrayList(_Model):
    """`GET /api/runs/{run}/checkpoints/{checkpoint}/arrays`: all of them, in natural order."""

    arrays: list[ArrayEntry]


class HistogramData(_Model):
    """Counts between edges, one more of these."""

    edges: list[float]
    counts: list[int]


class ArrayStatistics(_Model):
    """`GET /api/runs/{run}/checkpoints/{checkpoint}/stats?array=`."""

    array: str
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None
    nan: int
    inf: int
    histogram: HistogramData


class Difference(_Model):
    """`GET /api/runs/{run}/diff?before=&after=`: by checksums; with `array=`, that one by its values."""

    before: str
    after: str
    counts: dict[str, int]
    """Arrays by status."""
    arrays: list[Comparison]
    """Those that differ, or the one that was asked for."""


class Job(_Model):
    """Work behind requests. `GET /api/jobs`, `GET /api/jobs/{id}`."""

    id: str
    kind: Literal["verify", "prune", "upload"]
    run: str
    checkpoint: str | None
    state: Literal["running", "done", "failed"]
    """failed also if it was ended by a restart of the service, without `ended_at` if that did not end in order."""
    started_at: float
    ended_at: float | None
    done_bytes: int
    total_bytes: int
    lines: list[str]
    """Its results, as the command prints them: faults of a verification, checkpoints that were removed."""
    problem: str | None


class JobList(_Model):
    """`GET /api/jobs`: the newest 100, the oldest first."""

    jobs: list[Job]


class PruneRules(_Model):
    """Body of `POST /api/runs/{run}/prune`: which checkpoints stay. At least one rule."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: str | None = None
    keep_tags: list[str] = []
    plan: str | None = None
    """Of the answer to a dry run: the checkpoints in it are removed. None: a dry run."""


class CheckpointFate(_Model):
    """The fate of a checkpoint."""

    checkpoint: str
    tag: str
    step: int
    reasons: list[str]
    """Why it stays; empty: it goes."""
    size_bytes: int


class PruneResult(_Model):
    """The effects of pruning; with `job` it has begun."""

    fates: list[CheckpointFate]
    freed_bytes: int
    plan: str
    """Digest of the checkpoints that go; only they are removed."""
    job: str | None


class MarkChange(_Model):
    """Body of `POST /api/runs/{run}/tags`: what null says stays as it is."""

    checkpoint: str | None = None
    """Which one: its tag, a moving tag, the number of its step. None: `tag` is removed."""
    tag: str | None = None
    """The moving tag that shall point at it."""
    held: bool | None = None
    note: str | None = None
    """Empty: none."""


class RunMarksChange(_Model):
    """Body of `POST /api/runs/{run}/marks`: what null says stays as it is."""

    tags: list[str] | None = None
    """In place of those that the run has."""
    group: str | None = None
    """Empty: none."""
    note: str | None = None
    """Empty: none."""


class RunAction(_Model):
    """`POST /api/runs/{run}/actions/{save|stop}`: the run takes it up at the end of a step."""

    id: str
    """`RunDetail.actions` has it once the run has carried the request out."""
    action: Literal["save", "stop"]
    run_id: str
    requested_at: float


class Problem(_Model):
    """Body of every answer from 400 on."""

    error: str
    """What was expected, what was got, what to do."""


class WeightsFile(_Model):
    """A file of a model."""

    name: str
    size: int
    etag: str | None
    """Changes with the file's bytes: for `If-Range` of resumed downloads."""


class WeightsFolder(_Model):
    """`GET /weights/{run}/{checkpoint}/?dtype=bf16&max_shard_size=5GB&overflow=error`: files to download, with that query."""

    run: str
    checkpoint: str
    """By its own name if `latest` or a moving tag was asked for."""
    id: str
    """Of the checkpoint's record."""
    tag: str
    step: int
    dtype: Literal["bf16", "fp16", "fp32"]
    overflow: Literal["error", "inf", "clamp"]
    files: list[WeightsFile]
