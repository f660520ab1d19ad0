"""The data plane of a worker that may never meet a peer: no library, registration or listener before it does."""

from collections.abc import Callable

from deltaserve.control.transfer.commands import (
    EndpointFailed,
    FencePeer,
    OpenEndpoint,
    PeerFenced,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.core.errors import ConfigError
from deltaserve.core.transport import FenceResult
from deltaserve.process.children.shortage import telling_shortage


class PlaneOnDemand:
    """Opens the plane with the first endpoint; until then there is nothing that could be moved or fenced."""

    def __init__(self, open_plane: Callable[[], DataPlane]) -> None:
        """`open_plane` raises ConfigError, or the machine lacks something: that peer is then told that there is no
        endpoint for it."""
        self._open_plane = open_plane
        self._plane: DataPlane | None = None

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        if self._plane is None and isinstance(command, OpenEndpoint):
            try:
                with telling_shortage():
                    self._plane = self._open_plane()
            except ConfigError as error:
                return [EndpointFailed(command.peer, command.greeting, str(error))]
        if self._plane is not None:
            return self._plane.perform(command, now)
        return [PeerFenced(command.peer, FenceResult.CLOSED)] if isinstance(command, FencePeer) else []

    def poll(self, now: float) -> list[TransferReport]:
        return [] if self._plane is None else self._plane.poll(now)

    def is_idle(self) -> bool:
        return self._plane is None or self._plane.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        if self._plane is not None:
            self._plane.expect(is_active, now)

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()
