"""Whoever can reach a worker's port but does not hold the cluster key changes nothing: not a frame of his is read."""

import json
import socket
from pathlib import Path

import zmq

from deltaserve.wire.codec import encode
from deltaserve.wire.messages import Envelope, Facts, Hello
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Server, serving

PROMPT = random_prompt(40, seed=3)
NAMES = {"front": "front", "prefill-0": "prefill", "decode-0": "decode"}


def urls(server: Server) -> list[str]:
    """Where the workers listen for links."""
    specs = [json.loads(path.read_text()) for path in server.folder.glob("deltaserve-*/*-0.json")]
    return [f"tcp://127.0.0.1:{spec['port']}" for spec in specs]


def pose(url: str, name: str, role: str) -> None:
    """Greet as another process would after a restart: believed, it would end the real one's life."""
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


def test_a_stranger_at_the_workers_ports(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama"
    with serving(folder, model, "--page-size", "16", "--num-pages", "64") as server:
        before = server.complete(PROMPT, 4)
        assert_true(model, PROMPT, before)
        assert len(urls(server)) == 2
        for url in urls(server):
            for name, role in NAMES.items():
                pose(url, name, role)
            for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" + bytes(200)):
                shout(url, data)
            assert server.complete(PROMPT, 4).tokens == before.tokens
