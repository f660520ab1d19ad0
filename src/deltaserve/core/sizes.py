"""Numbers of bytes in words for people."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))
_KIB = 1 << 10


def size(num_bytes: int) -> str:
    """`0 B`, `512 KiB`, `1.5 MiB`, `16.0 GiB`."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B" if num_bytes < _KIB else f"{num_bytes / _KIB:.0f} KiB"


def sizes_apart(larger: int, smaller: int) -> tuple[str, str]:
    """Both as `size` has them, or in bytes where that would make two of them one."""
    words = size(larger), size(smaller)
    return words if words[0] != words[1] or larger == smaller else (f"{larger:,} B", f"{smaller:,} B")
