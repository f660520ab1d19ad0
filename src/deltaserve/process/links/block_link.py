"""KV events: what enters and leaves this worker's tree, published over ZeroMQ for routers of others.

The form is that of vLLM and SGLang (`vllm/distributed/kv_events.py`, `sglang/srt/disaggregation/kv_events.py`), which
Dynamo, llm-d, AIBrix and SGLang's gateway read: a PUB socket sends [topic, number (8 bytes, big endian), batch], a
ROUTER socket answers [number] with every kept batch from there on and an end mark. A batch is msgpack, arrays in place
of maps: [time, [event ...], rank], an event ["BlockStored", hashes, parent hash, token ids, block size, LoRA, medium]
and so on.

Both sockets belong to one thread. A worker's loop hands it changes and goes on.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import zmq

from deltaserve.control.cache.block_log import BlockChange, BlocksForgotten, BlocksRemoved, BlocksStored
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import DEFAULT_NAMESPACE
from deltaserve.core.keys import KEY_BYTES
from deltaserve.process.children.exits import start_thread
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.links.ends import Context, Socket, new_socket
from deltaserve.process.links.rare_log import RareLog
from deltaserve.settings.kv_events import KvEventsConfig

_LOG_EVERY_S = 5.0
_MOST_QUESTIONS = 256
"""In a turn: who asks without end must not keep others from hearing what is new."""
MAX_KEPT_BYTES = 256 << 20
"""Most bytes of batches that are kept for those who ask again, however few they are."""
_LAST_WORDS_MS = 200
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_HASH_MASK = (1 << 63) - 1
"""Hashes are 63 bits of a page's key: positive whether a reader takes 64 bits with a sign or without."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    """Pages that entered, one behind the other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None = None
    extra_keys: list[list[str]] | None = None
    """The namespace of each page, where that is not the default one: equal ids of two tenants are two pages."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    """Pages that left."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """Nothing holds that was told before."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What is sent at once. `ts`: Unix seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockPublisher:
    """Changes in, messages out."""

    def __init__(self, config: KvEventsConfig, page_size: int, medium: str) -> None:
        """Binds both sockets. `medium`: where the pages are, `GPU` or `CPU`. Raises ConfigError."""
        self._topic = config.topic.encode()
        self._page_size = page_size
        self._medium = medium
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._most_kept = config.buffer_steps
        self._next = 0
        self._log = RareLog(logging.getLogger(__name__), time.monotonic, _LOG_EVERY_S)
        self._inbox: Mailbox[tuple[BlockChange, ...] | None] = Mailbox()
        self._context: Context = zmq.Context()
        replay = config.replay_endpoint
        try:
            self._pub = _bound(self._context, zmq.PUB, config.endpoint, config.hwm)
            self._router = None if replay is None else _bound(self._context, zmq.ROUTER, replay, config.hwm)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.put((BlocksForgotten(),))  # a listener may have heard of an earlier life
        self._thread = start_thread("block events", self._run)

    def put(self, changes: tuple[BlockChange, ...]) -> None:
        """Publish them soon. Returns at once."""
        self._inbox.put(changes)

    def stop(self) -> None:
        """Send what is left, and close."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        is_asked_to_stop = False
        while not is_asked_to_stop:
            poller.poll()
            batches = self._inbox.take_all()
            is_asked_to_stop = None in batches
            for changes in batches:
                if changes:
                    self._publish(changes)
            self._answer()
        for socket in filter(None, (self._pub, self._router)):
            socket.close(linger=_LAST_WORDS_MS)
        self._context.term()

    def _publish(self, changes: Sequence[BlockChange]) -> None:
        batch = EventBatch(time.time(), list(events_of(changes, self._page_size, self._medium)))
        message = self._next, msgspec.msgpack.encode(batch)
        self._next += 1
        self._keep(message)
        self._pub.send_multipart([self._topic, *_numbered(message)])

    def _keep(self, message: tuple[int, bytes]) -> None:
        self._kept.append(message)
        self._num_kept_bytes += len(message[1])
        while len(self._kept) > self._most_kept or self._num_kept_bytes > MAX_KEPT_BYTES:
            _, payload = self._kept.popleft()
            self._num_kept_bytes -= len(payload)

    def _answer(self) -> None:
        """Every listener that asks gets what is kept from the number it names on; a few of them before the next
        batches are published."""
        for _ in range(_MOST_QUESTIONS):
            if self._router is None or not self._router.poll(0):
                return
            who, *question = self._router.recv_multipart()
            if len(question[-1]) != 8:
                self._log.warn(f"a listener of KV events asked for number {question[-1][:20]!r}: 8 bytes are one")
                continue
            first = int.from_bytes(question[-1], "big")
            for message in [each for each in self._kept if each[0] >= first]:
                self._router.send_multipart([who, b"", *_numbered(message)])
            self._router.send_multipart([who, b"", _END_OF_REPLAY, b""])


def _numbered(message: tuple[int, bytes]) -> list[bytes]:
    number, payload = message
    return [number.to_bytes(8, "big"), payload]


def events_of(
    changes: Iterable[BlockChange], page_size: int, medium: str
) -> Iterable[BlockStored | BlockRemoved | AllBlocksCleared]:
    """The events that changes are told as."""
    for change in changes:
        match change:
            case BlocksForgotten():
                yield AllBlocksCleared()
            case BlocksRemoved(keys):
                yield BlockRemoved(hashes_of(keys), medium)
            case BlocksStored(namespace, parent, keys, tokens):
                hashes = hashes_of(keys)
                yield BlockStored(
                    hashes,
                    hashes_of(parent)[0] if parent else None,
                    np.frombuffer(tokens, "<u4").tolist(),
                    page_size,
                    None,
                    medium,
                    extra_keys=None if namespace == DEFAULT_NAMESPACE else [[namespace]] * len(hashes),
                )


def hashes_of(keys: bytes) -> list[int]:
    """One for each packed page key."""
    return [int.from_bytes(keys[at : at + 8], "little") & _HASH_MASK for at in range(0, len(keys), KEY_BYTES)]


def _bound(context: Context, kind: int, endpoint: str, most_waiting: int) -> Socket:
    socket = new_socket(context, kind)
    socket.setsockopt(zmq.SNDHWM, most_waiting)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"--kv-events-config: cannot bind {endpoint} ({error.strerror})") from None
    return socket
