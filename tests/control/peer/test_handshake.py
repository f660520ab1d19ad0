"""What a frame is, in every state of its peer: each cell of the table, and what comes before it."""

import itertools

import pytest

from deltaserve.control.peer.handshake import NOT_READY, RECEPTIONS, Handshake, Reception, Saying
from deltaserve.control.peer.table import Patience, Peer, PeerState, PeerTable
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import Envelope, Facts, Flush, Heartbeat, Hello, Message

CELLS = list(itertools.product(PeerState, Saying))
US, PEER = PeerName("us"), PeerName("peer")
OURS, BOOT = Boot(100), Boot(10)
HELLO = Hello(role="decode", compat={}, facts=Facts())
SAID: dict[Saying, Message] = {Saying.HELLO: HELLO, Saying.NOT_READY: NOT_READY, Saying.ELSE: Heartbeat()}


def in_state(state: PeerState) -> tuple[Handshake, Peer]:
    handshake = Handshake(PeerTable(US, OURS, Patience(lost_s=5.0, suspect_s=1.5)))
    peer = handshake.table.get(PEER)
    handshake.table.rebooted(peer, BOOT, 0.0)
    peer.hello, peer.state = HELLO, state
    return handshake, peer


def frame(body: Message, src_boot: Boot = BOOT, dst_boot: Boot | None = OURS) -> Envelope:
    return Envelope(src=PEER, src_boot=src_boot, dst_boot=dst_boot, body=body)


@pytest.mark.parametrize(("state", "saying"), CELLS)
def test_every_cell(state: PeerState, saying: Saying) -> None:
    handshake, peer = in_state(state)
    received = handshake.receive(frame(SAID[saying]), 1.0)
    assert received.reception is RECEPTIONS[state][saying]
    assert (received.peer, received.is_new, received.is_gone) == (peer, False, False)
    assert (peer.state, peer.last_heard, handshake.num_ignored) == (state, 1.0, 0)
    owned = received.reception is Reception.CURRENT
    assert owned == (state is PeerState.READY and saying is Saying.ELSE), "only then is it somebody else's business"


@pytest.mark.parametrize(("state", "saying"), CELLS)
def test_a_frame_of_a_new_start_ends_the_former_life(state: PeerState, saying: Saying) -> None:
    handshake, peer = in_state(state)
    received = handshake.receive(frame(SAID[saying], Boot(BOOT + 1)), 1.0)
    assert received.reception is RECEPTIONS[PeerState.UNKNOWN][saying]
    assert (received.is_new, received.former_role, received.is_gone) == (True, "decode", True)
    assert (peer.state, peer.boot, peer.hello) == (PeerState.UNKNOWN, BOOT + 1, None)


@pytest.mark.parametrize(("state", "saying"), CELLS)
def test_a_frame_of_a_start_that_is_over_changes_nothing(state: PeerState, saying: Saying) -> None:
    handshake, peer = in_state(state)
    received = handshake.receive(frame(SAID[saying], Boot(BOOT - 1)), 1.0)
    assert (received.reception, received.is_gone, handshake.num_ignored) == (Reception.STALE, False, 1)
    assert (peer.state, peer.boot, peer.last_heard) == (state, BOOT, 0.0)


@pytest.mark.parametrize(("state", "saying"), CELLS)
@pytest.mark.parametrize("dst_boot", [Boot(OURS - 1), None])
def test_what_was_meant_for_another_start_of_ours(state: PeerState, saying: Saying, dst_boot: Boot | None) -> None:
    """Nothing of it counts but a Hello, which is heard whomever it was meant for."""
    handshake, peer = in_state(state)
    received = handshake.receive(frame(SAID[saying], dst_boot=dst_boot), 1.0)
    is_hello = saying is Saying.HELLO
    assert received.reception is (Reception.HELLO if is_hello else Reception.MISADDRESSED)
    assert (handshake.num_ignored, peer.last_heard) == ((0, 1.0) if is_hello else (1, 0.0))
    assert (peer.state, peer.boot) == (state, BOOT)


def test_the_first_frame_of_a_peer_ends_nothing() -> None:
    handshake = Handshake(PeerTable(US, OURS, Patience(lost_s=5.0, suspect_s=1.5)))
    received = handshake.receive(frame(Flush()), 1.0)
    assert (received.reception, received.is_new, received.is_gone) == (Reception.UNGREETED, True, False)
    assert (received.peer.boot, received.peer.last_heard) == (BOOT, 1.0)


def test_a_frame_says_that_the_connection_had_ended() -> None:
    handshake, peer = in_state(PeerState.READY)
    handshake.table.broke(PEER, 0.5)
    assert handshake.receive(frame(Heartbeat()), 1.0).was_broken
    assert not handshake.receive(frame(Heartbeat()), 1.1).was_broken
    assert peer.broken_since is None
