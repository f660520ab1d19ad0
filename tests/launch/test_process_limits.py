"""Threads and addresses that a process may have are looked at before any is started."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import cpu_bytes
from deltaserve.launch.process_limits import page_addresses, require_files, require_threads
from tests.patience import PATIENCE_S

GIB = 1 << 30
_FEW = """
import resource, sys
from deltaserve.core.errors import ConfigError
from deltaserve.launch.process_limits import require_threads
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)  # as few threads as pids.max or ulimit -u leave
try:
    require_threads(20, 40)
except ConfigError as error:
    print(error)
"""


def test_threads_that_can_be_had_are_ended_again() -> None:
    before = threading.active_count()
    require_threads(2, 3)
    assert threading.active_count() == before


def test_too_few_threads_are_told_before_anything_is_started() -> None:
    done = subprocess.run([sys.executable, "-c", _FEW], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.startswith("20 process(es) need some 200 threads, and ")
    assert "ulimit -u" in done.stdout


@pytest.mark.parametrize(
    ("limit", "pages"), [(resource.RLIM_INFINITY, None), (4 * GIB, GIB), (3 * GIB, GIB >> 1), (2 * GIB + 2, 1)]
)
def test_half_of_the_addresses_beside_the_libraries_are_for_pages(
    limit: int, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert page_addresses() == pages


def test_memory_cannot_be_told_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"/meminfo: No such file or directory; .* mount -t proc proc /proc"):
        cpu_bytes()


@pytest.mark.parametrize("limit", [2 * GIB, 1])
def test_addresses_without_room_for_a_page(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(ConfigError, match=r"\(ulimit -v\).*or `ulimit -v unlimited`"):
        page_addresses()


@pytest.mark.parametrize("hard", [16, 24, 63])
def test_too_few_files_for_a_worker(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    with pytest.raises(ConfigError, match=rf"may open {hard} files, too few .* \(ulimit -Hn\) to 64 or more"):
        require_files()


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"),
    [(16, 4096, [(4096, 4096)]), (16, resource.RLIM_INFINITY, [(1024, resource.RLIM_INFINITY)]), (64, 64, [])],
)
def test_a_low_soft_limit_is_raised(
    soft: int, hard: int, becomes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    require_files()
    assert told == becomes
