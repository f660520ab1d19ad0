"""The threads that compute a worker's steps: torch's and the native library's, as many as `ThreadPace` says."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch

from deltaserve.compute.executor.core_waits import compute_wait_s
from deltaserve.compute.executor.thread_pace import ThreadPace
from deltaserve.compute.native.native_library import NativeContext


class StepThreads:
    """Threads of one executor; called from the thread that computes."""

    def __init__(self, native: NativeContext | None, least: int, most: int) -> None:
        self._native = native
        self._pace = ThreadPace(most, compute_wait_s, least)

    @property
    def count(self) -> int:
        """Threads that compute the next step."""
        return self._pace.num_threads

    def computing(self) -> AbstractContextManager[None]:
        """Around a step: workers that share these cores leave them to it."""
        return nullcontext() if self._native is None else self._native.computing()

    def learn(self, seconds: float) -> None:
        """After a step that took so long."""
        before = self._pace.num_threads
        wanted = self._pace.learn(seconds, time.monotonic())
        if wanted == before:
            return
        if self._native is not None:
            self._native.use_threads(wanted)
        torch.set_num_threads(wanted if self._native is None else self._native.own_threads)
