"""Situations that are read from the books of a process when it is over (sim/situations.py)."""

from collections.abc import Iterable

from deltaserve.control.transfer.tables import ReceiverEvent
from deltaserve.core.ids import Role
from deltaserve.sim.clients import Asked
from deltaserve.sim.expert_rounds import SimExpertGroup
from deltaserve.sim.process import SimFront, SimWorker
from deltaserve.sim.rank_wire import Damage
from deltaserve.sim.situations import Sightings, Situation

_DAMAGES = {
    Damage.LOST: Situation.ENTRY_LOST,
    Damage.SWAPPED: Situation.ENTRY_SWAPPED,
    Damage.OF_ANOTHER_ORDER: Situation.ENTRY_EXCHANGED,
}


def met_by_worker(worker: SimWorker) -> Sightings:
    """Situations that a worker met with all engines and ranks that it had."""
    met = Sightings()
    engines = (*worker.former, worker.instance)
    met.note(Situation.FRAME_FOR_ANOTHER_LIFE, any(engine.links.stale_frames for engine in engines))
    met.note(Situation.RETRACTED, worker.instance.parts.scheduler.running.num_retractions > 0)
    moves = [event for e in engines if e.role is Role.PREFILL for _, event in e.serving.receiver.moves]
    met.note(Situation.WRITE_BACK_REVOKED, ReceiverEvent.REVOKE in moves)
    met.note(Situation.READ_NOT_FINITE, bool(worker.executor.not_finite))
    met.note(Situation.GRAMMAR_RESUMED, worker.executor.has_resumed_grammar)
    metrics = worker.instance.metrics()
    is_near = metrics.get("deltaserve_conditional_prefills_total", 0.0) > 0
    met.note(Situation.NEAR, is_near)
    met.note(Situation.NEAR_ON_SHARED_CORES, is_near and worker.config.options.weighs_work)
    met.note(Situation.PULLED, metrics.get("deltaserve_pulls_total", 0.0) > 0)
    met.note(Situation.NOT_WORTH_IT, metrics.get("deltaserve_write_backs_dear_total", 0.0) > 0)
    tiering = worker.instance.parts.tiering
    if tiering is not None:
        met.note(Situation.TIERED)
        met.note(Situation.LOADED, tiering.num_loaded > 0)
        met.note(Situation.LOAD_FAILED, tiering.num_bad_slots > 0)
    for rank in worker.ranks:
        met |= rank.endpoint.met
        met.note(Situation.SLOW_FENCE, rank.plane.has_waited)
        if rank.wire is not None and rank.wire.struck is not None:
            met.add(_DAMAGES[rank.wire.struck])
    return met


def met_by_front(front: SimFront) -> Sightings:
    met = Sightings()
    met.note(Situation.FRAME_FOR_ANOTHER_LIFE, front.core.workers.num_stale_frames > 0)
    met.note(Situation.WITHOUT_PREFILL, front.core.counts["without_prefill"] > 0)
    return met


def met_by_clients(asked: Iterable[Asked]) -> Sightings:
    """What was asked for besides tokens."""
    met = Sightings()
    for one in asked:
        sampling = one.generation.sampling
        met.note(Situation.LOGPROBS_ASKED, sampling.logprobs is not None)
        met.note(Situation.PROMPT_LOGPROBS_ASKED, sampling.prompt_logprobs is not None)
        met.note(Situation.STOP_IDS_ASKED, bool(sampling.stop_token_ids))
        met.note(Situation.GRAMMAR_ASKED, sampling.grammar is not None)
        hints = one.generation.hints
        met.note(Situation.HINTED_DONE, hints.done)
        met.note(Situation.HINTED_RETAIN, hints.retain_ms > 0)
        met.note(Situation.HINTED_PREFETCH, hints.prefetch)
    return met


def met_by_group(group: SimExpertGroup) -> Sightings:
    met = Sightings()
    met.note(Situation.IDLE_MEMBER, group.num_joined > 0)
    met.note(Situation.MEMBER_WAITED_FOR, group.has_waited)
    return met
