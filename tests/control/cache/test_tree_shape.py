"""The picture of a tree, against the tree itself: nothing is counted twice, what is left out is counted above it."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.cache.radix import Node, RadixTree
from deltaserve.control.cache.tree_shape import MOST_SEEN, MOST_TOLD, shape_of
from deltaserve.core.ids import Namespace, PageId, Room
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.namespaces import narrowed
from deltaserve.core.wire.messages import TreeNode, TreeShape
from tests.control.cache.toys import ALICE, BOB, keys_of, spell

PAGE_SIZE = 4
WORDS = st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.text("abc", min_size=1, max_size=6)), max_size=20)


def planted(words: list[tuple[Namespace, str]]) -> RadixTree:
    """A tree with one page for each letter of each word, split where words part."""
    tree = RadixTree(PAGE_SIZE, num_pools=1)
    for namespace, word in words:
        tokens = spell(word, PAGE_SIZE)
        keys = keys_of(tokens, PAGE_SIZE, namespace)
        node, end = tree.descend(tree.root(namespace), tokens, keys, len(word))
        if end == len(word):
            continue
        if end < node.end:
            node = tree.split(node, end)
        new = tuple(PageId(page) for page in range(len(word) - end))
        tree.add(node, tokens[end * len(tokens) // len(word) :], keys[end * KEY_BYTES :], (new,))
    return tree


def below(tree: RadixTree) -> Mapping[str, int]:
    """Label of every node that holds pages |-> pages of it and all below it."""
    return {
        node.keys[-KEY_BYTES:][:6].hex(): sum(n.num_pages for n in tree.below(node))
        for node in tree.nodes()
        if node.parent is not None
    }


def inner(shape: TreeShape) -> list[TreeNode]:
    return [node for node in shape.nodes if node.parent is not None]


@given(words=WORDS)
def test_all_of_a_small_tree_is_told(words: list[tuple[Namespace, str]]) -> None:
    tree = planted(words)
    shape = shape_of(tree, 0, (), MOST_TOLD)
    assert (shape.num_seen, shape.num_unseen) == (len(shape.nodes), 0)
    assert {node.label: node.num_below for node in inner(shape)} == below(tree)
    roots = {node.label: node.num_below for node in shape.nodes if node.parent is None}
    assert roots == {space: sum(n.num_pages for n in tree.below(root)) for space, root in tree.roots.items()}


@given(words=WORDS, most=st.integers(0, 12))
def test_what_is_left_out_is_counted_in_what_is_told(words: list[tuple[Namespace, str]], most: int) -> None:
    tree = planted(words)
    whole, part = shape_of(tree, 0, (), MOST_TOLD), shape_of(tree, 0, (), most)
    assert part.nodes == whole.nodes[: len(part.nodes)]
    assert len(part.nodes) == min(most, len(whole.nodes))
    for index, node in enumerate(part.nodes):
        assert node.parent is None or node.parent < index
        shown = sum(other.num_below for other in part.nodes if other.parent == index)
        assert node.num_pages + shown <= node.num_below
    left_out = [node.num_below for node in whole.nodes[len(part.nodes) :]]
    with_siblings = [node.num_below for node in part.nodes]
    assert not left_out or not with_siblings or max(left_out) <= max(with_siblings)


def test_a_look_is_bounded() -> None:
    """The tree has more nodes than are looked at: how many nobody saw is told."""
    tree = RadixTree(PAGE_SIZE, num_pools=1)
    root = tree.root(ALICE)
    for number in range(MOST_SEEN + 10):
        tree.add(root, number.to_bytes(4, "little") * PAGE_SIZE, number.to_bytes(KEY_BYTES, "big"), ((PageId(0),),))
    shape = shape_of(tree, 0, (), 10_000)
    assert (shape.num_seen, shape.num_unseen, len(shape.nodes)) == (MOST_SEEN, 11, MOST_TOLD)
    assert shape.nodes[0].num_below == MOST_SEEN - 1


def test_leases_and_who_has_them() -> None:
    tree = planted([(ALICE, "ab"), (ALICE, "ac"), (BOB, "a")])
    ends = {node.num_pages: node for node in tree.below(tree.root(ALICE)) if not node.children}
    leaf = next(iter(ends.values()))
    rooms = [Room(number.to_bytes(16, "big")) for number in range(12)]
    step: Node | None = leaf
    while step is not None:
        step.locks, step = len(rooms), step.parent
    shape = shape_of(tree, 0, [(leaf, room) for room in rooms], MOST_TOLD)
    leased = [node for node in shape.nodes if node.num_leases]
    assert {node.num_leases for node in leased} == {12}
    assert len(leased) == 3  # the leaf, the page that it shares, and its root
    assert [node.rooms for node in shape.nodes if node.rooms] == [tuple(rooms[:8])]


@pytest.mark.parametrize("salt", ["a secret", ""])
def test_what_a_client_chose_is_not_told(salt: str) -> None:
    tree = planted([(narrowed(ALICE, salt), "ab")])
    (root, _) = shape_of(tree, 0, (), 2).nodes
    assert root.label.startswith("alice ~")
    assert "secret" not in root.label


def test_what_is_leased_or_kept_is_told_before_what_is_large() -> None:
    tree = planted([(ALICE, "abcdef"), (BOB, "a"), (ALICE, "x")])
    (small,) = tree.root(BOB).children.values()
    small.locks = tree.root(BOB).locks = 1
    (kept,) = [node for node in tree.root(ALICE).children.values() if node.num_pages == 1]
    kept.kept = tree.root(ALICE).kept = True
    shape = shape_of(tree, 8, (), 4)
    assert [node.label for node in shape.nodes][:2] == ["alice", "bob"]
    assert [(node.num_pages, node.is_kept, node.num_leases) for node in shape.nodes[2:]] == [
        (1, True, 0),
        (1, False, 1),
    ]
    assert (shape.num_pages, shape.num_seen) == (8, 5)


def test_equal_paths_of_two_tenants_have_unlike_names() -> None:
    labels = [node.label for node in inner(shape_of(planted([(ALICE, "ab"), (BOB, "ab")]), 0, (), 10))]
    assert len(labels) == len(set(labels)) == 2
