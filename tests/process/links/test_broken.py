"""Connections that end: whoever dialled them is told."""

import time

from deltaserve.core.ids import PeerName
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.links import Links
from tests.patience import PATIENCE_S
from tests.process.links.frames import DECODE, PREFILL, MakeLinks, address, connect, envelope, receive


def until_broken(links: Links) -> list[PeerName]:
    deadline = time.monotonic() + PATIENCE_S
    while not (broken := links.take_broken()):
        assert time.monotonic() < deadline
        links.wait(0.1)
    return broken


def test_an_ended_connection_is_told_once_and_to_whoever_dialled_it(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    assert dialer.take_broken() == []
    port = listener.port
    listener.close()
    assert until_broken(dialer) == [PREFILL]
    dialer.wait(0.5)  # while it dials in vain
    assert dialer.take_broken() == []
    again = make_links()
    again.listen("127.0.0.1", port)
    dialer.send(PREFILL, envelope(DECODE))
    assert [e.src for e in receive(again)] == [DECODE]
    again.close()
    assert until_broken(dialer) == [PREFILL]
    assert listener.take_broken() == again.take_broken() == []


def test_as_many_peers_as_names_are_remembered_can_be_dialled_and_more_are_refused(make_links: MakeLinks) -> None:
    """A peer takes three ZeroMQ sockets, of which a context has 1023 unless told otherwise."""
    limits = LinkLimits(max_names=100)
    links = make_links(limits=limits)
    for number in range(2 * limits.max_names):
        links.dial(address(f"prefill-{number}", 20_000 + number))
        assert number >= limits.max_names or links.stats.refused_dials == 0
    assert links.stats.refused_dials > 0
    num_dialled = len(links.monitors())
    assert num_dialled + links.stats.refused_dials == 2 * limits.max_names
    assert links.take_broken() == []


def test_a_peer_that_is_given_up_is_not_told_of(make_links: MakeLinks) -> None:
    listener, dialer = connect(make_links)
    dialer.hang_up(PREFILL)
    listener.close()
    dialer.wait(0.2)
    assert dialer.take_broken() == []
