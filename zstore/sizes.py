"""Bytes and counts as people read them."""

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
