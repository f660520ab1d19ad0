"""Each breach the books of a prefix cache can show is found."""

from collections.abc import Callable

import pytest

from deltaserve.control.cache.eviction import LruOrder
from deltaserve.control.cache.radix import Node
from deltaserve.core.errors import IntegrityError
from tests.control.cache.toys import ALICE, BOB, Toy, taken


def leaf(toy: Toy, word: str) -> Node:
    """The node in which `word` ends."""
    tokens, keys = toy.text(word)
    return toy.cache._tree.descend(toy.cache._tree.root(ALICE), tokens, keys, len(word))[0]


def steal_a_lock(toy: Toy) -> None:
    leaf(toy, "abxy").locks += 1


def lose_a_lease(toy: Toy) -> None:
    toy.cache._leases.clear()


def miscount_evictable(toy: Toy) -> None:
    toy.cache._num_evictable += 1


def miscount_protected(toy: Toy) -> None:
    toy.cache._num_protected -= 1


def forget_an_unlocked_node(toy: Toy) -> None:
    toy.cache._order.remove(leaf(toy, "abxy"))


def _lru_of(toy: Toy) -> LruOrder:
    order = toy.cache._order._rest
    assert isinstance(order, LruOrder)
    return order


def age_a_parent(toy: Toy) -> None:
    _lru_of(toy)._order.move_to_end(leaf(toy, "pq"), last=False)


def free_a_tree_page(toy: Toy) -> None:
    toy.pools[1].evict(leaf(toy, "abxy").pages[1][:1])


def cache_a_page_behind_its_back(toy: Toy) -> None:
    toy.pools[0].cache(taken(toy.pools[0].allocate(1)))


def put_a_page_in_two_places(toy: Toy) -> None:
    leaf(toy, "abxy").pages = (leaf(toy, "abcd").pages[0], leaf(toy, "abxy").pages[1])


def shorten_one_pool(toy: Toy) -> None:
    node = leaf(toy, "abxy")
    node.pages = (node.pages[0], node.pages[1][:1])


def shorten_tokens(toy: Toy) -> None:
    leaf(toy, "abxy").tokens = b""


def shorten_keys(toy: Toy) -> None:
    leaf(toy, "abxy").keys = b""


def change_first_page(toy: Toy) -> None:
    node = leaf(toy, "abxy")
    node.tokens = bytes(len(node.tokens))


def cut_the_parent_link(toy: Toy) -> None:
    leaf(toy, "abxy").parent = toy.cache._tree.roots[ALICE]


def keep_an_empty_root(toy: Toy) -> None:
    toy.cache._tree.root(BOB)


def corrupt_a_pool(toy: Toy) -> None:
    toy.pools[0]._free.give_back([next(iter(toy.pools[0]._free))])


def miscount_a_window(toy: Toy) -> None:
    toy.cache._tails[0].num_evictable -= 1


def lose_a_window_page(toy: Toy) -> None:
    node = leaf(toy, "abxy")
    toy.pools[1].evict(node.pages[1][:1])
    node.set_pages(1, node.pages[1][1:])


def lose_a_leased_window_page(toy: Toy) -> None:
    node = leaf(toy, "abcd")
    toy.pools[1].evict(node.pages[1][:1])
    node.set_pages(1, node.pages[1][1:])
    toy.cache._tails[0].num_held -= 1


def steal_a_window_lock(toy: Toy) -> None:
    node = leaf(toy, "abcd")
    (start,) = toy.cache._tails[0].locks[node]
    toy.cache._tails[0].locks[node][start] += 1


def forget_a_window_in_the_order(toy: Toy) -> None:
    toy.cache._tails[0]._order.pop(leaf(toy, "abxy"))


def sever_half(toy: Toy) -> None:
    leaf(toy, "abxy").severed = True


def keep_a_severed_node_unleased(toy: Toy) -> None:
    toy.cache._tree.sever(leaf(toy, "abxy"))


BREACHES = [
    miscount_a_window,
    lose_a_window_page,
    lose_a_leased_window_page,
    steal_a_window_lock,
    forget_a_window_in_the_order,
    sever_half,
    keep_a_severed_node_unleased,
    steal_a_lock,
    lose_a_lease,
    miscount_evictable,
    miscount_protected,
    forget_an_unlocked_node,
    age_a_parent,
    free_a_tree_page,
    cache_a_page_behind_its_back,
    put_a_page_in_two_places,
    shorten_one_pool,
    shorten_tokens,
    shorten_keys,
    change_first_page,
    cut_the_parent_link,
    keep_an_empty_root,
    corrupt_a_pool,
]


@pytest.mark.parametrize("corrupt", BREACHES)
def test_check_integrity_sees(corrupt: Callable[[Toy], None]) -> None:
    toy = Toy(4)
    toy.put("abxy", "pqrs", "pqtu")
    held = toy.hold("abcd")
    toy.cache.check_integrity()
    corrupt(toy)
    with pytest.raises(IntegrityError):
        toy.cache.check_integrity()
    assert held.live
