"""CUDA graphs whose capture fails, by a stand-in for torch's part: which pools memory is taken for."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from deltaserve.compute.executor.step_recorder import GraphRecorder

_Pool = tuple[int, int]


class FakeAllocator:
    """torch's allocator and graphs, which throw at the end of a capture in which a run failed, before memory is no
    more taken for its pool."""

    def __init__(self, ends_itself: bool) -> None:
        """`ends_itself`: also then, as newer versions of torch do."""
        self._ends_itself = ends_itself
        self._num_pools = 0
        self.recording_to: list[_Pool] = []
        self.released: list[_Pool] = []
        self.is_invalid = False

    def pool(self) -> _Pool:
        self._num_pools += 1
        return 0, self._num_pools

    def begin(self, pool: _Pool) -> None:
        assert pool not in self.recording_to, "already recording to mempool_id"
        self.recording_to.append(pool)

    def end_capture(self) -> None:
        if self.is_invalid:
            if self._ends_itself:
                self.recording_to.pop()
            self.is_invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.recording_to.pop()

    def end(self, device: int, pool: _Pool) -> None:
        self.recording_to.remove(pool)

    def release(self, device: int, pool: _Pool) -> None:
        self.released.append(pool)

    def empty_cache(self) -> None:
        assert not self.recording_to, "captures_underway.empty() INTERNAL ASSERT FAILED"


@pytest.fixture(params=[False, True], ids=["older", "newer"])
def allocator(request: pytest.FixtureRequest) -> Iterator[FakeAllocator]:
    fake = FakeAllocator(request.param)

    def graph() -> Any:
        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: fake.begin(pool),
            capture_end=fake.end_capture,
            replay=lambda: None,
        )

    with (
        patch.multiple(
            torch.cuda,
            graph_pool_handle=fake.pool,
            Stream=Mock(),
            CUDAGraph=graph,
            current_stream=Mock(),
            stream=lambda _: nullcontext(),
            synchronize=Mock(),
            empty_cache=fake.empty_cache,
        ),
        patch.multiple(torch._C, _cuda_endAllocateToPool=fake.end, _cuda_releasePool=fake.release, create=True),
    ):
        yield fake


@pytest.mark.parametrize("problem", [RuntimeError("not permitted"), KeyboardInterrupt()])
def test_another_is_recorded_behind_a_capture_that_fails(allocator: FakeAllocator, problem: BaseException) -> None:
    recorder, num_calls = GraphRecorder(torch.device("cuda", 0)), 0

    def failing() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first one is not captured
            allocator.is_invalid = True
            raise problem

    with pytest.raises(type(problem)):
        recorder.record_each([lambda: None, failing, lambda: None])
    assert not allocator.recording_to
    assert len(recorder.record_each([lambda: None, lambda: None])) == 2
    assert not allocator.recording_to
