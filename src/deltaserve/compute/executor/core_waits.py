"""How long this process's threads wait for cores, as the kernel counts it. Without torch: the launcher asks, too."""

import threading
from pathlib import Path

_PROCESS = Path("/proc/self")
_NS = 1e-9


def counts_waits() -> bool:
    """Whether this kernel has the count (CONFIG_SCHED_INFO)."""
    return (_PROCESS / "schedstat").exists()


def compute_wait_s() -> float | None:
    """Seconds that this process's threads have been ready to run and had no core, in all. Of the threads that Python
    started, only of the one that calls this. None: nobody counts them."""
    if not counts_waits():
        return None
    others = {str(thread.native_id) for thread in threading.enumerate()} - {str(threading.get_native_id())}
    counts = [_schedstat(task) for task in (_PROCESS / "task").iterdir() if task.name not in others]
    ran_ns, waited_ns = (sum(of_task) for of_task in zip(*counts, strict=True))
    return waited_ns * _NS if ran_ns else None  # else a sandbox that has the file and counts nothing


def _schedstat(task: Path) -> tuple[int, int]:
    """Nanoseconds on a core, and ready without one. Of a thread that has ended: none."""
    try:
        ran, waited, _ = (task / "schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return int(ran), int(waited)
