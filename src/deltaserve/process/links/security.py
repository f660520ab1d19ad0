"""CURVE keys of a cluster: encryption and mutual authentication of links that leave the host.

Every member derives the same two key pairs from the cluster key: one that listeners prove, one that dialers prove.
Who does not hold the cluster key can neither read, nor join, nor pose as a member.
"""

import hashlib
import hmac
import threading
from dataclasses import dataclass, field
from functools import partial

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from deltaserve.core.files.private_file import MIN_KEY_BYTES
from deltaserve.process.children.exits import Exit, ProcessOver, start_thread

_DOMAIN = b"deltaserve"
"""Authentication domain of ZeroMQ: with one enforced, a listener without a running authenticator accepts nobody."""
_STOP_MS = 1000
"""How long the authenticator's thread may take to take the word that it is to end."""


@dataclass(frozen=True, slots=True)
class CurvePair:
    """Z85 text of a CURVE key pair."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """What both ends of a secured link must hold."""

    server: CurvePair
    client: CurvePair

    @classmethod
    def from_cluster_key(cls, key: bytes) -> "LinkSecurity":
        """Raises ValueError for a key shorter than 32 bytes."""
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"cluster key has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        return cls(_derive(key, b"deltaserve link server"), _derive(key, b"deltaserve link client"))

    def secure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only dialers that prove the client key. Needs `authenticate` on the socket's context."""
        socket.curve_server = True
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_secretkey = self.server.secret
        socket.curve_publickey = self.server.public

    def secure_dialer(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self.server.public
        socket.curve_secretkey = self.client.secret
        socket.curve_publickey = self.client.public

    def authenticate(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start the check of client keys for all listeners of a context; the caller stops it before terminating.

        The process ends when its thread dies: no new member could join.
        """
        authenticator = _Authenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(
            domain=_DOMAIN.decode(), credentials_provider=_Members(self.client.public)
        )
        return authenticator


class _Authenticator(ThreadAuthenticator):
    """One whose `stop` ends, and whose death is seen."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._is_stopping = threading.Event()
        super().__init__(context)

    def start(self) -> None:
        super().start()
        self.pipe.sndtimeo = _STOP_MS
        start_thread("authenticator", partial(self._watch, self.thread))

    def stop(self) -> None:
        """A thread that died has closed its end of the pipe: nobody takes what is sent to it."""
        self._is_stopping.set()
        try:
            super().stop()
        except zmq.Again:
            self.pipe.close()
            self.pipe = None  # type: ignore[assignment]  # pyzmq does so itself
            super().stop()

    def _watch(self, thread: threading.Thread) -> None:
        thread.join()
        if not self._is_stopping.is_set():
            raise ProcessOver(Exit.THREAD_DIED, "the authenticator of worker links died: no member could join")


@dataclass(frozen=True, slots=True)
class _Members:
    """Answers whether a client's public key (Z85) is that of the cluster."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self.public)


def derive_key(key: bytes, purpose: bytes) -> bytes:
    """A key for one purpose, of which the cluster key cannot be told: [32] bytes."""
    return hashlib.blake2b(purpose, key=_fold(key), digest_size=32).digest()


def _derive(key: bytes, purpose: bytes) -> CurvePair:
    secret = z85.encode(derive_key(key, purpose))
    return CurvePair(public=zmq.curve_public(secret), secret=secret)


def _fold(key: bytes) -> bytes:
    """blake2b keys are at most 64 bytes; longer ones are hashed, not cut."""
    return key if len(key) <= 64 else hashlib.blake2b(key, digest_size=64).digest()
