"""Worker links over real sockets: who gets what, and what happens to bytes and peers that are not as they should be."""

import random
import socket as sockets
import threading
import time

import pytest
import zmq

from deltaserve.core.errors import ConfigError, FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import Cancel, Offer, PeerAddress
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from tests.descriptors import no_more_files
from tests.patience import PATIENCE_S
from tests.process.links.frames import (
    DECODE,
    PREFILL,
    MakeLinks,
    address,
    connect,
    envelope,
    is_silent,
    receive,
    send_garbage,
)

FRONT = PeerName("front")


def raw_dealer(port: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A peer that sends whatever it likes."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return context, dealer


# ---------------------------------------------------------------- routing


def test_frames_go_both_ways_over_one_dialled_connection(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    assert listener.send(DECODE, envelope(PREFILL))
    assert [e.src for e in receive(dialer)] == [PREFILL]


def test_replies_find_each_of_many_names(make_links: MakeLinks) -> None:
    listener = make_links()
    port = listener.listen("127.0.0.1", 0)
    names = [PeerName(f"decode-{i}") for i in range(8)]
    dialers = {name: make_links() for name in names}
    for name, links in dialers.items():
        links.dial(address(PREFILL, port))
        links.send(PREFILL, envelope(name))
    assert {e.src for e in receive(listener, len(names))} == set(names)
    for i, name in enumerate(names):
        assert listener.send(name, envelope(PREFILL, boot=i))
    assert [receive(dialers[name])[0].src_boot for name in names] == list(range(8))


def test_frames_of_one_link_keep_their_order(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    for i in range(600):
        assert dialer.send(PREFILL, envelope(DECODE, boot=i))
    assert [e.src_boot for e in receive(listener, 600)] == list(range(600))


def test_a_frame_to_nobody_is_dropped_and_counted(make_links: MakeLinks) -> None:
    links = make_links()
    links.listen("127.0.0.1", 0)
    assert not links.send(DECODE, envelope(PREFILL))
    assert links.stats.dropped_no_link == 1


def test_dialling_again_changes_nothing_and_a_new_address_replaces(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    other = make_links()
    before = dialer.sockets()
    dialer.dial(address(PREFILL, listener.port))
    assert dialer.sockets() == before
    dialer.dial(address(PREFILL, other.listen("127.0.0.1", 0)))
    assert len(dialer.sockets()) == 1
    dialer.send(PREFILL, envelope(DECODE, boot=7))
    assert receive(other)[0].src_boot == 7


def test_after_hang_up_the_last_frame_still_leaves_and_nothing_else(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    dialer.send(PREFILL, envelope(DECODE, boot=9))
    dialer.hang_up(PREFILL)
    assert receive(listener)[0].src_boot == 9
    assert dialer.sockets() == []
    assert not dialer.send(PREFILL, envelope(DECODE))


def test_a_listener_forgets_a_name_on_hang_up_until_it_is_heard_again(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    listener.hang_up(DECODE)
    assert not listener.send(DECODE, envelope(PREFILL))
    dialer.send(PREFILL, envelope(DECODE))
    receive(listener)
    assert listener.send(DECODE, envelope(PREFILL))


def test_a_late_frame_of_a_connection_that_ends_does_not_take_the_replies_along(make_links: MakeLinks) -> None:
    """As when a process dials anew: what its former connection had accepted still arrives, and then that one ends."""
    listener, present = connect(make_links)
    former = make_links()
    former.dial(address(PREFILL, listener.port))
    former.send(PREFILL, envelope(DECODE, boot=2))
    assert receive(listener)[0].src_boot == 2
    former.close(linger_ms=100)
    deadline = time.monotonic() + PATIENCE_S
    while is_silent(present, 0.02):
        assert listener.send(DECODE, envelope(PREFILL))
        assert time.monotonic() < deadline


def test_the_latest_connection_of_a_name_gets_the_replies(make_links: MakeLinks) -> None:
    listener, first = connect(make_links)
    second = make_links()
    second.dial(address(PREFILL, listener.port))
    second.send(PREFILL, envelope(DECODE, boot=2))
    receive(listener)
    listener.send(DECODE, envelope(PREFILL, boot=5))
    assert receive(second)[0].src_boot == 5
    assert is_silent(first, 0.05)


def test_a_dead_connection_is_forgotten(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    dialer.close()
    while listener.send(DECODE, envelope(PREFILL)):
        listener.wait(0.02)
    assert listener.stats.dropped_no_link == 1


def test_a_dialer_finds_a_listener_that_restarts_on_its_port(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    port = listener.port
    listener.close()
    reborn = make_links()
    assert reborn.listen("127.0.0.1", port) == port
    dialer.send(PREFILL, envelope(DECODE))
    receive(reborn)
    assert reborn.send(DECODE, envelope(PREFILL, boot=2))
    assert receive(dialer)[0].src_boot == 2


def test_frames_sent_before_the_peer_listens_arrive_when_it_does(make_links: MakeLinks) -> None:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dialer, listener = make_links(), make_links()
    dialer.dial(address(PREFILL, port))
    assert dialer.send(PREFILL, envelope(DECODE, boot=3))
    listener.listen("127.0.0.1", port)
    assert receive(listener)[0].src_boot == 3


def test_a_taken_port_is_a_config_error(make_links: MakeLinks) -> None:
    first = make_links()
    port = first.listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        make_links().listen("127.0.0.1", port)


@pytest.mark.parametrize("url", ["ipc:///tmp/x", "tcp://nowhere", "tcp://127.0.0.1:99999", "", "http://a:1"])
def test_an_address_that_cannot_be_dialled_is_counted(make_links: MakeLinks, url: str) -> None:
    links = make_links()
    links.dial(PeerAddress(name=PREFILL, url=url))
    assert links.sockets() == []
    assert links.stats.refused_dials == 1


# ---------------------------------------------------------------- bad bytes


def good_frame(boot: int) -> bytes:
    return encode(envelope("stranger", boot=boot))


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [good_frame(1)[:-1]],
        [good_frame(1), b"more"],
        [good_frame(1)[:-1] + bytes([good_frame(1)[-1] ^ 1])],
        [b"dS\xff" + good_frame(1)[3:]],
    ],
)
def test_a_malformed_frame_is_counted_and_the_next_good_one_read(make_links: MakeLinks, parts: list[bytes]) -> None:
    listener = make_links()
    context, dealer = raw_dealer(listener.listen("127.0.0.1", 0))
    dealer.send_multipart(parts)
    dealer.send(good_frame(8))
    assert [e.src_boot for e in receive(listener)] == [8]
    assert listener.stats.malformed == 1
    context.destroy()


def test_three_malformed_frames_silence_that_connection_and_no_other(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    context, dealer = raw_dealer(listener.port)
    for _ in range(3):
        dealer.send(b"junk")
    dealer.send(good_frame(8))
    assert is_silent(listener)
    assert (listener.stats.malformed, listener.stats.ignored) == (3, 1)
    dialer.send(PREFILL, envelope(DECODE, boot=4))
    assert receive(listener)[0].src_boot == 4
    context.destroy()


def test_a_dialled_peer_with_another_name_is_not_heard(make_links: MakeLinks, caplog: pytest.LogCaptureFixture) -> None:
    listener, dialer = connect(make_links)
    assert listener.send(DECODE, envelope(FRONT))
    assert listener.send(DECODE, envelope(PREFILL, boot=6))
    assert [e.src_boot for e in receive(dialer)] == [6]
    assert dialer.stats.malformed == 1
    assert "the peer dialled as prefill-0 calls itself 'front': name it so in --workers" in caplog.text
    assert dialer.complaints == {}
    assert listener.send(DECODE, envelope(FRONT))
    assert is_silent(dialer)
    assert "it calls itself 'front'" in dialer.complaints[PREFILL]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(64), bytes(4096), b"\xff"]
)
def test_bytes_of_another_protocol_disturb_nobody(make_links: MakeLinks, data: bytes) -> None:
    listener, dialer = connect(make_links)
    with sockets.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(data)
        assert is_silent(listener, 0.1)
    dialer.send(PREFILL, envelope(DECODE, boot=4))
    assert receive(listener)[0].src_boot == 4
    assert listener.stats.malformed == 0


def test_an_oversize_frame_never_arrives_and_the_link_comes_back(make_links: MakeLinks) -> None:
    listener = make_links(limits=LinkLimits(max_frame_bytes=4096))
    context, dealer = raw_dealer(listener.listen("127.0.0.1", 0))
    dealer.send(bytes(5000))
    assert is_silent(listener)
    dealer.send(good_frame(8))
    assert [e.src_boot for e in receive(listener)] == [8]
    assert listener.stats.malformed == 0
    context.destroy()


def test_a_message_beyond_its_own_limit_is_not_sent(make_links: MakeLinks) -> None:
    _, dialer = connect(make_links)
    too_long = Cancel(room=bytes(2 << 20), reason=FailReason.CANCELLED)
    assert not dialer.send(PREFILL, envelope(DECODE, too_long))
    assert dialer.stats.dropped_oversize == 1


# ---------------------------------------------------------------- bounds


def test_a_full_outbox_drops_and_never_blocks(make_links: MakeLinks) -> None:
    with sockets.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        dialer = make_links(limits=LinkLimits(outbox_frames=10))
        dialer.dial(address(PREFILL, deaf.getsockname()[1]))
        accepted = sum(dialer.send(PREFILL, envelope(DECODE)) for _ in range(100))
    assert accepted == 10
    assert dialer.stats.dropped_full == 90


def dialled_garbler(dialer: Links) -> int:
    """The port at which the dialer has met garbage, and where nobody listens now."""
    with sockets.create_server(("127.0.0.1", 0)) as garbler:
        port = garbler.getsockname()[1]
        dialer.dial(address(PREFILL, port))
        send_garbage(garbler)
    return int(port)


def test_a_link_that_spoke_garbage_once_is_dialled_again(make_links: MakeLinks) -> None:
    """One bit flipped on the wire must not end a link for the life of the process."""
    dialer, listener = make_links(limits=LinkLimits(redial_s=0.05)), make_links()
    port = dialled_garbler(dialer)
    listener.listen("127.0.0.1", port)
    deadline = time.monotonic() + PATIENCE_S
    while is_silent(listener, 0.02):
        assert time.monotonic() < deadline, "the link stays dead"
        dialer.send(PREFILL, envelope(DECODE))
    assert dialer.stats.redialled >= 1
    assert listener.send(DECODE, envelope(PREFILL))
    assert [e.src for e in receive(dialer)] == [PREFILL]


def test_a_link_for_which_there_is_no_descriptor_is_dialled_again_later(make_links: MakeLinks) -> None:
    dialer, listener = make_links(limits=LinkLimits(redial_s=0.05)), make_links()
    port = dialled_garbler(dialer)
    deadline = time.monotonic() + PATIENCE_S
    with no_more_files():
        while dialer.stats.refused_dials == 0:
            assert time.monotonic() < deadline, "never dialled again"
            dialer.send(PREFILL, envelope(DECODE))
    assert dialer.stats.redialled == 0
    listener.listen("127.0.0.1", port)
    while is_silent(listener, 0.02):
        assert time.monotonic() < deadline, "the link is lost"
        dialer.send(PREFILL, envelope(DECODE))


def big_offer(num_bytes: int) -> Offer:
    return Offer(
        room=bytes(16),
        attempt=1,
        prompt=bytes(num_bytes),
        prompt_len=1,
        namespace="",
        sampling=SamplingParams(max_tokens=1, seed=0),
        remaining_ms=1,
    )


def test_large_frames_are_bounded_by_their_bytes(make_links: MakeLinks) -> None:
    with sockets.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        dialer = make_links(limits=LinkLimits(outbox_bytes=3 << 20))
        dialer.dial(address(PREFILL, deaf.getsockname()[1]))
        accepted = sum(dialer.send(PREFILL, envelope(DECODE, big_offer(1 << 20))) for _ in range(10))
        assert dialer.send(PREFILL, envelope(DECODE))
    assert accepted == 2
    assert dialer.stats.dropped_full == 8


def test_one_large_frame_passes_an_empty_outbox_and_room_comes_back(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links, limits=LinkLimits(outbox_bytes=1 << 20))
    for i, size in enumerate((8 << 20, 1 << 20) * 3):
        # ZeroMQ says a frame is gone some time after the other side has it: only then is there room.
        deadline = time.monotonic() + PATIENCE_S
        while not dialer.send(PREFILL, envelope(DECODE, big_offer(size), boot=i)):
            assert time.monotonic() < deadline
            dialer.wait(0.01)
        assert receive(listener)[0].src_boot == i


# ---------------------------------------------------------------- keys


def test_members_of_a_cluster_talk(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links, security=LinkSecurity.from_cluster_key(b"k" * 32))
    assert listener.send(DECODE, envelope(PREFILL, boot=3))
    assert receive(dialer)[0].src_boot == 3


def stranger_with_server_key(port: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """Knows the listener's public key, but not the client key."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = LinkSecurity.from_cluster_key(b"k" * 32).server.public
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return context, dealer


def test_who_lacks_the_cluster_key_is_not_heard(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links, security=LinkSecurity.from_cluster_key(b"k" * 32))
    other, plain = make_links(LinkSecurity.from_cluster_key(b"x" * 32)), make_links()
    for links in (other, plain):
        links.dial(address(PREFILL, listener.port))
        links.send(PREFILL, envelope("intruder"))
    context, dealer = stranger_with_server_key(listener.port)
    dealer.send(good_frame(1))
    assert is_silent(listener, 0.5)
    dialer.send(PREFILL, envelope(DECODE, boot=4))
    assert receive(listener)[0].src_boot == 4
    context.destroy()


def test_a_member_does_not_talk_to_a_listener_without_the_key(make_links: MakeLinks) -> None:
    impostor = make_links()
    dialer = make_links(LinkSecurity.from_cluster_key(b"k" * 32))
    dialer.dial(address(PREFILL, impostor.listen("127.0.0.1", 0)))
    dialer.send(PREFILL, envelope(DECODE))
    assert is_silent(impostor, 0.5)


def test_a_short_cluster_key_is_refused_and_secrets_are_not_shown() -> None:
    with pytest.raises(ValueError, match="32"):
        LinkSecurity.from_cluster_key(b"k" * 31)
    security = LinkSecurity.from_cluster_key(b"k" * 100)
    assert security.server.secret.decode() not in repr(security)
    assert security == LinkSecurity.from_cluster_key(b"k" * 100)
    assert security != LinkSecurity.from_cluster_key(b"k" * 99)


# ---------------------------------------------------------------- closing


def test_closing_ends_beside_peers_that_end(make_links: MakeLinks) -> None:
    """With a linger time without end at `bind`, libzmq did not return from about every tenth of these."""
    rng = random.Random(0)
    for _ in range(100):
        links = make_links()
        peers = [PeerName(f"p-{index}") for index in range(30)]
        strangers = _Strangers(links.listen("127.0.0.1", 0), peers)
        heard = {each.src for each in receive(links, len(peers))}
        assert heard == set(peers)
        end = threading.Thread(target=strangers.end)
        end.start()
        time.sleep(rng.uniform(0, 0.0003))
        for peer in peers * 3:
            links.send(peer, envelope(DECODE))
        closing = threading.Thread(target=links.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        end.join()


class _Strangers:
    """Connections in a context of their own, each of which has said who it is."""

    def __init__(self, port: int, names: list[PeerName]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers = [self._context.socket(zmq.DEALER) for _ in names]
        for name, dealer in zip(names, self._dealers, strict=True):
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(encode(envelope(name)))

    def end(self) -> None:
        for dealer in self._dealers:
            dealer.close()
        self._context.term()
