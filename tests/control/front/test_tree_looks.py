"""Whom a front asks what its tree holds, when all have answered, and whose answer is shown."""

from deltaserve.control.front.events import FrontAction, TreesTold
from deltaserve.control.peer.link import SendFrame
from deltaserve.core.wire.messages import AskTree, TreeNode, TreeShape
from tests.control.front.cluster import Cluster


def shape(num_pages: int) -> TreeShape:
    root = TreeNode(None, "tenant", 0, num_pages, 0, False, ())
    return TreeShape(page_size=4, num_pages=num_pages, nodes=(root,), num_seen=1, num_unseen=0)


def look(cluster: Cluster) -> list[FrontAction]:
    """Somebody looks."""
    actions = cluster.front.ask_trees(cluster.now)
    cluster.actions += actions
    return actions


def asked(actions: list[FrontAction]) -> list[str]:
    frames = [action for action in actions if isinstance(action, SendFrame)]
    assert all(isinstance(frame.envelope.body, AskTree) for frame in frames)
    return [frame.peer for frame in frames]


def num_told(cluster: Cluster) -> int:
    return sum(isinstance(action, TreesTold) for action in cluster.actions)


def seen(cluster: Cluster) -> dict[str, int | None]:
    trees = cluster.front.trees(cluster.now)
    return {tree.name: None if tree.shape is None else tree.shape.nodes[0].num_below for tree in trees}


def test_it_is_told_when_all_have_answered() -> None:
    cluster = Cluster().all_ready()
    assert asked(look(cluster)) == ["prefill-0", "decode-0"]
    cluster.say("decode-0", shape(3))
    assert (num_told(cluster), seen(cluster)) == (0, {"prefill-0": None, "decode-0": 3})
    cluster.say("prefill-0", shape(5))
    assert (num_told(cluster), seen(cluster)) == (1, {"prefill-0": 5, "decode-0": 3})


def test_however_many_look_a_worker_is_asked_at_a_bounded_rate() -> None:
    cluster = Cluster().all_ready()
    look(cluster)
    assert asked(look(cluster)) == []
    for name in ("prefill-0", "decode-0"):
        cluster.say(name, shape(1))
    assert look(cluster) == [TreesTold()]  # what was told a moment ago will do
    cluster.now += 0.3
    assert asked(look(cluster)) == ["prefill-0", "decode-0"]
    assert seen(cluster) == {"prefill-0": 1, "decode-0": 1}  # until they answer
    assert [round(tree.age_s, 3) for tree in cluster.front.trees(cluster.now)] == [0.3, 0.3]


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    cluster = Cluster().all_ready()
    look(cluster)
    cluster.die("prefill-0")
    cluster.say("decode-0", shape(3))
    assert (num_told(cluster), seen(cluster)) == (1, {"decode-0": 3})


def test_without_workers_it_is_told_at_once() -> None:
    cluster = Cluster()
    assert look(cluster) == [TreesTold()]
    assert seen(cluster) == {}


def test_a_new_life_has_another_tree() -> None:
    cluster = Cluster().all_ready()
    look(cluster)
    for name in ("prefill-0", "decode-0"):
        cluster.say(name, shape(9))
    cluster.die("decode-0")
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert seen(cluster) == {"prefill-0": 9, "decode-0": None}
    assert asked(look(cluster)) == ["prefill-0", "decode-0"]
    cluster.say("decode-0", shape(2))
    assert seen(cluster) == {"prefill-0": 9, "decode-0": 2}


def test_what_nobody_asked_for_is_not_kept() -> None:
    cluster = Cluster().all_ready()
    cluster.say("decode-0", shape(3))
    assert seen(cluster) == {"prefill-0": None, "decode-0": None}
    assert num_told(cluster) == 0
