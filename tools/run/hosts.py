"""Which machines and slots a run gets: hostfiles, `--include` and `--exclude`. Text in, data out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zstore.errors import UsageError

_HOSTFILE_LINE = re.compile(r"([^\s-]\S*)\s+slots=(\d+)(\s.*)?")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the run."""

    name: str
    slots: tuple[int, ...]
    """Indices of its GPUs, in ascending order."""


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
            raise UsageError(f"{where}: expected at least one slot, got slots=0; remove the line to leave {host} out")
        hosts[host] = Host(name=host, slots=tuple(range(slots)))
    if not hosts:
        raise UsageError(f"{name}: no host in the file; expected a line HOST slots=N for each machine")
    return list(hosts.values())


def parse_filter(text: str, *, option: str) -> dict[str, tuple[int, ...] | None]:
    """Return the slots that an `--include` or `--exclude` names, by host; None: all of the host's.

    Raises UsageError, which names `option`.
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", listed)):
            raise UsageError(f"{option}: expected HOST[:SLOT,...], joined by @ as in a@b:0,2, got {part!r}")
        if host in named:
            raise UsageError(f"{option}: host {host!r} is named twice; name it once, with all its slots")
        named[host] = tuple(sorted({int(slot) for slot in listed.split(",")})) if colon else None
    return named


def select(pool: Sequence[Host], *, include: str = "", exclude: str = "") -> list[Host]:
    """Return the machines of `pool` that are left, in its order, each with the slots that are left.

    Raises UsageError for a host or slot that `pool` does not have, and an empty result.
    """
    if not include and not exclude:
        return list(pool)
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option=option)
    _require(pool, named, option)
    chosen = []
    for host in pool:
        listed = named.get(host.name, ())
        matched = host.slots if listed is None else listed
        slots = matched if include else tuple(slot for slot in host.slots if slot not in matched)
        if slots:
            chosen.append(Host(name=host.name, slots=slots))
    if not chosen:
        raise UsageError(f"--exclude {exclude}: leaves no slot on any host; leave fewer out")
    return chosen


def _require(pool: Sequence[Host], named: Mapping[str, tuple[int, ...] | None], option: str) -> None:
    known = {host.name: host.slots for host in pool}
    for name, slots in named.items():
        if name not in known:
            raise UsageError(f"{option}: unknown host {name!r}; expected one of {', '.join(known)}")
        for slot in slots or ():
            if slot not in known[name]:
                raise UsageError(
                    f"{option}: host {name!r} has no slot {slot}; it has {', '.join(map(str, known[name]))}"
                )


def limit(hosts: Sequence[Host], *, num_hosts: int | None, ranks_per_host: int | None) -> list[Host]:
    """Return the first `num_hosts` of `hosts`, each with its first `ranks_per_host` slots (None: all).

    Raises UsageError if there are fewer.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise UsageError(f"--nnodes {num_hosts}: there are only {len(hosts)} ({names}); add hosts or ask for fewer")
    for host in hosts[:num_hosts]:
        if ranks_per_host is not None and ranks_per_host > len(host.slots):
            raise UsageError(
                f"--nproc {ranks_per_host}: host {host.name!r} has {len(host.slots)} slots; ask for fewer ranks, or "
                "give the host more slots"
            )
    return [Host(name=host.name, slots=host.slots[:ranks_per_host]) for host in hosts[:num_hosts]]
