"""Numbers of bytes in words for people."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))
_KIB = 1 << 10


def size(num_bytes: int) -> str:
    """`0 B`, `512 KiB`, `1.5 MiB`, `16.0 GiB`."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B" if num_bytes < _KIB else f"{num_bytes / _KIB:.0f} KiB"
