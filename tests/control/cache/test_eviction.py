"""Orders of eviction: a node stands after every node below it; what was used again outlives what was not."""

import random

import pytest

from deltaserve.control.cache.eviction import KvEviction, LruOrder
from deltaserve.control.cache.radix import Node
from deltaserve.core.ids import Namespace
from deltaserve.core.lifetime import KEEP_ALL
from deltaserve.core.namespaces import narrowed
from tests.control.cache.toys import ALICE, BOB, STATE, Toy, window


def family() -> tuple[Node, Node, Node, Node]:
    """root <- parent <- (left, right), each of one page."""
    root = Node(1, ALICE, None, b"", b"", ((),))
    parent = Node(2, ALICE, root, b"p", bytes(16), ((),))
    return root, parent, Node(3, ALICE, parent, b"l", bytes(16), ((),)), Node(4, ALICE, parent, b"r", bytes(16), ((),))


def test_order_is_that_of_use() -> None:
    _, parent, left, right = family()
    order = LruOrder()
    assert order.oldest() is None
    for node in (left, right, parent):
        order.add(node)
    assert list(order) == [left, right, parent]
    order.touch_path(left)
    assert list(order) == [right, left, parent]
    assert order.oldest() is right
    order.remove(right)
    assert (order.oldest(), len(list(order))) == (left, 2)


def test_touching_a_parent_leaves_its_children_older() -> None:
    _, parent, left, right = family()
    order = LruOrder()
    for node in (left, right, parent):
        order.add(node)
    order.touch_path(parent)
    assert list(order) == [left, right, parent]


def test_locked_ancestors_are_skipped() -> None:
    root, parent, left, right = family()
    root.locks = parent.locks = 1
    order = LruOrder()
    order.add(left)
    order.add(right)
    order.touch_path(left)
    assert list(order) == [right, left]
    order.touch_path(parent)
    order.touch_path(root)
    assert list(order) == [right, left]


def store(toy: Toy, word: str) -> str:
    """A request computes the word behind what is cached of it, and ends; that part."""
    match = toy.match(word)
    lease = toy.cache.lease(match)
    missing = len(word) - match.num_pages
    toy.cache.evict([max(0, missing - toy.pools[0].num_free)])
    tokens, keys = toy.text(word)
    insertion = toy.cache.insert(lease, ALICE, tokens, keys, toy.allocate(missing))
    toy.cache.release(insertion.lease)
    toy.cache.check_integrity()
    return word[: match.num_pages]


def toy_of(policy: KvEviction, num_pages: int) -> Toy:
    return Toy(pool_pages=(num_pages,), eviction=policy)


@pytest.mark.parametrize(("policy", "hit"), [(KvEviction.LRU, ""), (KvEviction.SLRU, "abcd")])
def test_prompts_that_never_come_again_do_not_evict_what_two_requests_used(policy: KvEviction, hit: str) -> None:
    toy = toy_of(policy, 20)
    store(toy, "abcd")
    assert store(toy, "abcd") == "abcd"
    for word in ("efghi", "jklmn", "opqrs", "tuvwx"):
        store(toy, word)
    assert toy.hit("abcd") == hit


def test_the_shared_part_alone_is_protected() -> None:
    """Two prompts with one beginning: what follows it was used once each."""
    toy = toy_of(KvEviction.SLRU, 12)
    store(toy, "abcd")
    store(toy, "abef")
    store(toy, "ghijklmnop")
    assert (toy.hit("abcd"), toy.hit("abef")) == ("ab", "ab")


def test_new_conversations_live_until_their_second_turn() -> None:
    """A pool full of conversations that went on once, and then never: four fifths of it may stay theirs."""
    toy = toy_of(KvEviction.SLRU, 20)
    for word in ("abcd", "efgh", "ijkl", "mnop", "qrst"):
        store(toy, word)
        store(toy, word)
    store(toy, "uvwx")
    assert store(toy, "uvwxyz") == "uvwx"
    assert toy.hit("abcd") == ""


def test_a_protected_node_is_cut_where_little_else_is_left() -> None:
    """Cutting a node makes nobody's share larger: what is demoted then would be the part above the cut one."""
    toy = toy_of(KvEviction.SLRU, 40)
    store(toy, "abcdefghijk")
    store(toy, "ABCDEFGHIJKLMNOPQRST")
    for word in ("abcd", "abcdefghijk"):
        toy.cache.release(toy.cache.lease(toy.match(word)))
    toy.cache.evict([20])
    lease = toy.cache.lease(toy.match("abcdefghi"))
    toy.cache.check_integrity()
    toy.cache.release(lease)
    toy.cache.check_integrity()


def done(toy: Toy, word: str) -> int:
    """As `store`, of a conversation that is over; how many pages were brought forward."""
    lease = toy.cache.lease(toy.match(word))
    tokens, keys = toy.text(word)
    insertion = toy.cache.insert(lease, ALICE, tokens, keys, toy.allocate(len(word) - lease.num_pages))
    num_pages = toy.cache.retire(insertion.lease)
    toy.cache.check_integrity()
    return num_pages


@pytest.mark.parametrize("policy", KvEviction)
def test_what_nobody_comes_back_to_goes_first(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    store(toy, "abcd")
    assert done(toy, "efgh") == 4
    toy.cache.evict([3])
    assert (toy.hit("abcd"), toy.hit("efgh")) == ("abcd", "e")


@pytest.mark.parametrize("policy", KvEviction)
def test_a_conversation_of_several_turns_goes_first_as_a_whole(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    store(toy, "wxyz")
    store(toy, "abcd")
    store(toy, "abcdef")
    assert done(toy, "abcdefgh") == 8
    toy.cache.evict([8])
    assert (toy.hit("wxyz"), toy.hit("abcd")) == ("wxyz", "")


@pytest.mark.parametrize("policy", KvEviction)
def test_what_others_use_or_have_used_stays(policy: KvEviction) -> None:
    """Be it that the other path is still there, was evicted, or is only leased."""
    toy = toy_of(policy, 20)
    store(toy, "abcd")
    assert done(toy, "abef") == 2
    assert done(toy, "abcd") == 2
    toy.cache.evict([4])
    assert toy.hit("abcd") == "ab"
    assert done(toy, "abgh") == 2
    reader = toy.lease("abgh")
    assert toy.cache.retire(toy.lease("abgh")) == 0
    assert toy.cache.retire(reader) == 2


def test_two_that_computed_the_same_at_a_time_share_it() -> None:
    toy = toy_of(KvEviction.LRU, 20)
    first, second = (toy.cache.empty_lease(ALICE) for _ in range(2))
    first = toy.insert(first, "abcd").lease
    second = toy.insert(second, "abcd").lease
    toy.cache.release(first)
    assert toy.cache.retire(second) == 0


@pytest.mark.parametrize("policy", KvEviction)
def test_a_match_takes_a_branch_back(policy: KvEviction) -> None:
    """Where it is matched in part, the rest still goes first."""
    toy = toy_of(policy, 20)
    done(toy, "abcd")
    store(toy, "efgh")
    toy.cache.match(ALICE, *toy.text("abcd"))
    toy.cache.check_integrity()
    toy.cache.evict([4])
    assert (toy.hit("abcd"), toy.hit("efgh")) == ("abcd", "")
    done(toy, "ijklmn")
    toy.cache.release(toy.cache.lease(toy.match("ijkl")))
    toy.cache.check_integrity()
    toy.cache.evict([2])
    assert (toy.hit("ijklmn"), toy.hit("abcd")) == ("ijkl", "abcd")


def test_states_and_windows_of_a_branch_go_first_as_well() -> None:
    toy = Toy(pool_pages=(20, 9, 3), retentions=(KEEP_ALL, window(2), STATE))
    for word in ("abcd", "efgh"):
        lease = toy.cache.insert(toy.cache.empty_lease(ALICE), ALICE, *toy.text(word), toy.take(4, 2, 1)).lease
        (toy.cache.retire if word == "efgh" else toy.cache.release)(lease)
    toy.cache.evict([0, 2, 1])
    toy.cache.check_integrity()
    assert (toy.hit("abcd"), toy.hit("efgh")) == ("abcd", "")


def room_of(toy: Toy, namespace: Namespace) -> int:
    """Pages that a conversation may keep."""
    return toy.cache.may_retain(namespace)


def kept(toy: Toy, word: str, seconds: float, namespace: Namespace = ALICE) -> int:
    """As `store`, of a conversation that goes on within so long; how many of its pages are kept."""
    lease = toy.cache.lease(toy.match(word, namespace))
    tokens, keys = toy.text(word, namespace)
    lease = toy.cache.insert(lease, namespace, tokens, keys, toy.allocate(len(word) - lease.num_pages)).lease
    num_pages = toy.cache.retain(lease, seconds)
    toy.cache.release(lease)
    toy.cache.check_integrity()
    return num_pages


@pytest.mark.parametrize("policy", KvEviction)
def test_what_is_kept_goes_last_until_its_time_is_over(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    assert kept(toy, "abcd", 5.0) == 4
    store(toy, "efgh")
    toy.cache.evict([3])
    assert (toy.hit("abcd"), toy.hit("efgh")) == ("abcd", "e")
    store(toy, "efgh")
    toy.cache.tell_time(4.9)
    assert toy.cache.num_retained == 4
    toy.cache.tell_time(5.0)
    toy.cache.check_integrity()
    assert toy.cache.num_retained == 0
    toy.cache.release(toy.cache.lease(toy.match("efgh")))
    toy.cache.evict([3])
    assert (toy.hit("abcd"), toy.hit("efgh")) == ("a", "efgh")


@pytest.mark.parametrize("policy", KvEviction)
def test_memory_that_is_needed_is_had_of_what_is_kept(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    kept(toy, "abcd", 5.0)
    assert toy.cache.evict([2]) == (2,)
    assert (toy.hit("abcd"), toy.cache.num_retained) == ("ab", 2)
    toy.cache.check_integrity()


@pytest.mark.parametrize("policy", KvEviction)
def test_a_tenant_keeps_a_quarter_and_all_of_them_half(policy: KvEviction) -> None:
    """What is kept of a path is its beginning."""
    toy = toy_of(policy, 20)
    carol = Namespace("carol")
    assert kept(toy, "abcdefg", 9.0) == 5
    assert (room_of(toy, ALICE), room_of(toy, BOB), room_of(toy, carol)) == (5, 5, 5)
    assert kept(toy, "abcdef", 5.0, BOB) == 5
    assert (room_of(toy, ALICE), room_of(toy, BOB), room_of(toy, carol)) == (5, 5, 0)
    assert kept(toy, "abc", 5.0, carol) == 0
    assert toy.cache.num_retained == 10
    toy.cache.tell_time(5.0)
    toy.cache.check_integrity()
    assert (toy.cache.num_retained, room_of(toy, carol)) == (5, 5)


@pytest.mark.parametrize("policy", KvEviction)
def test_what_ends_first_makes_way_for_what_is_kept_now(policy: KvEviction) -> None:
    """As much of it as has to, from its end on; what others keep stays."""
    toy = toy_of(policy, 40)
    for word, seconds, namespace in (("abcd", 9.0, ALICE), ("efgh", 5.0, ALICE), ("abcdef", 1.0, BOB)):
        assert kept(toy, word, seconds, namespace) == len(word)
    assert kept(toy, "ijkl", 3.0) == 4
    assert toy.cache.num_retained == 16
    toy.cache.evict([2])
    assert [toy.hit(word) for word in ("abcd", "efgh", "ijkl")] == ["abcd", "ef", "ijkl"]
    assert toy.hit("abcdef", BOB) == "abcdef"


@pytest.mark.parametrize("policy", KvEviction)
def test_what_is_kept_now_does_not_make_way_for_its_own_end(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    assert kept(toy, "ab", 9.0) == 2
    assert kept(toy, "xy", 5.0) == 2
    assert kept(toy, "xyzabc", 3.0) == 5
    toy.cache.tell_time(4.0)
    assert toy.cache.num_retained == 2, "its beginning was kept for longer"
    assert kept(toy, "abxyz", 3.0) == 5
    toy.cache.tell_time(7.0)
    toy.cache.check_integrity()
    assert toy.cache.num_retained == 0


@pytest.mark.parametrize("policy", KvEviction)
def test_of_a_tree_that_is_kept_the_branches_make_way_first(policy: KvEviction) -> None:
    toy = toy_of(policy, 28)
    for word in ("abcd", "abce", "abcf"):
        kept(toy, word, 5.0)
    assert toy.cache.num_retained == 6
    assert kept(toy, "xyz", 1.0) == 3
    assert toy.cache.num_retained == 7
    toy.cache.evict([2])
    assert toy.hit("abc") == "abc"


@pytest.mark.parametrize("policy", KvEviction)
def test_salts_do_not_multiply_what_a_tenant_keeps(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    one, other = narrowed(ALICE, "1"), narrowed(narrowed(ALICE, "1"), "2")
    assert kept(toy, "abc", 5.0, one) == 3
    assert kept(toy, "abcd", 5.0, other) == 4
    assert toy.cache.num_retained == 5
    assert room_of(toy, BOB) == room_of(toy, narrowed(BOB, "1")) == 5
    toy.cache.tell_time(5.0)
    assert (toy.cache.num_retained, toy.cache._kept._of) == (0, {})


@pytest.mark.parametrize("policy", KvEviction)
def test_who_is_done_keeps_nothing(policy: KvEviction) -> None:
    toy = toy_of(policy, 20)
    kept(toy, "abcd", 5.0)
    store(toy, "wxyz")
    assert done(toy, "abcdef") == 6
    assert toy.cache.num_retained == 0
    toy.cache.evict([6])
    assert (toy.hit("wxyz"), toy.hit("abcdef")) == ("wxyz", "")


@pytest.mark.parametrize("policy", KvEviction)
@pytest.mark.parametrize("seed", range(5))
def test_an_order_holds_exactly_what_is_unlocked_and_keeps_the_law(policy: KvEviction, seed: int) -> None:
    """Words of few letters share much; leases come and go across each other. The cache recounts after each."""
    draw, toy = random.Random(seed), toy_of(policy, 30)
    leases = []
    for now in range(300):
        toy.cache.tell_time(float(now))
        word = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 9)))
        namespace = draw.choice((ALICE, BOB))
        match draw.randrange(6):
            case 0:
                leases.append(toy.cache.lease(toy.match(word, namespace)))
            case 1 if leases:
                toy.cache.release(leases.pop(draw.randrange(len(leases))))
            case 2 if toy.pools[0].num_free + toy.cache.evictable_pages(0) >= 8:
                store(toy, word)
            case 3 if leases:
                toy.cache.retire(leases.pop(draw.randrange(len(leases))))
            case 4 if leases:
                lease = leases[draw.randrange(len(leases))]
                assert toy.cache.retain(lease, draw.uniform(0, 40.0)) <= lease.num_pages
            case _:
                toy.cache.evict([draw.randrange(4)])
        toy.cache.check_integrity()
    for lease in leases:
        toy.cache.release(lease)
    toy.cache.clear()
    assert toy.pools[0].num_free == 30
