"""Hypothesis profiles: `ci` is bounded and repeatable (the default), `full` searches. Tiny models.

And what a run tells when it ends badly: failed tests are named when they fail (progress.py), not only in the summary
that a killed run never prints; a test that hangs where no signal reaches it ends its process with all stacks, and so
does a run that cannot leave; one that eats memory gets a MemoryError of its own before the machine ends something else.
Signals mean to the processes that tests start what they mean to commands of a shell, also where the run itself was
started to ignore them (nohup, a script's `&`).
"""

import faulthandler
import gc
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.fixtures.cached import built_once
from tests.progress import Progress

gc.disable()  # until all is collected: what that makes stays, and looking for garbage in it takes half of the time
settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

_FIXTURES = Path(__file__).parent / "fixtures"
_GRACE_S = 60.0
"""After a test's time limit, which is a signal to Python, until its process is ended without Python."""
_EXIT_S = 600.0
"""How long a run may take to leave when all is reported: it removes folders of earlier runs, on a busy disk."""
_FIXTURES_S = 3 * 3600.0
"""Time limit of what is made before a test: compilations among it, on a busy machine."""
_LONG = (
    "tests/property/test_scheduler_machine.py",
    "tests/property/test_prefix_cache_machine.py",
    "tests/property/test_ticket_machine.py",
    "tests/property/test_allocator_machine.py",
    "tests/e2e/test_namespace_comparison.py",
    "tests/e2e/test_namespace_nodes.py",
    "tests/e2e/test_recall_by_state.py",
    "tests/e2e/test_structured_streams.py",
    "tests/e2e/test_tensor_parallel.py",
    "tests/e2e/test_hybrid_models.py",
    "tests/e2e/test_draft_heads.py",
    "tests/e2e/test_cache_file.py",
    "tests/e2e/test_expert_groups.py",
    "tests/e2e/test_pressure.py",
    "tests/compute/native/test_sanitizers.py",
    "tests/test_branches.py",
    "tests/compute/executor/test_step_graphs.py",
    "tests/compute/executor/test_warm_up.py",
    "tests/process/worker/test_worker.py",
    "tests/product/test_drafts.py",
    "tests/compute/executor/test_equal_bits.py",
    "tests/process/worker/test_ranks.py",
    "tests/launch/test_supervisor.py",
    "tests/chaos/test_chaos.py",
    "tests/e2e/test_shapes.py",
    "tests/e2e/test_service.py",
    "tests/chaos/test_nixl_storm.py",
    "tests/chaos/test_streams.py",
    "tests/chaos/test_unfenceable.py",
    "tests/e2e/test_deaths.py",
    "tests/e2e/test_roles.py",
    "tests/e2e/test_demo.py",
    "tests/e2e/test_windows.py",
    "tests/e2e/test_membership.py",
    "tests/e2e/test_rollout.py",
    "tests/e2e/test_many_at_once.py",
)
"""Files that take longest, of those that have few tests: they come first, or one process ends minutes after the other.
A file is never split: its tests share fixtures."""
_MAX_DATA_BYTES = psutil.virtual_memory().total // 2
"""Memory limit of a test process, and of each process it starts: far beyond what any of them needs."""


@pytest.fixture(scope="session")
def tiny_models(request: pytest.FixtureRequest) -> Path:
    """A folder with one model folder per variant of fixtures/tiny_models.py (`llama`, `qwen3`, ...)."""
    cache = request.config.rootpath / ".pytest_cache" / "tiny_models"
    cache.mkdir(parents=True, exist_ok=True)
    sources = [_FIXTURES / "tiny_models.py", _FIXTURES / "tiny_tokenizer.py"]
    return built_once(cache, "tests.fixtures.tiny_models", sources)


@pytest.fixture(scope="session", autouse=True)
def _native_libraries(request: pytest.FixtureRequest) -> None:
    """Compiled before the first test when one that was collected computes by them."""
    native_build = sys.modules.get("tests.compute.native.native_build")
    if native_build is not None:
        native_build.build_libraries([item.nodeid for item in request.session.items])


class _Watch:
    """Ends a pytest process whose test hangs where the signal of its time limit reaches no Python, or which cannot
    leave since a test left a thread behind."""

    def __init__(self, config: pytest.Config, stderr: int) -> None:
        self._limit_s = float(config.getini("timeout") or 0)
        self._stderr = stderr

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._within(_FIXTURES_S):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        with self._within(float(marker.args[0]) if marker is not None else self._limit_s):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        with self._within(self._limit_s):
            return (yield)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Processes of pytest-xdist wait for each other here, and are ended by the one that started them."""
        if not hasattr(config, "workerinput"):
            faulthandler.dump_traceback_later(_EXIT_S, exit=True, file=self._stderr)

    @contextmanager
    def _within(self, limit_s: float) -> Iterator[None]:
        """0: however long."""
        if limit_s > 0:
            faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=self._stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", metavar="NAME", help="say how far this run, called NAME, is: tests/progress.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with most tests: the order in which files are handed to processes."""
    files = [item.nodeid.partition("::")[0] for item in items]
    sizes, places = Counter(files), {file: place for place, file in enumerate(_LONG)}
    orders = {file: (places.get(file, len(_LONG)), -sizes[file], file) for file in sizes}
    items.sort(key=lambda item: orders[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)  # ignored here, and not inherited by what is started
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA_BYTES, most))
    stderr = os.dup(2)
    config.pluginmanager.register(_Watch(config, stderr))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(stderr, config.getoption("--progress")))
