"""Makes a worker's parts from its spec: the torch executor, the data plane, the control plane of its role."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.collective.collective import ALONE, Collective, ProcessCollective
from deltaserve.compute.collective.expert_group import ExpertMesh, Partners
from deltaserve.compute.collective.nccl import NcclCollective
from deltaserve.compute.collective.net_experts import NetExpertMesh
from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.compute.executor.recordable_models import most_piece_tokens
from deltaserve.compute.executor.recordings import most_tokens
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.compute.executor.warm_up import WarmUp, warm_up
from deltaserve.compute.memory.cache_file import CacheFile
from deltaserve.compute.memory.memory_block import DeviceAllocator, MemoryBlock
from deltaserve.compute.memory.staging_arena import PagesOfGroup, StagingArena
from deltaserve.control.engine.api import Instance, InstanceConfig
from deltaserve.control.engine.core import EngineCore
from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    EndpointAttached,
    OpenEndpoint,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.control.transfer.rank_plane import RankPlane
from deltaserve.control.transfer.staging import STAGING, Staging, StagingConfig, StagingMode
from deltaserve.control.transfer.tier_plane import TierPlane
from deltaserve.core.errors import ConfigError
from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName, RegionId, Role
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheGroup, CacheSpec
from deltaserve.core.transport import Transport, TransportError
from deltaserve.core.wire.messages import RankEnd, RegionInfo
from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.drafts.draft_algorithm import with_head
from deltaserve.model.fingerprint import model_fingerprint, tokenizer_fingerprint
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.shard_rules import ExpertPlacement
from deltaserve.process.worker.grammars_ahead import GrammarsAhead
from deltaserve.process.worker.member_thread import ExpertMember, group_errors
from deltaserve.process.worker.plane_on_demand import PlaneOnDemand
from deltaserve.process.worker.rank_group import GroupExecutor, RankProcesses
from deltaserve.process.worker.rank_process import RankParts, RankSeat
from deltaserve.process.worker.rank_spec import MeetingPoint, group_key, rank_device
from deltaserve.process.worker.tier_log import TierLog
from deltaserve.process.worker.transports import open_transport
from deltaserve.process.worker.worker_process import WorkerParts
from deltaserve.process.worker.worker_spec import WorkerSpec, read_secret
from deltaserve.server.text.text_codec import read_vocabulary
from deltaserve.transports.registry import transport_kind

log = logging.getLogger(__name__)


def build_worker(
    spec: WorkerSpec,
    boot: Boot,
    progress: Callable[[str], None],
    ranks: RankProcesses | None,
    staging_memory: DeviceAllocator | None = None,
) -> WorkerParts:
    """Loads the weights and allocates the pools. Raises ConfigError.

    `staging_memory`: where a GPU's staging memory comes from, for whoever embeds a worker
    (compute/memory/memory_block.py).
    """
    model = _model_of(spec)
    path = Path(spec.model_path)
    names = CheckpointNames(model_fingerprint(path), tokenizer_fingerprint(path))
    shard = Shard(0, spec.tp_size)
    collective = ALONE if ranks is None else _join(spec, shard, ranks.meeting, ranks.listener)
    grammars = AnswerGrammars(lambda: read_vocabulary(Path(spec.model_path), spec.model_overrides))
    with group_errors():
        mesh = _join_group(spec, progress)
        executor = _load(spec, model, Partners(collective, mesh), progress, grammars)
        if mesh is not None:
            progress("waiting for the other members of its expert group")
            mesh.wait_for_all()
    computes_beside = torch.device(spec.device).type == "cuda" and ranks is None and mesh is None
    config = replace(instance_config(spec, boot, model, names), computes_beside=computes_beside)

    def open_plane() -> DataPlane:
        own = _plane(spec, boot, executor, shard, staging_memory)
        return own if ranks is None else RankPlane(own, ranks.transfers, spec.step_stuck_after_s)

    several = None if ranks is None else GroupExecutor(executor, ranks.steps, spec.step_stuck_after_s)
    member = None if mesh is None else ExpertMember(mesh, executor.accompany)
    launcher = executor if config.computes_beside else None
    if launcher is not None:
        warm_up(lambda plan: launcher.launch(plan).wait(), _warm_up_of(spec, launcher.piece_tokens), progress)
    ahead = GrammarsAhead(grammars.compile)
    return WorkerParts(make_instance(config), several or executor, open_plane, member, launcher, ahead)


def build_rank(
    spec: WorkerSpec, seat: RankSeat, progress: Callable[[str], None], staging_memory: DeviceAllocator | None = None
) -> RankParts:
    """A further rank of the worker: its part of the weights and of every page. Raises ConfigError."""
    model = _model_of(spec)
    executor = _load(spec, model, Partners(_join(spec, seat.shard, seat.meeting)), progress)
    return RankParts(executor, lambda: _plane(spec, seat.boot, executor, seat.shard, staging_memory))


def _model_of(spec: WorkerSpec) -> ModelSpec:
    path, folder = Path(spec.model_path), None if spec.draft_path is None else Path(spec.draft_path)
    seat = spec.expert_seat
    member = Shard() if seat is None else Shard(seat.member, seat.size)
    model = with_head(load_spec(path, spec.model_overrides), path, spec.drafts, folder)
    return model.placed(ExpertPlacement(spec.ep_size, member))


def _join_group(spec: WorkerSpec, progress: Callable[[str], None]) -> ExpertMesh | NetExpertMesh | None:
    """Waits for all members. Raises CollectiveError, and ConfigError where they have other weights."""
    seat = spec.expert_seat
    if seat is None:
        return None
    member = Shard(seat.member, seat.size)
    if seat.nodes is None:
        return ExpertMesh.join(member, Path(seat.meeting_point), spec.step_stuck_after_s)
    host, port, own_host = seat.nodes.host, seat.nodes.port, seat.nodes.own_host
    progress(f"member {member.rank} of {member.size} of an expert group: waiting for the others at {host}:{port}")
    met = NetMeeting(own_host if member.rank == 0 else host, port, own_host, group_key(spec))
    mesh = NetExpertMesh.join(member, met, spec.step_stuck_after_s)
    _require_equal(spec, torch.cat(mesh.all_to_all([_digest_of_weights(spec)] * member.size)))
    return mesh


def _join(spec: WorkerSpec, shard: Shard, meeting: MeetingPoint, listener: socket.socket | None = None) -> Collective:
    """The collective of the ranks; waits for all of them. `listener`: rank 0's, where they are on several machines.

    Raises ConfigError where these have other weights.
    """
    device, limit_s = torch.device(rank_device(spec, shard)), spec.step_stuck_after_s
    if isinstance(meeting, NetMeeting):
        collective = ProcessCollective.join_over(shard, meeting, limit_s, listener)
        _require_equal(spec, collective.all_gather(_digest_of_weights(spec)).view(shard.size, -1))
        return collective
    if device.type == "cuda":
        return NcclCollective.join(shard, device, meeting, limit_s)
    return ProcessCollective.join(shard, meeting, limit_s)


def _digest_of_weights(spec: WorkerSpec) -> Tensor:
    """What only equal weights have in common: [1, 32] uint8."""
    digest = bytearray.fromhex(model_fingerprint(Path(spec.model_path)))
    return torch.frombuffer(digest, dtype=torch.uint8).view(1, -1)


def _require_equal(spec: WorkerSpec, digests: Tensor) -> None:
    """Processes on several machines read folders of their own: [n, 32] uint8. Raises ConfigError."""
    if not bool((digests == digests[0]).all()):
        raise ConfigError(f"{spec.model_path}: not the same weights on all machines of this worker")


def _load(
    spec: WorkerSpec,
    model: ModelSpec,
    partners: Partners,
    progress: Callable[[str], None],
    grammars: AnswerGrammars | None = None,
) -> TorchExecutor:
    """`grammars`: for the rank that draws."""
    path, device = Path(spec.model_path), rank_device(spec, partners.collective.shard)
    progress(f"loading {path.name} ({spec.dtype.value}) on {device}")
    sizes = ExecutorSizes(
        num_pages=spec.num_pages,
        max_rows=spec.max_running_requests,
        max_context_len=spec.max_context_len,
        num_threads=spec.num_threads,
        least_threads=spec.least_threads,
        core_share=spec.core_share,
        attention_backend=spec.attention_backend,
        rounding=spec.rounding,
        graph_rows=_graph_rows(spec),
        piece_tokens=most_piece_tokens(model, spec.options.sched.step_len + spec.max_running_requests),
        sharing=transport_kind(spec.transport).sharing,
        drafts=spec.drafts,
        quantization=spec.quantization,
        grammars=grammars,
    )
    cache = model.cache_spec(spec.page_size, spec.kv_dtype, spec.state_dtype)
    return TorchExecutor.load(path, model, cache, sizes, device, spec.dtype, partners)


def _graph_rows(spec: WorkerSpec) -> int | None:
    """See ExecutorSizes: no more than come."""
    if spec.graph_rows is None:
        return None
    return most_tokens(spec.graph_rows, spec.max_running_requests, spec.options.sched.max_drafts)


def _warm_up_of(spec: WorkerSpec, piece_tokens: int | None) -> WarmUp:
    return WarmUp(
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        chunk_len=spec.options.sched.chunk_len,
        step_len=spec.options.sched.step_len,
        split_tokens=spec.options.sched.split_tokens,
        max_context_len=spec.max_context_len,
        max_rows=spec.max_running_requests,
        graph_rows=_graph_rows(spec),
        piece_tokens=piece_tokens,
        is_decoding=spec.role is not Role.PREFILL,
        num_drafts=spec.options.sched.max_drafts,
    )


def make_instance(config: InstanceConfig) -> Instance:
    """The control plane of a role."""
    if config.role is Role.FRONT:
        raise ConfigError("a front is not a worker")
    return EngineCore(config)


class CheckpointNames(NamedTuple):
    """What a checkpoint is known by."""

    fingerprint: str
    tokenizer: str
    """Hash of tokenizer, chat template and end tokens."""


def instance_config(spec: WorkerSpec, boot: Boot, model: ModelSpec, names: CheckpointNames) -> InstanceConfig:
    """What the control plane must know of spec, model and memory."""
    cache = model.cache_spec(spec.page_size, spec.kv_dtype, spec.state_dtype)
    seat = spec.expert_seat
    return InstanceConfig(
        name=PeerName(spec.name),
        role=spec.role,
        boot=boot,
        cache=cache,
        num_pages=spec.num_pages,
        max_running_requests=spec.max_running_requests,
        max_context_len=spec.max_context_len,
        vocab_size=model.vocab_size,
        compat=compat_of(spec, cache, names),
        cluster_secret=read_secret(spec),
        fingerprint=names.fingerprint,
        transport=spec.transport,
        evidence=transport_kind(spec.transport).evidence,
        options=spec.options,
        tp_size=spec.tp_size,
        has_staging=spec.staging is not None,
        tier_slots=spec.cache_slots,
        lacks_file=spec.cache_dir is not None and not spec.cache_slots,
        group="" if seat is None or seat.nodes is None else f"{seat.nodes.host}:{seat.nodes.port}",
    )


def compat_of(spec: WorkerSpec, cache: CacheSpec, names: CheckpointNames) -> tuple[tuple[str, str], ...]:
    """All that must be equal on both sides before pages may move between them: a revision. For the rest see
    control/peer/page_fit.py."""
    groups = {f"pages.{group.name}": _describe(group) for group in cache.groups if not group.is_for_guesses}
    fields = {
        "fingerprint": names.fingerprint,
        "tokenizer": names.tokenizer,
        "dtype": spec.dtype.value,
        "quantization": "exact" if spec.quantization in ("none", "auto") else spec.quantization,
        "transport": spec.transport,
        "overrides": spec.model_overrides or "",
        "checksums": "crc" if spec.options.verify_checksums else "off",
        **groups,
    }
    return tuple(sorted(fields.items()))


def _describe(group: CacheGroup) -> str:
    shape = f"{group.num_layers} layers, " + " + ".join(
        f"{b.num_heads} heads x {b.num_rows} x {b.row_width}" for b in group.blocks
    )
    kept = group.retention
    return f"{shape}, {kept.lifetime.value} {kept.window_len or ''}".rstrip()


def _announce(component: str, region: Region) -> RegionInfo:
    return RegionInfo(
        id=region.id, base=region.base, num_bytes=region.num_bytes, device=region.device, component=component
    )


# ---------------------------------------------------------------- the data plane


class StagingLog:
    """Says which peers have no staging memory, when transfers are staged for the first time, and when, and why, some
    are not; ever more rarely."""

    def __init__(self) -> None:
        self._is_staged = False
        self._tell_at = 1

    def look_at_peer(self, endpoint: Endpoint, peer: PeerName, ends: Sequence[RankEnd]) -> None:
        """`ends`: what its ranks announced."""
        has_staging = all(any(info.component == STAGING for info in end.regions) for end in ends)
        if endpoint.staged is not None and not has_staging:
            log.info("%s has no staging memory (--staging): pages go to it and come from it by direct writes", peer)

    def look(self, endpoint: Endpoint) -> None:
        if endpoint.staged is None:
            return
        if endpoint.counters["staged_writes"] and not self._is_staged:
            self._is_staged = True
            log.info("pages for ranks with other heads go through staging memory")
        num_direct = endpoint.counters["staging_fallbacks"]
        if num_direct >= self._tell_at:
            self._tell_at = 2 * num_direct
            reason = endpoint.staged.writer.last_reason
            log.warning("%d staged transfers went directly; the last one: %s", num_direct, reason)


@dataclass(frozen=True, slots=True)
class _Plane:
    """An endpoint and the transport under it."""

    endpoint: Endpoint
    transport: Transport
    staging: StagingLog

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        reports = self.endpoint.perform(command, now)
        if isinstance(command, OpenEndpoint | AttachEndpoint) and command.theirs is not None:
            self.staging.look_at_peer(self.endpoint, command.peer, command.theirs)
        for report in reports:
            if isinstance(report, EndpointAttached) and self.endpoint.writes_rows(report.peer):
                log.warning("pages for %s, whose size is another, are written row by row: see --staging", report.peer)
        return reports

    def poll(self, now: float) -> list[TransferReport]:
        reports = self.endpoint.poll(now)
        self.staging.look(self.endpoint)
        return reports

    def is_idle(self) -> bool:
        return self.endpoint.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        pass

    def close(self) -> None:
        self.transport.close()


def _plane(
    spec: WorkerSpec, boot: Boot, executor: TorchExecutor, shard: Shard, staging_memory: DeviceAllocator | None
) -> DataPlane:
    """A unified worker computes whole answers: it needs a transport only if a prefill worker ever joins it."""

    def open_now() -> DataPlane:
        return _open_plane(spec, boot, executor, shard, staging_memory)

    folder = spec.cache_dir if spec.cache_slots else None
    store = None if folder is None else _cache_file(spec, folder, executor, shard)
    plane = PlaneOnDemand(open_now) if spec.role is Role.UNIFIED else open_now()
    return plane if store is None else TierLog(TierPlane(plane, store, time.monotonic))


def _cache_file(spec: WorkerSpec, folder: str, executor: TorchExecutor, shard: Shard) -> CacheFile:
    """The file under the tree, of one rank. Raises ConfigError."""
    executor.memory.work_beside_steps()
    kv = executor.memory.kv
    of_whom = f"{model_fingerprint(Path(spec.model_path))} {kv.cache} {shard}"
    return CacheFile(Path(folder), spec.cache_slots, kv, of_whom)


def _open_plane(
    spec: WorkerSpec, boot: Boot, executor: TorchExecutor, shard: Shard, staging_memory: DeviceAllocator | None
) -> DataPlane:
    executor.memory.work_beside_steps()
    regions = executor.memory.regions()
    staging, kind = None, transport_kind(spec.transport)
    device = executor.memory.kv.arenas[0].bytes.device
    if spec.staging is not None:
        block = MemoryBlock(spec.staging_bytes, device, kind.sharing, staging_memory)
        region = block.region(RegionId(len(regions)))
        staging = _staging(spec.staging, block, region, executor)
        regions = [*regions, (STAGING, region)]
    try:
        transport = open_transport(spec, PeerName(f"{spec.name}.{shard.rank}"), boot, [region for _, region in regions])
    except TransportError as error:
        raise ConfigError(str(error)) from None
    config = EndpointConfig(
        cache=executor.memory.kv.cache,
        shard=shard,
        regions=tuple(_announce(component, region) for component, region in regions),
        checksums=spec.options.verify_checksums,
    )
    if device.type in kind.window_bytes:
        config = replace(config, window_bytes=kind.window_bytes[device.type])
    return _Plane(Endpoint(config, transport, executor.memory, staging), transport, StagingLog())


def _staging(mode: StagingMode, block: MemoryBlock, region: Region, executor: TorchExecutor) -> Staging:
    """Staging memory beside the pages of this rank."""
    arenas = executor.memory.kv.arenas
    groups = {arena.layout.group.name: PagesOfGroup(arena.bytes, arena.num_pages) for arena in arenas}
    return Staging(StagingConfig(region.id, region.num_bytes, mode), StagingArena(block.data, groups))
