"""Bytes handed to a socket that have not left it yet."""

from collections import deque

import zmq

TRACKED_BYTES = 1 << 16
"""Smaller frames are copied by ZeroMQ and bounded by their number alone."""


class Outbox:
    """Large frames of one link in flight. ZeroMQ bounds an outbox by frames only; this bounds its bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._num_bytes = 0

    def admits(self, num_bytes: int) -> bool:
        """Whether a frame of that size may be handed over now. An empty outbox admits any frame."""
        while self._frames and self._frames[0][0].done:
            self._num_bytes -= self._frames.popleft()[1]
        return not self._frames or self._num_bytes + num_bytes <= self._limit_bytes

    def add(self, tracker: zmq.MessageTracker, num_bytes: int) -> None:
        self._frames.append((tracker, num_bytes))
        self._num_bytes += num_bytes
