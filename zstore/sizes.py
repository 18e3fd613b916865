"""Bytes and counts as people read them."""

import re

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in decimal units, as drives and networks are sold: 1304000000 is "1.30 GB"."""
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def format_count(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "1,024 ranks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def parse_bytes(text: str) -> int:
    """Return the bytes in a size like "5GB" (decimal), "512MiB" (binary) or "1000000"; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgt])(i?))?b?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"expected a size like 5GB, 512MiB or a number of bytes, got {text!r}")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    num_bytes = int(float(number) * (1024 if binary else 1000) ** power)
    if num_bytes < 1:
        raise ValueError(f"expected a size of at least one byte, got {text!r}")
    return num_bytes
