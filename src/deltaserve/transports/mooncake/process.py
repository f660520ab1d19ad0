"""The transport's end of an engine process: start it, talk to it, end it."""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from deltaserve.core.extents import Region
from deltaserve.core.transport import TransportError
from deltaserve.transports.mooncake.frames import (
    EngineCard,
    EngineFailed,
    EngineReady,
    EngineWithoutLibrary,
    FrameBuffer,
    FromEngine,
    SharedRegion,
    StartEngine,
    ToEngine,
    decode_from_engine,
    encode_frame,
)
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.registry import LibraryError

_START_LIMIT_S = 30.0
"""An engine starts in a quarter of a second; only a broken machine takes this long."""
_REAP_LIMIT_S = 5.0
"""A killed process is gone in milliseconds, unless the kernel itself waits for something."""
_RECEIVE_BYTES = 1 << 20
_MAX_FRAME_BYTES = 64 << 20


class EngineProcess:
    """A child process with one engine that has registered our regions. Never blocks, but in `wait_ready` and `kill`."""

    def __init__(self, options: MooncakeOptions, regions: Sequence[Region]) -> None:
        """Starts it. Raises TransportError when there is no such process afterwards."""
        files = [_file(region) for region in regions]
        try:
            self._control, theirs = socket.socketpair()
        except OSError as error:
            raise TransportError(f"mooncake: no process for an engine: {error.strerror}") from None
        self._control.setblocking(False)
        self._received = FrameBuffer(_MAX_FRAME_BYTES)
        self._unsent = bytearray()
        self.is_alive = True
        """False once it has closed its end: then nothing more will be heard of it."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deltaserve.transports.mooncake.engine", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # our own may be somebody's protocol
                env=options.environment(os.environ),
                pass_fds=(theirs.fileno(), *files),
            )
        except OSError as error:
            self._control.close()
            raise TransportError(f"mooncake: no process for an engine: {error.strerror}") from None
        finally:
            theirs.close()
        shared = [SharedRegion(r.id, file, r.num_bytes) for r, file in zip(regions, files, strict=True)]
        self.send(StartEngine(options.host, options.protocol, options.devices, tuple(shared)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> EngineCard:
        """Where peers find it. Raises TransportError when it does not start."""
        give_up = time.monotonic() + _START_LIMIT_S
        selector = selectors.PollSelector()  # takes descriptors above 1023, and none for itself
        selector.register(self._control, selectors.EVENT_READ)
        while self.is_alive and (left := give_up - time.monotonic()) > 0:
            writing = selectors.EVENT_WRITE if self._unsent else 0
            selector.modify(self._control, selectors.EVENT_READ | writing)
            selector.select(left)
            for frame in self.receive():
                if isinstance(frame, EngineReady):
                    return frame.card
                if isinstance(frame, EngineWithoutLibrary):
                    raise LibraryError(f"mooncake: {frame.problem}")
                if isinstance(frame, EngineFailed):
                    raise TransportError(f"mooncake: {frame.problem}")
        raise TransportError("mooncake: the engine process ended, or does not start")

    def send(self, frame: ToEngine) -> None:
        self._unsent += encode_frame(frame)
        self._flush()

    def receive(self) -> list[FromEngine]:
        """What it has said and was not heard yet."""
        self._flush()
        frames: list[FromEngine] = []
        while self.is_alive:
            try:
                data = self._control.recv(_RECEIVE_BYTES)
                frames += [decode_from_engine(frame) for frame in self._received.feed(data)]
            except BlockingIOError:
                break
            except (OSError, ValueError, msgspec.DecodeError):
                data = b""
            self.is_alive = bool(data)
        return frames

    def kill(self) -> bool:
        """End it at once, and wait until the kernel has taken it apart; whether that happened. Idempotent.

        A process that was waited for has no thread left that could write: what peers still send ends in its sockets,
        which went with it.
        """
        self.is_alive = False
        self._control.close()
        self._process.kill()
        try:
            self._process.wait(_REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _flush(self) -> None:
        try:
            while self._unsent and self.is_alive:
                del self._unsent[: self._control.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_alive = False


def engine_problem(options: MooncakeOptions) -> TransportError | None:
    """Why engines cannot be started on this machine, found by starting one; None when they can."""
    try:
        engine = EngineProcess(options, ())
    except TransportError as error:
        return error
    try:
        engine.wait_ready()
    except TransportError as error:
        return error
    finally:
        engine.kill()
    return None


def _file(region: Region) -> int:
    if region.file is None:
        raise TransportError(f"region {region.id}: its memory is private to this process")
    return region.file
