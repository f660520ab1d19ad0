"""What a router of others is told, over real sockets, and read with structs of its own making."""

import msgspec
import pytest
import zmq

from deltaserve.control.cache.block_log import BlocksForgotten, BlocksRemoved, BlocksStored
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import DEFAULT_NAMESPACE, Namespace
from deltaserve.core.tokens import pack_u32
from deltaserve.process.links import block_link
from deltaserve.process.links.block_link import BlockPublisher, hashes_of
from deltaserve.settings.kv_events import KvEventsConfig
from tests.patience import PATIENCE_S
from tests.ports import free_port

PAGE_SIZE = 2
KEYS = bytes(range(32))
FIRST, SECOND = KEYS[:16], KEYS[16:]
WAIT_MS = int(1000 * PATIENCE_S)


class Listener:
    """A subscriber as those of vLLM's and Dynamo's are: message by message, asking again for what it missed."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.connect(config.endpoint)
        self.sub.subscribe(config.topic)
        self._replay_endpoint = config.replay_endpoint or ""

    def next(self) -> tuple[int, list[object]]:
        assert self.sub.poll(WAIT_MS)
        _, number, payload = self.sub.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]

    def ask_again(self, first: int) -> list[tuple[int, list[object]]]:
        """What is kept from this number on: any number of answers to one question."""
        found = []
        asking = self._context.socket(zmq.DEALER)
        asking.connect(self._replay_endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        while asking.poll(WAIT_MS):
            _, number, payload = asking.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]))
        asking.close(linger=0)
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


def config() -> KvEventsConfig:
    port = free_port()
    return KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{port + 1}")


def stored(namespace: Namespace = DEFAULT_NAMESPACE) -> BlocksStored:
    return BlocksStored(namespace, b"", KEYS, pack_u32([5, 6, 7, 8]))


def test_events_have_the_form_that_routers_read() -> None:
    where = config()
    publisher = BlockPublisher(where, PAGE_SIZE, "CPU")
    listener = Listener(where)
    try:
        publisher.put((stored(), BlocksStored(Namespace("team"), FIRST, SECOND, pack_u32([9, 10]))))
        publisher.put((BlocksRemoved(SECOND), BlocksForgotten()))
        told = listener.ask_again(0)
        while len(told) < 3:
            told = listener.ask_again(0)
        first, second = hashes_of(KEYS)
        assert told == [
            (0, [["AllBlocksCleared"]]),
            (
                1,
                [
                    ["BlockStored", [first, second], None, [5, 6, 7, 8], PAGE_SIZE, None, "CPU", None, None],
                    ["BlockStored", [second], first, [9, 10], PAGE_SIZE, None, "CPU", None, [["team"]]],
                ],
            ),
            (2, [["BlockRemoved", [second], "CPU"], ["AllBlocksCleared"]]),
        ]
        assert listener.ask_again(2) == told[2:]
        assert listener.ask_again(99) == []
    finally:
        listener.close()
        publisher.stop()


def test_a_listener_hears_what_comes_and_sees_that_it_missed_something() -> None:
    where = config()
    publisher = BlockPublisher(where, PAGE_SIZE, "GPU")
    publisher.put((stored(),))
    early = Listener(where)
    while len(kept := early.ask_again(0)) < 2:  # what the other one misses, however soon it is connected
        assert kept == [(0, [["AllBlocksCleared"]])][: len(kept)]
    early.close()
    listener = Listener(where)
    try:
        number = 0
        while not listener.sub.poll(20):  # until it is connected
            publisher.put((stored(),))
            number += 1
        heard, events = listener.next()
        assert 1 < heard <= 1 + number
        assert events == [["BlockStored", hashes_of(KEYS), None, [5, 6, 7, 8], PAGE_SIZE, None, "GPU", None, None]]
        assert [each for each, _ in listener.ask_again(0)][:2] == [0, 1]
    finally:
        listener.close()
        publisher.stop()


def test_only_so_many_batches_are_kept() -> None:
    where = msgspec.structs.replace(config(), buffer_steps=3)
    publisher = BlockPublisher(where, PAGE_SIZE, "CPU")
    listener = Listener(where)
    try:
        for _ in range(6):
            publisher.put((BlocksForgotten(),))
        told = listener.ask_again(0)
        while told[-1][0] < 6:
            told = listener.ask_again(0)
        assert [number for number, _ in told] == [4, 5, 6]
    finally:
        listener.close()
        publisher.stop()


def test_nonsense_on_the_replay_socket_is_passed_over() -> None:
    where = config()
    publisher = BlockPublisher(where, PAGE_SIZE, "CPU")
    listener = Listener(where)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(where.replay_endpoint or "")
    try:
        for frames in ([b"x"], [b""], [b"", b"123456789"], [b"a" * 100_000, b"b"]):
            stranger.send_multipart(frames)
        assert listener.ask_again(0) == [(0, [["AllBlocksCleared"]])]
    finally:
        context.destroy(linger=0)
        listener.close()
        publisher.stop()


def test_much_nonsense_is_one_warning_and_a_turn_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_link, "_MOST_QUESTIONS", 2)
    where = config()
    publisher = BlockPublisher(where, PAGE_SIZE, "CPU")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(where.replay_endpoint or "")
    try:
        for _ in range(50):
            stranger.send_multipart([b"", b"123456789"])
        stranger.send_multipart([b"", bytes(8)])  # in order: answered behind them, though nothing else wakes the thread
        assert stranger.poll(WAIT_MS)
    finally:
        context.destroy(linger=0)
        publisher.stop()
    assert caplog.text.count("asked for number") == 1


def test_an_address_that_is_taken_is_told() -> None:
    where = config()
    publisher = BlockPublisher(where, PAGE_SIZE, "CPU")
    try:
        with pytest.raises(ConfigError, match="--kv-events-config: cannot bind"):
            BlockPublisher(where, PAGE_SIZE, "CPU")
    finally:
        publisher.stop()
