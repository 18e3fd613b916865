"""Which machines and slots a run gets: hostfiles, `--include` and `--exclude`. Text in, data out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zstore.errors import UsageError

_HOSTFILE_LINE = re.compile(r"([^\s-]\S*)\s+slots=(\d+)(\s.*)?")
_SYNTAX = "expected HOST[:SLOT,...], several joined by @, as in worker-0@worker-1:0,2"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the run."""

    name: str
    slots: tuple[int, ...] | None
    """Its slots in ascending order, the indices of its GPUs; None: not known, whatever the machine has."""


def parse_hostfile(text: str, *, name: str) -> list[Host]:
    """Return the machines of a hostfile in its order: a line `HOST slots=N` each; empty lines and `#` comments are skipped.

    Raises UsageError, which names the file `name` and the line.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOSTFILE_LINE.fullmatch(content)
        where = f"{name}, line {number}"
        if match is None:
            raise UsageError(f"{where}: expected HOST slots=N, got {content!r}")
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise UsageError(f"{where}: host {host!r} stands there twice; give each machine one line")
        if slots < 1:
            raise UsageError(
                f"{where}: expected at least one slot, got slots={slots}; remove the line to leave {host} out"
            )
        hosts[host] = Host(name=host, slots=tuple(range(slots)))
    if not hosts:
        raise UsageError(f"{name}: no host in the file; expected a line HOST slots=N for each machine")
    return list(hosts.values())


def parse_filter(text: str, *, option: str) -> dict[str, tuple[int, ...] | None]:
    """Return the slots that an `--include` or `--exclude` names, by host; None: all of the host's.

    A host may come several times with other slots. Raises UsageError, which names `option`.
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", listed)):
            raise UsageError(f"{option}: {_SYNTAX}, got {part!r}")
        slots = tuple(int(slot) for slot in listed.split(",")) if colon else None
        before = named.get(host, ())
        if before is None or (slots is None and host in named):
            raise UsageError(f"{option}: host {host!r} is named with and without slots; name it once")
        repeated = sorted({slot for slot in slots or () if (*before, *(slots or ())).count(slot) > 1})
        if repeated:
            raise UsageError(f"{option}: host {host!r} names slot {repeated[0]} twice")
        named[host] = None if slots is None else tuple(sorted({*before, *slots}))
    return named


def select(pool: Sequence[Host], *, include: str = "", exclude: str = "") -> list[Host]:
    """Return the machines of `pool` that are left, in its order, each with the slots that are left.

    Raises UsageError for both filters at once, a host or slot that `pool` does not have, and an empty result.
    """
    if include and exclude:
        raise UsageError("--include and --exclude cannot both be given; name what to use, or what to leave out")
    if not include and not exclude:
        return list(pool)
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option=option)
    _require(pool, named, option)
    chosen = []
    for host in pool:
        asked = named.get(host.name, ())
        if include:
            slots = host.slots if asked is None else asked
        elif asked is None:
            slots = ()
        else:
            slots = host.slots and tuple(slot for slot in host.slots if slot not in asked)
        if slots is None or slots:
            chosen.append(Host(name=host.name, slots=slots))
    if not chosen:
        raise UsageError(f"--exclude {exclude}: leaves no slot on any host; leave fewer out")
    return chosen


def _require(pool: Sequence[Host], named: Mapping[str, tuple[int, ...] | None], option: str) -> None:
    known = {host.name: host for host in pool}
    for name, slots in named.items():
        if name not in known:
            raise UsageError(f"{option}: unknown host {name!r}; expected one of {', '.join(known)}")
        there = known[name].slots
        if there is None and slots is not None and option == "--exclude":
            raise UsageError(f"{option}: the slots of {name!r} are not known; give a --hostfile, or use --include")
        for slot in slots or ():
            if there is not None and slot not in there:
                raise UsageError(f"{option}: host {name!r} has no slot {slot}; it has {_range(there)}")


def _range(slots: Sequence[int]) -> str:
    if len(slots) > 2 and list(slots) == list(range(slots[0], slots[-1] + 1)):
        return f"slots {slots[0]} to {slots[-1]}"
    return f"slot{'s' if slots[1:] else ''} {' and '.join(map(str, slots))}"


def limit(hosts: Sequence[Host], *, num_hosts: int | None, ranks_per_host: int | None) -> list[Host]:
    """Return the first `num_hosts` of `hosts`, each with its first `ranks_per_host` slots (None: all).

    Raises UsageError if there are fewer.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        there = f"{len(hosts)} host{'s' if hosts[1:] else ''} ({', '.join(host.name for host in hosts)})"
        raise UsageError(f"--nnodes {num_hosts}: there is only {there}; add hosts or ask for fewer")
    taken = []
    for host in hosts[:num_hosts]:
        slots = host.slots
        if ranks_per_host is not None and slots is not None:
            if ranks_per_host > len(slots):
                raise UsageError(
                    f"--nproc {ranks_per_host}: host {host.name!r} has {len(slots)} slot{'s' if slots[1:] else ''}; "
                    "ask for fewer ranks, or give the host more slots"
                )
            slots = slots[:ranks_per_host]
        taken.append(Host(name=host.name, slots=slots))
    return taken
