"""Every cell of the peer table, and what boots say about frames."""

import itertools

import pytest

from deltaserve.control.peer.table import (
    PEER_TRANSITIONS,
    Patience,
    PeerEvent,
    PeerState,
    PeerTable,
    Verdict,
)
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import Envelope, Facts, Heartbeat, Hello

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


def frame(src_boot: Boot, dst_boot: Boot | None = OURS) -> Envelope:
    return Envelope(src=PEER, src_boot=src_boot, dst_boot=dst_boot, body=Heartbeat())


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


def test_an_unknown_boot_is_new_and_a_current_frame_counts_as_a_heartbeat() -> None:
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    assert table.judge(frame(THEIRS), 3.0) is Verdict.NEW_BOOT
    assert (peer.boot, peer.last_heard) == (None, 0.0)
    table.rebooted(peer, THEIRS, 3.0)
    assert table.judge(frame(THEIRS), 4.0) is Verdict.CURRENT
    assert peer.last_heard == 4.0


def test_a_frame_for_an_earlier_life_of_ours_is_no_heartbeat() -> None:
    table = table_in(PeerState.UNKNOWN)
    table.rebooted(table.get(PEER), THEIRS, 3.0)
    assert table.judge(frame(THEIRS, Boot(99)), 4.0) is Verdict.WRONG_ADDRESSEE
    assert table.get(PEER).last_heard == 3.0


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
    assert table.judge(frame(EARLIER), 1.01) is Verdict.DEAD_BOOT
    assert table.judge(frame(EARLIER, None), 1.01) is Verdict.DEAD_BOOT
    assert table.judge(frame(LATER), 1.01) is Verdict.NEW_BOOT
    assert table.judge(frame(THEIRS), 1.01) is Verdict.CURRENT
    table.rebooted(peer, LATER, 1.02)
    assert table.judge(frame(THEIRS), 1.03) is Verdict.DEAD_BOOT


def test_an_earlier_boot_is_believed_when_the_present_one_was_silent_for_long() -> None:
    """Its clock was set back between two starts, and nobody knew the number of the one before."""
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    assert table.judge(frame(EARLIER), 5.99) is Verdict.DEAD_BOOT
    assert table.judge(frame(EARLIER), 6.0) is Verdict.NEW_BOOT
    table.rebooted(peer, EARLIER, 6.0)
    assert table.judge(frame(EARLIER), 7.0) is Verdict.CURRENT


def test_who_is_known_to_be_dead_stays_so_with_all_before() -> None:
    table = table_in(PeerState.UNKNOWN)
    peer = table.get(PEER)
    table.rebooted(peer, THEIRS, 1.0)
    for _ in range(2):
        table.bury(peer)
        assert (peer.boot, peer.over) == (None, THEIRS)
    for boot in (EARLIER, THEIRS):
        assert table.judge(frame(boot), 100.0) is Verdict.DEAD_BOOT
    assert table.judge(frame(LATER), 2.0) is Verdict.NEW_BOOT
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
    table.get(PEER).boot = THEIRS
    table.broke(PEER, 1.0)
    table.judge(frame(THEIRS), 2.0)
    assert table.silent(6.9) == []
    assert [p.name for p in table.silent(7.0)] == [PEER]


def test_connections_that_end_at_once_are_no_sign_of_life() -> None:
    """Somebody accepts and resets, every fifth of a second, as a proxy does whose other end is gone."""
    table = table_in(PeerState.READY)
    table.get(PEER).boot = THEIRS
    for tenth in range(10, 25):
        table.broke(PEER, tenth / 10)
    assert [p.name for p in table.silent(2.5)] == [PEER]
    table.judge(frame(THEIRS), 2.6)
    table.broke(PEER, 3.0)
    assert table.silent(4.4) == []


def test_time_in_which_this_process_stood_still_counts_against_nobody() -> None:
    table = table_in(PeerState.READY)
    table.broke(PEER, 1.0)
    table.discount_pause(10.0, 11.5)
    assert table.silent(12.4) == []
    assert [p.name for p in table.silent(12.5)] == [PEER]
    table.judge(frame(THEIRS), 12.0)
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
    assert table.get(PEER).state is PeerState.UNKNOWN
    assert table.judge(frame(THEIRS), 2.0) is Verdict.NEW_BOOT
