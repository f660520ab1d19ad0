"""Pools: workers of one revision (control/peer/revision.py). Only within one is anything placed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from deltaserve.control.front.known_worker import Worker
from deltaserve.control.peer.page_fit import other_revision
from deltaserve.control.peer.revision import Revision
from deltaserve.core.ids import PeerName, Role


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers to choose among: any prefill with any decode, or a unified one alone."""

    revision: Revision | None
    prefills: list[Worker] = field(default_factory=list)
    decodes: list[Worker] = field(default_factory=list)
    unified: list[Worker] = field(default_factory=list)

    @property
    def has_pair(self) -> bool:
        return bool((self.prefills and self.decodes) or self.unified)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes, *self.unified]

    def of(self, role: Role) -> list[Worker]:
        return {Role.PREFILL: self.prefills, Role.DECODE: self.decodes, Role.UNIFIED: self.unified}[role]

    def alone(self) -> "Pool":
        """The pool without its prefill workers: each decode worker computes prompts itself, as a unified one does."""
        return Pool(self.revision, unified=[*self.unified, *self.decodes])

    def without_decode(self, name: PeerName | None) -> "Pool":
        """The pool without one that decodes."""
        decodes, unified = ([w for w in kind if w.name != name] for kind in (self.decodes, self.unified))
        return replace(self, decodes=decodes, unified=unified)


def pools_of(workers: Iterable[Worker], role: Callable[[Worker], Role] = lambda worker: worker.role) -> list[Pool]:
    """Workers by revision, in order. Those that never said theirs are left out."""
    pools: dict[Revision, Pool] = {}
    for worker in workers:
        if worker.revision is not None:
            pools.setdefault(worker.revision, Pool(worker.revision)).of(role(worker)).append(worker)
    return list(pools.values())


def fellows_missing(pools: Sequence[Pool]) -> dict[PeerName, str]:
    """Workers without another half in their pool, where another pool has one |-> why that is none for them.
    Of two that do not fit each other the later one."""
    found: dict[PeerName, str] = {}
    halves: dict[Role, Worker] = {}
    for pool in sorted(pools, key=lambda pool: not pool.has_pair):
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            half = halves.get(other)
            for worker in pool.of(role) if half is not None and not pool.of(other) else ():
                found[worker.name] = _unlike(worker, half)
        for role in (Role.PREFILL, Role.DECODE):
            for worker in pool.of(role)[:1]:
                halves.setdefault(role, worker)
    return found


def _unlike(worker: Worker, half: Worker | None) -> str:
    assert half is not None and half.peer.hello is not None and worker.peer.hello is not None  # all take rooms
    return other_revision(worker.peer.hello, half.name, half.peer.hello)
