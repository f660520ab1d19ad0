"""resolve(): settings + facts of model and machine -> plain numbers. The only place where "auto" has a meaning."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from deltaserve.core.branches import ATTENTION, automatic
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.quantization import Quantization
from deltaserve.core.sizes import size
from deltaserve.settings.config import STATES_PER_ROW, USEFUL_POOL_FACTOR, Settings

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What bounds a step. Lengths in tokens."""

    device: Device
    max_rows: int
    step_len: int
    context_len: int
    split_tokens: int
    page_size: int
    may_record: bool = True
    """Whether steps may be recorded on this device."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool of pages, on one rank."""

    page_bytes: int
    retention: Retention


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the checkpoint says about its model, as far as the numbers depend on it."""

    dtype: str
    """Type of the weights, as in --dtype."""
    weight_bytes: Callable[[str, Quantization, Device], int]
    """(dtype, quantization, device) |-> bytes of all weights that a rank loads."""
    context_len: int
    pools: Callable[[int, str], tuple[PoolFacts, ...]]
    """(page size, KV dtype) |-> its pools, FULL first. The layout computes bytes, not we."""
    scratch_bytes: Callable[[StepSizes], int]
    """Most memory that one step needs beside weights and pages, in bytes."""
    tp_size: int = 1
    """Ranks per worker. All bytes here are those of one rank."""
    has_codes: bool = False
    """Whether its files have matrices that can be computed with as they are stored."""


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """What the choice of a transport depends on."""

    tls: Mapping[str, str]
    """Device whose memory it moves |-> what --transfer-tls auto is; empty: it reads none."""
    limits: str = ""
    """What it is for, where it is not for all workers."""
    is_usable: bool = True
    """Whether workers like these can have it."""


class AttentionFacts(Protocol):
    """What the choice of an attention backend depends on."""

    @property
    def devices(self) -> Collection[str]:
        """Devices that it computes on."""
        ...

    @property
    def with_library(self) -> bool:
        """Whether the native library computes norms and products beside it."""
        ...

    @property
    def refuse(self) -> Callable[[str, str, str], str | None]:
        """(device, type of weights, type of KV) |-> why it does not compute so; None: it does."""
        ...


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What there is to use, measured once, before weights are loaded."""

    device: Device
    num_cores: int
    free_bytes: int
    """Bytes of the device's memory that are free."""
    num_ranks: int = 1
    """Ranks of all workers that share these cores, this one's included."""
    num_devices: int = 1
    """Devices that the ranks are spread over, each with memory like this."""
    total_bytes: int | None = None
    """Bytes of the device's memory, swap included: more can never be there. None: unknown."""
    slow_dtypes: frozenset[str] = frozenset()
    """Types, as in --dtype, that this device multiplies several times slower than float32."""
    native_problem: str | None = None
    """Why the native library cannot compute here; None: it can."""
    counts_waits: bool = True
    """Whether its kernel tells how long threads wait for a core."""
    transports: Mapping[str, TransportFacts] = field(default_factory=dict)
    """Transports by name, the one that is preferred first."""
    attention: Mapping[str, AttentionFacts] = field(default_factory=dict)
    """Attention backends by name, the one that is preferred first."""
    lends_cores: bool = False
    """Whether its workers see which cores the others do not need."""
    core_shares: tuple[int, int] = (1, 0)
    """Parts of the cores for computing: a rank of this worker gets the first number where all ranks together get the
    second; 0: the parts are the ranks, and each gets one."""

    @property
    def num_on_device(self) -> int:
        """Ranks that share the memory of one device."""
        return -(-self.num_ranks // self.num_devices)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """One worker's numbers. Lengths in tokens."""

    device: Device
    dtype: str
    quantization: Quantization
    """Quantization in effect: "auto" only where there are codes, and the native library computes."""
    kv_cache_dtype: str
    page_size: int
    num_pages: tuple[int, ...]
    """Pages of each pool, in order of the pools."""
    context_len: int
    max_running_requests: int
    chunk_len: int
    step_len: int
    """Prompt tokens per step over all requests."""
    extend_len: int
    """Prompt tokens beside rows of decode, where it does not compute the prompts as it shares prefill's cores."""
    split_tokens: int
    """Attention reads keys in splits of so many tokens."""
    tp_size: int
    """Ranks per worker."""
    num_threads: int
    """Threads that a rank computes with."""
    own_threads: int
    """Threads of a rank that always compute; those beyond compute only on cores that no other worker of this server
    uses."""
    least_threads: int
    """Threads of a rank that compute even where more would wait for cores."""
    num_cores: int
    """Cores of this machine that this process may use."""
    num_devices: int
    transfer_backend: str
    transfer_tls: str
    """The ways that it may move data by, as its library names them; empty: it has one only."""
    kv_bytes: int
    """Bytes of all pools on one rank."""
    pools: tuple[PoolFacts, ...]
    shortened_from: int | None = None
    """The model's context, where nobody asked for a length and the pool holds no more than `context_len`."""
    moves_pages: bool = True
    """False: a worker computes whole answers and opens no transport."""
    widened_from: str | None = None
    """The checkpoint's type, where float32 was chosen in its place because this CPU has no instructions for it."""
    native_problem: str | None = None
    """Why torch computes on this CPU where the native library was to."""
    attention: tuple[str, ...] = ()
    """What --attention-backend auto tries, one after the other."""


_LEAST_CONTEXT = 2
_MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.85}
_MAX_RUNNING = {"cpu": 32, "cuda": 256}
_CHUNK_LEN = {"cpu": 512, "cuda": 8192}
_MEAN_SHARE = 0.25
"""Mean prefix as a share of the longest context: a guess that only the split between FULL pages and others goes by."""
_PAGE_SIZE = {"cpu": 16, "cuda": 64}
"""The last page of a prompt is computed anew by each turn, unless it is full: on a CPU a token costs milliseconds and
a page microseconds. What pages of 16 tokens cost on a GPU has not been measured."""
_MANY_CORES = 4


@dataclass(frozen=True, slots=True)
class _Pools:
    """How many pages the further pools have beside so many FULL ones, and what all of them weigh."""

    facts: tuple[PoolFacts, ...]
    page_size: int
    max_running: int
    context_len: int
    chunk_len: int
    num_states: int | None = None
    """Slots of states that were asked for."""

    def num_pages(self, num_full: int) -> tuple[int, ...]:
        return tuple(self._count(pool, num_full) for pool in self.facts)

    def _count(self, pool: PoolFacts, num_full: int) -> int:
        match pool.retention.lifetime:
            case Lifetime.FULL:
                return num_full
            case Lifetime.WINDOW:
                return self._of_window(num_full, pool.retention)
            case Lifetime.STATE:
                return self.num_states or self._of_states(num_full, pool.page_bytes)

    def _of_window(self, num_full: int, kept: Retention) -> int:
        """What running requests hold, and as much again to keep; never more than FULL ones.

        At least the tail of each prefix that the FULL ones hold, were all as long as _MEAN_SHARE says: both run out
        together, for a prefix whose window is gone is of no use.
        """
        held = 2 * self.max_running * kept.most_pages(self.context_len, self.chunk_len, self.page_size)
        tail = kept.most_pages(self.context_len, 1, self.page_size)
        return min(num_full, max(held, num_full * tail // self._prefix_pages))

    @property
    def _prefix_pages(self) -> int:
        return max(1, int(self.context_len * _MEAN_SHARE) // self.page_size)

    def _of_states(self, num_full: int, state_bytes: int) -> int:
        """What running requests use, and at least one for each prefix of the mean length that the FULL pages hold.

        No more memory than the FULL pages have: one state may weigh as much as the KV of thousands of tokens.
        """
        most = min(num_full, max(STATES_PER_ROW * self.max_running, num_full // self._prefix_pages))
        equal = num_full * self.facts[0].page_bytes // state_bytes
        return max(min(STATES_PER_ROW, most), min(equal, most))

    def num_bytes(self, num_full: int) -> int:
        return sum(n * f.page_bytes for n, f in zip(self.num_pages(num_full), self.facts, strict=True))

    def num_full(self, num_bytes: int) -> int:
        """Most FULL pages that leave room for the others."""
        above = max(0, num_bytes) // self.facts[0].page_bytes + 1
        return bisect_right(range(above + 1), num_bytes, key=self.num_bytes) - 1


def resolve(settings: Settings, model: ModelFacts, machine: MachineFacts) -> ResolvedConfig:
    """Raises ConfigError when an asked-for value does not fit the model or the machine."""
    device = _device(settings, machine)
    if device == "cuda":
        _check_gpus(settings, model, machine)
    transfer_backend, transfer_tls = _transfer(settings, device, machine.transports)
    dtype, kv_dtype = _dtypes(settings, model, machine.slow_dtypes)
    _check_attention(settings, machine, (device, dtype, kv_dtype))
    quantization = _quantization(settings, model, device, dtype, machine)
    page_size = _or_auto(settings.memory.page_size, _PAGE_SIZE[device])
    chunk_len = _chunk_len(settings, device, page_size)
    max_running = _or_auto(settings.scheduling.max_running_requests, _MAX_RUNNING[device])
    wanted_len = _wanted_context(settings, model)
    states = settings.memory.max_mamba_cache_size
    num_states = None if states == "auto" else states
    pools = _Pools(model.pools(page_size, kv_dtype), page_size, max_running, wanted_len, chunk_len, num_states)
    if settings.memory.num_pages == "auto":
        useful = USEFUL_POOL_FACTOR * max_running * _pages(wanted_len, page_size)
        step_len, split_tokens = _step_len(settings, chunk_len), _split_tokens(settings, page_size)
        num_rows = max_running * (1 + max_drafts(settings))
        may_record = device != "cpu" and not settings.scheduling.disable_cuda_graph
        step = StepSizes(device, num_rows, step_len, wanted_len, split_tokens, page_size, may_record)
        affordable = _affordable_pages(settings, model, machine, (step, dtype, quantization), pools)
        num_pages = min(useful, affordable)
    else:
        num_pages = settings.memory.num_pages
        _check_room(num_pages, pools, model.weight_bytes(dtype, quantization, device), machine)
    context_len = _context_len(settings, wanted_len, num_pages * page_size)
    own_threads = _own_threads(settings, machine)
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_dtype,
        page_size=page_size,
        num_pages=pools.num_pages(num_pages),
        context_len=context_len,
        max_running_requests=max_running,
        chunk_len=chunk_len,
        step_len=_step_len(settings, chunk_len),
        extend_len=_or_auto(settings.scheduling.decode_extend_tokens, _EXTEND_LEN),
        split_tokens=_split_tokens(settings, page_size),
        tp_size=model.tp_size,
        num_threads=max(own_threads, _compute_cores(machine)) if _borrows_cores(settings, machine) else own_threads,
        own_threads=own_threads,
        least_threads=_least_threads(settings, model.tp_size, own_threads),
        num_cores=machine.num_cores,
        num_devices=machine.num_devices,
        transfer_backend=transfer_backend,
        transfer_tls=transfer_tls,
        kv_bytes=pools.num_bytes(num_pages),
        pools=pools.facts,
        shortened_from=wanted_len if context_len < wanted_len else None,
        moves_pages=settings.disaggregation.disaggregation_mode != "null",
        widened_from=model.dtype if settings.model.dtype == "auto" and dtype != model.dtype else None,
        native_problem=_native_problem(settings, machine),
        attention=_automatic_attention(machine, device),
    )


def _check_gpus(settings: Settings, model: ModelFacts, machine: MachineFacts) -> None:
    """Each rank needs a GPU of its own, on this machine."""
    if settings.parallelism.nnodes > 1:
        raise ConfigError(
            f"--nnodes {settings.parallelism.nnodes}: ranks on GPUs add up over NCCL, here within one machine alone; "
            "leave it out, or add --device cpu"
        )
    if model.tp_size > machine.num_devices:
        raise ConfigError(
            f"--tp-size {model.tp_size}: each rank needs a GPU of its own, and {machine.num_devices} can be used here "
            "(CUDA_VISIBLE_DEVICES); lower it, or add --device cpu"
        )


def max_drafts(settings: Settings) -> int:
    """Guesses behind a row's last token in one step."""
    asked = settings.speculation
    return 0 if asked.speculative_algorithm == "off" else asked.speculative_num_steps


def of_one_context(configs: Mapping[Role, ResolvedConfig]) -> dict[Role, ResolvedConfig]:
    """Workers of several roles that serve the same requests: none takes a longer one than another."""
    shortest = min(config.context_len for config in configs.values())
    return {
        role: config
        if config.context_len == shortest
        else replace(config, context_len=shortest, shortened_from=config.shortened_from or config.context_len)
        for role, config in configs.items()
    }


_WEIGHED = "each prompt is weighed"
_EXTEND_LEN = 256
"""Longest suffix that decode computes beside prefill's prompts, in tokens."""


def auto_values(settings: Settings, resolved: ResolvedConfig, mode: str) -> dict[str, str]:
    """Field |-> what it came to, of all that are "auto" and that a worker reads. `mode`: what the command runs."""
    found: dict[str, object] = {
        "disaggregation_mode": mode,
        "conditional_prefill": _WEIGHED,
        "dtype": resolved.dtype,
        "context_length": resolved.context_len,
        "quantization": "as stored" if resolved.quantization == "auto" else resolved.quantization,
        "device": resolved.device,
        "page_size": resolved.page_size,
        "num_pages": resolved.num_pages[0],
        "mem_fraction_static": _MEMORY_SHARE[resolved.device],
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "max_mamba_cache_size": _num_states(resolved),
        "max_running_requests": resolved.max_running_requests,
        "chunked_prefill_size": resolved.chunk_len,
        "max_prefill_tokens": resolved.step_len,
        "decode_extend_tokens": f"{resolved.extend_len}; {resolved.step_len} on shared cores, for prompts there",
        "num_threads": resolved.num_threads,
        "ep_size": "a group for each rank where the experts divide, or else 1",
        "attention_backend": ", or else ".join(resolved.attention),
        "disaggregation_transfer_backend": resolved.transfer_backend,
        "transfer_tls": resolved.transfer_tls or f"not read: {resolved.transfer_backend} has one way only",
        "tool_call_parser": "not read: the front reads answers",
        "reasoning_parser": "not read: the front reads answers",
    }
    if settings.memory.num_pages != "auto":
        found["mem_fraction_static"] = "not read: num-pages is given"
    return _of_automatic(settings, found)


def _num_states(resolved: ResolvedConfig) -> int | str:
    pools = zip(resolved.pools, resolved.num_pages, strict=True)
    slots = [num for pool, num in pools if pool.retention.lifetime is Lifetime.STATE]
    return slots[0] if slots else "not read: no layer of the model is recurrent"


def shared_auto_values(settings: Settings, model: ModelFacts) -> dict[str, str]:
    """What `auto_values` returns, but for a router, which does not know its workers' machines: dtype is the
    checkpoint's type, and workers name the size of their pages."""
    dtype, kv_dtype = _dtypes(settings, model)
    found = {"dtype": dtype, "page_size": "what each worker has", "kv_cache_dtype": kv_dtype}
    return _of_automatic(settings, {**found, "conditional_prefill": _WEIGHED})


def _of_automatic(settings: Settings, found: Mapping[str, object]) -> dict[str, str]:
    """Values found for settings that were given as "auto"."""
    asked = {name: value for group in settings.model_dump().values() for name, value in group.items()}
    return {name: str(value) for name, value in found.items() if asked[name] == "auto"}


def kv_bytes_per_token(settings: Settings, model: ModelFacts) -> float:
    """Bytes per token as `resolve` finds them, but without the machine's facts: a router needs no memory for the
    model."""
    page_size = _or_auto(settings.memory.page_size, _PAGE_SIZE["cuda"])
    return _token_bytes(model.pools(page_size, _dtypes(settings, model)[1]), page_size)


def _token_bytes(pools: Iterable[PoolFacts], page_size: int) -> float:
    """Bytes per token in the pools that keep every token; a window or a state weighs the same for a prompt of any
    length."""
    return sum(pool.page_bytes for pool in pools if pool.retention == KEEP_ALL) / page_size


_CODE_DTYPES = ("float32", "bfloat16")
"""Types of the activations of models whose matrices may be codes."""


def _quantization(
    settings: Settings, model: ModelFacts, device: Device, dtype: str, machine: MachineFacts
) -> Quantization:
    """What is quantized, as ResolvedConfig has it. Raises ConfigError where it was asked for and cannot be computed."""
    asked = settings.model.quantization
    if asked == "none" or (asked == "auto" and not model.has_codes):
        return "none"
    problem = None
    if device != "cpu":
        problem = f"computed on CPUs only, and the device is {device}"
    elif not _has_library(settings, machine):
        left_out = f"which --attention-backend {settings.scheduling.attention_backend} leaves out"
        problem = f"computed by the native library, {left_out}"
    elif dtype not in _CODE_DTYPES:
        problem = f"computed with activations in {' or '.join(_CODE_DTYPES)}, and --dtype is {dtype}"
    elif machine.native_problem is not None:
        problem = f"computed by the native library: {machine.native_problem}"
    if problem is not None and asked != "auto":
        raise ConfigError(f"--quantization {asked}: {problem}")
    return asked if problem is None else "none"


def _dtypes(settings: Settings, model: ModelFacts, slow: frozenset[str] = frozenset()) -> tuple[str, str]:
    """Types of weights and of KV. They never depend on free memory: prefill and decode must come to the same."""
    automatic = "float32" if model.dtype in slow else model.dtype
    dtype = automatic if settings.model.dtype == "auto" else settings.model.dtype
    return dtype, dtype if settings.memory.kv_cache_dtype == "auto" else settings.memory.kv_cache_dtype


def _check_attention(settings: Settings, machine: MachineFacts, types: tuple[Device, str, str]) -> None:
    """`types`: device, type of weights, type of KV. Which layers it can compute a worker says that has their pages."""
    asked = settings.scheduling.attention_backend
    problem = None if asked == "auto" else machine.attention[asked].refuse(*types)
    if problem is not None:
        raise ConfigError(f"--attention-backend {asked}: {problem}")


def _automatic_attention(machine: MachineFacts, device: Device) -> tuple[str, ...]:
    tried = automatic(ATTENTION)
    return tuple(name for name, facts in machine.attention.items() if name in tried and device in facts.devices)


def _has_library(settings: Settings, machine: MachineFacts) -> bool:
    """Whether the native library computes where it can: it does unless a backend was asked for that leaves it out."""
    asked = settings.scheduling.attention_backend
    return asked == "auto" or machine.attention[asked].with_library


def _or_auto(value: int | Literal["auto"], automatic: int) -> int:
    return automatic if value == "auto" else value


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def _device(settings: Settings, machine: MachineFacts) -> Device:
    wanted = settings.model.device
    if wanted == "cuda" and machine.device != "cuda":
        raise ConfigError("--device cuda: no CUDA device is visible here; allowed: auto, cpu")
    return machine.device if wanted == "auto" else wanted


def _chunk_len(settings: Settings, device: Device, page_size: int) -> int:
    """An automatic one fits into a step, as long as that holds a page."""
    asked, step = settings.scheduling.chunked_prefill_size, settings.scheduling.max_prefill_tokens
    if asked == "auto" and step != "auto" and step >= page_size:
        return min(_CHUNK_LEN[device], step // page_size * page_size)
    if asked == "auto":
        return _CHUNK_LEN[device]
    if asked % page_size:
        raise ConfigError(f"--chunked-prefill-size {asked}: must be a multiple of the page size {page_size}")
    return asked


def _step_len(settings: Settings, chunk_len: int) -> int:
    asked = _or_auto(settings.scheduling.max_prefill_tokens, chunk_len)
    if asked < chunk_len:
        raise ConfigError(f"--max-prefill-tokens {asked}: must be at least the chunk of {chunk_len} tokens")
    return asked


def _split_tokens(settings: Settings, page_size: int) -> int:
    asked = settings.scheduling.attention_split_tokens
    if asked % page_size:
        raise ConfigError(f"--attention-split-tokens {asked}: must be a multiple of the page size {page_size}")
    return asked


def _compute_cores(machine: MachineFacts) -> int:
    """Cores for the steps of all workers. Threads of a step wait for each other: one that does not get its core at once
    stops all. So a core is left to the front and whatever else runs. Where cores are few that would be a large part of
    them: none is left, and fewer threads compute while they wait for cores.

    """
    return machine.num_cores - (machine.num_cores >= _MANY_CORES)


def _own_threads(settings: Settings, machine: MachineFacts) -> int:
    """Threads of a rank that always compute; one where cores are few and nobody would know that threads wait for
    them."""
    own, of_all = machine.core_shares
    own_cores = _compute_cores(machine) * own // (of_all or machine.num_ranks)
    most = own_cores if machine.counts_waits or machine.num_cores >= _MANY_CORES else 1
    return _or_auto(settings.scheduling.num_threads, max(1, most))


def _native_problem(settings: Settings, machine: MachineFacts) -> str | None:
    """Why the native library cannot compute here. None where the backend is named: a worker without it says so
    itself."""
    is_auto = settings.scheduling.attention_backend == "auto"
    return machine.native_problem if machine.device == "cpu" and is_auto else None


def _borrows_cores(settings: Settings, machine: MachineFacts) -> bool:
    """Whether cores are lent; not where others than these workers could keep threads waiting for one, and nobody
    would know."""
    is_native = machine.native_problem is None and _has_library(settings, machine)
    is_auto = settings.scheduling.num_threads == "auto"
    return machine.lends_cores and machine.device == "cpu" and machine.counts_waits and is_native and is_auto


def _least_threads(settings: Settings, tp_size: int, num_threads: int) -> int:
    """Ranks of a worker wait for each other whatever their threads do, and come to the same numbers, to the bit, by the
    same number of them."""
    return _or_auto(settings.scheduling.num_threads, 1 if tp_size == 1 else num_threads)


def _transfer(settings: Settings, device: Device, transports: Mapping[str, TransportFacts]) -> tuple[str, str]:
    """What moves pages, and the ways it may move them by. Raises ConfigError."""
    asked, tls = settings.disaggregation.disaggregation_transfer_backend, settings.disaggregation.transfer_tls
    able = {name: facts for name, facts in transports.items() if facts.is_usable and device in facts.tls}
    if asked == "auto":
        asked = next((name for name, facts in able.items() if tls == "auto" or facts.tls[device]), "")
    if not asked and settings.disaggregation.disaggregation_mode == "null":
        return next(iter(transports)), ""  # which no worker opens
    if not asked:
        raise ConfigError(
            f"--disaggregation-transfer-backend auto: there is none that moves memory of {device} by --transfer-tls "
            f"{tls}; leave that out, or add --device cpu or --disaggregation-mode null, which moves no pages"
        )
    if asked not in able:
        others = "".join(f", or say {name}" for name in list(able)[:1])
        way_out = "add --device cpu" if transports[asked].is_usable else f"leave it out{others}"
        raise ConfigError(f"--disaggregation-transfer-backend {asked}: {transports[asked].limits}; {way_out}")
    automatic = able[asked].tls[device]
    return asked, tls if automatic and tls != "auto" else automatic


def _wanted_context(settings: Settings, model: ModelFacts) -> int:
    asked = _or_auto(settings.model.context_length, model.context_len)
    if asked > model.context_len:
        beyond = f"--json-model-override-args '{{\"max_position_embeddings\": {asked}}}'"
        raise ConfigError(
            f"--context-length {asked}: the model was made for at most {model.context_len} tokens, rope scaling "
            f"counted; to go beyond all the same, add {beyond}"
        )
    if asked < _LEAST_CONTEXT:
        raise ConfigError(f"a context of {asked} tokens holds no prompt and answer: at least {_LEAST_CONTEXT}")
    return asked


def _context_len(settings: Settings, wanted_len: int, pool_len: int) -> int:
    if settings.model.context_length != "auto" and wanted_len > pool_len:
        raise ConfigError(
            f"--context-length {wanted_len}: the pool holds {pool_len} tokens; lower it, or give more memory "
            "(--num-pages, --mem-fraction-static)"
        )
    return min(wanted_len, pool_len)


def _check_room(num_pages: int, pools: _Pools, weights: int, machine: MachineFacts) -> None:
    """Raises ConfigError when the ranks could not be held even by an empty machine: what is free now is luck."""
    if machine.total_bytes is None:
        return
    largest = pools.num_full(machine.total_bytes // machine.num_on_device - weights)
    if num_pages > largest:
        hint = f"at most {largest} fit" if largest > 0 else "not one page fits beside the weights"
        raise ConfigError(
            f"--num-pages {num_pages}: {size(pools.num_bytes(num_pages))} of pages and {size(weights)} of weights "
            f"for each of {machine.num_on_device} worker processes, {size(machine.total_bytes)} of memory here; "
            f"{hint}"
        )


def _affordable_pages(
    settings: Settings,
    model: ModelFacts,
    machine: MachineFacts,
    kind: tuple[StepSizes, str, Quantization],
    pools: _Pools,
) -> int:
    """Pages that fit beside weights and scratch into this rank's share of memory, at least one.

    `kind`: sizes of a step, type of the weights and how they are kept.
    """
    step, dtype, quantization = kind
    asked = settings.memory.mem_fraction_static
    share = _MEMORY_SHARE[step.device] if asked == "auto" else asked
    budget = int(machine.free_bytes * share) // machine.num_on_device
    weights = model.weight_bytes(dtype, quantization, step.device)
    reachable = max(1, pools.num_full(budget - weights)) * step.page_size  # no row is longer than the pool
    scratch = model.scratch_bytes(replace(step, context_len=min(step.context_len, reachable)))
    num_pages = pools.num_full(budget - weights - scratch)
    if num_pages < 1:
        raise ConfigError(
            f"--mem-fraction-static {share:g}: {size(budget)} for each of {machine.num_on_device} worker processes "
            f"do not hold {size(weights)} of weights, {size(scratch)} for a step "
            f"and one page of {size(pools.num_bytes(1))}; "
            "raise it, or take fewer workers or a smaller model"
        )
    return num_pages
