"""Envelopes, and links that are read until something is there."""

import socket as sockets
import time
from collections.abc import Callable
from contextlib import suppress

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Envelope, Heartbeat, Message, PeerAddress
from deltaserve.process.links.links import Links
from tests.patience import PATIENCE_S

MakeLinks = Callable[..., Links]
"""The fixture that makes links and closes them after the test."""
PREFILL, DECODE = PeerName("prefill-0"), PeerName("decode-0")


class Hands:
    """A clock that stands where it was put."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def envelope(src: str, body: Message | None = None, boot: int = 1) -> Envelope:
    return Envelope(src=src, src_boot=boot, dst_boot=None, body=body if body is not None else Heartbeat())


def address(name: str, port: int) -> PeerAddress:
    return PeerAddress(name=name, url=f"tcp://127.0.0.1:{port}")


def receive(links: Links, count: int = 1) -> list[Envelope]:
    """The next `count` envelopes; fails when they do not come."""
    found: list[Envelope] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} frames came"
        for socket in links.wait(0.2):
            found += links.receive(socket)
    return found


def is_silent(links: Links, wait_s: float = 0.3) -> bool:
    """Whether nothing readable as a frame comes for a moment (what is refused is consumed meanwhile)."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        for socket in links.wait(deadline - time.monotonic()):
            if links.receive(socket):
                return False
    return True


def send_garbage(listener: sockets.socket) -> None:
    """To the first who connects: ZeroMQ gives up such a connection, and does not try again by itself."""
    connection, _ = listener.accept()
    with connection, suppress(ConnectionResetError):
        connection.sendall(bytes(range(64)))
        while connection.recv(1 << 16):
            pass


def connect(make_links: MakeLinks, **options: object) -> tuple[Links, Links]:
    """(listening as prefill-0, dialled to it as decode-0), with one frame already received by the listener."""
    listener, dialer = make_links(**options), make_links(**options)
    port = listener.listen("127.0.0.1", 0)
    dialer.dial(address(PREFILL, port))
    dialer.send(PREFILL, envelope(DECODE))
    assert [e.src for e in receive(listener)] == [DECODE]
    return listener, dialer
