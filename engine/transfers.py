"""Copies between tensors that may rest in different memories, counted where they do.

torch casts on the host's side of a copy that it waits for, so what travels has the type of the device's side.
"""

from __future__ import annotations

import torch

from zstore.links import LinkCounters


def copy_into(target: torch.Tensor, source: torch.Tensor, links: LinkCounters) -> None:
    """Copy `source` into `target`, cast to its type."""
    link = link_between(source.device, target.device)
    if link is None:
        target.copy_(source)
        return
    with links.moving(link, _travelling_bytes(source, link, target.dtype)):
        target.copy_(source)


def copy_to(source: torch.Tensor, device: torch.device, dtype: torch.dtype, links: LinkCounters) -> torch.Tensor:
    """Return `source` on `device` in `dtype`; itself where it is that already."""
    link = link_between(source.device, device)
    if link is None:
        return source.to(device=device, dtype=dtype)
    with links.moving(link, _travelling_bytes(source, link, dtype)):
        return source.to(device=device, dtype=dtype)


def _travelling_bytes(source: torch.Tensor, link: str, dtype: torch.dtype) -> int:
    return source.numel() * (source.dtype if link == "device_to_host" else dtype).itemsize


def link_between(source: torch.device, target: torch.device) -> str | None:
    """Return the link of a copy from one device to another, None within one memory."""
    if source == target or source.type == target.type:
        return None
    return "device_to_host" if target.type == "cpu" else "host_to_device"
