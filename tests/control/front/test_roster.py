"""Who is told to join and to leave, by what every source of workers says."""

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.front.events import Member
from deltaserve.control.front.roster import CONFIGURED, Changes, Roster
from deltaserve.core.ids import PeerName, Role


def _member(name: str, place: int = 0) -> Member:
    return Member(PeerName(name), Role.DECODE, f"tcp://{name}:{place}")


def test_a_list_that_changes_lets_workers_join_move_and_leave() -> None:
    roster = Roster([_member("a")])
    assert roster.update("file", [_member("b"), _member("c")]) == Changes((_member("b"), _member("c")))
    assert roster.update("file", [_member("b"), _member("c")]) == Changes()
    assert roster.update("file", [_member("c", 1)]) == Changes((_member("c", 1),), (PeerName("b"),))


def test_who_is_named_elsewhere_stays() -> None:
    roster = Roster([_member("a")])
    roster.update("file", [_member("a"), _member("b")])
    roster.update("dns", [_member("b")])
    assert roster.update("file", []) == Changes()
    assert roster.update("dns", []) == Changes(leaves=(PeerName("b"),))


def test_an_operators_word_counts_more_than_a_list() -> None:
    roster = Roster([])
    roster.update("file", [_member("a")])
    assert roster.send_away(PeerName("a")) == Changes(leaves=(PeerName("a"),))
    assert roster.update("file", [_member("a", 1)]) == Changes()
    assert roster.join(_member("a", 1)) == Changes((_member("a", 1),))
    assert roster.update("file", []) == Changes()
    assert roster.send_away(PeerName("a")) == Changes(leaves=(PeerName("a"),))
    assert roster.update("file", [_member("a")]) == Changes((_member("a"),)), "a new entry brings it back"


_NAMES = st.sampled_from("abc")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("file", "dns", CONFIGURED)), st.frozensets(_NAMES)),
        st.tuples(st.sampled_from(("join", "leave")), _NAMES),
    )
)


@given(_STEPS)
def test_what_was_told_comes_to_what_is_named(steps: list[tuple[str, str | frozenset[str]]]) -> None:
    roster, there = Roster([]), set[str]()
    named: dict[str, frozenset[str]] = {}
    operator, away = set[str](), set[str]()
    for source, what in steps:
        if isinstance(what, frozenset):
            changes = roster.update(source, [_member(name) for name in sorted(what)])
            named[source] = what
        elif source == "join":
            changes = roster.join(_member(what))
            operator.add(what)
            away.discard(what)
        else:
            changes = roster.send_away(PeerName(what))
            operator.discard(what)
            away.add(what)
        there = there - set(changes.leaves) | {member.name for member in changes.joins}
        away &= set().union(*named.values())
        assert there == set().union(operator, *named.values()) - away
