"""What this CPU has instructions for, without loading torch."""

from pathlib import Path

_NEEDED_FLAGS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "fphp"}),
}
"""Type |-> flags of Linux (x86 and arm64) of which one is needed to multiply matrices of it fast."""


def slow_dtypes(cpuinfo: str) -> frozenset[str]:
    """Types whose products are several times slower than those of float32. `cpuinfo`: as in /proc/cpuinfo."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break  # all cores of a machine have the same
    return frozenset(dtype for dtype, needed in _NEEDED_FLAGS.items() if flags.isdisjoint(needed))


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> str:
    """Empty where there is none: float32 is right everywhere."""
    try:
        return path.read_text()
    except OSError:
        return ""
