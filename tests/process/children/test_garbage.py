"""`keep_loaded`: full collections come soon and look at nothing that was loaded. In a process of its own each time."""

import subprocess
import sys

_PROGRAM = """
import gc, sys
from deltaserve.process.children.garbage import keep_loaded

class Node:
    pass

loaded = [Node() for _ in range(400_000)]
gc.collect()  # as one while it was loaded
if sys.argv[1] == "kept":
    keep_loaded()
    assert gc.get_freeze_count() > len(loaded)
    assert not any(isinstance(each, Node) for each in gc.get_objects())
before, num_made, recent = gc.get_stats()[2]["collections"], 0, []
while gc.get_stats()[2]["collections"] == before:
    node = Node()
    node.itself = node  # only a collection frees it
    recent.append(node)
    if len(recent) > 20_000:
        recent.clear()
    num_made += 1
print(num_made)
"""


def _made_until_a_full_collection(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_without_it_garbage_waits_for_a_quarter_of_what_was_loaded() -> None:
    assert _made_until_a_full_collection("left") >= 100_000


def test_what_was_loaded_is_kept_out_and_full_collections_come_soon() -> None:
    assert _made_until_a_full_collection("kept") < 100_000
