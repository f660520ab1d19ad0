"""A look at a tree, while it is used: it tells who leases what, and changes nothing."""

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import AskTree, TreeShape
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, slow_fabric

HEAD = list(range(1, 17))


def told(duo: Duo, name: PeerName) -> TreeShape:
    """What the worker answers."""
    before = len(duo.frames)
    duo.inject(name, FRONT, AskTree(max_nodes=64))
    duo.run(0.1)
    (shape,) = [
        frame.body for src, _, frame in duo.frames[before:] if src == name and isinstance(frame.body, TreeShape)
    ]
    return shape


@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_a_quiet_tree(name: PeerName) -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    duo.serve([*HEAD[:8], *range(50, 58)], 1)
    shape = told(duo, name)
    assert shape.page_size == duo.shape.page_size
    assert shape.nodes[0].num_below == duo.cached_pages(name) > 4
    assert not any(node.num_leases or node.rooms for node in shape.nodes)
    assert shape == told(duo, name)


def test_who_leases_what() -> None:
    duo = Duo(fabric=slow_fabric(0.3))
    duo.serve(HEAD, 1)
    asked = duo.ask([*HEAD, 40, 41, 42, 43, 44], 6)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.ticket is not None)
    shapes = {name: told(duo, name) for name in (DECODE, PREFILL)}
    for shape in shapes.values():
        (node,) = [node for node in shape.nodes if node.rooms]
        assert node.rooms == (asked.room,)
        assert node.num_leases == 1
    duo.settle(asked)
    assert not any(node.rooms for name in (DECODE, PREFILL) for node in told(duo, name).nodes)


@pytest.mark.parametrize(("dst", "src"), [(DECODE, PREFILL), (PREFILL, DECODE)])
def test_only_a_front_may_look(dst: PeerName, src: PeerName) -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    duo.inject(dst, src, AskTree(max_nodes=64))
    duo.run(0.2)
    assert not [frame for _, _, frame in duo.frames if isinstance(frame.body, TreeShape)]
