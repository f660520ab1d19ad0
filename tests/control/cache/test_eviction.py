"""LruOrder: a node stands after every node below it."""

from deltaserve.control.cache.eviction import LruOrder
from deltaserve.control.cache.radix import Node
from tests.control.cache.toys import ALICE


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
