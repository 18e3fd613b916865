"""Which machines and slots a run gets: hostfiles, `--include` and `--exclude`. Text in, data out."""

from __future__ import annotations

import re
from itertools import islice

from zstore.errors import UsageError

_HOSTFILE_LINE = re.compile(r"([^\s-]\S*)\s+slots=(\d+)(\s.*)?")


Hosts = dict[str, tuple[int, ...]]
"""The machines of a run, in order, each with the indices of its GPUs, ascending."""


def parse_hostfile(text: str, *, name: str) -> Hosts:
    """Return the machines of a hostfile in its order: a line `HOST slots=N` each; empty lines and `#` comments are skipped.

    Raises UsageError, which names the file `name` and the line.
    """
    hosts: Hosts = {}
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
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise UsageError(f"{name}: no host in the file; expected a line HOST slots=N for each machine")
    return hosts


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


def select(pool: Hosts, *, include: str = "", exclude: str = "") -> Hosts:
    """Return the machines of `pool` that are left, in its order, each with the slots that are left.

    Raises UsageError for a host or slot that `pool` does not have, and an empty result.
    """
    if not include and not exclude:
        return pool
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option=option)
    for host, listed in named.items():
        if host not in pool:
            raise UsageError(f"{option}: unknown host {host!r}; expected one of {', '.join(pool)}")
        for slot in listed or ():
            if slot not in pool[host]:
                raise UsageError(
                    f"{option}: host {host!r} has no slot {slot}; it has {', '.join(map(str, pool[host]))}"
                )
    chosen: Hosts = {}
    for host, there in pool.items():
        listed = named.get(host, ())
        matched = there if listed is None else listed
        if slots := matched if include else tuple(slot for slot in there if slot not in matched):
            chosen[host] = slots
    if not chosen:
        raise UsageError(f"--exclude {exclude}: leaves no slot on any host; leave fewer out")
    return chosen


def limit(hosts: Hosts, *, num_hosts: int | None, ranks_per_host: int | None) -> Hosts:
    """Return the first `num_hosts` of `hosts`, each with its first `ranks_per_host` slots (None: all).

    Raises UsageError if there are fewer.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        names = ", ".join(hosts)
        raise UsageError(f"--nnodes {num_hosts}: there are only {len(hosts)} ({names}); add hosts or ask for fewer")
    first = dict(islice(hosts.items(), num_hosts))
    for host, slots in first.items():
        if ranks_per_host is not None and ranks_per_host > len(slots):
            raise UsageError(
                f"--nproc {ranks_per_host}: host {host!r} has {len(slots)} slots; ask for fewer ranks, or give the host "
                "more slots"
            )
    return {host: slots[:ranks_per_host] for host, slots in first.items()}
