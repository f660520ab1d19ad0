"""What one tenant hints costs no other one a page, and nobody who hints nothing is served otherwise than before."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.cache.eviction import KvEviction
from deltaserve.core.ids import Namespace
from deltaserve.core.keys import key_at
from deltaserve.core.namespaces import narrowed
from tests.control.cache.toys import ALICE, BOB, Toy

NUM_PAGES = 12
ASKED_WORDS = st.text("ab", min_size=1, max_size=6)
Ask = tuple[Namespace, str, bool]
"""Who asks, for which word, and whether it is done with it: some come back all the same."""
ASKS = st.lists(st.tuples(st.sampled_from([ALICE, BOB]), ASKED_WORDS, st.booleans()), max_size=60)


class Served:
    """A tree that requests of two tenants go through, one after the other. Its nodes have one page each: what is used
    is told from what is not page by page."""

    def __init__(self, policy: KvEviction, num_pages: int = NUM_PAGES) -> None:
        self.toy = Toy(page_size=1, pool_pages=(num_pages,), eviction=policy)

    def serve(self, namespace: Namespace, word: str, *, is_done: bool = False, seconds: float = 0.0) -> int:
        """Returns the hits. It gets its memory, whatever was hinted."""
        toy = self.toy
        match = toy.match(word, namespace)
        lease = toy.cache.lease(match)
        missing = len(word) - match.num_pages
        toy.cache.evict([max(0, missing - toy.pools[0].num_free)])
        beside = [toy.lease(word[: match.num_pages], namespace)]
        for end in range(match.num_pages + 1, len(word) + 1):
            lease = toy.insert(lease, word[:end]).lease
            beside.append(toy.lease(word[:end], namespace))  # a page that is leased to its end does not grow
        for other in beside:
            toy.cache.release(other)
        if seconds:
            toy.cache.retain(lease, seconds)
        (toy.cache.retire if is_done else toy.cache.release)(lease)
        toy.cache.check_integrity()
        return match.num_pages

    def pages_of(self, namespace: Namespace) -> set[bytes]:
        """Token paths that are cached."""
        return {path for owner, path in self.toy.contents() if owner == namespace}

    def kept_of(self, namespace: Namespace) -> dict[bytes, float]:
        """Last page keys of what is kept, and until when."""
        kept = self.toy.cache._kept._ends.until
        return {node.keys: until for node, until in kept.items() if node.namespace == namespace}


def replay(asks: Sequence[Ask], hinting: Mapping[Namespace, bool], policy: KvEviction) -> list[tuple[int, set[bytes]]]:
    """After each request: its hits, and what Bob has cached."""
    served = Served(policy)
    return [
        (served.serve(name, word, is_done=is_done and hinting[name]), served.pages_of(BOB))
        for name, word, is_done in asks
    ]


@given(asks=ASKS)
def test_hints_of_one_tenant_take_no_page_of_another(asks: list[Ask]) -> None:
    """Under lru: what is evicted of Bob then has as many pages behind it in the order as without Alice's hints."""
    plain = replay(asks, {ALICE: False, BOB: False}, KvEviction.LRU)
    hinted = replay(asks, {ALICE: True, BOB: False}, KvEviction.LRU)
    for (name, _, _), (hits, before), (new_hits, after) in zip(asks, plain, hinted, strict=True):
        assert before <= after
        assert name != BOB or new_hits >= hits


@given(asks=ASKS, policy=st.sampled_from(KvEviction))
def test_who_hints_nothing_is_given_up_in_the_order_of_the_policy(asks: list[Ask], policy: KvEviction) -> None:
    """The order without a hint is the policy's own, node by node."""
    served = Served(policy)
    for name, word, _ in asks:
        served.serve(name, word, is_done=False)
        order = served.toy.cache._order
        assert list(order) == list(order._rest)


@given(
    asks=st.lists(st.tuples(st.sampled_from([ALICE, BOB]), ASKED_WORDS, st.integers(1, 5)), max_size=60),
    policy=st.sampled_from(KvEviction),
)
def test_what_is_kept_now_is_kept_at_the_cost_of_its_own_tenant(
    asks: list[tuple[Namespace, str, int]], policy: KvEviction
) -> None:
    """Whatever it keeps already, and nothing that another one keeps ends earlier."""
    served = Served(policy)
    for name, word, seconds in asks:
        other = BOB if name == ALICE else ALICE
        before = served.kept_of(other)
        served.serve(name, word, seconds=float(seconds))
        assert served.kept_of(other) == before
        _, keys = served.toy.text(word, name)
        share = {key_at(keys, index) for index in range(min(len(word), NUM_PAGES // 4))}
        assert share <= served.kept_of(name).keys()


SALTED_ASKS = st.lists(
    st.tuples(st.sampled_from([ALICE, BOB]), st.sampled_from(["", "1", "2", "3"]), ASKED_WORDS),
    max_size=60,
)


@given(asks=SALTED_ASKS)
def test_who_keeps_all_it_can_leaves_three_quarters_to_others(asks: list[tuple[Namespace, str, str]]) -> None:
    """Under lru Bob, who keeps nothing, has whatever he would have in a pool of three quarters where nobody does; and
    all of the pool when he needs it. Alice keeps under as many salts as she likes."""
    plain, keeping = Served(KvEviction.LRU, NUM_PAGES - NUM_PAGES // 4), Served(KvEviction.LRU)
    for name, salt, word in asks:
        namespace = narrowed(name, salt) if salt and name == ALICE else name
        plain.serve(namespace, word)
        keeping.serve(namespace, word, seconds=60.0 if name == ALICE else 0.0)
        assert keeping.toy.cache.num_retained <= NUM_PAGES // 4
        assert plain.pages_of(BOB) <= keeping.pages_of(BOB)
    word = "".join(chr(ord("A") + i) for i in range(NUM_PAGES))
    assert keeping.serve(BOB, word) == 0
    assert len(keeping.pages_of(BOB)) == NUM_PAGES


TENANTS = [ALICE, Namespace("carol"), Namespace("dave"), Namespace("erin")]
"""Who keeps all it can."""


@given(
    asks=st.lists(st.tuples(st.sampled_from([BOB, *TENANTS]), ASKED_WORDS), max_size=60),
    policy=st.sampled_from(KvEviction),
)
def test_many_who_keep_all_they_can_leave_half_to_others(asks: list[tuple[Namespace, str]], policy: KvEviction) -> None:
    """None of them has more than a quarter of the pool to itself. Bob, who keeps nothing, has all of it when he needs
    it, and under lru whatever he would have in a pool of half the size where nobody keeps."""
    plain, keeping = Served(policy, NUM_PAGES // 2), Served(policy)
    for name, word in asks:
        plain.serve(name, word)
        keeping.serve(name, word, seconds=0.0 if name == BOB else 60.0)
        assert keeping.toy.cache.num_retained <= NUM_PAGES // 2
        assert all(len(keeping.kept_of(tenant)) <= NUM_PAGES // 4 for tenant in TENANTS)
        assert policy is not KvEviction.LRU or plain.pages_of(BOB) <= keeping.pages_of(BOB)
    word = "".join(chr(ord("A") + i) for i in range(NUM_PAGES))
    assert keeping.serve(BOB, word) == 0
    assert len(keeping.pages_of(BOB)) == NUM_PAGES
