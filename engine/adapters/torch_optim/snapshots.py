"""`durability="step"`: a snapshot after every step, so that a loop that is killed goes on from its last finished step.

[Note: an optimizer's snapshots]
A snapshot is a checkpoint of zstore's format, saved by torch.distributed.checkpoint through `zstore.dcp.Writer` as any
other: weights under "model", the optimizer under "optim", and the loop's own state of each rank under "loop". `SnapshotOrder`
has the order of snapshots and steps. `step()` notes the groups' settings and the loop's state; the rest is done behind it: the
update under way is waited for, files on disk are linked, other state is written. The ranks talk on a process group of their
own, since the loop's collectives go on meanwhile.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from zstore.checkpoint import CheckpointReader, Keep, discard, open_checkpoint, retire, step_tag
from zstore.dcp import Reader, Writer
from zstore.engine.checkpoint.pending import Pending
from zstore.engine.checkpoint.snapshot_folder import boot_id, choose_together, first_whole, make_shared_folder, tags_of
from zstore.engine.checkpoint.snapshot_order import SnapshotOrder
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.io import Files, Ticket, UnsyncedFiles, run_in_thread
from zstore.io.closing import settle
from zstore.ranks.world import World

from .block_kernel import BlockKernel
from .local_state import LocalState
from .stepping import Stepping

_log = logging.getLogger("zstore")

STEPS_FOLDER = "zstore-run/steps"
"""Folder of snapshots, in the folder of the state."""
LoopState = Any | Callable[[], Any]
Groups = Sequence[Mapping[str, Any]]


class Resumed(NamedTuple):
    """The state from which a loop goes on."""

    step: int
    """Number of `step()` calls that it had finished."""
    loop_state: Any
    """`loop_state` at the end of the last one, on this rank; tensors are on the CPU."""


class Snapshots:
    """Takes a snapshot of `state` after each step, in `folder` (all ranks). See [Note: an optimizer's snapshots]."""

    def __init__(self, state: LocalState, stepping: Stepping, folder: Path, files: Files | None) -> None:
        if any(isinstance(kernel, BlockKernel) for kernel in state.arrays.kernels):
            raise UsageError(
                'durability="step" keeps fp32 state, of one value an element: with an 8-bit optimizer save checkpoints of the '
                "state_dict() instead"
            )
        self._state = state
        self._stepping = stepping
        self._folder = folder
        self._files = UnsyncedFiles(files or Files())
        self._world = World.current()
        make_shared_folder(folder, self._world, "durability_path")
        self._left = self._world.broadcast_object([info.tag for info in tags_of(folder)])
        """Tags of an earlier process, which nobody resumed yet."""
        group = torch_dist.new_group(backend="gloo") if self._world.world_size > 1 else None
        self._behind = replace(self._world, group=group, backend="gloo", device=torch.device("cpu"))
        self.order: SnapshotOrder[Ticket[None]] = SnapshotOrder(pending=Pending())
        """Its steps are the `step()` calls that were finished."""
        self._has_room = False

    # -- one step -----------------------------------------------------------------------------------------------------

    def before_change(self) -> None:
        """Wait until the state may change; raise the error of the snapshot under way.

        Raises UsageError if there is a snapshot of an earlier process that was not resumed.
        """
        if self._left:
            raise UsageError(
                f"{self._folder} has the snapshot {self._left[-1]!r} of an earlier process: call optimizer.resume() before the "
                "first step to go on from it, or remove the folder to begin anew"
            )
        self.order.complete()

    def take(self, groups: Groups, loop_state: LoopState) -> None:
        """Begin the snapshot of the step that ended (all ranks). Raises UsageError for a loop's state that cannot be kept,
        DiskFullError if the next step would have no room."""
        error: Exception | None = None
        small: dict[str, Any] = {}
        step, context = self.order.step + 1, self._state.arrays.transfers.streams.stream_context()
        try:
            self._check_room()
            small = self._small(step, groups, loop_state)
        except Exception as raised:
            error = raised

        def work() -> None:
            with context():
                self._save(step, small, error)

        self.order.begin(step, lambda: run_in_thread(work, "zstore-snapshot"))
        if error is not None:
            with suppress(Exception):
                self.order.complete()
            raise error

    def _check_room(self) -> None:
        """Check once that the drive holds a second generation of the state."""
        if not self._has_room:
            arrays = self._state.arrays
            names = [name for record in self._state.records.values() for name in arrays.arrays_of(record)]
            arrays.store.require_room(names, num_stores=self._world.local_world_size)
            self._has_room = True

    def _small(self, step: int, groups: Groups, loop_state: LoopState) -> dict[str, Any]:
        kept = _encoded(loop_state() if callable(loop_state) else loop_state)
        return {
            "step": step,
            "loop": {str(self._world.rank): {"boot": boot_id(), "state": kept}},
            "optim": {"param_groups": [copy.deepcopy(group) for group in self._named(groups)]},
            "model": self._weights(),
        }

    def _named(self, groups: Groups) -> list[dict[str, Any]]:
        """Return the groups with the names of the parameters in their places."""
        names = {parameter: record.name for parameter, record in self._state.records.items()}
        return [
            {name: value for name, value in group.items() if name != "param_names"}
            | {"params": [names[parameter] for parameter in group["params"] if parameter in names]}
            for group in groups
        ]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {record.name: record.parameter.detach() for record in self._state.records.values()}

    def _entries(self) -> dict[str, Any]:
        return {record.name: self._state.entry(record) for record in self._state.records.values()}

    @torch.no_grad()
    def _save(self, step: int, small: dict[str, Any], error: Exception | None) -> None:
        """Carry the save out, behind the loop (all ranks)."""
        with self._behind.agreeing():
            if error is not None:
                raise error
            self._stepping.wait(self._state.records.values())
            self._state.arrays.transfers.synchronize()
            small["optim"]["state"] = self._entries()
        writer = Writer(
            self._folder / step_tag(step), step=step, overwrite=True, link_unchanged=False, _files=self._files
        )
        alone = self._world.world_size == 1
        with _raising_causes():  # not `save`, which warns if there is one process only
            _save_state_dict(small, writer, process_group=self._behind.group, no_dist=alone)
        if self._world.rank == 0:
            keep, run = Keep(last=1), ""
            for message in retire(
                self._folder, keep=keep, run=run, remove=lambda info: discard(self._files, info.path)
            ):
                _log.warning("%s", message)

    def _finish(self) -> None:
        """Complete the snapshot under way; an error is a warning."""
        settle(self.order.complete, f"the snapshot of step {self.order.step} failed: ")

    def close(self) -> None:
        """Complete the snapshot under way, which stays, and release the process group."""
        self._finish()
        group, self._behind.group = self._behind.group, None
        if group is not None:
            with suppress(ValueError):  # the process group of all ranks, and this one with it, is gone already
                torch_dist.destroy_process_group(group)

    # -- resuming -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def resume(self, groups: Groups, load: Callable[[dict[str, Any]], None]) -> Resumed | None:
        """Load the newest whole snapshot into parameters and state (all ranks); None if there is none.

        `load` takes the state dict of the optimizer. Raises CheckpointMismatchError, before anything is changed, if the
        snapshot is of other parameters.
        """
        self._finish()
        self._stepping.forget()
        path = choose_together(self._world, lambda boots: first_whole(reversed(tags_of(self._folder)), boots, _made_in))
        self._left = []
        if path is None:
            return None
        with self._world.agreeing():
            self._check_names(path)
            progress = self._progress(path)
        optim = {"state": self._entries(), "param_groups": self._named(groups)}
        state: dict[str, Any] = {"model": self._weights(), "optim": optim}
        try:
            with self._world.agreeing():
                _load_alone(state, path)
                load(optim)
        except BaseException as error:
            self._stepping.torn = error
            raise
        self.order.step = self.order.committed_step = progress.step
        return progress

    def _check_names(self, path: Path) -> None:
        with closing(Reader(path)) as reader:
            keys = reader.read_metadata().state_dict_metadata
            stored = {key for key in keys if key.startswith(("model.", "optim.state."))}
        own = {f"model.{name}" for name in self._weights()}
        own |= {f"optim.state.{name}.{slot}" for name, entry in self._entries().items() for slot in entry}
        if stored != own:
            missing, unknown = sorted(own - stored)[:3], sorted(stored - own)[:3]
            raise CheckpointMismatchError(
                f"the snapshot {path} is of another model or optimizer: it lacks {', '.join(missing) or 'nothing'}, and has "
                f"{', '.join(unknown) or 'nothing'} besides; make the optimizer as the one that was killed, or remove "
                f"{path.parent} to begin anew"
            )

    def _progress(self, path: Path) -> Resumed:
        rank = self._world.rank
        with open_checkpoint(path) as reader:
            rank = rank if rank < reader.record.world_size else 0
        found: dict[str, Any] = {"step": 0, "loop": {str(rank): {"state": b""}}}
        _load_alone(found, path)
        kept = torch.load(io.BytesIO(found["loop"][str(rank)]["state"]), map_location="cpu", weights_only=True)
        return Resumed(int(found["step"]), kept)


def _encoded(loop_state: Any) -> bytes:
    """Return the loop's state as bytes. Raises UsageError for values that could not be read back without running code."""
    stream = io.BytesIO()
    try:
        torch.save(loop_state, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "loop_state: expected tensors, numbers, text, and dicts, lists and tuples of them (what torch.load reads with "
            f"weights_only=True): {error}"
        ) from error
    return stream.getvalue()


def _made_in(reader: CheckpointReader) -> set[str]:
    """Return the boots that wrote a snapshot."""
    made_in = {str(rank): {"boot": ""} for rank in range(reader.record.world_size)}
    _load_alone({"loop": made_in}, Path(reader.location))
    return {each["boot"] for each in made_in.values()}


@contextmanager
def _raising_causes() -> Iterator[None]:
    """Raise the error that made a save of all ranks, or a load, fail, if that is an Exception of some rank."""
    try:
        yield
    except CheckpointException as raised:
        causes = [error for error, _ in raised.failures.values() if isinstance(error, Exception)]
        raise (causes[0] if causes else RuntimeError(str(raised))) from None


def _load_alone(state: dict[str, Any], path: Path) -> None:
    """Do as torch.distributed.checkpoint's `load`, for this rank alone; that warns if there is one process only."""
    with closing(Reader(path)) as reader, _raising_causes():
        _load_state_dict(state, reader, no_dist=True)
