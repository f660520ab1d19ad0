"""What a container or a service may use of this machine: the limits of this process's control groups, both versions."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of the control groups; None: there is none."""

    cores: float | None = None
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """What of it is not in use now, or only by a cache of files."""


def read_limits(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> CgroupLimits:
    """The tightest of the groups this process is in. What cannot be read limits nothing."""
    groups = _read_text(membership).splitlines()
    cores = [_cores(folder) for folder in _folders(groups, "cpu", mount)]
    memory = [_memory(folder) for folder in _folders(groups, "memory", mount)]
    return CgroupLimits(
        min((count for count in cores if count is not None), default=None),
        min((limit for limit, _ in filter(None, memory)), default=None),
        min((free for _, free in filter(None, memory)), default=None),
    )


def usable_cores(limits: CgroupLimits) -> int:
    """Cores that this process may use, at least one."""
    allowed = math.inf if limits.cores is None else limits.cores
    return max(1, int(min(len(os.sched_getaffinity(0)), allowed)))


def _folders(groups: list[str], controller: str, mount: Path) -> Iterator[Path]:
    """Folders of the process's own group and all above it. In a container its own may be what is mounted, whatever
    its name."""
    for line in groups:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "" or controller in names.split(","):
            root = mount / controller if names else mount
            group = root / path.lstrip("/")
            yield group
            yield from (folder for folder in group.parents if folder.is_relative_to(root))


def _cores(folder: Path) -> float | None:
    quota, _, period = _read_text(folder / "cpu.max").partition(" ")
    if not period:
        quota, period = _read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")
    quota_us, period_us = _number(quota), _number(period)
    return quota_us / period_us if quota_us and period_us else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """Memory in all, and free, in bytes; None: the folder limits none."""
    for limit_file, usage_file, cache_field in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = (_number(_read_text(folder / name)) for name in (limit_file, usage_file))
        if limit is not None and usage is not None:
            stat = dict(line.split(" ", 1) for line in _read_text(folder / "memory.stat").splitlines() if " " in line)
            return limit, max(0, limit - usage + (_number(stat.get(cache_field, "")) or 0))
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """The number in a text; None for `max` and -1, which say that there is no limit."""
    return int(text) if text.isascii() and text.isdigit() else None
