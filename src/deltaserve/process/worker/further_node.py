"""The life of a further node of a worker: join node 0, start the ranks of this machine when it says so, end them when
it is gone or one of them is, and join anew.

It decides nothing and serves nobody: a stop signal ends it at once, and with it the worker. Drain that at node 0.
"""

import logging
import secrets
import signal
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deltaserve.core.errors import ConfigError
from deltaserve.process.children.exits import Exit, leave
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.parent import Parent, live
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.children.terminal import start_log
from deltaserve.process.links.node_link import NodeSpoke
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
    at_node,
    decode_from_first,
    encode_node_frame,
)
from deltaserve.process.worker.rank_spec import RankSpec, write_rank_spec
from deltaserve.process.worker.ranks_here import RanksHere
from deltaserve.process.worker.worker_spec import RankNodes, WorkerSpec, ranks_here, read_secret, read_spec

_log = logging.getLogger(__name__)


class _Over(Enum):
    """Why ranks are ended, and this node joins anew."""

    FIRST_IS_GONE = "node 0 is gone"
    RANK_ENDED = "a rank has ended"


def run_node(argv: Sequence[str], rank_argv: tuple[str, ...]) -> NoReturn:
    """Be the node that the file argv[1] describes; ends the process. `rank_argv`: the program of its ranks."""

    def follow(parent: Parent | None) -> NoReturn:
        if len(argv) != 2:
            raise ConfigError("usage: python -m deltaserve.process.worker.node SPEC.json")
        spec = read_spec(Path(argv[1]))
        if spec.nodes is None or not spec.nodes.node:
            raise ConfigError("a further node of a worker is started with --nnodes and --node-rank")
        start_log(f"{spec.name} node {spec.nodes.node}", spec.log, None if parent is None else parent.progress)
        for number in stop_signals():
            signal.signal(number, _leave)
        _FurtherNode(spec, spec.nodes, rank_argv).run()

    live("the node", follow)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """The kernel ends the ranks with this process."""
    leave(Exit.OK)


class _FurtherNode:
    """Called from one thread, but for what ranks tell (RankEvents), which goes through a mailbox."""

    def __init__(self, spec: WorkerSpec, nodes: RankNodes, rank_argv: tuple[str, ...]) -> None:
        self._spec = spec
        self._join = Join(life=secrets.randbits(63), worker=spec)
        self._url = f"tcp://{nodes.host}:{nodes.port}"
        self._rank_argv = rank_argv
        self._security = LinkSecurity.from_cluster_key(read_secret(spec))
        self._told: Mailbox[FromNode] = Mailbox()

    def run(self) -> NoReturn:
        while True:
            spoke = NodeSpoke(self._url, self._security)
            try:
                _log.info("joins node 0 at %s", self._url.removeprefix("tcp://"))
                begin = self._wait_begin(spoke)
                with private_folder(self._spec.state_dir) as folder:
                    over = self._serve(spoke, begin.ranks, folder)
                _log.warning("%s: the ranks here have ended, and join anew", over.value)
            finally:
                spoke.close()

    def _wait_begin(self, spoke: NodeSpoke) -> Begin:
        """Join until node 0 says that ranks are to be started. Raises ConfigError where it says that they never are."""
        looks = Looks()
        spoke.send(encode_node_frame(self._join))
        while True:
            messages = self._hear(spoke, looks)
            spoke.was_cut()  # it is dialled until somebody is there
            self._told.take_all()  # of ranks that have ended
            for message in messages:
                match message:
                    case Begin():
                        return message
                    case TurnedAway(reason):
                        raise ConfigError(f"node 0 turned this node away: {reason}")
                    case Alive():
                        pass
            if looks.is_due():
                spoke.send(encode_node_frame(self._join))

    def _serve(self, spoke: NodeSpoke, asked: RankSpec, folder: Path) -> _Over:
        """Have ranks until node 0 or one of them is gone."""
        file = write_rank_spec(at_node(asked, self._spec), folder)
        here = RanksHere(self._rank_argv, file, ranks_here(self._spec), self)
        looks, num_missed = Looks(), 0
        try:
            while True:
                if self._hear(spoke, looks):
                    num_missed = 0
                for told in self._told.take_all():
                    spoke.send(encode_node_frame(told))
                    if isinstance(told, NodeEnded):
                        _log.warning("%s", told.how)
                        return _Over.RANK_ENDED
                    if isinstance(told, NodeRefused):
                        raise ConfigError(told.message)
                if looks.is_due():
                    num_missed += 1
                    spoke.send(encode_node_frame(Alive()))
                if spoke.was_cut() or num_missed >= MAX_MISSED:
                    return _Over.FIRST_IS_GONE
        finally:
            here.end()

    def _hear(self, spoke: NodeSpoke, looks: Looks) -> list[FromFirst]:
        """What node 0 has said by the next look, or sooner when a rank or the connection has something to tell."""
        frames = spoke.wait(looks.wait_ms(), self._told.fileno())
        return [message for frame in frames if (message := decode_from_first(frame)) is not None]

    # ------------------------------------------------------------ what ranks tell, from a thread of theirs

    def says(self, rank: int, text: str) -> None:
        self._told.put(Said(f"rank {rank}: {text}"))

    def all_ready(self) -> None:
        self._told.put(NodeReady())

    def refused(self, rank: int, message: str) -> None:
        self._told.put(NodeRefused(f"rank {rank}: {message}"))

    def ended(self, rank: int, how: str) -> None:
        self._told.put(NodeEnded(how))
