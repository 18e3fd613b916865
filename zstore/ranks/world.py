"""The ranks of a run and the few collectives that everything else uses.

[Note: one error for all]
`World.raise_together` is how a failure on one rank ends a call on every rank. Every rank calls it with its own error or
None; if all are None it returns. Otherwise a rank that failed raises its own error, so that handlers see its type,
and every other rank raises RankError with the failed ranks' tracebacks. It is a collective: all ranks call it, in the
same order.

An error that escapes elsewhere on one rank, or a rank that dies, is the business of `watch`: a world that is watched
raises RankError if its collectives fail.

Values travel between ranks as JSON and as tensors, never pickled. Without a process group the same code runs alone.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as torch_dist

from ..errors import RankError
from ..io.links import LinkCounters
from ..io.tensors import plain_memory
from .connections import Connections, listed
from .incident import Activity
from .meeting import Meetings
from .watch import Watch, store_port
from .work import CountedWork, Done, Kind, Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values, 1-D, on the device, for which the host does not wait."""
    here = torch.tensor(values, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


@dataclass(kw_only=True)
class World:
    """The ranks of a run, as this rank sees them. Made by `World.current()`."""

    rank: int = 0
    """This rank, from 0."""
    world_size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """This rank's number on its machine."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    backend: str | None = None
    """Backend of the collectives on `device` ("gloo", "nccl"); None alone."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of tensors in the backend's collectives."""
    group: torch_dist.ProcessGroup | None = None
    """Process group of the collectives; None is the default one."""
    links: LinkCounters = field(default_factory=LinkCounters)
    """Bytes that this rank sent to others and the time waited, by `Kind`. A second world on another group shares them."""
    activity: Activity = field(default_factory=Activity)
    """The place of this rank in its work; a second world shares it."""
    watch: Watch | None = None
    """Fails all ranks if one fails; None alone, and until `begin_watch`."""
    meetings: Meetings | None = None
    """The ranks' meetings before calls that all of them make; None if they are not watched."""
    connections: Connections = field(default_factory=Connections)
    """To the other ranks, of all groups; a second world shares them."""
    requested: int = 0
    """This rank's request to all ranks, 0: none. It travels with `raise_together`, for a few bytes there."""
    granted: int = 0
    """The greatest request of any rank that has travelled: the same on all ranks after the same call."""
    tells: Callable[[], float | None] | None = None
    """Gives a number of this rank, which travels with the next `raise_together` alone."""
    told: list[float] = field(default_factory=list)
    """The numbers of all ranks that had one, as they travelled last: the same on all ranks after the same call."""
    when_broken: list[Callable[[], None]] = field(default_factory=list)
    """Further things to give up if the run is broken; called from the watch's thread."""
    near_ranks: int | None = None
    """Of the other ranks, those in this rank's group (see `groups`); None if ranks are in no groups. With groups, bytes
    sent, except for "control", are also counted as `within_group` and `between_groups`."""

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes that this rank sent to others, by `Kind`."""
        return Counter({kind: link.bytes for kind, link in self.links.statistics().items() if kind in get_args(Kind)})

    @staticmethod
    def current() -> World:
        """Return the world of the process group that is initialised, or a world of one rank."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        if not (torch_dist.is_available() and torch_dist.is_initialized()):
            return World(local_rank=local_rank, device=cuda_device(local_rank) if cuda else torch.device("cpu"))
        backend = _backend(cuda)
        world_size = torch_dist.get_world_size()
        return World(
            rank=torch_dist.get_rank(),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
            backend=backend,
            device=cuda_device(local_rank) if backend == "nccl" else torch.device("cpu"),
        )

    def second(self) -> World:
        """Return the same ranks on a process group of their own (a collective); alone, this very world.

        Collectives on two groups need no common order, so that one may wait without blocking the other.
        """
        if self.world_size == 1:
            return self
        if self.world_size != torch_dist.get_world_size():
            raise ValueError("a second process group of some ranks: make_groups() makes another one of each group")
        with self._within("new_group"):
            group = torch_dist.new_group()
        self.know_connections()
        return World(**{**self.__dict__, "group": group})

    def release(self) -> None:
        """Destroy the process group that `second` made, once no collective on it is under way; a second call does nothing.

        Its threads end here. Left to the interpreter's end, one that still holds a tensor would abort the process.
        """
        group, self.group = self.group, None
        if group is None or (self.watch is not None and self.watch.broken):
            return
        with suppress(ValueError):  # the process group of all ranks, and this one with it, is gone already
            torch_dist.destroy_process_group(group)

    def begin_watch(self, silent_s: float | None = None) -> None:
        """Watch over the ranks until `end_watch` (all ranks); see `zstore.ranks.watch`."""
        if self.world_size == 1:
            return
        self._know_connections()
        self.watch = Watch(
            self.rank, self.world_size, activity=self.activity, store=_store(), cut=self._cut, silent_s=silent_s
        )
        self.meetings = Meetings(self.watch, self.rank, self.world_size, self.connections)

    def end_watch(self) -> None:
        """Stop watching; a second call does nothing."""
        if self.watch is not None:
            self.watch.close()

    @contextmanager
    def calling(self, phase: str, *, meeting: str | None = None) -> Iterator[None]:
        """Name this rank's task in the block; an error that escapes from it on one rank fails all.

        `meeting` names a call that scripts may make on one rank alone, by mistake: it begins once all ranks are in it.
        """
        if self.activity.phase or self.watch is None:
            yield
            return
        self.watch.begin_call()
        self.activity.phase, self.activity.unit = phase, ""
        try:
            if meeting is not None and self.meetings is not None:
                self.meetings.meet(meeting)
            yield
        except BaseException as error:
            self.watch.escaped(error)
            raise
        finally:
            self.activity.phase = ""

    def tell_uncaught(self) -> None:
        """Tell the other ranks of the error that ends the interpreter, if one does."""
        if self.watch is not None:
            self.watch.tell_uncaught()

    def leave_together(self) -> None:
        """Note that all ranks know of the error about to be raised, and that it is no failure."""
        if self.watch is not None:
            self.watch.agree()

    def require_others(self) -> None:
        """Raise RankError if a rank was lost, any number of times."""
        if self.watch is not None:
            self.watch.require_others()

    def escaped(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this rank that was raised outside of a call."""
        if self.watch is not None:
            self.watch.escaped(error)

    def _count_reach(self, kind: Kind, sent_bytes: int, target: int | None = None) -> None:
        """Count bytes sent to all others alike, or to rank `target`, by whether it leaves this rank's group."""
        if self.near_ranks is None or self.world_size == 1 or kind == "control":
            return
        size = self.near_ranks + 1
        if target is None:
            near_bytes = sent_bytes * self.near_ranks // (self.world_size - 1)
        else:
            near_bytes = sent_bytes if target // size == self.rank // size else 0
        if near_bytes:
            self.links.begin("within_group", near_bytes)
        if sent_bytes > near_bytes:
            self.links.begin("between_groups", sent_bytes - near_bytes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole run, of which this world may have some."""
        return self.world_size if self.group is None else torch_dist.get_world_size()

    def global_rank(self, rank: int) -> int:
        """Return the number among all ranks of a rank of this world."""
        return rank if self.group is None else torch_dist.get_global_rank(self.group, rank)

    @contextmanager
    def _within(self, collective: str, *, enters: bool = True) -> Iterator[None]:
        """Enter a collective, or wait for one that was entered; if it fails, raise the watch's account of it."""
        if self.watch is not None and enters:
            self.watch.require_sound()
        self.activity.entered += enters
        self.activity.collective = collective
        try:
            yield
        except RuntimeError as error:
            if self.watch is None:
                raise
            raise self.watch.lost(error) from error
        finally:
            self.activity.collective = ""

    def know_connections(self) -> None:
        """Note the connections to the other ranks anew, if they are watched: a process group was made (all ranks)."""
        if self.watch is not None:
            self._know_connections()

    def _know_connections(self) -> None:
        everyone = self.all_gather_object(listed(store_port(_store())))
        self.connections.learn(everyone, self.rank)

    def _cut(self) -> None:
        """End every collective that this rank waits in, or that others wait in for this rank."""
        if self.backend == "nccl":
            torch_dist.distributed_c10d._abort_process_group()
        self.connections.cut()
        for give_up in self.when_broken:
            give_up()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON data) in rank order."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, on_device([data.numel()], torch.int64, self.device), kind="control")
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        mine[: data.numel()] = data
        everyone = torch.empty(self.world_size * longest, dtype=torch.uint8, device=self.device)
        self.all_gather(everyone, mine, kind="control")
        rows = everyone.cpu().view(self.world_size, longest)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return rank `source`'s `value` (JSON data) on every rank."""
        return self.all_gather_object(value if self.rank == source else None)[source]

    @contextmanager
    def agreeing(self, note: str | None = None) -> Iterator[None]:
        """Raise on every rank if the block raised on any; `note` is added to this rank's error (all ranks).

        Anything but an Exception, such as KeyboardInterrupt, ends this rank's block at once.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if note is not None:
                raised.add_note(note)
            error = raised
        self.raise_together(error)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank passed an error. See [Note: one error for all]."""
        if self.world_size == 1:
            self.granted = max(self.granted, self.requested)
            if error is not None:
                raise error
            return
        if error is not None and self.watch is not None and self.watch.told:
            raise error
        text = None if error is None else "".join(traceback.format_exception(error))
        number, self.tells = None if self.tells is None or error is not None else self.tells(), None
        more = [] if number is None else [number]
        told = self.all_gather_object([str(self.activity), text, self.requested, *more])
        self.granted = max(self.granted, *(requested for _, _, requested, *_ in told))
        self.told = [row[3] for row in told if row[3:]] or self.told
        failures = {rank: text for rank, (_, text, *_) in enumerate(told) if text is not None}
        if failures and self.watch is not None:
            self.watch.agree()
        if error is not None:
            raise error
        if failures:
            ranks = ", ".join(map(str, failures))
            where = "".join(f" in {told[rank][0]}" for rank in list(failures)[:1] if self.activity.phase)
            raise RankError(
                f"rank {ranks} of {self.world_size} failed{where}; rank {self.rank} stops with it", failures
            )

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replace the values of `tensor` by rank `source`'s."""
        if self.world_size > 1 and tensor.numel():
            # On the device of the backend's collectives; a model may be built on the host, and NCCL sends the device's alone.
            whole = plain_memory(tensor.to(self.device))
            sent_bytes = (self.world_size - 1) * whole.nbytes if self.rank == source else 0
            with self._moving("broadcast", sent_bytes), self._within("broadcast"):
                torch_dist.broadcast(whole.view(-1).view(torch.uint8), self.global_rank(source), group=self.group)
            if whole is not tensor:
                tensor.copy_(whole)

    def transfer(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Replace the values of rank `target`'s `tensor`, contiguous, by rank `source`'s; those two call it."""
        if source == target or not tensor.numel():
            return
        flat = tensor.view(-1).view(torch.uint8)
        sent_bytes = tensor.nbytes if self.rank == source else 0
        moving = self._moving("transfer", sent_bytes, target)
        with moving, self._within("transfer", enters=False):
            if self.rank == source:
                torch_dist.send(flat, self.global_rank(target), group=self.group)
            else:
                torch_dist.recv(flat, self.global_rank(source), group=self.group)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor, *, kind: Kind = "all_gather") -> None:
        """Fill `out` [world * n] with every rank's `mine` [n] in rank order. Any data type; bits are moved, not
        values."""
        if self.world_size == 1:
            out.copy_(mine)
            return
        if mine.numel():
            sent_bytes = (self.world_size - 1) * mine.nbytes
            with self._moving(kind, sent_bytes), self._within(kind):
                torch_dist.all_gather_single(out.view(torch.uint8), mine.view(torch.uint8), group=self.group)

    def start_all_gather(self, out: torch.Tensor, mine: torch.Tensor, *, kind: Kind = "all_gather") -> Work:
        """Do as `all_gather`, but return at once; the caller must keep both and not touch them until the work is
        done."""
        if self.world_size == 1:
            out.copy_(mine)
        if self.world_size == 1 or not mine.numel():
            return Done()
        gather = partial(
            torch_dist.all_gather_single, out.view(torch.uint8), mine.view(torch.uint8), group=self.group, async_op=True
        )
        return self._start(kind, (self.world_size - 1) * mine.nbytes, gather)

    def _moving(self, kind: Kind, sent_bytes: int, target: int | None = None) -> AbstractContextManager[None]:
        """Count a `with` block as a collective, whose whole time the caller waits; one that sends to `target`
        alone if it is given."""
        self._count_reach(kind, sent_bytes, target)
        return self.links.moving(kind, sent_bytes)

    def _start(self, kind: Kind, sent_bytes: int, collective: Callable[[], Work]) -> Work:
        self._count_reach(kind, sent_bytes)
        self.links.begin(kind, sent_bytes)
        with self._within(kind):
            work = collective()
        return CountedWork(work, self.links, kind, partial(self._within, kind, enters=False))

    def all_to_all(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind) -> Work:
        """Send row r of `send` [world, n] to rank r, and receive its row in row r of `out`. Returns at once.

        The caller must keep both and not touch them until the work is done.
        """
        if not send.numel():
            return Done()
        flat_out, flat_send = out.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8)
        exchange = partial(torch_dist.all_to_all_single, flat_out, flat_send, group=self.group, async_op=True)
        sent_bytes = send.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, exchange)

    def all_reduce(self, tensor: torch.Tensor, *, kind: Kind) -> Work:
        """Replace `tensor`, contiguous, by its sum over ranks, by the backend's own reduction. Returns at once.

        The caller must keep it and not touch it until the work is done.
        """
        if self.world_size == 1 or not tensor.numel():
            return Done()
        reduce = partial(torch_dist.all_reduce, tensor, group=self.group, async_op=True)
        sent_bytes = 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, reduce)

    def reduce_scatter_mean(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind) -> Work:
        """Fill `out` [n] with the mean over ranks of this rank's row of `send` [world, n], by the backend's own
        reduction."""
        if not send.numel():
            return Done()
        reduce = partial(
            torch_dist.reduce_scatter_single,
            out,
            send.view(-1),
            op=torch_dist.ReduceOp.AVG,
            group=self.group,
            async_op=True,
        )
        sent_bytes = send.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, reduce)


def cuda_device(local_rank: int) -> torch.device:
    """Return the CUDA device of a rank: that of its number on the machine, or the only one that the process sees."""
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def _backend(cuda: bool) -> str:
    """Return the backend of the default group on the device that computes: a group may have one for each kind of device, as
    by default."""
    names = torch_dist.get_backend_config().split(",")
    by_device = {device: name for device, _, name in (each.partition(":") for each in names)}
    found = by_device.get("cuda") if cuda else None
    # NCCL takes tensors of the device alone; other backends take those of the host.
    return found if found == "nccl" else by_device.get("cpu", torch_dist.get_backend())


def _store() -> Store:
    """Return the store by which the ranks found each other."""
    store: Store = torch_dist.distributed_c10d._get_default_store()
    return store
