"""What the workers' trees hold, as lines: the largest prefixes, indented below those that they continue."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST_LINES = 24
"""Prefixes shown of one worker."""
_BAR_LEN = 32
_NAME_LEN = 44
Node = Mapping[str, Any]


def tree_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """`content`: what /admin/trees answers."""
    for worker in content["workers"]:
        nodes: Sequence[Node] | None = worker["nodes"]
        if nodes is None:
            yield f"{worker['name']} ({worker['role']}): has not told yet"
            continue
        total = worker["pages"]
        unseen = f", {worker['nodes_unseen']} more were not looked at" if worker["nodes_unseen"] else ""
        yield (
            f"{worker['name']} ({worker['role']}): {total} pages of {worker['page_size']} tokens in "
            f"{worker['nodes_seen']} prefixes{unseen}"
        )
        yield from _nodes(nodes[:_MOST_LINES], total)


def _nodes(nodes: Sequence[Node], total: int) -> Iterator[str]:
    below: dict[int | None, list[int]] = {}
    for index, node in enumerate(nodes):
        below.setdefault(node["parent"], []).append(index)
    waiting = [(index, 1) for index in reversed(below.get(None, []))]
    while waiting:
        index, depth = waiting.pop()
        yield _line(nodes[index], depth, total)
        waiting += [(child, depth + 1) for child in reversed(below.get(index, []))]


def _line(node: Node, depth: int, total: int) -> str:
    share = node["pages_below"] / total if total else 0.0
    bar = "#" * max(int(node["pages_below"] > 0), round(_BAR_LEN * share))
    name = f"{'  ' * depth}{node['label']}"[:_NAME_LEN]
    about = [f"{node['leases']} leases"] if node["leases"] else []
    about += ["kept"] if node["kept"] else []
    about += [f"rooms {', '.join(room[:8] for room in node['rooms'])}"] if node["rooms"] else []
    return f"{name:<{_NAME_LEN}} {node['pages_below']:>8}  {bar:<{_BAR_LEN}}  {', '.join(about)}".rstrip()
