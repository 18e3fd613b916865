"""Bytes as people read them."""

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in decimal units, as drives and networks are sold: 1304000000 is "1.30 GB"."""
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"
