"""Shape of the tree: moves that would tear it are refused."""

import pytest

from deltaserve.control.cache.radix import Node, RadixTree
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PageId
from tests.control.cache.toys import ALICE, BOB, keys_of, spell

PAGE_SIZE = 4


def grown(tree: RadixTree, parent: Node, word: str, first_page: int = 0) -> Node:
    """Add `word` below `parent`; keys are those of the word alone."""
    tokens = spell(word, PAGE_SIZE)
    pages = tuple(PageId(first_page + index) for index in range(len(word)))
    return tree.add(parent, tokens, keys_of(tokens, PAGE_SIZE, ALICE), (pages,))


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, num_pools=1)


def test_split_keeps_the_lower_part_as_the_same_object(tree: RadixTree) -> None:
    node = grown(tree, tree.root(ALICE), "abcd")
    node_id = node.id
    upper = tree.split(node, 1)
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 4)
    assert node.id == node_id != upper.id
    assert upper.pages + node.pages == ((0,), (1, 2, 3))
    assert upper.tokens + node.tokens == spell("abcd", PAGE_SIZE)
    assert list(tree.nodes()) == [tree.root(ALICE), upper, node]


@pytest.mark.parametrize("index", [0, 4, 5])
def test_split_needs_a_page_on_both_sides(tree: RadixTree, index: int) -> None:
    node = grown(tree, tree.root(ALICE), "abcd")
    with pytest.raises(StateError):
        tree.split(node, index)


def test_a_root_is_not_split_extended_or_removed(tree: RadixTree) -> None:
    root = tree.root(ALICE)
    with pytest.raises(StateError):
        tree.split(root, 0)
    with pytest.raises(StateError):
        tree.extend(root, b"", b"", ((),))
    with pytest.raises(StateError):
        tree.remove(root)


def test_only_leaves_are_extended_trimmed_and_removed(tree: RadixTree) -> None:
    node = grown(tree, tree.root(ALICE), "ab")
    grown(tree, node, "cd", 2)
    with pytest.raises(StateError):
        tree.extend(node, b"", b"", ((),))
    with pytest.raises(StateError):
        tree.trim(node, 1)
    with pytest.raises(StateError):
        tree.remove(node)


def test_trim_leaves_at_least_one_page(tree: RadixTree) -> None:
    node = grown(tree, tree.root(ALICE), "ab")
    with pytest.raises(StateError):
        tree.trim(node, 0)
    tree.trim(node, 1)
    assert (node.num_pages, node.pages, node.tokens) == (1, ((0,),), spell("a", PAGE_SIZE))


def test_siblings_differ_in_their_first_page(tree: RadixTree) -> None:
    root = tree.root(ALICE)
    node = grown(tree, root, "ab")
    with pytest.raises(StateError):
        grown(tree, root, "ac")
    assert list(root.children.values()) == [node]


def test_descend_goes_on_from_where_it_is_told(tree: RadixTree) -> None:
    tokens = spell("abcdef", PAGE_SIZE)
    keys = keys_of(tokens, PAGE_SIZE, ALICE)
    root = tree.root(ALICE)
    upper = tree.add(root, tokens[:32], keys[:32], ((PageId(0), PageId(1)),))
    lower = tree.add(upper, tokens[32:64], keys[32:64], ((PageId(2), PageId(3)),))
    assert tree.descend(root, tokens, keys, 6) == (lower, 4)
    assert tree.descend(upper, tokens, keys, 6) == (lower, 4)
    assert tree.descend(upper, tokens, keys, 3) == (lower, 3)
    assert tree.descend(upper, tokens, keys, 2) == (upper, 2)
    assert tree.descend(tree.root(BOB), tokens, keys, 6) == (tree.root(BOB), 0)


def test_a_root_is_forgotten_only_when_empty_and_unlocked(tree: RadixTree) -> None:
    root = tree.root(ALICE)
    node = grown(tree, root, "a")
    tree.forget_if_empty(root)
    assert tree.root(ALICE) is root
    root.locks = 1
    assert tree.remove(node) is root
    tree.forget_if_empty(root)
    assert tree.root(ALICE) is root
    root.locks = 0
    tree.forget_if_empty(root)
    assert tree.roots == {}
