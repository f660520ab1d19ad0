"""What the workers' trees hold, asked for while somebody looks."""

from dataclasses import dataclass

from deltaserve.control.front.client import WorkerTree
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.workers import Workers
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import AskTree, TreeShape

MOST_NODES = 256
"""Nodes of one worker that are shown."""
_PAUSE_S = 0.25
"""Least time between two questions to one worker, however many look."""


@dataclass(slots=True)
class _Look:
    """One worker's last answer, and whether it owes one."""

    boot: Boot | None
    """Life of the worker that was asked: another has another tree."""
    asked_at: float
    is_owed: bool = True
    shape: TreeShape | None = None
    told_at: float = 0.0


class TreeLooks:
    """Asks every worker that is there, and keeps the last answer of each."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._looks: dict[PeerName, _Look] = {}

    def ask(self, now: float) -> None:
        """Ask who is there, and forget who is not. Who was asked a moment ago is not asked again."""
        there = {worker.name: worker for worker in self._workers if worker.is_ready}
        self._looks = {name: look for name, look in self._looks.items() if _is_of(look, there.get(name))}
        for name, worker in there.items():
            look = self._looks.get(name)
            if look is None or now >= look.asked_at + _PAUSE_S:
                shape, told_at = (None, 0.0) if look is None else (look.shape, look.told_at)
                self._looks[name] = _Look(worker.peer.boot, now, shape=shape, told_at=told_at)
                self._workers.send(worker, AskTree(max_nodes=MOST_NODES))

    def tell(self, worker: Worker, shape: TreeShape, now: float) -> bool:
        """A worker has answered. Whether nobody owes an answer now."""
        look = self._looks.get(worker.name)
        if look is None or not _is_of(look, worker):
            return False
        look.shape, look.told_at, look.is_owed = shape, now, False
        return not self.is_owed

    @property
    def is_owed(self) -> bool:
        """Whether an answer is to come of somebody who is there."""
        return any(look.is_owed and _is_of(look, self._workers.get(name)) for name, look in self._looks.items())

    def trees(self, now: float) -> tuple[WorkerTree, ...]:
        """What was told last, of who is there."""
        there = ((worker, self._looks.get(worker.name)) for worker in self._workers if worker.is_ready)
        return tuple(_tree(worker, look, now) for worker, look in there)


def _is_of(look: _Look, worker: Worker | None) -> bool:
    return worker is not None and worker.is_ready and worker.peer.boot == look.boot


def _tree(worker: Worker, look: _Look | None, now: float) -> WorkerTree:
    if look is None or look.shape is None or not _is_of(look, worker):
        return WorkerTree(worker.name, worker.role.value, None)
    return WorkerTree(worker.name, worker.role.value, look.shape, now - look.told_at)
