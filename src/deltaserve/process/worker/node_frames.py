"""What the nodes of a worker tell each other: one message per frame, over links that prove the cluster key."""

import time
from enum import Enum
from math import ceil
from typing import TypeVar

import msgspec

from deltaserve import __version__
from deltaserve.process.worker.rank_spec import RankSpec
from deltaserve.process.worker.worker_spec import WorkerSpec

_LOOK_S = 0.5


class Looks:
    """When a node is to say that it is there, and to look who is not: every half second."""

    def __init__(self) -> None:
        self._at = time.monotonic() + _LOOK_S

    def wait_ms(self) -> int:
        """Milliseconds until then."""
        return max(0, ceil((self._at - time.monotonic()) * 1000))

    def is_due(self) -> bool:
        """Whether it is time, which it is not again for half a second then."""
        if time.monotonic() < self._at:
            return False
        self._at = time.monotonic() + _LOOK_S
        return True


MAX_MISSED = 20
"""Looks in a row at which nothing had come from a node that is gone then. Looks are counted, no clock is read: a
process that was stopped and goes on hears first what has waited for it."""


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Another node: it is there for the next start."""

    life: int
    """Number of this process, drawn when it began."""
    worker: WorkerSpec
    """What it was told to be."""
    version: str = __version__


class Said(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Another node: a line for the user."""

    text: str


class NodeReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Another node: all of its ranks are ready."""


class NodeRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Another node: the configuration of one of its ranks is wrong."""

    message: str


class NodeEnded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Another node: one of its ranks has ended."""

    how: str


class Alive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either side: it is there."""


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Node 0: the ranks are to be started."""

    ranks: RankSpec
    """Paths and addresses in it are those of node 0."""


class TurnedAway(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Node 0: this node cannot join."""

    reason: str


FromNode = Join | Said | NodeReady | NodeRefused | NodeEnded | Alive
FromFirst = Begin | TurnedAway | Alive

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_from_first: msgspec.msgpack.Decoder[FromFirst] = msgspec.msgpack.Decoder(FromFirst)
T = TypeVar("T")


def encode_node_frame(message: FromNode | FromFirst) -> bytes:
    return _encoder.encode(message)


def decode_from_node(frame: bytes) -> FromNode | None:
    """The message in a frame; None where there is none: another version may have sent it."""
    return _decode(_from_node, frame)


def decode_from_first(frame: bytes) -> FromFirst | None:
    """The message in a frame of node 0; None where there is none."""
    return _decode(_from_first, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T | None:
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError:
        return None


# ---------------------------------------------------------------- who fits

_EQUAL = (
    "role",
    "dtype",
    "quantization",
    "kv_dtype",
    "state_dtype",
    "page_size",
    "max_running_requests",
    "model_overrides",
    "transport",
    "tp_size",
    "ep_size",
    "drafts",
)
"""Fields of a spec that all nodes of a worker must have alike."""


def misfit(own: WorkerSpec, join: Join) -> str | None:
    """Why a node cannot be one of this worker's; None: it can. `own`: of node 0."""
    other = join.worker
    if own.nodes is None or other.nodes is None or not 0 < other.nodes.node < own.nodes.size:
        return "it is no further node of this worker (--nnodes, --node-rank)"
    if join.version != __version__:
        return f"it is deltaserve {join.version}, node 0 is {__version__}"
    pairs = [
        (f"{name} {_shown(other, name)}", _shown(own, name))
        for name in _EQUAL
        if getattr(own, name) != getattr(other, name)
    ]
    if other.nodes.size != own.nodes.size:
        pairs.append((f"--nnodes {other.nodes.size}", str(own.nodes.size)))
    if (other.cache_dir is None) != (own.cache_dir is None):
        pairs.append(("--cache-dir on one", "not on the other"))
    if not pairs:
        return None
    return "it differs from node 0: " + "; ".join(f"{theirs}, node 0 {ours}" for theirs, ours in pairs)


def _shown(spec: WorkerSpec, name: str) -> str:
    value = getattr(spec, name)
    return str(value.value if isinstance(value, Enum) else value)


def fitted(own: WorkerSpec, others: list[WorkerSpec]) -> WorkerSpec:
    """`own`, of node 0, with as many pages as every node has room for: ranks hold parts of the same pages."""
    num_pages = tuple(map(min, zip(own.num_pages, *(other.num_pages for other in others), strict=True)))
    most = num_pages[0] * own.page_size
    return msgspec.structs.replace(own, num_pages=num_pages, max_context_len=min(own.max_context_len, most))


def at_node(ranks: RankSpec, own: WorkerSpec) -> RankSpec:
    """What node 0 says of its ranks, with the paths, devices and addresses of another node, whose spec is `own`."""
    local = (
        "model_path",
        "draft_path",
        "device",
        "secret_path",
        "transport_folder",
        "transport_tls",
        "transport_devices",
        "transport_host",
        "cache_dir",
        "num_threads",
        "least_threads",
        "core_share",
        "nodes",
        "state_dir",
        "log",
    )
    changes = {name: getattr(own, name) for name in local}
    return msgspec.structs.replace(ranks, worker=msgspec.structs.replace(ranks.worker, **changes))
