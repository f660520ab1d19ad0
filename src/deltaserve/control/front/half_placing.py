"""Placing rooms of a front that speaks for one worker: the pair is given, by the room and by whose front it is."""

from deltaserve.control.front.balance import Choice
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.placing import Placer
from deltaserve.control.front.pools import Pool
from deltaserve.control.front.streams import KeyedSample, Placement
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import PeerName, Role


class HalfPlacer(Placer):
    """Chooses nobody that was not named. What does not fit is refused by the worker itself."""

    def choose(self, sample: KeyedSample, now: float, without: PeerName | None = None) -> Choice:
        """The pair of the sample's prefill worker and this front's decode worker, or this front's worker alone. Raises
        RequestFailed NO_PEER."""
        workers = self._workers
        own = [w for w in workers.of(workers.alone_role) if w.name != without and sample.may_use(w.revision)]
        revision, named = own[0].revision if own else None, self._named(sample)
        if named is None:
            pool = Pool(revision, unified=own)
        else:
            pool = Pool(revision, [worker for worker in named if worker.revision == revision], own)
        if not pool.has_pair:
            problems = [problem for worker in named or () if (problem := workers.problem_of(worker)) is not None]
            words = "; ".join(problems) or workers.shortage() or "no worker is ready"
            raise RequestFailed(FailReason.NO_PEER, words)
        return self._best(sample, [pool], now)

    def check_held(self, sample: KeyedSample, now: float) -> None:
        """Nothing is known of it before the workers are there."""

    def left_alone(self, now: float) -> str | None:
        """Why a room would most likely fail although its worker is there."""
        own = self._workers.of(self._workers.alone_role)
        names = [worker.name for worker in own if not self.breakers.may_try(worker.name, now)]
        return f"{', '.join(names)}: one request after the other fails there" if names else None

    def _prefills_for(self, sample: KeyedSample, failed: Placement) -> list[Worker]:
        decode = self._workers.get(failed.decode)
        if decode is None or not decode.is_ready:
            return []
        return [worker for worker in self._named(sample) or () if worker.revision == decode.revision]

    def _named(self, sample: KeyedSample) -> list[Worker] | None:
        """The prefill worker that the sample names, where it takes rooms; None: it names none."""
        named = sample.generation.prefill
        if named is None:
            return None
        return [worker for worker in self._workers.of(Role.PREFILL) if worker.name == named.name]
