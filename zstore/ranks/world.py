"""The ranks of a run and the few collectives that everything else uses.

[Note: one error for all]
Every rank calls `World.raise_on_all_ranks`, a collective, with its own error or None; if all are None it returns. Otherwise a
rank that failed raises its own error, so that handlers see its type, and every other rank raises RankError with the failed
ranks' tracebacks. An error that escapes elsewhere on one rank, or a rank that dies, is detected by `watch`: a world that is
watched raises RankError if its collectives fail.

[Note: groups]
With groups of k consecutive ranks (a machine's, or those that share one copy of the training state), rank r is member r % k
of group r // k. `within` is the world of its group, `between` the world of the ranks with the same member number in every
group, in the order of the groups. A group may have any number of ranks; best is the number of devices with a fast link.

Ranks exchange JSON and tensors, never pickles. Without a process group the same code runs on one rank.
"""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as torch_dist

from ..errors import RankError, UsageError
from ..io.memory import plain_memory
from ..io.queue import LinkCounters
from .watch import Watch, WatchState

# torch 2.9 has them only by the names that are now deprecated.
_all_gather_single: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "transfer", "control"]
"""The purpose of the bytes sent; "control" is agreement between ranks (counts, flags, errors), not tensors."""


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values, 1-D, on the device, without waiting on the host."""
    data = torch.tensor(values, dtype=dtype)
    return data.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else data


class Work:
    """A running collective, which counts how long it took and how long callers waited for it; None: nothing to do.

    On CUDA a wait stalls the stream and not this thread, so only the host's time is counted there.
    """

    def __init__(
        self,
        work: Any,
        links: LinkCounters,
        kind: Kind,
        in_collective: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._work, self._links, self._kind, self._in_collective = work, links, kind, in_collective
        self._started: float | None = time.perf_counter()

    def wait(self) -> None:
        """Block until it is done; raise its error."""
        if self._work is None:
            return
        with self._links.waiting(self._kind, "begun earlier"), self._in_collective():
            self._work.wait()
        started, self._started = self._started, None
        if started is not None:
            self._links.add_busy(self._kind, time.perf_counter() - started)

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._work is None or self._work.is_completed()


@dataclass(kw_only=True)
class World:
    """The ranks of a run, as this rank sees them. Created by `World.current()`."""

    rank: int = 0
    """This rank, from 0."""
    world_size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """This rank's number on its machine."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    backend: str | None = None
    """Backend of the collectives on `device` ("gloo", "nccl"); None on a single rank. A group may have several."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of tensors in the backend's collectives."""
    group: torch_dist.ProcessGroup | None = None
    """Process group of the collectives; None: the default group."""
    links: LinkCounters = field(default_factory=LinkCounters)
    """Bytes that this rank sent to other ranks and the time waited, by `Kind`; shared with worlds on other groups."""
    watch: Watch = field(default_factory=Watch)
    """Fails all ranks if one fails, once it has been started; worlds of one run share it."""
    messages: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """By topic, returns the JSON that this rank sends with each `raise_on_all_ranks` without an error; None: nothing."""
    received: dict[str, list[Any]] = field(default_factory=dict)
    """By topic, the messages of all ranks that sent one in the last exchange: the same on all ranks."""
    group_peers: int | None = None
    """Number of the other ranks of this world in this rank's group (see [Note: groups]); None without groups. With
    groups, bytes sent, except for "control", are also counted as `within_group` and `between_groups`."""

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes that this rank sent to other ranks, by `Kind`."""
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

    def on_new_group(self) -> World:
        """Return the same ranks on a separate process group (a collective); on a single rank, this world itself.

        Collectives on two groups need no common order: one group may wait without blocking the other.
        """
        if self.world_size == 1:
            return self
        if self.world_size != torch_dist.get_world_size():
            raise ValueError("a second process group of only some ranks: call make_groups() again instead")
        with self._in_collective("new_group"):
            group = torch_dist.new_group()
        self.learn_connections()
        return replace(self, group=group, messages={}, received={})

    def release(self) -> None:
        """Destroy the process group that `on_new_group` made, once no collective on it is running; a second call does nothing.

        Its threads end here: at interpreter shutdown a thread that still has a tensor would abort the process.
        """
        group, self.group = self.group, None
        if group is not None and self.watch.failed is None:
            with suppress(ValueError):  # the process group of all ranks, and with it this one, has been destroyed
                torch_dist.destroy_process_group(group)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole run, of which this world may have only some."""
        return self.world_size if self.group is None else torch_dist.get_world_size()

    def global_rank(self, rank: int) -> int:
        """Return the number that a rank of this world has among all ranks."""
        return rank if self.group is None else torch_dist.get_global_rank(self.group, rank)

    def begin_watch(self, silent_s: float | None = None) -> None:
        """Watch the ranks until `watch.close()` (all ranks); see `zstore.ranks.watch`."""
        if self.world_size > 1:
            aborts = self.backend == "nccl"
            self.watch.begin(self.all_gather_object, self.rank, self.world_size, aborts=aborts, timeout_s=silent_s)

    def learn_connections(self) -> None:
        """Update the connections to the other ranks, if they are watched, after a process group was created (all ranks)."""
        if self.watch.state is not WatchState.NOT_STARTED:
            self.watch.connections.learn(self.all_gather_object(self.watch.connections.list_endpoints()), self.rank)

    @contextmanager
    def calling(self, phase: str, *, meeting: str | None = None) -> Iterator[None]:
        """Name this rank's task in the block; an error that escapes from it on one rank fails all ranks.

        `meeting` names a call that a script may mistakenly make on one rank only: the block begins once all are in it.
        """
        watch = self.watch
        if watch.activity.phase or watch.state is WatchState.NOT_STARTED:
            yield
            return
        watch.raise_if_broken()
        watch.error_is_shared = False
        watch.activity.phase, watch.activity.unit = phase, ""
        try:
            if meeting is not None:
                watch.synchronize(meeting)
            yield
        except BaseException as error:
            watch.report_error(error)
            raise
        finally:
            watch.activity.phase = ""

    @contextmanager
    def agreeing(self, note: str | None = None, *, call: str = "") -> Iterator[None]:
        """Raise on every rank if the block raised on any, or if ranks make different calls; `note` is added to this
        rank's error (all ranks).

        Anything but an Exception, such as KeyboardInterrupt, ends this rank's block at once.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if note is not None:
                raised.add_note(note)
            error = raised
        self.raise_on_all_ranks(error, call)

    def raise_on_all_ranks(self, error: BaseException | None, call: str = "") -> None:
        """Raise on every rank if any rank passed an error, and UsageError if ranks pass different calls. See [Note: one error
        for all]."""
        if error is not None and (self.world_size == 1 or self.watch.state is WatchState.RAISED):
            raise error
        failure = None if error is None else [str(self.watch.activity), "".join(traceback.format_exception(error))]
        messages = {} if error is not None else {topic: make() for topic, make in self.messages.items()}
        sent = {topic: message for topic, message in messages.items() if message is not None}
        rows = self.all_gather_object([failure, call, sent])
        for topic in {topic for *_, sent in rows for topic in sent}:
            self.received[topic] = [sent[topic] for *_, sent in rows if topic in sent]
        places = {rank: failure[0] for rank, (failure, *_) in enumerate(rows) if failure is not None}
        failures = {rank: rows[rank][0][1] for rank in places}
        calls = [rank_call for _, rank_call, _ in rows]
        if failures or len(set(calls)) > 1:
            self.watch.error_is_shared = True
        if error is not None:
            raise error
        if failures:
            ranks = ", ".join(map(str, failures))
            place = (places if self.watch.activity.phase else calls)[min(failures)]
            where = f" in {place}" if place else ""
            text = f"rank {ranks} of {self.world_size} failed{where}; rank {self.rank} is stopping too"
            raise RankError(text, failures)
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {made or 'another one'}" for rank, made in enumerate(calls))
            raise UsageError(
                f"all ranks have to make the same call, but they made different ones: {listed}. Run the same code on every rank"
            )

    @contextmanager
    def _in_collective(self, collective: str, *, enters: bool = True) -> Iterator[None]:
        """Enter a collective, or wait for one that was entered; if it fails, raise the watch's account of it."""
        watch, activity = self.watch, self.watch.activity
        if enters:
            watch.raise_if_broken()
        activity.num_collectives += enters
        activity.collective = collective
        try:
            yield
        except RuntimeError as error:
            if watch.state is WatchState.NOT_STARTED:
                raise
            raise watch.collective_failed(error) from error
        finally:
            activity.collective = ""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON data) in rank order."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, on_device([data.numel()], torch.int64, self.device), kind="control")
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        gathered = torch.empty(self.world_size * longest, dtype=torch.uint8, device=self.device)
        self.all_gather(gathered, padded, kind="control")
        rows = gathered.cpu().view(self.world_size, longest)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return rank `source`'s `value` (JSON data) on every rank."""
        return self.all_gather_object(value if self.rank == source else None)[source]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replace the values of `tensor` with rank `source`'s."""
        if self.world_size > 1 and tensor.numel():
            # A model may be built on the host, but NCCL sends only device tensors.
            whole = plain_memory(tensor.to(self.device))
            sent_bytes = (self.world_size - 1) * whole.nbytes if self.rank == source else 0
            flat = whole.view(-1).view(torch.uint8)
            self._run("broadcast", sent_bytes, partial(torch_dist.broadcast, flat, group_src=source, group=self.group))
            if whole is not tensor:
                tensor.copy_(whole)

    def transfer(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Replace the values of rank `target`'s `tensor`, contiguous, with rank `source`'s; only these two call it."""
        if source == target or not tensor.numel():
            return
        flat, sends = tensor.view(-1).view(torch.uint8), self.rank == source
        send = partial(torch_dist.send, flat, group_dst=target, group=self.group)
        receive = partial(torch_dist.recv, flat, group_src=source, group=self.group)
        self._run("transfer", tensor.nbytes if sends else 0, send if sends else receive, target)

    def all_gather(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind = "all_gather") -> None:
        """Fill `out` [world * n] with every rank's `send` [n] in rank order, bit for bit in any data type."""
        if self.world_size == 1:
            out.copy_(send)
        elif send.numel():
            self._run(kind, (self.world_size - 1) * send.nbytes, self._gather(out, send))

    def start_all_gather(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind = "all_gather") -> Work:
        """Like `all_gather`, but return at once; the caller must keep both, untouched, until the work is done."""
        if self.world_size == 1:
            out.copy_(send)
        peers = self.world_size - 1
        return self._start(kind, peers * send.nbytes, self._gather(out, send) if peers and send.numel() else None)

    def _gather(self, out: torch.Tensor, send: torch.Tensor) -> Callable[..., Any]:
        return partial(_all_gather_single, out.view(torch.uint8), send.view(torch.uint8), group=self.group)

    def all_to_all(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind) -> Work:
        """Send row r of `send` [world, n] to rank r, and receive rank r's row in row r of `out`. Returns at once.

        The caller must keep both and not touch them until the work is done.
        """
        flat_out, flat_send = out.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8)
        exchange = partial(torch_dist.all_to_all_single, flat_out, flat_send, group=self.group)
        sent_bytes = send.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, exchange if send.numel() else None)

    def all_reduce(self, tensor: torch.Tensor, *, kind: Kind) -> Work:
        """Replace `tensor`, contiguous, with its sum over ranks, by the backend's own reduction. Returns at once.

        The caller must keep it and not touch it until the work is done.
        """
        reduce = partial(torch_dist.all_reduce, tensor, group=self.group)
        sent_bytes = 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, reduce if self.world_size > 1 and tensor.numel() else None)

    def reduce_scatter_mean(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind) -> Work:
        """Fill `out` [n] with the backend's own mean over ranks of this rank's row of `send` [world, n]."""
        mean = torch_dist.ReduceOp.AVG
        reduce = partial(_reduce_scatter_single, out, send.view(-1), op=mean, group=self.group)
        sent_bytes = send.nbytes * (self.world_size - 1) // self.world_size
        return self._start(kind, sent_bytes, reduce if send.numel() else None)

    def _run(self, kind: Kind, sent_bytes: int, collective: Callable[..., Any], target: int | None = None) -> None:
        """Run a collective that the caller waits for; with `target`, one that sends only to this rank."""
        self._count_by_group(kind, sent_bytes, target)
        with self.links.moving(kind, sent_bytes), self._in_collective(kind, enters=target is None):
            collective()

    def _start(self, kind: Kind, sent_bytes: int, collective: Callable[..., Any] | None) -> Work:
        """Begin a collective; with None there is nothing to do."""
        if collective is None:
            return Work(None, self.links, kind)
        self._count_by_group(kind, sent_bytes)
        self.links.begin(kind, sent_bytes)
        with self._in_collective(kind):
            work = collective(async_op=True)
        return Work(work, self.links, kind, partial(self._in_collective, kind, enters=False))

    def _count_by_group(self, kind: Kind, sent_bytes: int, target: int | None = None) -> None:
        """Count bytes sent to all other ranks equally, or to rank `target`, as within a group or between groups."""
        if self.group_peers is None or self.world_size == 1 or kind == "control":
            return
        size = self.group_peers + 1
        bytes_within = sent_bytes * self.group_peers // (self.world_size - 1)
        if target is not None:
            bytes_within = sent_bytes if target // size == self.rank // size else 0
        if bytes_within:
            self.links.begin("within_group", bytes_within)
        if sent_bytes > bytes_within:
            self.links.begin("between_groups", sent_bytes - bytes_within)


def make_groups(world: World, size: int) -> tuple[World, World]:
    """Return this rank's worlds `within` and `between` groups of `size` ranks, which divides the world size (a collective); see
    [Note: groups]. The caller releases both.

    From now on `world`, worlds derived from it later, and the groups count the bytes that they send as `within_group` or
    `between_groups`.
    """
    if size < 1 or world.world_size % size:
        raise ValueError(f"{world.world_size} ranks cannot be divided into groups of {size}")
    if world.group is not None:
        raise ValueError("groups are made from the world of all ranks, on the default process group")
    world.group_peers = size - 1
    groups = [range(first, first + size) for first in range(0, world.world_size, size)]
    within = _world_of_group(groups, world, group_peers=size - 1)
    between = _world_of_group([range(first, world.world_size, size) for first in range(size)], world, group_peers=0)
    world.learn_connections()
    return within, between


def _world_of_group(groups: Sequence[range], world: World, *, group_peers: int) -> World:
    """Return the world of this rank's group among `groups`, all of one size (all ranks, in the same order)."""
    size = len(groups[0])
    created = [torch_dist.new_group(list(ranks)) if size > 1 else None for ranks in groups]
    own_ranks, group = next((ranks, group) for ranks, group in zip(groups, created, strict=True) if world.rank in ranks)
    return replace(
        world,
        rank=own_ranks.index(world.rank),
        world_size=size,
        group=group,
        group_peers=group_peers,
        messages={},
        received={},
    )


def agree_any(world: World, flags: Sequence[bool]) -> list[bool]:
    """Return whether any rank has set each flag (all ranks)."""
    if world.world_size == 1 or not flags:
        return list(flags)
    own = on_device(flags, torch.uint8, world.device)
    gathered = torch.empty(world.world_size * len(flags), dtype=torch.uint8, device=world.device)
    world.all_gather(gathered, own, kind="control")
    return [bool(flag) for flag in gathered.view(world.world_size, -1).amax(dim=0).tolist()]


def cuda_device(local_rank: int) -> torch.device:
    """Return the CUDA device of a rank: the one with its number on the machine, or the only one that the process sees."""
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def cpu_capabilities() -> Mapping[str, Any]:
    """Return the CPU's features by torch's names: `torch.cpu.get_capabilities`; torch 2.9 lacks that: some of them."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\nflags")[2].partition("\n")[0].split()
    names = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    return {"architecture": platform.machine(), **{name: name in flags for name in names}}


def _backend(cuda: bool) -> str:
    """Return the default group's backend for the device that computes: a group may have one per kind of device."""
    names = torch_dist.get_backend_config().split(",")
    by_device = {device: name for device, _, name in (each.partition(":") for each in names)}
    on_cuda = by_device.get("cuda") if cuda else None
    # NCCL accepts only device tensors; other backends accept host tensors.
    return on_cuda if on_cuda == "nccl" else by_device.get("cpu", torch_dist.get_backend())
