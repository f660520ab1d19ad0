"""A rollout: workers of another revision join one after the other, and those of the first leave, while fronts run.

The order is drawn; nobody leaves whom some front cannot do without. No request may fail by it, and no two revisions may
meet (I34).
"""

from collections.abc import Collection, Iterable
from enum import Enum
from itertools import combinations

from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName
from deltaserve.sim.chance import Chance
from deltaserve.sim.membership import GRACE_S, TOLD_S, Company, Membership
from deltaserve.sim.situations import Situation

NEXT_REVISION = "next model"
"""Fingerprint of the model of those that join."""
_PAUSE_S = 0.02, 1.0
"""Between two steps."""
_WAIT_S = 0.1
"""Until one that cannot be done without is tried again."""


class _RolloutStep(Enum):
    JOIN = "join"
    LEAVE = "leave"


class Rollout:
    """The one of a run, if it has one."""

    def __init__(
        self,
        cast: Company,
        membership: Membership,
        old: Iterable[PeerName],
        new: Iterable[PeerName],
        chance: Chance,
    ) -> None:
        self._cast = cast
        self._membership = membership
        self._chance = chance
        self._old, self._new = list(old), list(new)
        self.awaited: set[PeerName] = set(self._new)
        """Workers that have not started yet."""
        self._steps = [(_RolloutStep.JOIN, name) for name in self._new] + [
            (_RolloutStep.LEAVE, name) for name in self._old
        ]
        self._is_healed = False
        chance.shuffle(self._steps)

    def begin(self) -> None:
        """Take the first step soon; nothing where nobody is to join."""
        if self._new:
            self._go_on_later(self._chance.log_uniform(*_PAUSE_S))

    def heal(self) -> None:
        """Whoever has not joined does so now; nobody leaves any more."""
        self._is_healed = True
        self.awaited.clear()

    def are_apart(self, one: PeerName, other: PeerName) -> bool:
        """Whether two workers are of two revisions whenever they live."""
        return (one in self._new) != (other in self._new)

    def look(self) -> None:
        """Note which revisions serve."""
        for front in self._cast.world.fronts.values():
            pools = [pool for pool in front.core.workers.pools() if pool.has_pair]
            self._cast.world.seen.note(Situation.TWO_REVISIONS, len(pools) > 1)
            is_over = bool(self._new) and not any(front.core.workers.get(name) for name in self._old)
            self._cast.world.seen.note(Situation.ROLLED_OUT, is_over and bool(pools))

    # ------------------------------------------------------------ steps

    def _go_on_later(self, delay: float) -> None:
        world = self._cast.world
        world.at(world.now + delay, self._go_on)

    def _go_on(self) -> None:
        if self._is_healed or not self._steps:
            return
        done = next((step for step in self._steps if self._take(*step)), None)
        if done is not None:
            self._steps.remove(done)
            self._cast.note_step()
        self._go_on_later(_WAIT_S if done is None else self._chance.log_uniform(*_PAUSE_S))

    def _take(self, step: _RolloutStep, name: PeerName) -> bool:
        """Whether the step can be taken now; it is then."""
        if step is _RolloutStep.LEAVE:
            return self._membership.leave_for_good(name, self._chance.log_uniform(*GRACE_S))
        self.awaited.discard(name)
        world = self._cast.world
        self._cast.start(name)
        for front in [front for front in world.fronts.values() if front.is_alive]:
            told = world.now + self._chance.exponential(TOLD_S)
            world.at(told, lambda at=front.name: self._membership.tell_of_join(world.fronts[at], name))  # type: ignore[misc]
        return True


class Apart:
    """I34: workers of two revisions say nothing to each other: nobody has told one of the other."""

    def __init__(self, rollout: Rollout, workers: Collection[PeerName]) -> None:
        self._rollout = rollout
        self._workers = workers
        self._fellows: set[frozenset[PeerName]] = set()
        """Pairs that were of one revision once: what each knows of the other may outlast that."""

    def meet(self, misfits: Collection[PeerName]) -> None:
        """These run with another model now, a third one, so they are of one revision while they do."""
        self._fellows.update(map(frozenset, combinations(misfits, 2)))

    def check(self, src: PeerName, dst: PeerName) -> None:
        """Asked of each frame that is sent."""
        if src not in self._workers or dst not in self._workers or not self._rollout.are_apart(src, dst):
            return
        if frozenset({src, dst}) not in self._fellows:
            raise IntegrityError(f"I34: {src} speaks to {dst}, which is of another revision")
