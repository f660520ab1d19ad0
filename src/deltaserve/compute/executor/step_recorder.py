"""What the device was told to do, recorded once and repeated: the seam, and CUDA's graphs behind it.

A decode step of a small model is hundreds of launches of a few microseconds each, which take longer to ask for from
Python than to compute. A graph is one launch for all of them (as in vLLM, SGLang and TensorRT-LLM).
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch


class StepRecorder(Protocol):
    """Records what one thread tells the device, and gives a function that repeats it."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """The function returned tells the device again what `run` told it, with the tensors and numbers of then: it
        reads inputs from the same memory, and what `run` left last is where results stand after each replay.

        So whatever differs from one time to the next must be the contents of tensors. `run` is called once or more, for
        an effect that may come about once more than it is replayed. It may not wait for the device. Raises whatever
        ends a recording; others can be made afterwards.
        """
        ...

    def record_each(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """As `record`, of each by itself: what one reads of another lies in memory that was there before."""
        ...


class GraphRecorder:
    """Recording by CUDA graphs. What one leaves is valid until any of them is replayed: their intermediate tensors lie
    in one pool, since only one is computed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return self.record_each((run,))[0]

    def record_each(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Waits for the device once, as memory is given back to it before the captures."""
        calling, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(calling)
        try:
            with torch.cuda.stream(stream):
                for run in runs:  # compiles and loads kernels, libraries take their memory: a capture may do neither
                    run()
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
                return [self._capture(run) for run in runs]
        finally:  # what follows stands behind what was run, also where a capture failed
            calling.wait_stream(stream)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Other threads wait for events and copy pages meanwhile: what they ask of CUDA must not end the capture. Nor
        may Python's collector: a graph that it frees in this thread meanwhile is such a call."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            run()
            graph.capture_end()
        except BaseException:
            self._give_up(graph)
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave nothing of a capture that failed: where torch throws as it ends one, its allocator goes on as if memory
        were taken for it, and neither gives back any nor begins another capture with the same pool."""
        with suppress(Exception):  # it says no more than that something went wrong before
            graph.capture_end()
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with suppress(Exception):  # it has ended
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)  # which the graph would have done
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]


def recorder_of(device: torch.device) -> StepRecorder | None:
    """What records steps on this device; None: nothing can."""
    return GraphRecorder(device) if device.type == "cuda" else None
