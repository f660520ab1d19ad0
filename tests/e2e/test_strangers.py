"""Whoever can reach a worker's port but does not hold the cluster key changes nothing: not a frame of his is read."""

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import zmq

from deltaserve.core.errors import ProtocolError
from deltaserve.core.wire.codec import decode, encode
from deltaserve.core.wire.messages import Envelope, Facts, Hello
from deltaserve.process.links.ends import Dialer
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.security import LinkSecurity
from tests.core.wire.mutations import Mutator, framed
from tests.core.wire.samples import MESSAGE_TYPES, sample
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Server, serving

PROMPT = random_prompt(40, seed=3)
FLAGS = ("--page-size", "16", "--num-pages", "64")
NAMES = {"front": "front", "prefill-0": "prefill", "decode-0": "decode"}


@pytest.fixture(scope="module")
def server(tiny_models: Path) -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-") as folder, serving(Path(folder), tiny_models / "llama", *FLAGS) as started:
        yield started


def urls(server: Server) -> list[str]:
    """Where the workers listen for links."""
    return [f"tcp://127.0.0.1:{server.worker_port(name)}" for name in ("prefill-0", "decode-0")]


def pose(url: str, name: str, role: str) -> None:
    """Send Hello as another process would after a restart: believed, it would end the real one's life."""
    hello = Hello(role=role, compat={}, facts=Facts())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(url)
        stranger.send(encode(Envelope(src=name, src_boot=666, dst_boot=None, body=hello)))
        assert not stranger.poll(200), "he must not be answered"


def shout(url: str, data: bytes) -> None:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(data)


def key_of(server: Server) -> bytes:
    """What the cluster's own processes prove to each other."""
    (path,) = server.folder.glob("deltaserve-*/cluster.key")
    return path.read_bytes().strip()


def damaged(mutator: Mutator) -> bytes:
    """A damaged frame; nobody's whose name is in use here: such a lie is believed, of whoever holds the key."""
    if mutator.chance(0.5):
        return framed(msgspec.msgpack.encode({**mutator.changed(), "src": "insider"}))
    while True:
        frame = mutator.frame()
        try:
            if decode(frame).src not in NAMES:
                return frame
        except ProtocolError:
            return frame


def test_damaged_frames_from_a_holder_of_the_key(tiny_models: Path, server: Server) -> None:
    """A thousand, over the real links of both workers: no process ends, the answer stays right."""
    model = tiny_models / "llama"
    mutator = Mutator([encode(sample(kind)) for kind in MESSAGE_TYPES], seed=7)
    with zmq.Context() as context:
        before = server.complete(PROMPT, 4)
        assert_true(model, PROMPT, before)
        security = LinkSecurity.from_cluster_key(key_of(server))
        for _ in range(125):  # links, as one is ignored after three frames that cannot be read
            for url in urls(server):
                insider = Dialer(context, url, LinkLimits(), security)
                for _ in range(4):
                    insider.send(damaged(mutator))
                insider.close(linger_ms=1000)
        assert server.complete(PROMPT, 4).tokens == before.tokens
        assert_true(model, PROMPT[::-1], server.complete(PROMPT[::-1], 4))


def test_a_stranger_at_the_workers_ports(tiny_models: Path, server: Server) -> None:
    before = server.complete(PROMPT, 4)
    assert_true(tiny_models / "llama", PROMPT, before)
    for url in urls(server):
        for name, role in NAMES.items():
            pose(url, name, role)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" + bytes(200)):
            shout(url, data)
        assert server.complete(PROMPT, 4).tokens == before.tokens
