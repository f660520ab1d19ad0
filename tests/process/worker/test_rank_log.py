"""The log between ranks: entries come back as they were, and what was dropped, reordered or changed is found."""

import contextlib
import dataclasses
from collections.abc import Iterator
from enum import Enum
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.sched.plan import PlanItem, StepPlan, TokenOf, TokenValues, WorkList
from deltaserve.control.transfer.plane_turns import TransferOrder
from deltaserve.control.transfer.rank_chain import LogEnd, RankLogError
from deltaserve.control.transfer.rank_entries import NEWS, ORDERS, RankNews
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.process.links.rank_link import RankSilent, RankSockets
from deltaserve.process.worker.rank_log import (
    RankChannel,
    StepDone,
    decode_done_step,
    decode_plan,
    encode_done_step,
    encode_plan,
)
from tests.patience import PATIENCE_S

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    str: st.text(max_size=8),
    NoneType: st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the log: dataclasses, structs and named tuples of plain fields."""
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if get_origin(kind) is tuple:
        of = get_args(kind)
        is_run = len(of) == 2 and of[1] is Ellipsis
        return st.lists(values_of(of[0]), max_size=3).map(tuple) if is_run else st.tuples(*map(values_of, of))
    if get_args(kind):
        return st.one_of(*map(values_of, get_args(kind)))
    return st.builds(kind, **{name: values_of(hint) for name, hint in get_type_hints(kind).items()})


@given(st.lists(values_of(TransferOrder), max_size=4))
def test_orders_come_back_as_they_were(orders: list[TransferOrder]) -> None:
    assert ORDERS.decode(ORDERS.encode(orders)) == orders


@given(st.lists(values_of(RankNews), max_size=4))
def test_news_come_back_as_they_were(news: list[RankNews]) -> None:
    assert NEWS.decode(NEWS.encode(news)) == news


PLANS = st.builds(
    StepPlan,
    items=st.lists(values_of(PlanItem), max_size=3).map(tuple),
    decode=st.none(),  # only rank 0 knows what its rows drew
    **{name: values_of(hint) for name, hint in get_type_hints(StepPlan).items() if name not in ("items", "decode")},
)


@given(PLANS)
def test_plans_come_back_as_they_were(plan: StepPlan) -> None:
    items = tuple(dataclasses.replace(item, inputs=TokenValues(b"\1\0\0\0")) for item in plan.items)
    plan = dataclasses.replace(plan, items=items)
    assert decode_plan(encode_plan(plan)) == plan


def test_a_plan_that_means_what_a_row_drew_is_not_sent() -> None:
    item = PlanItem(RowId(0), 1, 1, TokenOf(StepIndex(3)), samples=True)
    with pytest.raises(RankLogError, match="drew in step 3"):
        encode_plan(StepPlan(StepIndex(4), (item,), WorkList(16)))


def test_the_end_of_a_step_comes_back_as_it_was() -> None:
    assert decode_done_step(encode_done_step(StepDone(StepIndex(7)))) == StepDone(StepIndex(7))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_entry_are_one_error(body: bytes) -> None:
    for decode in (ORDERS.decode, NEWS.decode, decode_plan, decode_done_step):
        with contextlib.suppress(RankLogError):
            decode(body)


# ---------------------------------------------------------------- numbers and hashes


class Sides(NamedTuple):
    """Both ends of a log in one process."""

    one: LogEnd
    other: LogEnd


def sides() -> Sides:
    return Sides(LogEnd(), LogEnd())


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=8)), max_size=30))
def test_what_one_side_seals_the_other_opens(entries: list[tuple[bool, bytes]]) -> None:
    one, other = sides()
    for is_ours, body in entries:
        sender, receiver = (one, other) if is_ours else (other, one)
        assert receiver.open(sender.seal(body)) == body
    assert other.open(one.seal(b"")) == b""
    assert other.num_unanswered == 0


def test_entries_count_as_unanswered_until_the_other_side_has_spoken() -> None:
    one, other = sides()
    frames = [one.seal(b"a"), one.seal(b"b")]
    other.open(frames[0])
    assert one.num_unanswered == 2
    one.open(other.seal(b"x"))
    assert one.num_unanswered == 1
    other.open(frames[1])
    one.open(other.seal(b"y"))
    assert one.num_unanswered == 0


@pytest.mark.parametrize(
    ("arriving", "words"),
    [
        ([1], "entry 2 came where entry 1 was due"),
        ([0, 2], "entry 3 came where entry 2 was due"),
        ([1, 0], "entry 2 came where entry 1 was due"),
        ([0, 0], "entry 1 came where entry 2 was due"),
    ],
)
def test_dropped_reordered_and_repeated_entries_are_found(arriving: list[int], words: str) -> None:
    one, other = sides()
    frames = [one.seal(bytes([number])) for number in range(3)]
    with pytest.raises(RankLogError, match=words):
        for number in arriving:
            other.open(frames[number])


@given(st.integers(0, 2**32 - 1), st.integers(1, 255))
def test_a_changed_entry_is_found(where: int, change: int) -> None:
    """Wherever in body or header; what the header says of the other direction is found there, not here."""
    one, other = sides()
    other.open(one.seal(b"first"))
    frame = bytearray(one.seal(b"second"))
    frame[where % len(frame)] ^= change
    with pytest.raises(RankLogError):
        other.open(bytes(frame))


def test_a_log_that_went_another_way_is_found_by_its_hash() -> None:
    """The same last entry after another first one."""
    (one, other), (another, _) = sides(), sides()
    other.open(one.seal(b"first"))
    another.seal(b"another first")
    with pytest.raises(RankLogError, match="entry 2 differs"):
        other.open(another.seal(b"second"))


def test_an_answer_to_another_log_is_found() -> None:
    (one, _), (another, other) = sides(), sides()
    one.seal(b"mine")
    other.open(another.seal(b"not mine"))
    with pytest.raises(RankLogError, match="took an entry 1 that differs"):
        one.open(other.seal(b"done"))


def test_an_answer_to_what_was_never_sent_is_found() -> None:
    (one, _), (another, other) = sides(), sides()
    other.open(another.seal(b"of somebody else"))
    with pytest.raises(RankLogError, match="took an entry 1 that differs"):
        one.open(other.seal(b"done"))


# ---------------------------------------------------------------- over the link


@pytest.fixture
def sockets() -> Iterator[RankSockets]:
    made = RankSockets()
    yield made
    made.close()


@pytest.fixture
def url() -> Iterator[str]:
    """Short: the folders of tests have long names."""
    with TemporaryDirectory(prefix="rank-") as folder:
        yield f"ipc://{folder}/steps"


def test_entries_pass_a_link(url: str, sockets: RankSockets) -> None:
    ours, theirs = RankChannel(sockets.bind(url), PATIENCE_S), RankChannel(sockets.connect(url), PATIENCE_S)
    ours.send(b"plan")
    assert theirs.receive(None) == b"plan"
    theirs.send(b"done")
    assert ours.receive(PATIENCE_S) == b"done"
    assert ours.num_unanswered == 0
    assert ours.receive(0.0) is None
    assert ours.receive(0.0001) is None
    ours.close()
    theirs.close()


def test_a_side_that_is_not_there_takes_nothing_for_ever(url: str, sockets: RankSockets) -> None:
    ours = RankChannel(sockets.bind(url), 0.05)
    with pytest.raises(RankSilent, match=r"took no frame for 0\.05 s"):
        ours.send(b"plan")
    ours.close()


def test_a_folder_with_a_long_name_is_refused(url: str, sockets: RankSockets) -> None:
    with pytest.raises(ConfigError, match="too long for the address of a socket"):
        sockets.bind(url + "x" * 100)


def test_a_folder_that_is_not_there_is_refused(url: str, sockets: RankSockets) -> None:
    with pytest.raises(ConfigError, match="no socket can be made"):
        sockets.bind(f"{url}/steps")
