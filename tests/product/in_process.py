"""The whole product in one process: production front, engines, endpoints and executors, over the loopback transport.

The simulator's world carries frames and drives the threads; instead of the stand-in model every worker computes a real
one, its ranks as threads. So what is checked are the answers, against transformers.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from deltaserve.compute.collective.expert_group import ExpertMesh, Partners
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.compute.memory.cache_file import CacheFile
from deltaserve.compute.memory.staging_arena import PagesOfGroup, StagingArena
from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.front.client import Generation
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.control.sched.sched_config import SchedOptions
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.staging import STAGING, Staging, StagingConfig, StagingMode
from deltaserve.core.extents import Region
from deltaserve.core.ids import PeerName, RegionId, Role, RowId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.lifetime import Lifetime
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import RegionInfo
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.drafts.draft_algorithm import OFF, with_head
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.shard_rules import ExpertPlacement
from deltaserve.sim.cluster import Shape, front_config, member_of, room_of, url_of, worker_config
from deltaserve.sim.expert_rounds import Plans, SimExpertGroup
from deltaserve.sim.loopback import Fabric, Fate, Part
from deltaserve.sim.process import Answer, PlaneSizes, SimFront, SimWorker
from deltaserve.sim.sim_rank import RankPace, SimRankParts
from deltaserve.sim.wiring import SimTransport, TaggedEndpoint
from tests.compute.executor.world import TOLERANCE, grammars_of, reference_logprobs
from tests.compute.thread_ranks import ThreadCollective, expert_members
from tests.patience import PATIENCE_S
from tests.sim.small_cluster import LinkWorld

PREFILL, DECODE, UNIFIED = PeerName("prefill-0"), PeerName("decode-0"), PeerName("unified-0")
NUM_TOP = 5
_STAGING_BYTES = 1 << 20
_STAGING_REGION = RegionId(99)
_SLOTS = 400


def member_name(index: int) -> PeerName:
    """Name of a decode worker."""
    return PeerName(f"decode-{index}")


class TorchRanks:
    """The simulator's executor of a worker, by torch: all ranks compute a step together, the first one draws."""

    def __init__(self, executors: Sequence[TorchExecutor]) -> None:
        self.namespaces: dict[RowId, object] = {}
        """The simulator tells of its rows here."""
        self.executors = executors
        self._threads = [ThreadPoolExecutor(1) for _ in executors]
        self._of_round: Future[StepResult] | None = None

    def launch(self, plan: StepPlan) -> None:
        """Nothing is computed beside the world."""

    def execute(self, plan: StepPlan) -> StepResult:
        if self._of_round is not None:
            steps, self._of_round = [self._of_round], None
        else:
            steps = [t.submit(rank.execute, plan) for t, rank in zip(self._threads, self.executors, strict=True)]
        wait(steps)
        first, *_ = [step.result() for step in steps]
        return replace(first, seconds=0.0)  # what is planned does not depend on this machine's load

    def take_part(self, plan: StepPlan | None) -> Future[Any]:
        """In a round of an expert group; `execute` gives the result afterwards."""
        (thread,), (rank,) = self._threads, self.executors
        if plan is None:
            return thread.submit(rank.accompany)
        self._of_round = thread.submit(rank.execute, plan)
        return self._of_round

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@dataclass(frozen=True)
class Drawing:
    """How a worker's executor comes to its tokens."""

    rounding: Rounding = Rounding.OF_QUERY
    guesses: str = OFF


@dataclass(frozen=True)
class SetAside:
    """What a worker has for pages beside its pools."""

    staging: StagingMode | None = None
    cache_folder: Path | None = None
    """Folder of the file under its tree."""


class TorchWorker(SimWorker):
    """A worker of the simulated world whose ranks hold and compute a real model."""

    def __init__(
        self,
        world: LinkWorld,
        config: InstanceConfig,
        folder: Path,
        spec: ModelSpec,
        aside: SetAside,
        mesh: ExpertMesh | None = None,
        drawing: Drawing = Drawing(),
    ) -> None:
        super().__init__(world, config, url_of(config.name), plane=PlaneSizes(stall_s=60.0))
        sizes = ExecutorSizes(
            config.num_pages,
            config.max_running_requests,
            config.max_context_len,
            rounding=drawing.rounding,
            drafts=drawing.guesses,
            grammars=grammars_of(folder),
        )
        executors = [
            TorchExecutor.load(folder, spec, config.cache, sizes, partners=Partners(collective, mesh))
            for collective in ThreadCollective.group(config.tp_size, PATIENCE_S)
        ]
        self.computing = TorchRanks(executors)
        self.executor = self.computing  # type: ignore[assignment]
        shards = [Shard(rank, config.tp_size) for rank in range(config.tp_size)]
        self.join([self._torch_parts(shard, executors[shard.rank], aside) for shard in shards])

    def _torch_parts(self, shard: Shard, executor: TorchExecutor, aside: SetAside) -> SimRankParts:
        config, arenas = self.config, executor.memory.kv.arenas
        buffer = torch.zeros(_STAGING_BYTES, dtype=torch.uint8)
        regions = [*executor.memory.regions(), (STAGING, Region(_STAGING_REGION, 0, _STAGING_BYTES, "cpu"))]
        tensors = [*(arena.bytes for arena in arenas), buffer]
        memory: Any = {region.id: memoryview(t.numpy()) for (_, region), t in zip(regions, tensors, strict=True)}  # type: ignore[arg-type]
        transport = SimTransport(config.name, self.world.fabric, memory)
        for _, region in regions:
            transport.register(region)
        infos = [
            RegionInfo(id=r.id, base=r.base, num_bytes=r.num_bytes, device="cpu", component=name) for name, r in regions
        ]
        groups = {arena.layout.group.name: PagesOfGroup(arena.bytes, arena.num_pages) for arena in arenas}
        staging = None
        if aside.staging is not None:
            staging = Staging(
                StagingConfig(_STAGING_REGION, _STAGING_BYTES, aside.staging), StagingArena(buffer, groups)
            )
        endpoint_config = EndpointConfig(config.cache, tuple(infos), shard, checksums=True, stall_s=60.0)
        endpoint = TaggedEndpoint(endpoint_config, transport, executor.memory, staging)
        slots: Any = None
        if aside.cache_folder is not None:
            slots = CacheFile(aside.cache_folder, config.tier_slots, executor.memory.kv, f"{self.name} {shard}")
        return SimRankParts(endpoint, transport, None, RankPace(0.001 * shard.rank, 0.0), slots)

    def count(self, name: str) -> int:
        """A counter of the endpoints, summed over all ranks."""
        return sum(rank.endpoint.counters[name] for rank in self.ranks)


@dataclass(frozen=True)
class Pages:
    """Pages of one worker."""

    size: int = 16
    dtype: DType = DType.FLOAT32


@dataclass(frozen=True)
class Setup:
    """Setup of both workers."""

    chunk_len: int = 48
    """Rounded down to whole pages."""
    max_running: int = 4
    context_len: int = 256
    num_contexts: int = 3
    """What each pool holds, in requests of `context_len` tokens."""
    state_slots: int | None = None
    """None: as many as there are pages of KV."""
    state_interval_len: int | None = None
    decode_extend_len: int = 4
    conditional_prefill: bool = False
    decode_cache: bool = True
    writes_back: bool = False
    cache_folder: Path | None = None
    """Folder of a file under the tree of each worker, which holds all pages; None: there is none."""
    reference: Path | None = None
    """What transformers computes with; None: the same folder."""
    drafting: tuple[Role, ...] = ()
    """Workers that have the model's draft head."""
    guesses: str = "EAGLE"
    """Who guesses there."""
    draft_folder: Path | None = None
    """Folder of the head; None: it is among the model's own weights."""
    num_drafts: int = 3
    """Guesses of a head in a step of decode."""
    is_unified: bool = False
    """One worker does both."""
    members: int = 1
    """Decode workers that share experts."""
    num_decode: int = 1
    """Decode workers, where they share none."""
    rounding: Rounding = Rounding.OF_QUERY


@dataclass(frozen=True)
class Served:
    """An answer, and where its prompt came from."""

    tokens: tuple[int, ...]
    decode_cached_len: int
    prefill_cached_len: int
    transferred_bytes: int
    num_rounds: int = 0
    num_accepted: int = 0
    """Guesses, over all rounds."""


def accepted_per_round(answers: Sequence[Served]) -> float:
    return sum(answer.num_accepted for answer in answers) / sum(answer.num_rounds for answer in answers)


class Product:
    """One front, one prefill and one decode worker of a model."""

    def __init__(
        self,
        folder: Path,
        prefill_ranks: int,
        decode_ranks: int,
        pages: Pages | tuple[Pages, Pages] = Pages(),
        staging: StagingMode | None = None,
        tolerance: float = TOLERANCE,
        setup: Setup = Setup(),
    ) -> None:
        """`pages`: of prefill and of decode. `tolerance`: of log-probabilities; greedy tokens may differ by as much."""
        of_role = dict(
            zip((Role.PREFILL, Role.DECODE), pages if isinstance(pages, tuple) else (pages, pages), strict=True)
        )
        self._tolerance = tolerance
        self._is_rounded = tolerance > TOLERANCE
        self._reference = setup.reference or folder
        self._folder = folder
        half = Part(0.001, 1)
        self.world = LinkWorld(fabric=Fabric(lambda p: Fate((half, Part(0.002)), notified_s=0.002, told_s=0.002)))
        page_size, decode_page_size = (of_role[role].size for role in (Role.PREFILL, Role.DECODE))
        shape = Shape(
            page_size=page_size,
            decode_page_size=decode_page_size,
            chunk_len=max(page_size, setup.chunk_len // page_size * page_size),
            max_running=setup.max_running,
            context_len=setup.context_len,
            state_chunk_len=SchedOptions().state_chunk_len,
            state_interval_len=setup.state_interval_len,
            extend_len=setup.decode_extend_len,
            conditional_prefill=setup.conditional_prefill,
            writes_back=setup.writes_back,
        )
        self._num_rooms = 0
        self.worst = 0.0
        """Difference of a log-probability from that of transformers."""
        members = []
        self.group = SimExpertGroup(setup.members, self._compute_round)
        self.joint_rounds = 0
        """Rounds in which several members had something to compute."""
        meshes = expert_members(setup.members, PATIENCE_S) if setup.members > 1 else (None,)
        workers = [(PREFILL, Role.PREFILL, prefill_ranks)]
        workers += [
            (member_name(index), Role.DECODE, decode_ranks) for index in range(max(setup.members, setup.num_decode))
        ]
        if setup.is_unified:
            workers = [(UNIFIED, Role.UNIFIED, decode_ranks)]
            of_role[Role.UNIFIED] = of_role[Role.DECODE]
        for name, role, ranks in workers:
            config = worker_config(
                replace(shape, radix_cache=setup.decode_cache or role is Role.PREFILL), name, role, 1
            )
            config = replace(config, tp_size=ranks, has_staging=staging is not None)
            mesh = meshes[int(name.rpartition("-")[2])] if role is Role.DECODE and setup.members > 1 else None
            self._start(config, of_role[role], setup, staging, mesh)
            members.append(member_of(name, role, shares_experts=setup.members > 1))
        self.front = SimFront(self.world, front_config(shape, members, 1))
        self.world.run(until=5.0, done=lambda: all(worker.takes_rooms for worker in self.front.core.workers))
        assert self.front.core.ready() is None, self.front.core.ready()

    def _compute_round(self, plans: Plans) -> None:
        """All members at once."""
        self.joint_rounds += sum(plan is not None for plan in plans.values()) > 1
        parts = [self.worker(name).computing.take_part(plan) for name, plan in plans.items()]
        wait(parts)
        for part in parts:
            part.result()

    def _start(
        self,
        config: InstanceConfig,
        pages: Pages,
        setup: Setup,
        staging: StagingMode | None,
        mesh: ExpertMesh | None,
    ) -> None:
        is_drafting = config.role in setup.drafting
        spec = load_spec(self._folder)
        if is_drafting:
            spec = with_head(spec, self._folder, setup.guesses, setup.draft_folder)
        if mesh is not None:
            spec = spec.placed(ExpertPlacement(member=mesh.member))
        cache = spec.cache_spec(pages.size, pages.dtype)
        sched = msgspec.structs.replace(
            config.options.sched,
            max_drafts=setup.num_drafts if is_drafting else 0,
            draft_policy="always",
            num_ahead=int(config.tp_size == 1),
        )
        options = msgspec.structs.replace(config.options, sched=sched)
        config = replace(
            config,
            options=options,
            cache=cache,
            num_pages=_num_pages(cache, setup),
            vocab_size=spec.vocab_size,
            tier_slots=(_SLOTS,) * cache.num_pools if setup.cache_folder is not None else (),
        )
        drawing = Drawing(setup.rounding, setup.guesses if is_drafting else OFF)
        worker = TorchWorker(
            self.world, config, self._folder, spec, SetAside(staging, setup.cache_folder), mesh, drawing
        )
        if mesh is not None:
            worker.expert_group = self.group
            self.group.admit(worker)

    def worker(self, name: PeerName) -> TorchWorker:
        worker = self.world.workers[name]
        assert isinstance(worker, TorchWorker)
        return worker

    def settle(self) -> None:
        """What is on its way between the workers arrives."""
        self.world.run(until=self.world.now + 1.0)

    def metrics(self, name: PeerName) -> dict[str, float]:
        return self.worker(name).instance.metrics()

    def serve(self, *prompts: Sequence[int], max_tokens: int = 6) -> list[Served]:
        """All at once; each answer is that of transformers, greedy, with its log-probabilities."""
        answers = self.answers(*prompts, max_tokens=max_tokens)
        return [self._checked(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def answers(self, *prompts: Sequence[int], max_tokens: int) -> list[Answer]:
        """All at once, whatever they are."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, logprobs=NUM_TOP)
        answers = [self.ask(prompt, sampling) for prompt in prompts]
        self.run_until(answers)
        return answers

    def run_until(self, answers: Sequence[Answer]) -> None:
        """All of these have ended."""
        self.world.run(until=self.world.now + 120.0, done=lambda: all(answer.ends for answer in answers))

    def kill_in_the_middle(self, worker: PeerName, most: int | None = None) -> None:
        """Kill a decode worker on which three answers have more than three tokens, and fewer than `most`."""

        def is_under_way() -> bool:
            lengths = [len(live.output) for live in self.front.core.rooms.on(worker)]
            return sum(length > 3 and (most is None or length < most) for length in lengths) >= 3

        self.world.run(until=self.world.now + 60.0, done=is_under_way)
        assert is_under_way()
        self.world.kill(worker)

    def ask(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        """What the answer will be, when the world has run."""
        self._num_rooms += 1
        wanted = Generation(room_of(self._num_rooms), pack_u32(prompt), "", sampling, deadline_s=3600.0)  # type: ignore[arg-type]
        return self.front.submit(wanted)

    def _checked(self, prompt: Sequence[int], answer: Answer) -> Served:
        assert answer.ends == 1
        assert answer.error is None, answer.error
        tokens = [*prompt, *answer.tokens]
        lines = reference_logprobs(self._reference, tokens)[len(prompt) - 1 : -1]  # [output, V]
        assert len(answer.logprobs) == len(answer.tokens)
        for line, token, told in zip(lines, answer.tokens, answer.logprobs, strict=True):
            assert token == line.argmax().item() or (
                self._is_rounded and line.max() - line[token] <= 2 * self._tolerance
            )
            for one, logprob in ((token, told.logprob), *told.top):
                self.worst = max(self.worst, abs(line[one].item() - logprob))
        assert self.worst <= self._tolerance
        assert answer.last is not None
        assert answer.last.usage is not None
        usage = answer.last.usage
        hits = usage.decode_cached_len, usage.prefill_cached_len
        guessed = usage.num_rounds, usage.num_accepted
        return Served(tuple(answer.tokens), *hits, usage.transferred_bytes, *guessed)

    def close(self) -> None:
        """Everything was given back."""
        self.world.run(until=self.world.now + 5.0)
        for worker in self.world.workers.values():
            worker.instance.check_integrity()
            assert isinstance(worker, TorchWorker)
            assert not worker.instance.transfer_active()
            worker.computing.close()
            for rank in worker.ranks:
                if rank.slots is not None:
                    rank.slots.close()


def _num_pages(cache: CacheSpec, setup: Setup) -> tuple[int, ...]:
    """Pages of each pool."""
    count = -(-setup.num_contexts * setup.context_len // cache.page_size)
    return tuple(
        setup.state_slots if kept.lifetime is Lifetime.STATE and setup.state_slots is not None else count
        for kept in cache.pools
    )
