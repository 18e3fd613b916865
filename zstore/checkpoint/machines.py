"""Checkpoints on drives of each machine's own: which machine has which ranks' part, and how such a save commits.

[Note: parts]
The ranks of a machine save into its own folder, as all ranks do into a shared one; the first of them leads, as rank 0 does
there. Each part has all metadata, the manifests and shards of its ranks, copies of all that every rank loads and rank 0 stores
(its manifest, module buffers and the client's tensors), and a file that names the machine:

    manifest/machine-<n>.json

All parts have the same commit record, which lists the machines, so that parts that are copied into one folder are a checkpoint
like any other. The leaders talk through the store of the process group, in the thread of the save:

    each leader     waits for its ranks' manifests, and posts their digests
    rank 0          waits for those of all machines, makes the record and posts it
    each leader     commits, and posts that it did; waits for all others before anything older is removed

A machine that is lost between the last two has no part, and others do: a load takes the newest checkpoint of which every
machine has its part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..ranks.rendezvous import Board
from .folder import Folder
from .format import MACHINES_KEY, Record
from .names import MANIFEST_FOLDER

Wait = Callable[[Callable[[], bool], Callable[[], str]], None]
"""`wait(ready, failure)` returns once `ready()` is true; raises with the text of `failure()` if it takes too long."""


@dataclass(frozen=True)
class Machine:
    """One part of a checkpoint."""

    host: str
    folder: str
    """The folder of checkpoints that its ranks saved to."""
    ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        """Machine, ranks and folder, for a sentence."""
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"machine {self.host!r} (rank{'s' * (len(self.ranks) > 1)} {ranks}; it saved in {self.folder})"


def machine_file(number: int) -> str:
    """Return the path of the file, inside a checkpoint, that says that a machine's part is there."""
    return f"{MANIFEST_FOLDER}/machine-{number:05d}.json"


def machines_of(record: Record) -> list[Machine]:
    """Return the machines that have parts of a checkpoint; none for one in a shared folder."""
    found = record.state.get(MACHINES_KEY)
    machines: list[Machine] = []
    for one in found if isinstance(found, list) else ():
        host, folder, ranks = (one.get(key) if isinstance(one, dict) else None for key in ("host", "folder", "ranks"))
        if isinstance(host, str) and isinstance(folder, str) and isinstance(ranks, list):
            machines.append(Machine(host, folder, tuple(rank for rank in ranks if type(rank) is int)))
    return machines


def missing_machines(folder: Folder, record: Record) -> list[Machine]:
    """Return those machines whose part is not in the folder of the tag."""
    return [one for number, one in enumerate(machines_of(record)) if not folder.has(machine_file(number))]


def missing_text(location: str, missing: Sequence[Machine]) -> str:
    """Return the message about missing parts."""
    return (
        f"{location} was saved on drives of each machine's own, and the part of {missing[0].text} is not here"
        + (f", nor those of {len(missing) - 1} others" if missing[1:] else "")
        + ": copy it here, or name a folder that has it with --also FOLDER or the variable ZSTORE_PARTS"
    )


@dataclass(frozen=True)
class Parts:
    """A save in parts, as one rank sees it. See [Note: parts]."""

    machines: tuple[Machine, ...]
    here: int
    """Number of this rank's machine."""
    board: Board
    save_id: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this machine."""
        return self.machines[self.here].ranks

    @property
    def leader(self) -> int:
        """The rank that leads here."""
        return self.ranks[0]

    def state(self) -> dict[str, Any]:
        """Return the record's entry about the machines."""
        return {MACHINES_KEY: [{"host": m.host, "folder": m.folder, "ranks": list(m.ranks)} for m in self.machines]}

    def check(self) -> None:
        """Raise CheckpointError if another machine gave up."""
        told = self._read("failed")
        if told is not None:
            raise CheckpointError(f"the save was given up on {told}")

    def give_up(self, reason: str) -> None:
        """Tell the other machines why this one gives up; only the first reason counts."""
        if self._read("failed") is None:
            self._post("failed", f"{self.machines[self.here].text}: {reason}")

    def post_manifest(self, data: bytes) -> None:
        """Give rank 0's manifest to the other machines (rank 0)."""
        self._post("manifest", data.decode())

    def manifest(self, wait: Wait) -> bytes:
        """Return rank 0's manifest, once it is there (leaders)."""
        return self._await("manifest", wait, self.machines[0]).encode()

    def gather(self, digests: Mapping[int, str], wait: Wait) -> dict[int, str]:
        """Post the digests of this machine's manifests; return those of all ranks on rank 0 (leaders)."""
        self._post(f"digests-{self.here}", json.dumps({str(rank): text for rank, text in digests.items()}))
        if self.here:
            return dict(digests)
        found: dict[int, str] = {}
        for number, machine in enumerate(self.machines):
            told = json.loads(self._await(f"digests-{number}", wait, machine))
            found |= {int(rank): text for rank, text in told.items() if int(rank) in machine.ranks}
        return found

    def share_record(self, record: Record | None, wait: Wait) -> Record:
        """Return rank 0's record, which rank 0 passes (leaders)."""
        if record is not None:
            self._post("record", record.encode().decode())
            return record
        return Record.decode(self._await("record", wait, self.machines[0]).encode(), "rank 0's record")

    def committed(self, wait: Wait) -> None:
        """Announce that this machine's part is committed, and return once all parts are (leaders)."""
        self._post(f"committed-{self.here}", "")
        for number, machine in enumerate(self.machines):
            self._await(f"committed-{number}", wait, machine)

    def _await(self, key: str, wait: Wait, machine: Machine) -> str:
        found = self._read(key)
        if found is None:
            wait(lambda: self._read(key) is not None, lambda: f"{machine.text} did not finish its part")
            found = self._read(key)
        return found or ""

    def _post(self, key: str, text: str) -> None:
        self.board.post(f"{self.save_id}/{key}", text.encode())

    def _read(self, key: str) -> str | None:
        found = self.board.read(f"{self.save_id}/{key}")
        return None if found is None else found.decode()
