"""Error messages of a failed command, printed once for all the ranks that fail with them.

[Note: one message]
Each rank that fails leaves its message in the store by which the ranks found each other, and looks for a short while for
the others'. The lowest rank of those with the same message prints it, with the ranks it came from. A rank that stopped
only because of others says nothing if theirs are printed. If the ranks cannot agree, because one hangs or the store is
gone, each prints its own: a message too many is better than none.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zstore.errors import RankError, UsageError, ZstoreError

from ..printing import printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WAIT_S = 5.0
"""How long a rank looks for the messages of others, and how long it stays for those that read its own."""
_LOOK_S = 0.02


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`: 2 for wrong usage, else 1."""
    return 2 if isinstance(error, UsageError) else 1


def say(error: BaseException, ranks: str = "") -> None:
    """Print `error` on stderr: as a line, or with ZSTORE_TRACEBACK=1 in full."""
    if os.environ.get("ZSTORE_TRACEBACK") == "1":
        traceback.print_exception(error)
    else:
        print(printable(f"zstore: {ranks}{error}"), file=sys.stderr, flush=True)


@contextmanager
def said_once() -> Iterator[None]:
    """End this process with the message of an error in the block, printed by one rank (all ranks). See [Note: one
    message]. A process alone lets the error pass."""
    try:
        yield
    except (ZstoreError, OSError) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
            raise
        rank = int(os.environ["RANK"])
        told = _messages(error, rank)
        same = [other for other, message in told.items() if message == told[rank]]
        # One that stopped only because of others says nothing if they say why themselves.
        is_told = isinstance(error, RankError) and any(not is_others for is_others, _, _ in told.values())
        if rank == same[0] and not is_told:
            say(error, f"rank{'s' if same[1:] else ''} {', '.join(map(str, same))}: ")
        _stay(told)
        raise SystemExit(max(code for _, _, code in told.values())) from None


def _messages(error: BaseException, rank: int) -> dict[int, list[Any]]:
    """Return [whether it stopped because of others, message, exit code] of each rank that failed, by rank."""
    mine = [isinstance(error, RankError), str(error), exit_code(error)]
    told = {rank: mine}
    with suppress(RuntimeError, OSError, ValueError):
        store = _store()
        store.set(str(rank), json.dumps(mine))
        end = time.monotonic() + _WAIT_S
        world = range(int(os.environ["WORLD_SIZE"]))
        while len(told) < len(world) and time.monotonic() < end:
            for other in world:
                if other not in told and store.check([str(other)]):
                    told[other] = json.loads(store.get(str(other)))
            time.sleep(_LOOK_S)
    return dict(sorted(told.items()))


def _stay(told: dict[int, list[Any]]) -> None:
    """Wait until all known ranks have read and printed: the store may be in this process, and a launcher ends the others as
    soon as one ends."""
    with suppress(RuntimeError, OSError, ValueError):
        store = _store()
        store.add("read", 1)
        end = time.monotonic() + _WAIT_S
        while store.add("read", 0) < len(told) and time.monotonic() < end:
            time.sleep(_LOOK_S)


def _store() -> Store:
    """Return the store of the process group, or before there is one that of the launcher."""
    import torch.distributed as torch_dist
    from torch.distributed.rendezvous import rendezvous

    store: Store
    if torch_dist.is_initialized():
        store = torch_dist.distributed_c10d._get_default_store()
    else:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_WAIT_S)))
    # A rank that failed before there was a process group must meet those that failed after.
    while isinstance(store, torch_dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found: Store = torch_dist.PrefixStore(f"zstore/failed/{attempt}", store)  # type: ignore[attr-defined]
    return found
