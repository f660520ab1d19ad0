"""Node 0 of a worker whose ranks are on several machines: the others join it, start their ranks when it says so, and
are heard from then on.

A node that ends, says that a rank of its own has ended, or is silent for ten seconds ends this process, which is rank
0: the worker starts again whole. The others end their ranks when they miss it, and join anew.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, Protocol

from deltaserve.core.errors import ConfigError
from deltaserve.process.children.exits import Exit, end_process, start_thread
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.links.node_link import NodeHub
from deltaserve.process.links.security import LinkSecurity
from deltaserve.process.worker.node_frames import (
    MAX_MISSED,
    Alive,
    Begin,
    FromFirst,
    FromNode,
    Join,
    Looks,
    NodeEnded,
    NodeReady,
    NodeRefused,
    Said,
    TurnedAway,
    decode_from_node,
    encode_node_frame,
    fitted,
    misfit,
)
from deltaserve.process.worker.rank_spec import RankSpec
from deltaserve.process.worker.worker_spec import RankNodes, WorkerSpec, read_secret

_MOST_RIVALS = 6
"""A node says so twice a second."""
_TELL_EVERY = 20
"""Looks between two lines that say who is waited for."""


class NodeState(Enum):
    """How far another node is."""

    JOINED = "joined"
    BEGUN = "begun"
    READY = "ready"


@dataclass(slots=True)
class _Node:
    connection: bytes
    life: int
    worker: WorkerSpec
    state: NodeState = NodeState.JOINED
    num_missed: int = 0
    num_rivals: int = 0
    """Times that another process has said it was this node."""


class Told(Protocol):
    """Who hears of the nodes."""

    @property
    def progress(self) -> Callable[[str], None]: ...

    @property
    def refuse(self) -> Callable[[str], NoReturn]: ...


class FirstNode:
    """The link to the other nodes, with a thread of its own."""

    def __init__(self, spec: WorkerSpec, nodes: RankNodes, told: Told) -> None:
        """Listens. Raises ConfigError."""
        self._spec = spec
        self._nodes = nodes
        self._told = told
        self._known: dict[int, _Node] = {}
        self._begins: Mailbox[Begin] = Mailbox()
        self.all_joined = threading.Event()
        self.all_ready = threading.Event()
        self._turned_away: set[str] = set()
        self._num_looks = 0
        try:
            self._hub = NodeHub(nodes.own_host, nodes.port, LinkSecurity.from_cluster_key(read_secret(spec)))
        except ConfigError as error:
            raise ConfigError(f"--dist-init-addr {nodes.host}:{nodes.port}: {error}") from None
        self._thread = start_thread("nodes", self._run)

    def wait_joined(self) -> WorkerSpec:
        """Wait for all nodes, however long that takes. The spec of this worker, as all of them have room for it."""
        self.all_joined.wait()
        own = self._spec
        common = fitted(own, [node.worker for node in self._known.values()])
        if common.num_pages != own.num_pages:
            now, planned = (" + ".join(map(str, spec.num_pages)) for spec in (common, own))
            self._told.progress(f"ranks hold {now} pages, as many as the smallest machine has room for, not {planned}")
        return common

    def begin(self, ranks: RankSpec) -> None:
        """Have every node start its ranks."""
        self._begins.put(Begin(ranks=ranks))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        looks = Looks()
        while True:
            for connection, frame in self._hub.wait(looks.wait_ms(), self._begins.fileno()):
                message = decode_from_node(frame)
                if message is not None:
                    self._hear(connection, message)
            for begin in self._begins.take_all():
                for node in self._known.values():
                    node.state = NodeState.BEGUN
                    self._send(node.connection, begin)
            if looks.is_due():
                self._look()

    def _hear(self, connection: bytes, message: FromNode) -> None:
        if isinstance(message, Join):
            self._join(connection, message)
            return
        found = next(((n, node) for n, node in self._known.items() if node.connection == connection), None)
        if found is None:
            return
        number, node = found
        node.num_missed = 0
        match message:
            case Said(text):
                self._told.progress(f"node {number}: {text}")
            case NodeReady():
                node.state = NodeState.READY
                if all(other.state is NodeState.READY for other in self._known.values()):
                    self.all_ready.set()
            case NodeRefused(reason):
                self._told.refuse(f"node {number}: {reason}")
            case NodeEnded(how):
                end_process(Exit.RANK_ENDED, f"node {number}: {how}")
            case Alive():
                pass

    def _join(self, connection: bytes, join: Join) -> None:
        reason = misfit(self._spec, join)
        nodes = join.worker.nodes
        if reason is not None or nodes is None:
            self._turn_away(connection, reason or "", join)
            return
        known = self._known.get(nodes.node)
        if known is not None and known.connection == connection:
            return  # it had said so more than once
        is_new = known is None or known.life != join.life
        if known is not None and is_new:
            known.num_rivals += 1  # one that was started again, whose end is seen by then, or one too many
            if known.num_rivals >= _MOST_RIVALS:
                self._turn_away(connection, f"node {nodes.node} is there already, at {known_at(known.worker)}", join)
            return
        if known is not None and known.state is not NodeState.JOINED:
            end_process(Exit.RANK_ENDED, f"node {nodes.node} has lost its connection, and ended its ranks")
        if is_new:
            self._told.progress(f"node {nodes.node} has joined, from {nodes.own_host}")
        self._known[nodes.node] = _Node(connection, join.life, join.worker)
        if len(self._known) == self._nodes.size - 1:
            self.all_joined.set()

    def _turn_away(self, connection: bytes, reason: str, join: Join) -> None:
        self._send(connection, TurnedAway(reason))
        at = known_at(join.worker)
        if reason not in self._turned_away:
            self._turned_away.add(reason)
            self._told.progress(f"a node at {at} was turned away: {reason}")

    def _look(self) -> None:
        self._num_looks += 1
        for number, node in list(self._known.items()):
            node.num_missed += 1
            is_gone = not self._send(node.connection, Alive()) or node.num_missed >= MAX_MISSED
            if is_gone and node.state is not NodeState.JOINED:
                end_process(
                    Exit.RANK_ENDED, f"node {number} at {known_at(node.worker)} is gone, or was not heard any more"
                )
            if is_gone and not self.all_joined.is_set():
                del self._known[number]
        if not self.all_joined.is_set() and self._num_looks % _TELL_EVERY == 1:
            missing = [str(number) for number in range(1, self._nodes.size) if number not in self._known]
            at = f"{self._nodes.own_host}:{self._nodes.port}"
            self._told.progress(f"waiting at {at} for node {', '.join(missing)} of {self._nodes.size} (--node-rank)")

    def _send(self, connection: bytes, message: FromFirst) -> bool:
        """Whether the connection is there."""
        return self._hub.send(connection, encode_node_frame(message))


def known_at(worker: WorkerSpec) -> str:
    """Where a node is, for messages."""
    return "an unknown address" if worker.nodes is None else worker.nodes.own_host
