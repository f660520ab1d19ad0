"""Every cell of the peer table, and what boots say about frames."""

import itertools

import pytest

from deltaserve.control.peer.table import PEER_TRANSITIONS, Patience, PeerEvent, PeerState, PeerTable
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import Facts, Heartbeat, Hello

OURS, EARLIER, THEIRS, LATER = Boot(1), Boot(6), Boot(7), Boot(8)
PEER = PeerName("prefill-0")
HELLO = Hello(role="prefill", compat={"dtype": "float32"}, facts=Facts())

PATHS: dict[PeerState, tuple[PeerEvent, ...]] = {
    PeerState.UNKNOWN: (),
    PeerState.GREETING: (PeerEvent.GREET,),
    PeerState.READY: (PeerEvent.HELLO,),
    PeerState.REFUSED: (PeerEvent.REFUSE,),
    PeerState.LOST: (PeerEvent.HELLO, PeerEvent.LOSE),
}
"""How each state is reached from UNKNOWN."""


def table_in(state: PeerState) -> PeerTable:
    table = PeerTable(PeerName("decode-0"), OURS, Patience(lost_s=5.0, suspect_s=1.5))
    for event in PATHS[state]:
        table.move(table.get(PEER), event)
    return table


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PeerState, PeerEvent)))
def test_every_cell(state: PeerState, event: PeerEvent) -> None:
    table = table_in(state)
    peer = table.get(PEER)
    assert peer.state is state
    target = PEER_TRANSITIONS[state].get(event)
    if target is None:
        with pytest.raises(StateError, match=rf"prefill-0: {event.value} while {state.value}"):
            table.move(peer, event)
        assert peer.state is state
    else:
        table.move(peer, event)
        assert peer.state is target


def test_a_hello_makes_ready_from_everywhere() -> None:
    assert {row[PeerEvent.HELLO] for row in PEER_TRANSITIONS.values()} == {PeerState.READY}


def test_nobody_can_be_lost_who_was_not_there() -> None:
    without = {state for state, row in PEER_TRANSITIONS.items() if PeerEvent.LOSE not in row}
    assert without == {PeerState.UNKNOWN, PeerState.LOST}


def test_a_reboot_ends_all_that_was_known() -> None:
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    peer.hello = HELLO
    table.move(peer, PeerEvent.HELLO)
    table.rebooted(peer, LATER, 2.0)
    assert (peer.state.value, peer.boot) == ("unknown", LATER)
    assert peer.hello is None, "facts die with their boot"


def test_a_later_boot_is_believed_at_once_and_an_earlier_one_is_over() -> None:
    """An old life's frame may come late, over another connection."""
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    assert [table.is_over(peer, boot, 1.01) for boot in (EARLIER, THEIRS, LATER)] == [True, False, False]
    table.rebooted(peer, LATER, 1.02)
    assert table.is_over(peer, THEIRS, 1.03)


def test_an_earlier_boot_is_believed_when_the_present_one_was_silent_for_long() -> None:
    """Its clock was set back between two starts, and nobody knew the number of the one before."""
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    assert table.is_over(peer, EARLIER, 5.99)
    assert not table.is_over(peer, EARLIER, 6.0)
    table.rebooted(peer, EARLIER, 6.0)
    assert not table.is_over(peer, EARLIER, 7.0)


def test_who_is_known_to_be_dead_stays_so_with_all_before() -> None:
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    for _ in range(2):
        table.bury(peer)
        assert (peer.boot, peer.over) == (None, THEIRS)
    assert all(table.is_over(peer, boot, 100.0) for boot in (EARLIER, THEIRS))
    assert not table.is_over(peer, LATER, 2.0)
    table.rebooted(peer, LATER, 2.0)
    table.bury(peer)
    assert peer.over == LATER


@pytest.mark.parametrize("state", PeerState)
def test_only_live_peers_can_fall_silent(state: PeerState) -> None:
    table = table_in(state)
    is_live = state in (PeerState.READY, PeerState.GREETING)
    assert table.silent(4.9) == []
    assert [p.name for p in table.silent(5.0)] == ([PEER] if is_live else [])
    table.broke(PEER, 1.0)
    assert table.silent(2.4) == []
    assert [p.name for p in table.silent(2.5)] == ([PEER] if is_live else [])


def test_a_frame_heals_a_broken_connection() -> None:
    table = table_in(PeerState.READY)
    table.broke(PEER, 1.0)
    table.heard(table.get(PEER), 2.0)
    assert table.silent(6.9) == []
    assert [p.name for p in table.silent(7.0)] == [PEER]


def test_connections_that_end_at_once_are_no_sign_of_life() -> None:
    """Somebody accepts and resets, every fifth of a second, as a proxy does whose other end is gone."""
    table = table_in(PeerState.READY)
    for tenth in range(10, 25):
        table.broke(PEER, tenth / 10)
    assert [p.name for p in table.silent(2.5)] == [PEER]
    table.heard(table.get(PEER), 2.6)
    table.broke(PEER, 3.0)
    assert table.silent(4.4) == []


def test_time_in_which_this_process_stood_still_counts_against_nobody() -> None:
    table = table_in(PeerState.READY)
    table.broke(PEER, 1.0)
    table.discount_pause(10.0, 11.5)
    assert table.silent(12.4) == []
    assert [p.name for p in table.silent(12.5)] == [PEER]
    table.rebooted(table.get(PEER), THEIRS, 12.0)
    table.discount_pause(10.0, 13.0)
    assert table.lost_at(table.get(PEER)) == 18.0, "nobody was heard of in the future"


def test_a_sealed_frame_names_both_boots() -> None:
    table = table_in(PeerState.UNKNOWN)
    assert table.seal(PEER, HELLO).dst_boot is None
    table.rebooted(table.get(PEER), THEIRS, 1.0)
    envelope = table.seal(PEER, Heartbeat(), closed_below=5)
    assert (envelope.src, envelope.src_boot, envelope.dst_boot) == ("decode-0", OURS, THEIRS)
    assert envelope.closed_below == 5


def test_a_forgotten_peer_is_a_stranger_again() -> None:
    table = table_in(PeerState.READY)
    table.rebooted(table.get(PEER), THEIRS, 1.0)
    table.forget(PEER)
    assert list(table) == []
    assert (table.get(PEER).state, table.get(PEER).boot) == (PeerState.UNKNOWN, None)
