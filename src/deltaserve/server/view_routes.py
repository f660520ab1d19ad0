"""Routes for whoever looks at a server: what its trees hold, what its requests do. No text of any request is told."""

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.control.front.client import WorkerTree
from deltaserve.core.wire.messages import TreeNode
from deltaserve.server.api_errors import ApiError, excerpt, invalid
from deltaserve.server.front import Front
from deltaserve.server.observe import MAX_REMEMBERED
from deltaserve.server.replies import json_reply

_MOST_LISTED = 50


async def trees(front: Front, request: Request) -> Response:
    """GET /admin/trees: per worker the largest prefixes of its tree, by their hashes, and who leases them."""
    return json_reply({"workers": [_tree(tree) for tree in await front.engine.trees()]})


def _tree(tree: WorkerTree) -> dict[str, object]:
    """`nodes` is null while the worker, which is there, has not answered."""
    shape = tree.shape
    worker: dict[str, object] = {"name": tree.name, "role": tree.role}
    if shape is None:
        return {**worker, "nodes": None}
    return {
        **worker,
        "age_s": round(tree.age_s, 3),
        "page_size": shape.page_size,
        "pages": shape.num_pages,
        "nodes_seen": shape.num_seen,
        "nodes_unseen": shape.num_unseen,
        "nodes": [_node(node) for node in shape.nodes],
    }


def _node(node: TreeNode) -> dict[str, object]:
    return {
        "parent": node.parent,
        "label": node.label,
        "pages": node.num_pages,
        "pages_below": node.num_below,
        "leases": node.num_leases,
        "kept": node.is_kept,
        "rooms": [room.hex() for room in node.rooms],
    }


async def requests(front: Front, request: Request) -> Response:
    """GET /admin/requests: those inside, oldest first, and those that ended, latest first; at most `limit` of each."""
    most = _limit(request.query_params.get("limit"))
    return json_reply({"running": front.recorder.running(most), "recent": front.recorder.recent(most)})


def _limit(given: str | None) -> int:
    if given is None:
        return _MOST_LISTED
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:5]) <= MAX_REMEMBERED):
        raise invalid("limit", f"{excerpt(given)}: expected 1 to {MAX_REMEMBERED}")
    return int(given[:5])


async def past_request(front: Front, request: Request) -> Response:
    """GET /admin/requests/{id}: where a recent request's time went."""
    line = front.recorder.find(request.path_params["id"])
    if line is None:
        raise ApiError(404, "not_found", "no recent request has this id")
    return json_reply(line)
