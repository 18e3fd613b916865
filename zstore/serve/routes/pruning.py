"""Pruning and verifying a run's checkpoints as jobs: the work of the commands, and the lines that they print."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from ...checkpoint.catalog import TagInfo, find_folder
from ...checkpoint.folder import Folder
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.retention import Fate, Keep, plan_lines, remove_each, weigh
from ...checkpoint.usage import bytes_freed
from ...checkpoint.verify import VerifyFault, verify_checkpoint
from ...errors import CorruptionError, StorageError, UsageError
from ...io.shards import open_resources
from ...remote.commit import remover
from .. import models
from ..jobs import RunningJob
from ..models import Job, PruneResult, PruneRules
from ..replies import ConflictError
from ..runs import Run
from ..service import Service
from ..views.timeline import checkpoint_of


def start_verify(service: Service, run: Run, checkpoint: str) -> Job:
    """Begin to check every byte of a checkpoint. Raises CheckpointNotFoundError, ConflictError if a job is under way."""
    listed = service.timeline(run).find(checkpoint)
    info, location = listed.info, listed.info.location

    def verify(job: RunningJob) -> None:
        with open_resources(pool_bytes=service.memory.verification_bytes) as resources:
            try:
                with CheckpointReader(info, resources) as reader:
                    job.expect(sum(array.file_bytes for array in reader.arrays.values()))
                    faults = verify_checkpoint(reader, job.advance)
                    num_arrays = len(reader.arrays)
            except CorruptionError as error:
                faults, num_arrays = [VerifyFault(file=location, problem=str(error))], 0
        for fault in faults:
            job.say(str(fault))
        if not faults:
            job.say(f"no faults: every chunk of {num_arrays} arrays matches its checksum")

    return service.jobs.start("verify", run.name, listed.entry.checkpoint, verify)


def prune(service: Service, run: Run, rules: PruneRules) -> PruneResult:
    """Return the fates of a run's checkpoints by the rules; with `rules.plan`, the digest of such an answer, begin to remove
    the others.

    Raises UsageError for rules that make no sense, CheckpointNotFoundError if there is nothing to weigh, ConflictError
    if the checkpoints that go are not those of the plan any more.
    """
    fates = _weigh(service, run, _keep(rules))
    doomed = [fate for fate in fates if not fate.reasons]
    freed_bytes = bytes_freed(fate.info.folder for fate in doomed)
    plan = _digest(doomed)
    job = None
    if rules.plan is not None:
        if rules.plan != plan:
            raise ConflictError(
                "the checkpoints changed since the plan was made: expected its digest to be that of what would go now; ask for "
                "a new plan (the same rules without `plan`), look at it, and send its digest"
            )
        job = _start(service, run, fates, freed_bytes).id if doomed else None
    return PruneResult(
        fates=[
            models.CheckpointFate(
                checkpoint=checkpoint_of(fate.info, run.folder),
                tag=fate.info.tag,
                step=fate.info.record.step,
                reasons=list(fate.reasons),
                size_bytes=fate.size_bytes,
            )
            for fate in fates
        ],
        freed_bytes=freed_bytes,
        plan=plan,
        job=job,
    )


def _keep(rules: PruneRules) -> Keep:
    if rules.keep_last is None and rules.keep_every is None and rules.keep_best is None and not rules.keep_tags:
        raise UsageError("say what to keep: expected keep_last, keep_every, keep_best or keep_tags")
    last = 1 if rules.keep_last is None else rules.keep_last
    return Keep(last=last, every=rules.keep_every, best=rules.keep_best, tags=tuple(rules.keep_tags))


def _weigh(service: Service, run: Run, keep: Keep) -> list[Fate]:
    listed = service.timeline(run).listed()
    if listed and all("/" in one.entry.checkpoint for one in listed):
        raise UsageError(
            f"the checkpoints of {run.name!r} are in folders of its training loop, as {listed[-1].entry.checkpoint}, which "
            "hold files of the loop beside them: have the loop keep fewer, or remove its folders"
        )
    return weigh(run.folder, keep)


def _digest(doomed: Sequence[Fate]) -> str:
    names = sorted(f"{fate.info.folder.name} {fate.info.record.id}" for fate in doomed)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _remover_of_same(folder: Folder) -> Callable[[TagInfo], None]:
    """Return a function that removes a checkpoint in the folder, unless another one took its name while the job waited."""
    remove = remover(folder)

    def remove_same(info: TagInfo) -> None:
        now = find_folder(folder, info.folder.name)
        if now is not None and now.record.id != info.record.id:
            raise ConflictError("another checkpoint was saved under its name since the plan was made: that one stays")
        remove(info)

    return remove_same


def _start(service: Service, run: Run, fates: Sequence[Fate], freed_bytes: int) -> Job:
    doomed = [fate for fate in fates if not fate.reasons]
    sizes = {fate.info.location: fate.size_bytes for fate in doomed}
    place: Folder = run.folder

    def remove(job: RunningJob) -> None:
        for line in plan_lines(fates, freed_bytes, dry_run=False):
            job.say(line.removeprefix("plan: "))
        try:
            messages = remove_each(
                [fate.info for fate in doomed], _remover_of_same(place), lambda info: job.advance(sizes[info.location])
            )
        finally:
            service.timeline(run).forget()
        for message in messages:
            job.say(message)
        if messages:
            raise StorageError(f"{len(messages)} of {len(doomed)} checkpoints could not be removed: {messages[0]}")

    return service.jobs.start("prune", run.name, None, remove, total_bytes=sum(sizes.values()))
