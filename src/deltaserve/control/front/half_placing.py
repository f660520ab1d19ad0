"""Placing rooms of a front that speaks for one worker: the pair is given, by the room and by whose front it is."""

from deltaserve.control.front.balance import Choice
from deltaserve.control.front.events import FrontConfig
from deltaserve.control.front.placing import Eligible, Placer
from deltaserve.control.front.streams import KeyedSample, Placement
from deltaserve.control.front.workers import Worker, Workers
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import PeerName, Role


class HalfPlacer(Placer):
    """Chooses nobody that was not named. What does not fit is refused by the worker itself."""

    def __init__(self, config: FrontConfig, workers: Workers) -> None:
        super().__init__(config, workers)
        self._half_workers = workers

    def choose(self, sample: KeyedSample, now: float, without: PeerName | None = None) -> Choice:
        """The pair of the sample's prefill worker and this front's decode worker, or this front's worker alone. Raises
        RequestFailed NO_PEER."""
        own = [w for w in self._half_workers.of(self._half_workers.alone_role) if w.name != without]
        named = self._named(sample)
        eligible = Eligible([], [], own) if named is None else Eligible(named, own, [])
        if not eligible.has_pair:
            raise RequestFailed(FailReason.NO_PEER, self._half_workers.shortage() or "no worker is ready")
        return self._best(sample, eligible, now)

    def check_held(self, sample: KeyedSample, now: float) -> None:
        """Nothing is known of it before the workers are there."""

    def left_alone(self, now: float) -> str | None:
        """Why a room would most likely fail although its worker is there."""
        own = self._half_workers.of(self._half_workers.alone_role)
        names = [worker.name for worker in own if not self.breakers.may_try(worker.name, now)]
        return f"{', '.join(names)}: one request after the other fails there" if names else None

    def _prefills_for(self, sample: KeyedSample, failed: Placement) -> list[Worker]:
        decode = self._half_workers.get(failed.decode)
        return self._named(sample) or [] if decode is not None and decode.is_ready else []

    def _named(self, sample: KeyedSample) -> list[Worker] | None:
        """The prefill worker that the sample names, where it takes rooms; None: it names none."""
        named = sample.generation.prefill
        if named is None:
            return None
        return [worker for worker in self._half_workers.of(Role.PREFILL) if worker.name == named.name]
