"""Turns settings into processes: what checkpoint and machine allow, and the spec of each worker and the front."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from random import Random

import msgspec
import psutil

from deltaserve.compute.attention.registry import attention_kinds
from deltaserve.compute.executor.core_waits import counts_waits
from deltaserve.compute.executor.scratch import scratch_bytes
from deltaserve.compute.native.core_share import CoreShare
from deltaserve.compute.native.native_library import library_problem
from deltaserve.control.engine.api import InstanceOptions
from deltaserve.control.sched.sched_config import SchedOptions
from deltaserve.control.transfer.slot_seal import HEADER_BYTES
from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.layout.shard import Shard
from deltaserve.core.lifetime import KEEP_ALL
from deltaserve.core.quantization import Quantization
from deltaserve.core.rounding import Rounding
from deltaserve.core.transport import Evidence
from deltaserve.launch.cgroup import read_limits, usable_cores
from deltaserve.launch.cpu import read_cpuinfo, slow_dtypes
from deltaserve.launch.lacking import model_problem
from deltaserve.launch.process_limits import page_addresses
from deltaserve.model.checkpoint_config import idle_overrides, spec_of
from deltaserve.model.code_plan import CODE_RULES, stored_kinds
from deltaserve.model.drafts.draft_algorithm import OFF, own_inventory, with_head
from deltaserve.model.files import model_name
from deltaserve.model.fingerprint import model_fingerprint, tokenizer_fingerprint
from deltaserve.model.known_families import family_named
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.open_source import open_source
from deltaserve.model.shard_rules import ExpertPlacement
from deltaserve.model.tensors import Inventory, as_stored, check_weights
from deltaserve.model.weight_bytes import rank_weight_bytes
from deltaserve.process.children.child import ChildSpec, Kind
from deltaserve.process.children.terminal import LogSpec
from deltaserve.process.children.title import ROOM
from deltaserve.process.worker.worker_spec import ExpertSeat, WorkerSpec, worker_environment, write_spec
from deltaserve.settings.config import Settings
from deltaserve.settings.kv_events import KvEventsConfig, read_kv_events
from deltaserve.settings.resolve import (
    Device,
    MachineFacts,
    ModelFacts,
    PoolFacts,
    ResolvedConfig,
    StepSizes,
    TransportFacts,
    max_drafts,
    of_one_context,
    resolve,
)
from deltaserve.transports.registry import TransportKind, transport_kind, transport_kinds

_PORTS = range(20_000, 32_000, 2)
"""Below those that Linux chooses from (net.ipv4.ip_local_port_range): it gives none of them to anybody unasked."""


@dataclass(frozen=True, slots=True)
class Head:
    """Which head the model gets that guesses at next tokens."""

    algorithm: str = OFF
    folder: Path | None = None
    """The head's own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder or GGUF file, looked at without loading it."""

    path: Path
    spec: ModelSpec
    fingerprint: str
    tokenizer: str
    """Hash of what makes tokens of text and text of tokens."""
    num_bytes: int
    """Bytes of all weight files."""
    num_values: int
    """Elements of all weights."""
    stored: ModelSpec
    """Spec as the files have it: see `as_stored`."""
    kinds: Mapping[str, str]
    """How each tensor is stored: see `stored_kinds`."""
    overrides: str | None = None
    idle_overrides: tuple[str, ...] = ()
    """Keys of `overrides` that nothing reads."""

    @classmethod
    def open(
        cls,
        folder: str | None,
        overrides: str | None = None,
        head: Head = Head(),
        placement: ExpertPlacement = ExpertPlacement(),
    ) -> "Checkpoint":
        """Raises ConfigError naming the file and field that is wrong."""
        if folder is None:
            raise ConfigError("MODEL: missing; give the folder of a Hugging Face checkpoint, or a GGUF file")
        problem = model_problem(folder)
        if problem is not None:
            raise ConfigError(problem)
        path = Path(folder)
        try:
            return cls._read(path, overrides, head, placement)
        except (ConfigError, OSError) as error:
            raise ConfigError(f"MODEL {_located(path, str(error))}") from None

    @classmethod
    def _read(cls, path: Path, overrides: str | None, head: Head, placement: ExpertPlacement) -> "Checkpoint":
        source = open_source(path)
        num_bytes = source.num_bytes
        spec = with_head(spec_of(source, overrides), path, head.algorithm, head.folder).placed(placement)
        fingerprint = model_fingerprint(path)
        family = family_named(spec.family)
        stored = as_stored(spec, family, source.headers())
        inventory = Inventory.of(family, stored, source.index)
        check_weights(source.headers(), inventory)
        if spec.draft is not None and spec.draft.folder is not None:
            of_head = open_source(Path(spec.draft.folder))
            check_weights(of_head.headers(), own_inventory(spec.draft, of_head.index))
        return cls(
            path.resolve(),
            spec,
            fingerprint,
            tokenizer_fingerprint(path),
            num_bytes,
            inventory.num_values,
            stored,
            stored_kinds(source, family),
            overrides,
            tuple(idle_overrides(source, overrides)),
        )

    @property
    def name(self) -> str:
        """What clients call it."""
        return model_name(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about what was accepted and changes nothing."""
        if not self.idle_overrides:
            return ()
        keys = ", ".join(self.idle_overrides)
        return (f"--json-model-override-args: nothing here reads {keys[:200]}, so it changes nothing",)

    def facts(self, tp_size: int = 1, state_dtype: str = "float32", num_members: int = 1) -> ModelFacts:
        """Facts of a worker with so many ranks, or in a group of so many that share experts. Raises ConfigError when
        the model does not divide over them."""
        spec, stored, shard = self.spec, self.stored, Shard(0, tp_size)
        if num_members > 1:
            placement = ExpertPlacement(member=Shard(0, num_members))
            spec, stored = spec.placed(placement), stored.placed(placement)
        local = spec.local(shard)

        def weight_bytes(dtype: str, quantization: Quantization, device: Device) -> int:
            return rank_weight_bytes(stored, DType(dtype), shard, self.kinds, CODE_RULES[quantization], device)

        def pools(page_size: int, kv_dtype: str) -> tuple[PoolFacts, ...]:
            cache = spec.cache_spec(page_size, DType(kv_dtype), DType(state_dtype))
            return tuple(map(PoolFacts, pool_page_bytes(cache, shard), cache.pools))

        def scratch(sizes: StepSizes) -> int:
            is_alone = tp_size == num_members == 1  # steps in which others take part are not recorded
            return scratch_bytes(local, replace(sizes, may_record=sizes.may_record and is_alone))

        return ModelFacts(spec.dtype.value, weight_bytes, spec.max_position, pools, scratch, tp_size, bool(self.kinds))


def open_checkpoint(settings: Settings) -> Checkpoint:
    """The checkpoint as workers of these settings load it. Raises ConfigError."""
    asked = settings.speculation
    folder = asked.speculative_draft_model_path
    head = Head(asked.speculative_algorithm, None if folder is None else Path(folder))
    model = settings.model
    return Checkpoint.open(
        model.model_path, model.json_model_override_args, head, ExpertPlacement(ep_size_of(settings))
    )


def ep_size_of(settings: Settings) -> int | None:
    asked = settings.parallelism.ep_size
    return None if asked == "auto" else asked


def machine_facts(settings: Settings, num_ranks: int) -> MachineFacts:
    """What there is to use now, for so many ranks of all workers."""
    device = _visible_device() if settings.model.device != "cpu" else "cpu"
    cores = usable_cores(read_limits())
    if device == "cuda":
        gpus = _gpu_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"))[:num_ranks]
        free, total = (min(sizes) for sizes in zip(*gpus, strict=True))
        return MachineFacts(
            device,
            cores,
            free,
            num_ranks,
            len(gpus),
            total,
            transports=transport_facts(),
            attention=attention_kinds(),
        )
    free, total = cpu_bytes()
    addresses = page_addresses()
    if addresses is not None:
        free, total = min(free, addresses * num_ranks), min(total, addresses * num_ranks)
    return MachineFacts(
        device,
        cores,
        free,
        num_ranks,
        1,
        total,
        slow_dtypes(read_cpuinfo()),
        native_problem=library_problem(),
        counts_waits=counts_waits(),
        transports=transport_facts(),
        attention=attention_kinds(),
    )


def transport_facts(in_one_serve: bool = False, num_gpus: int = 1) -> dict[str, TransportFacts]:
    """Transports for workers that one `serve` starts on this machine, on `num_gpus` where they compute on GPUs, or else
    for workers with peers anywhere."""
    return {
        kind.name: TransportFacts(
            _devices_of(kind, num_gpus),
            kind.limits,
            (in_one_serve or not kind.is_for_one_serve) and kind.machine_problem() is None,
        )
        for kind in transport_kinds()
    }


def _devices_of(kind: TransportKind, num_gpus: int) -> Mapping[str, str]:
    """Its `tls`, without GPUs that it cannot move bytes between."""
    if "cuda" not in kind.tls or kind.gpu_problem(num_gpus) is None:
        return kind.tls
    return {device: tls for device, tls in kind.tls.items() if device != "cuda"}


def _visible_device() -> Device:
    return "cuda" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else "cpu"


def cpu_bytes() -> tuple[int, int]:
    """Available now, and in all. Raises ConfigError where /proc is not mounted."""
    try:
        memory, limits = psutil.virtual_memory(), read_limits()
        total = memory.total + psutil.swap_memory().total
    except OSError as error:
        what = f"{error.filename or '/proc'}: {error.strerror}"
        raise ConfigError(f"{what}; the kernel tells there how much memory is free: mount -t proc proc /proc") from None
    free = memory.available if limits.free_memory_bytes is None else min(memory.available, limits.free_memory_bytes)
    return free, total if limits.memory_bytes is None else min(total, limits.memory_bytes)


def _gpu_bytes(visible: str | None) -> list[tuple[int, int]]:
    """(free, in all) of each GPU that this process and its children see. `visible`: CUDA_VISIBLE_DEVICES."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        rows = [[word.strip() for word in line.split(",")] for line in lines if line.strip()]
        gpus = {index: (uuid, int(free) << 20, int(total) << 20) for index, uuid, free, total in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ConfigError("--device cuda: nvidia-smi does not tell the free memory") from None
    wanted = list(gpus) if visible is None else visible.replace(" ", "").split(",")
    found = [gpu[1:] for name in wanted for index, gpu in gpus.items() if _is_called(name, index, gpu[0])]
    if not found:
        raise ConfigError(f"--device cuda: CUDA_VISIBLE_DEVICES {(visible or '')[:80]!r} names no GPU of nvidia-smi")
    return found


def _is_called(name: str, index: str, uuid: str) -> bool:
    """Whether a device is called so by CUDA's rule: an index, or the beginning of a UUID."""
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


def device_of(resolved: ResolvedConfig, first: int) -> str:
    """Device of rank 0 of a worker; `first`: ranks of the workers before it on this machine. While there are enough
    GPUs, each rank has one to itself; the ranks of a worker always have different ones."""
    if resolved.device == "cpu":
        return "cpu"
    number = first % resolved.num_devices
    return f"cuda:{number if number + resolved.tp_size <= resolved.num_devices else 0}"


def free_port() -> int:
    """A loopback port nobody listens on now, and the one above it neither: admin routes may have that."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Free ports, all different, found as `free_port` finds one. Raises ConfigError."""
    candidates = Random().sample(_PORTS, len(_PORTS))
    found = list(islice(filter(_has_room, candidates), count))
    if len(found) < count:
        raise ConfigError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")
    return found


def _has_room(port: int) -> bool:
    try:
        with socket.socket() as lower, socket.socket() as upper:
            lower.bind(("127.0.0.1", port))
            upper.bind(("127.0.0.1", port + 1))
    except OSError:
        return False
    return True


_CORE_SHARES = {Role.PREFILL: 2, Role.DECODE: 1, Role.UNIFIED: 1}
"""A prompt's products keep every core busy that they get; a decode step reads weights and KV, and so few cores take all
that the memory gives."""


def resolve_settings(settings: Settings, checkpoint: Checkpoint) -> dict[Role, ResolvedConfig]:
    """Resolved numbers of each role that `serve` starts. Raises ConfigError."""
    roles = [role for _, role in worker_names(settings)]
    facts = {role: divided(settings, checkpoint, role, group_size(settings, role)) for role in dict.fromkeys(roles)}
    num_ranks = sum(facts[role].tp_size for role in roles)
    here = machine_facts(settings, num_ranks)
    machine = replace(
        here,
        transports=transport_facts(in_one_serve=True, num_gpus=here.num_devices),
        lends_cores=1 < len(roles) == num_ranks,  # ranks of one worker must have equally many threads
    )
    all_shares = sum(_CORE_SHARES[role] * facts[role].tp_size for role in roles)
    resolved = {
        role: resolve(
            settings_of(settings, role), of_role, replace(machine, core_shares=(_CORE_SHARES[role], all_shares))
        )
        for role, of_role in facts.items()
    }
    if len(resolved) > 1:
        check_pair(settings, checkpoint.spec, resolved)
    return of_one_context(resolved)


def settings_of(settings: Settings, role: Role) -> Settings:
    """Settings as they are for workers of a role: what is said of that role alone goes before."""
    memory = settings.memory
    sizes = {Role.PREFILL: memory.prefill_page_size, Role.DECODE: memory.decode_page_size}
    dtypes = {Role.PREFILL: memory.prefill_kv_cache_dtype, Role.DECODE: memory.decode_kv_cache_dtype}
    own = {"page_size": sizes.get(role), "kv_cache_dtype": dtypes.get(role)}
    of_role = memory.model_copy(update={name: value for name, value in own.items() if value is not None})
    scheduling = settings.scheduling
    threads = {Role.PREFILL: scheduling.prefill_num_threads, Role.DECODE: scheduling.decode_num_threads}.get(role)
    if threads is not None:
        scheduling = scheduling.model_copy(update={"num_threads": threads})
    return settings.model_copy(update={"memory": of_role, "scheduling": scheduling})


def check_pair(settings: Settings, spec: ModelSpec, resolved: Mapping[Role, ResolvedConfig]) -> None:
    """Check what would be refused at the workers' handshake (control/peer/page_fit.py). Raises ConfigError."""
    prefill, decode = resolved[Role.PREFILL], resolved[Role.DECODE]
    ours, theirs = prefill.kv_cache_dtype, decode.kv_cache_dtype
    if ours != theirs and not has_staging(settings):
        raise ConfigError(
            f"KV is {ours} on prefill and {theirs} on decode: it is converted on the way only with --staging auto or on"
        )
    sizes = prefill.page_size, decode.page_size
    pools = spec.cache_spec(prefill.page_size, DType(ours)).pools
    if sizes[0] != sizes[1] and any(kept != KEEP_ALL for kept in pools):
        raise ConfigError(
            f"--prefill-page-size {sizes[0]}, --decode-page-size {sizes[1]}: must be equal for a model with layers "
            "that do not keep all tokens"
        )


_FILE_NAME = re.compile(r"[\w.-]+\.[a-z]+( with --[a-z-]+)?")


def _located(path: Path, problem: str) -> str:
    """A problem with the path of the file that it names first: path: problem."""
    problem = problem.removeprefix(f"{path.name}: ")
    name, _, rest = problem.partition(": ")
    is_of_file = path.is_dir() and rest and _FILE_NAME.fullmatch(name)
    return f"{str(path)[:200]}/{name}: {rest}" if is_of_file else f"{str(path)[:200]}: {problem}"


def has_staging(settings: Settings) -> bool:
    """Whether workers have memory in which pages are gathered, converted and scattered."""
    return settings.disaggregation.staging != "off"


def divided(settings: Settings, checkpoint: Checkpoint, role: Role, num_members: int) -> ModelFacts:
    """What each rank of a worker of this role holds, of which so many share experts. Raises ConfigError naming the
    flag."""
    flag, tp_size = tp_size_of(settings, role)
    if num_members > 1:
        return checkpoint.facts(tp_size, settings.memory.mamba_ssm_dtype, num_members)
    try:
        return checkpoint.facts(tp_size, settings.memory.mamba_ssm_dtype)
    except ConfigError as error:
        raise ConfigError(f"{flag} {tp_size}: {error}") from None


def tp_size_of(settings: Settings, role: Role) -> tuple[str, int]:
    """The flag that says it, and how many ranks a worker of this role has."""
    asked = settings.parallelism
    own = {
        Role.PREFILL: ("--prefill-tp-size", asked.prefill_tp_size),
        Role.DECODE: ("--decode-tp-size", asked.decode_tp_size),
    }
    flag, tp_size = own.get(role, ("", None))
    return ("--tp-size", asked.tp_size) if tp_size is None else (flag, tp_size)


def worker_spec(
    name: str, role: Role, settings: Settings, checkpoint: Checkpoint, resolved: ResolvedConfig, secret_path: Path
) -> WorkerSpec:
    """One worker; where it listens is added by whoever starts it."""
    scheduling, disaggregation = settings.scheduling, settings.disaggregation
    evidence, folder = transport_kind(resolved.transfer_backend).evidence, _cache_dir(role, settings)
    return WorkerSpec(
        name=name,
        role=role,
        model_path=str(checkpoint.path),
        model_overrides=checkpoint.overrides,
        device=device_of(resolved, 0),
        dtype=DType(resolved.dtype),
        quantization=resolved.quantization,
        kv_dtype=DType(resolved.kv_cache_dtype),
        state_dtype=DType(settings.memory.mamba_ssm_dtype),
        page_size=resolved.page_size,
        num_pages=resolved.num_pages,
        max_running_requests=resolved.max_running_requests,
        max_context_len=resolved.context_len,
        secret_path=str(secret_path),
        curve=True,
        options=InstanceOptions(
            sched=_sched_options(role, settings, resolved),
            max_queued_requests=scheduling.max_queued_requests * 8,
            kv_eviction=settings.memory.radix_eviction_policy,
            writes_back=settings.disaggregation.write_back == "on",
            state_eviction=settings.memory.state_eviction,
            verify_checksums=disaggregation.verify == "crc" or evidence is Evidence.CONTENTS,
            drain_timeout_s=disaggregation.drain_timeout_s,
            tells_blocks=kv_events_of(settings) is not None,
        ),
        transport=resolved.transfer_backend,
        transport_tls=resolved.transfer_tls,
        transport_fenced=disaggregation.transfer_fenced,
        staging=None if disaggregation.staging == "off" else StagingMode(disaggregation.staging),
        staging_bytes=0 if disaggregation.staging == "off" else disaggregation.staging_memory_mib << 20,
        cache_dir=folder,
        cache_slots=() if folder is None else cache_slots(settings, checkpoint.spec, resolved),
        cache_bytes=0 if folder is None else settings.memory.cache_dir_mib << 20,
        tp_size=resolved.tp_size,
        ep_size=ep_size_of(settings),
        num_threads=resolved.num_threads,
        least_threads=resolved.least_threads,
        attention_backend=scheduling.attention_backend,
        rounding=Rounding.OF_POSITION if scheduling.enable_deterministic_inference else Rounding.OF_QUERY,
        graph_rows=None if scheduling.disable_cuda_graph else scheduling.cuda_graph_max_bs,
        drafts=settings.speculation.speculative_algorithm,
        draft_path=settings.speculation.speculative_draft_model_path,
        drain_grace_s=settings.process.shutdown_grace_s,
        state_dir=settings.process.state_dir,
        kv_events=kv_events_of(settings),
        log=log_spec(settings),
    )


def _cache_dir(role: Role, settings: Settings) -> str | None:
    """Folder of the file under the cache of a worker; None: it has none, or no cache."""
    folder = settings.memory.cache_dir
    return None if folder is None or not _has_radix_cache(role, settings) else str(Path(folder).absolute())


def cache_slots(settings: Settings, spec: ModelSpec, resolved: ResolvedConfig) -> tuple[int, ...]:
    """Pages of each pool that the file under the tree of a worker holds, shared out as its memory is; empty: it has
    none. Raises ConfigError."""
    asked, ranks = settings.memory, Shard(0, resolved.tp_size)
    if asked.cache_dir is None:
        return ()
    cache = spec.cache_spec(resolved.page_size, DType(resolved.kv_cache_dtype), DType(asked.mamba_ssm_dtype))
    slot_bytes = [ranks.size * (HEADER_BYTES + num_bytes) for num_bytes in pool_page_bytes(cache, ranks)]
    pool_bytes = [size * count for size, count in zip(slot_bytes, resolved.num_pages, strict=True)]
    share = (asked.cache_dir_mib << 20) / sum(pool_bytes)
    num_slots = tuple(int(share * count) for count in resolved.num_pages)
    if not all(num_slots):
        least = sum(pool_bytes) / min(resolved.num_pages)
        raise ConfigError(f"--cache-dir-mib {asked.cache_dir_mib}: too little, it takes {ceil(least / (1 << 20))} MiB")
    return num_slots


def kv_events_of(settings: Settings) -> KvEventsConfig | None:
    """Where the first worker of this machine tells of its cache; None: none does."""
    text = settings.network.kv_events_config
    config = None if text is None else read_kv_events(text)
    return config if config is not None and config.is_on else None


def with_own_kv_events(spec: WorkerSpec, index: int) -> WorkerSpec:
    """`spec` with endpoints that no other worker of this machine has."""
    if spec.kv_events is None:
        return spec
    return msgspec.structs.replace(spec, kv_events=spec.kv_events.of_worker(index, spec.name))


def _sched_options(role: Role, settings: Settings, resolved: ResolvedConfig) -> SchedOptions:
    scheduling = settings.scheduling
    return SchedOptions(
        chunk_len=resolved.chunk_len,
        step_len=resolved.step_len,
        split_tokens=resolved.split_tokens,
        reserve_len=scheduling.num_reserved_decode_tokens,
        extend_len_beside_decode=resolved.extend_len,
        policy=scheduling.schedule_policy,
        step_target_s=None if scheduling.itl_target_ms is None else scheduling.itl_target_ms / 1000,
        max_drafts=max_drafts(settings),
        draft_policy=settings.speculation.speculative_policy,
        num_ahead=0 if scheduling.disable_overlap_schedule else scheduling.steps_ahead - 1,
        state_interval_len=settings.memory.mamba_track_interval,
        radix_cache=_has_radix_cache(role, settings),
    )


def _has_radix_cache(role: Role, settings: Settings) -> bool:
    memory = settings.memory
    return not memory.disable_radix_cache and not (role is Role.DECODE and memory.disable_decode_radix_cache)


def log_spec(settings: Settings) -> LogSpec:
    logging = settings.logging
    return LogSpec(level=logging.log_level, format=logging.log_format, is_seen=logging.log_to == "stdout")


def worker_child(spec: WorkerSpec, folder: Path) -> ChildSpec:
    """A worker process of this machine, for the supervisor."""
    path = folder / f"{spec.name}.json"
    write_spec(msgspec.structs.replace(spec, transport_folder=str(folder.resolve())), path)
    kind = Kind.PREFILL if spec.role is Role.PREFILL else Kind.DECODE
    argv = (sys.executable, "-m", "deltaserve.process.worker.worker", str(path))
    group = None if spec.expert_seat is None else spec.expert_seat.meeting_point or None
    may_be_forked = spec.device == "cpu"
    return ChildSpec(spec.name, argv, kind, worker_environment(spec), (path,), group, may_be_forked)


def preload_child(workers: Sequence[ChildSpec]) -> ChildSpec | None:
    """The process that workers are forked from, for the supervisor. None: too few can be for that to be worth it."""
    forked = [worker for worker in workers if worker.may_be_forked]
    if len(forked) < 2:
        return None
    first, *others = (worker.env for worker in forked)
    alike = {name: value for name, value in first.items() if all(env.get(name) == value for env in others)}
    # Libraries read these when they are loaded, and numpy's starts threads then. Workers set torch's own number.
    env = {**alike, "OPENBLAS_NUM_THREADS": "1"}
    argv = (sys.executable, "-m", "deltaserve.process.worker.worker_forks", ROOM)
    return ChildSpec("preload", argv, Kind.PREFILL, env)


def with_core_shares(
    specs: Sequence[WorkerSpec], resolved: Mapping[Role, ResolvedConfig], settings: Settings, folder: Path
) -> list[WorkerSpec]:
    """All have a place as soon as one may borrow: who does not borrow must say that it computes."""
    if all(one.num_threads == one.own_threads for one in resolved.values()):
        return list(specs)
    path, num_cores = str(folder.resolve() / "cores"), max(one.num_threads for one in resolved.values())
    shares = [
        CoreShare(path, place, len(specs), num_cores, resolved[spec.role].own_threads)
        for place, spec in enumerate(specs)
    ]
    return [_with_core_share(spec, share, settings) for spec, share in zip(specs, shares, strict=True)]


def _with_core_share(spec: WorkerSpec, share: CoreShare, settings: Settings) -> WorkerSpec:
    options = msgspec.structs.replace(spec.options, shares_cores=True)
    if computes_prompts(spec.role, options, settings) and settings.scheduling.decode_extend_tokens == "auto":
        # Each step reads all weights and the pages of its rows: short ones would do so more often than one server.
        sched = msgspec.structs.replace(options.sched, extend_len_beside_decode=None)
        options = msgspec.structs.replace(options, sched=sched)
    return msgspec.structs.replace(spec, core_share=share, options=options)


def computes_prompts(role: Role, options: InstanceOptions, settings: Settings) -> bool:
    """Whether this is decode, and computes prompts of any length as it shares prefill's cores."""
    return role is Role.DECODE and settings.disaggregation.conditional_prefill == "auto" and options.weighs_work


def worker_names(settings: Settings) -> Sequence[tuple[str, Role]]:
    """Names and roles of the workers that `serve` starts."""
    disaggregation = settings.disaggregation
    if disaggregation.disaggregation_mode == "null":
        return [("unified-0", Role.UNIFIED)]
    num_prefill = disaggregation.prefill * group_size(settings, Role.PREFILL)
    num_decode = disaggregation.decode * group_size(settings, Role.DECODE)
    prefill = [(f"prefill-{i}", Role.PREFILL) for i in range(num_prefill)]
    decode = [(f"decode-{i}", Role.DECODE) for i in range(num_decode)]
    return [*prefill, *decode]


def group_size(settings: Settings, role: Role) -> int:
    """Workers of a role that share the experts of one model; 1: each has all of them."""
    asked = settings.parallelism
    return {Role.PREFILL: asked.prefill_dp_size, Role.DECODE: asked.dp_size}.get(role, 1)


def with_expert_seat(spec: WorkerSpec, index: int, settings: Settings, folder: Path) -> WorkerSpec:
    """`index`: of the worker among those of its role. Members of a group follow one another."""
    size = group_size(settings, spec.role)
    if size == 1:
        return spec
    group, member = divmod(index, size)
    point = folder.resolve() / f"experts-{spec.role.value}-{group}"
    seat = ExpertSeat(member=member, size=size, meeting_point=str(point))
    return msgspec.structs.replace(spec, expert_seat=seat)
