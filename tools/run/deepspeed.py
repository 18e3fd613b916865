"""`deepspeed.launcher.runner`: hostfiles and filters of slots, as `zstore run` reads them; `zstore run` starts the ranks."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zstore.errors import ConfigError, UsageError

from .hosts import parse_hostfile

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    """Return the slots of each host. Raises ConfigError for a line that is none."""
    try:
        hosts = parse_hostfile("\n".join(line.strip() for line in hostfile_lines), name="hostfile")
    except UsageError as error:
        raise ConfigError(str(error)) from None
    return {host.name: len(host.slots or ()) for host in hosts}


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the slots of each host of a file; None if there is no such file."""
    path = Path(hostfile_path)
    return _parse_hostfile(path.read_text().splitlines()) if path.is_file() else None


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the slots that are left of each host, in the order of `host_info`; `HOST[:SLOT,...]@...` names what is taken or
    left out, a host without slots all of them.

    Raises ConfigError for both at once, and for hosts and slots that are not there.
    """
    if include_str and exclude_str:
        raise ConfigError("include_str and exclude_str: expected one of them, got both")
    if not (include_str or exclude_str):
        return {host: list(slots) for host, slots in host_info.items()}
    named: dict[str, list[int]] = {}
    for part in (include_str or exclude_str).split("@"):
        host, colon, listed = part.partition(":")
        if host not in host_info:
            raise ConfigError(f"{part!r}: unknown host {host!r}; expected one of {', '.join(host_info)}")
        slots = listed.split(",") if colon else [str(slot) for slot in host_info[host]]
        wrong = next((slot for slot in slots if slot not in map(str, host_info[host])), None)
        if wrong is not None:
            raise ConfigError(f"{part!r}: host {host!r} has no slot {wrong!r}")
        named.setdefault(host, []).extend(int(slot) for slot in slots)
    left = {
        host: [slot for slot in slots if (slot in named.get(host, ())) == bool(include_str)]
        for host, slots in host_info.items()
    }
    return {host: slots for host, slots in left.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Do as `parse_resource_filter` for hosts of which the number of slots is known."""
    return parse_resource_filter({name: range(slots) for name, slots in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Return slots by host as base64 of their JSON, which DeepSpeed's launcher passes on."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
