"""Placing rooms on pairs: who could serve a room, which pair is cheapest, and what is placed where now."""

from collections.abc import Sequence
from dataclasses import replace

from deltaserve.control.front.balance import POLICIES, Choice, Choosable
from deltaserve.control.front.breaker import Breakers
from deltaserve.control.front.client import Limits, WorkerStats
from deltaserve.control.front.estimate import Candidate, Computing, Keeping, Prices, prefill_way
from deltaserve.control.front.events import FrontConfig
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.load import Assumed, decode_loads, prefill_loads
from deltaserve.control.front.pools import Pool
from deltaserve.control.front.residency import Residency
from deltaserve.control.front.retry import Cause, Remedy
from deltaserve.control.front.streams import KeyedSample, Placement, Rooms
from deltaserve.control.front.workers import Workers
from deltaserve.core.errors import FailReason, IntegrityError, RequestFailed
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.wire.messages import CacheUse

_ROLES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)


class Placer:
    """Chooses pairs by the configured policy and keeps each worker's own_* counts."""

    def __init__(self, config: FrontConfig, workers: Workers) -> None:
        self._config = config
        self._workers = workers
        self._policy = POLICIES[config.load_balance_method]()
        self._prices = Prices(config.kv_bytes_per_token, config.transfer_bytes_per_s)
        self._assumed = Assumed(
            config.prefill_tokens_per_s, config.decode_step_s, config.assumed_output_len, config.stale_report_s
        )
        self._weighs_prompts = config.weighs_prompts
        self.residency = Residency(config.max_resident_keys)
        self.breakers = Breakers()

    # ------------------------------------------------------------ choosing

    def choose(self, sample: KeyedSample, now: float, without: PeerName | None = None) -> Choice:
        """The best pair now. Raises RequestFailed: NO_PEER, or TOO_LONG where pairs are there but too small."""
        pools = [pool.without_decode(without) for pool in self._workers.pools() if sample.may_use(pool.revision)]
        if not any(pool.has_pair for pool in pools):
            raise RequestFailed(FailReason.NO_PEER, self._workers.shortage() or "no other pair of workers is ready")
        return self._best(sample, _fitting(sample, pools), now)

    def check_held(self, sample: KeyedSample, now: float) -> None:
        """Raises RequestFailed TOO_LONG where neither who is there nor who is expected back can hold it."""
        _fitting(sample, self._workers.takers(now))

    def choose_next(self, sample: KeyedSample, failed: Placement, remedy: Remedy, now: float) -> Choice:
        """Where to try a room again. Raises RequestFailed as `choose` does."""
        if self._worker(failed.decode).leaves_at is not None:
            try:
                return self.choose(sample, now)
            except RequestFailed:
                pass  # it is the only one, and has not left yet
        if remedy is Remedy.OTHER_DECODE:
            return self.choose(sample, now, without=failed.decode)
        if remedy is Remedy.NEXT_PREFILL and failed.prefill is None:
            return self.choose(sample, now)
        decode = self._worker(failed.decode)
        others = [w for w in self._prefills_for(sample, failed) if w.name != failed.prefill]
        if remedy is Remedy.OTHER_PAIR:
            try:
                return self.choose(sample, now, without=failed.decode)
            except RequestFailed:
                return self._best(sample, [Pool(decode.revision, others, [decode])], now)
        again = self._prefills_for(sample, failed) if remedy is Remedy.NEXT_PREFILL else []
        pool = Pool(decode.revision, others or again or self._leaving_for(sample, failed), [decode])
        is_usable = decode.is_ready and sample.may_use(decode.revision)
        goes_alone = not others and is_usable and self._workers.may_go_alone(pool)
        return self._best(sample, [pool.alone() if goes_alone else pool], now)

    def _prefills_for(self, sample: KeyedSample, failed: Placement) -> list[Worker]:
        """Prefill workers that could serve the decode worker that has the room: those of its revision."""
        decode = self._worker(failed.decode)
        if failed.prefill is None or not decode.is_ready or not sample.may_use(decode.revision):
            return []
        return [w for w in self._workers.pool(decode.revision).prefills if _holds(w, sample.prompt_len)]

    def _leaving_for(self, sample: KeyedSample, failed: Placement) -> list[Worker]:
        """The prefill worker that is to leave and has not yet, for what no other revision may go on with."""
        prefill = None if failed.prefill is None else self._worker(failed.prefill)
        if sample.revision is None or prefill is None or prefill.leaves_at is None or not prefill.is_ready:
            return []
        return [prefill] if prefill.revision == sample.revision else []

    def _best(self, sample: KeyedSample, fitting: Sequence[Pool], now: float) -> Choice:
        pools = [pool for pool in fitting if pool.has_pair]
        if not pools:
            raise RequestFailed(FailReason.NO_PEER, "no other worker to try")
        return self._policy.choose(sample.prompt_len, self._choosable(sample, pools, now), self._prices)

    def _choosable(self, sample: KeyedSample, pools: Sequence[Pool], now: float) -> list[Choosable]:
        """Loads are compared across pools: a new revision has measured nothing yet."""
        usable = [pool.alone() if self._must_go_alone(pool, now) else pool for pool in pools]
        advised = [[self._advised(pool.of(role), now) for role in _ROLES] for pool in usable]
        computes = [w for prefills, _, unified in advised for w in (*prefills, *unified)]
        keeps = [w for _, decodes, unified in advised for w in (*decodes, *unified)]
        computing = {side.load.worker: side for side in self._computing(sample, computes, now)}
        keeping = {side.load.worker: side for side in self._keeping(sample, keeps, now)}
        return [
            Choosable(
                [computing[w.name] for w in prefills],
                [keeping[w.name] for w in decodes],
                [Candidate(computing[w.name], keeping[w.name]) for w in unified],
            )
            for prefills, decodes, unified in advised
        ]

    def _computing(self, sample: KeyedSample, workers: Sequence[Worker], now: float) -> list[Computing]:
        loads = prefill_loads([w.report(now) for w in workers], self._assumed)
        hits = [0 if sample.recomputes else self._hit_len(sample, w, now) for w in workers]
        return [Computing(load, hit) for load, hit in zip(loads, hits, strict=True)]

    def _keeping(self, sample: KeyedSample, workers: Sequence[Worker], now: float) -> list[Keeping]:
        loads = decode_loads([w.report(now) for w in workers], self._assumed)
        return [Keeping(load, self._hit_len(sample, w, now)) for load, w in zip(loads, workers, strict=True)]

    def _advised(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        """The workers that are heard of and whose circuit is closed; all that there are, where none is such."""
        heard = [w for w in workers if not self._workers.table.is_suspect(w.peer, now)] or workers
        names = set(self.breakers.advised([w.name for w in heard], now))
        return [w for w in heard if w.name in names]

    def _must_go_alone(self, pool: Pool, now: float) -> bool:
        """Whether decode workers may compute prompts themselves, and no prefill worker is likely to."""
        return self._workers.may_go_alone(pool) and not any(self._is_well(w, now) for w in pool.prefills)

    def _is_well(self, worker: Worker, now: float) -> bool:
        return self.breakers.may_try(worker.name, now) and not self._workers.table.is_suspect(worker.peer, now)

    def _hit_len(self, sample: KeyedSample, worker: Worker, now: float) -> int:
        if sample.generation.cache is CacheUse.BYPASS:
            return 0
        page_size = worker.facts.page_size
        return self.residency.hit_len(worker.name, sample.keys.of(worker.fingerprint, page_size), page_size, now)

    # ------------------------------------------------------------ accounts

    def place(self, sample: KeyedSample, choice: Choice, now: float) -> Placement:
        """Book the sample on the pair; `release_prefill` and `release_decode` undo it, each once."""
        computing, keeping = choice.pair.computing, choice.pair.keeping
        prefill = None if choice.pair.is_unified else computing.load.worker
        way = prefill_way(sample.prompt_len, choice.pair, self._prices) if self._weighs_prompts else None
        placement = Placement(
            decode=keeping.load.worker,
            prefill=prefill,
            compute_tokens=sample.prompt_len - computing.hit,
            memory_tokens=sample.prompt_len - keeping.hit,
            output_tokens=min(sample.generation.sampling.max_tokens, self._assumed.output_len),
            prefill_way=way,
            prefill_tokens_per_s=computing.load.tokens_per_s if computing.load.is_measured else None,
        )
        for name in placement.workers:
            worker = self._worker(name)
            worker.own_rooms += 1
            self.breakers.chosen(name, now)
            if sample.generation.cache is CacheUse.NORMAL:
                self.residency.expect(name, sample.keys.of(worker.fingerprint, worker.facts.page_size), now)
        computes, keeps = self._worker(placement.computing), self._worker(placement.decode)
        computes.own_tokens += placement.compute_tokens
        computes.unseen.compute_tokens += placement.compute_tokens
        keeps.own_output_tokens += placement.output_tokens
        keeps.unseen.memory_tokens += placement.memory_tokens
        keeps.unseen.rooms += 1
        return placement

    def release_prefill(self, placement: Placement) -> None:
        """The prompt is computed, or needs not be any more."""
        computes = self._worker(placement.computing)
        computes.own_tokens -= placement.compute_tokens
        computes.unseen.compute_tokens -= placement.compute_tokens
        if placement.prefill is not None:
            self._worker(placement.prefill).own_rooms -= 1

    def release_decode(self, placement: Placement, num_output_tokens: int) -> None:
        """The room is over on decode. Its last report may still count it, and the memory that it gave back."""
        keeps = self._worker(placement.decode)
        keeps.own_rooms -= 1
        keeps.own_output_tokens -= placement.output_tokens
        keeps.unseen.memory_tokens -= placement.memory_tokens + num_output_tokens
        keeps.unseen.rooms -= 1

    def succeeded(self, placement: Placement) -> None:
        """The first token came: all workers did their part."""
        for name in placement.workers:
            self.breakers.succeeded(name)

    def computed_by_decode(self, sample: KeyedSample, placement: Placement) -> None:
        """Prefill never began with the prompt: it has nothing of it but what it tells of."""
        if placement.prefill is not None:
            worker = self._worker(placement.prefill)
            self.residency.unexpect(worker.name, sample.keys.of(worker.fingerprint, worker.facts.page_size))

    def failed(self, placement: Placement, half: Cause, now: float) -> None:
        """A room failed there, by the fault of one half."""
        self.breakers.failed(placement.decode if half is Cause.DECODE else placement.computing, now)

    def _worker(self, name: PeerName) -> Worker:
        worker = self._workers.get(name)
        assert worker is not None  # a worker that a room is placed on is never forgotten
        return worker

    def without_prefill(self, placement: Placement) -> Placement:
        """The placement of a room whose prompt was computed, with another prefill worker, where its revision has one:
        to be used if the answer has to be computed again."""
        others = self._workers.pool(self._worker(placement.decode).revision).prefills
        return replace(placement, prefill=others[0].name) if others else placement

    def forget(self, worker: PeerName) -> None:
        """It has left."""
        self.residency.forget(worker)
        self.breakers.forget(worker)

    # ------------------------------------------------------------ questions

    def left_alone(self, now: float) -> str | None:
        """Why a room would most likely fail although there is a pair: of some kind every circuit is open, and no pause
        is over. None else; without any room it is None again soon, so whoever heeds it comes back."""
        open_ones = [self._open_kinds(pool, now) for pool in self._workers.pools() if pool.has_pair]
        names = ", ".join(worker.name for of_pool in open_ones for worker in of_pool)
        return f"{names}: one request after the other fails there" if names and all(open_ones) else None

    def _open_kinds(self, pool: Pool, now: float) -> list[Worker]:
        """Workers of those kinds of which every circuit is open; none: the pool can be tried."""
        if self._workers.may_go_alone(pool):
            pool = pool.alone()
        kinds = [pool.unified] if pool.unified else [pool.prefills, pool.decodes]
        open_ones = [kind for kind in kinds if not any(self.breakers.may_try(w.name, now) for w in kind)]
        return [worker for kind in open_ones for worker in kind]

    def limits(self, now: float) -> Limits:
        """What every pair that takes rooms can take. Precondition: there is one, or one is expected back."""
        pools = [pool for pool in self._workers.takers(now) if self._workers.is_enough(pool)]
        holders = [worker for pool in pools for worker in pool.workers]
        keepers = [worker for pool in pools for worker in (*pool.decodes, *pool.unified)]
        context_len = min((w.facts.max_context_len for w in holders if w.facts.max_context_len), default=_UNLIMITED)
        total_len = min((w.pool_tokens for w in keepers if w.pool_tokens), default=context_len)
        return Limits(
            max_context_len=context_len,
            max_prompt_len=min((w.pool_tokens for w in holders if w.pool_tokens), default=context_len),
            vocab_size=min(w.facts.vocab_size for w in holders),
            max_total_len=min(context_len, total_len),
        )

    def stats_of(self, worker: Worker) -> WorkerStats:
        return WorkerStats(
            name=worker.name,
            role=worker.role.value,
            state=worker.peer.state.value,
            url=worker.member.url,
            revision=None if worker.revision is None else str(worker.revision),
            group=worker.group,
            leaving=worker.leaves_at is not None,
            refusal=worker.refusal,
            breaker=self.breakers.state(worker.name).value,
            rooms=worker.own_rooms,
            tokens_to_compute=worker.own_tokens,
            resident_keys=self.residency.num_resident(worker.name),
            reports=worker.num_reports,
            status=worker.status,
        )

    def check_integrity(self, rooms: Rooms) -> None:
        """Raises IntegrityError when booked and recomputed counts differ."""
        self.residency.check_integrity()
        tokens = {w.name: 0 for w in self._workers}
        num_rooms, output_tokens = dict(tokens), dict(tokens)
        for live in rooms:
            placement = live.placement
            if placement is None:
                continue
            num_rooms[placement.decode] += 1
            output_tokens[placement.decode] += placement.output_tokens
            if live.is_computing:
                tokens[placement.computing] += placement.compute_tokens
                if placement.prefill is not None:
                    num_rooms[placement.prefill] += 1
        for worker in self._workers:
            booked = worker.own_tokens, worker.own_rooms, worker.own_output_tokens
            found = tokens[worker.name], num_rooms[worker.name], output_tokens[worker.name]
            if booked != found:
                raise IntegrityError(f"{worker.name}: (tokens, rooms, output tokens) booked {booked}, found {found}")


def _fitting(sample: KeyedSample, pools: Sequence[Pool]) -> list[Pool]:
    """The workers large enough for the sample. Precondition: there is a pair. Raises RequestFailed TOO_LONG when
    none is."""
    fitting = [
        Pool(
            pool.revision,
            [w for w in pool.prefills if _holds(w, sample.prompt_len)],
            [w for w in pool.decodes if _holds(w, sample.total_len)],
            [w for w in pool.unified if _holds(w, sample.total_len)],
        )
        for pool in pools
    ]
    if not any(pool.has_pair for pool in fitting):
        largest = max(_capacity(w) for pool in pools for w in (*pool.decodes, *pool.unified))
        text = f"prompt of {sample.prompt_len} tokens, {sample.total_len} with the output, limit {largest}"
        raise RequestFailed(FailReason.TOO_LONG, text)
    return fitting


_UNLIMITED = 1 << 31


def _capacity(worker: Worker) -> int:
    """Longest sequence the worker can hold; 0: not told."""
    return min((n for n in (worker.pool_tokens, worker.facts.max_context_len) if n), default=0)


def _holds(worker: Worker, num_tokens: int) -> bool:
    pool_tokens, context_len = worker.pool_tokens, worker.facts.max_context_len
    return (not pool_tokens or num_tokens <= pool_tokens) and (not context_len or num_tokens <= context_len)
