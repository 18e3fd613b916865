"""Checkpoints on drives of each machine's own: which ranks share a folder, and which checkpoint all of them have.

See [Note: parts] in `zstore.checkpoint.machines`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zstore.checkpoint import RECORD_FILE, Machine, Parts, tags
from zstore.errors import CheckpointError, CheckpointNotFoundError, UsageError
from zstore.io import read_host_memory
from zstore.open.sources import folder_of
from zstore.ranks.rendezvous import StoreBoard
from zstore.ranks.world import World


def parts_of(world: World, folder: Path, save_id: str) -> Parts | None:
    """Return the division of a save into `folder`, which may be another one on each machine; None if all ranks share it
    (all ranks).

    Raises UsageError if two machines have one folder: their ranks would take it for their own.
    """
    with world.agreeing():
        folder.mkdir(parents=True, exist_ok=True)
        status = os.stat(folder)
    # Machines of the same name differ in the second.
    mine = [socket.gethostname(), read_host_memory().machine, status.st_dev, status.st_ino]
    told = world.all_gather_object([mine, str(folder.absolute())])
    ranks: dict[str, list[int]] = {}
    for rank, (identity, _) in enumerate(told):
        ranks.setdefault(str(identity), []).append(rank)
    machines = tuple(Machine(told[own[0]][0][0], told[own[0]][1], tuple(own)) for own in ranks.values())
    if len(machines) == 1:
        return None
    here = next(number for number, machine in enumerate(machines) if world.rank in machine.ranks)
    if _see_each_other(world, folder, save_id, here, machines):
        raise UsageError(
            f"checkpoint.use_node_local_storage: several machines see {folder}, {machines[here].host!r} among them: leave the "
            "key out for a folder that is shared, or name one on each machine's own drive"
        )
    return Parts(machines, here, StoreBoard(), save_id)


def _see_each_other(world: World, folder: Path, save_id: str, here: int, machines: tuple[Machine, ...]) -> bool:
    """Return whether some machine sees another one's file in its folder (all ranks)."""
    probe = folder / f".zstore-{save_id}-{here}"
    leads = world.rank == machines[here].ranks[0]
    try:
        with world.agreeing():
            if leads:
                probe.touch()
        with world.agreeing():
            seen = len(list(folder.glob(f".zstore-{save_id}-*"))) if leads else 1
        return bool(max(world.all_gather_object(seen)) > 1)
    finally:
        probe.unlink(missing_ok=True)


def share_small(world: World, arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> None:
    """Replace the values of `arrays`, which are this rank's own, by rank 0's: each machine has a copy (all ranks)."""
    for name in sorted(arrays):
        data = arrays[name].reshape(-1).view(np.uint8)
        world.broadcast(torch.from_numpy(data if data.flags.writeable else data.copy()))


def common_tag(world: World, folder: str, tag: str | None, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the tag that all ranks load: `tag`, or of the checkpoints that every rank sees the newest; None if no rank
    sees any (all ranks).

    Raises CheckpointError that names ranks and machines if some see the requested one, or any at all, and others do not.
    """
    if (Path(folder) / RECORD_FILE).is_file():
        return tag
    with world.agreeing():
        try:
            found = tags(folder_of(folder, storage_options, ()))
        except CheckpointNotFoundError:
            found = []
    mine = {info.record.id: [info.tag, info.record.committed_ns, info.record.is_latest] for info in found}
    everyone = world.all_gather_object([mine, socket.gethostname()])
    wanted = [
        {key: each for key, each in one.items() if (each[0] == tag if tag is not None else each[2])}
        for one, _ in everyone
    ]
    shared = set.intersection(*(set(one) for one in wanted))
    if shared:
        newest = max(shared, key=lambda key: wanted[0][key][1])
        return str(wanted[0][newest][0])
    without = [f"{rank} on {everyone[rank][1]!r}" for rank, one in enumerate(wanted) if not one]
    if len(without) == world.world_size:
        return tag
    what = "no checkpoint is on all machines" if tag is None else f"checkpoint {tag!r} is not on all machines"
    who = f"rank {', '.join(without[:8])} sees none of it" if without else "each sees another one"
    raise CheckpointError(
        f"{folder}: {what}: {who}. Bring back the drive of the machine that has it, or copy its part and name the folder in "
        "the variable ZSTORE_PARTS"
    )
