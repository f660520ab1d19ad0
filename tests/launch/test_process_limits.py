"""Threads and addresses that a process may have are looked at before any is started."""

import resource
import subprocess
import sys
import threading

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.process_limits import page_addresses, require_threads
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


@pytest.mark.parametrize("limit", [2 * GIB, 1])
def test_addresses_without_room_for_a_page(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(ConfigError, match=r"\(ulimit -v\).*or `ulimit -v unlimited`"):
        page_addresses()
