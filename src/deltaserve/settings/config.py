"""All settings as one frozen tree: each field is at once a flag, a YAML key and a `DELTASERVE_*` variable.

The tree says what a value may be and what it means; `rules` says what values may stand together;
`resolve` turns it, with the facts of model and machine, into plain numbers. Reading is done in settings/flags.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler

from deltaserve.core.branches import (
    ANSWERS,
    ATTENTION,
    CLUSTERS,
    DRAFTS,
    TRANSPORTS,
    automatic_help,
    branch_help,
    with_words,
)
from deltaserve.core.quantization import Quantization
from deltaserve.core.sampling import SamplingSource
from deltaserve.settings.worker_list import NAME_PATTERN, SERVICE_PATTERN, WORKER_PATTERN

MAX_TOKENS = 2**31 - 1
MAX_PAGE_SIZE = 128
MAX_WORKERS = 64
"""Most workers of one role."""
STATES_PER_ROW = 4
"""Slots of recurrent states for each request that runs: the state that it goes on from, the one it writes, and as many
that are kept for later ones."""
USEFUL_POOL_FACTOR = 4
"""An automatic pool is not larger than this many times what the running requests can fill."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("not a power of two")
    return value


def _host(value: str) -> str:
    if ":" in value:
        if "%" in value:
            raise ValueError("an address with a zone")
        ipaddress.IPv6Address(value)
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", value):
        raise ValueError("not a host name")
    return value


def _network(value: str) -> str:
    if "/" not in value or ipaddress.IPv4Network(value, strict=False).prefixlen < 8:
        raise ValueError("not a network")
    return value


@dataclass(frozen=True, slots=True)
class BranchWords:
    """The words that a text may be, where a table of branches has them."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._known).__get_pydantic_core_schema__(source, handler)

    def _known(self, value: str) -> str:
        if value not in self.words:
            raise ValueError("none of the words")
        return value


# A type's description is what error lines and --help say is allowed.
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS, description="an integer >= 1")]
Fronts = Annotated[int, Field(ge=1, le=64, description="an integer of 1 to 64")]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_TOKENS, description="an integer >= 0")]
Rows = Annotated[int, Field(ge=1, le=65_536, description="an integer from 1 to 65536")]
StepsAhead = Annotated[int, Field(ge=1, le=8, description="an integer from 1 to 8")]
Threads = Annotated[int, Field(ge=1, le=1024, description="an integer from 1 to 1024")]
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS, description=f"an integer from 1 to {MAX_WORKERS}")]
Ranks = Annotated[int, Field(ge=1, le=64, description="an integer from 1 to 64")]
PageSize = Annotated[
    int,
    Field(ge=1, le=MAX_PAGE_SIZE, description=f"a power of two from 1 to {MAX_PAGE_SIZE}"),
    AfterValidator(_power_of_two),
]
TransferBackend = Annotated[str, BranchWords(("auto", *TRANSPORTS))]
DraftAlgorithm = Annotated[str, BranchWords(("off", *DRAFTS))]
Attention = Annotated[str, BranchWords(("auto", *ATTENTION))]
Launcher = Annotated[str, BranchWords(("none", *CLUSTERS))]
CallParser = Annotated[str, BranchWords(("auto", "none", *with_words(ANSWERS, "tool_call_parser")))]
ReasoningParser = Annotated[str, BranchWords(("auto", "none", *with_words(ANSWERS, "reasoning_parser")))]
KvDtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
Drafts = Annotated[int, Field(ge=1, le=15, description="an integer from 1 to 15")]
"""Guesses that one row may have verified in a step: with its last token they are a short extend."""
StagingMemory = Annotated[int, Field(ge=1, le=512, description="an integer from 1 to 512")]
Share = Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1, both excluded")]
Seconds = Annotated[float, Field(gt=0, le=86400, description="seconds, above 0 and at most 86400")]
Milliseconds = Annotated[float, Field(gt=0, le=60_000, description="milliseconds, above 0 and at most 60000")]
Port = Annotated[int, Field(ge=1, le=65534, description="a port from 1 to 65534")]
Text = Annotated[str, Field(min_length=1, max_length=4096, description="a text of 1 to 4096 characters")]
_NAME = "[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}"
Names = Annotated[
    str,
    Field(pattern=f"^{_NAME}(,{_NAME}){{0,99}}$", description="names of letters, digits and . _ : / -, after commas"),
]
Host = Annotated[str, Field(description="a host name, IPv4 or IPv6 address"), AfterValidator(_host)]
HostList = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}(,[A-Za-z0-9][A-Za-z0-9.-]{0,252}){0,99}$",
        description="a list of host names such as chat.example.com,llm.lan",
    ),
]
_ORIGIN = r"(\*|https?://[A-Za-z0-9.:\[\]-]{1,262})"
OriginList = Annotated[
    str,
    Field(
        pattern=f"^{_ORIGIN}(,{_ORIGIN}){{0,99}}$",
        description="a list of origins such as https://chat.example.com,http://localhost:3000, or * for any",
    ),
]
SocketPath = Annotated[
    str, Field(pattern=r"^/[^\x00\n]+$", max_length=100, description="an absolute path of 2 to 100 characters")
]
"""The kernel's limit is 107 bytes."""
MetricsNames = Annotated[
    str, Field(pattern=r"^(vllm|sglang)(,(vllm|sglang))*$", description="vllm, sglang or vllm,sglang")
]
TracesUrl = Annotated[
    str,
    Field(
        pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$",
        max_length=500,
        description="a URL such as http://127.0.0.1:4318/v1/traces",
    ),
]
KvEvents = Annotated[
    str,
    Field(max_length=4096, description='a JSON object such as {"endpoint": "tcp://127.0.0.1:5557"}'),
]
Network = Annotated[
    str,
    Field(description="an IPv4 network such as 10.0.0.0/24, no wider than /8"),
    AfterValidator(_network),
]
NodeRank = Annotated[int, Field(ge=0, le=63, description="an integer from 0 to 63")]
JoinAddress = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[1-9]\d{0,4}$",
        description="a host name or IPv4 address, and :PORT",
    ),
]
Advertised = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[1-9]\d{0,4})?$",
        description="a host name or IPv4 address, and :PORT where it is another than this worker's own",
    ),
]
Transports = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9_]*(,[a-z][a-z0-9_]*)*$",
        max_length=200,
        description="UCX transports such as rc,tcp,self",
    ),
]
Devices = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*(,[A-Za-z0-9][A-Za-z0-9_.:-]*)*$",
        max_length=500,
        description="UCX devices such as eth0 or mlx5_0:1,mlx5_1:1",
    ),
]
WorkerList = Annotated[
    str,
    Field(
        pattern=f"^{WORKER_PATTERN}(,{WORKER_PATTERN})*$",
        description="a list such as prefill@10.0.0.1:8998,decode@10.0.0.2:8998, or with names: p0=prefill@host:8998",
    ),
]
ServiceList = Annotated[
    str,
    Field(
        pattern=f"^{SERVICE_PATTERN}(,{SERVICE_PATTERN})*$",
        description="a list such as prefill@prefill.default.svc:8998,decode@decode.default.svc:8998",
    ),
]
WorkerName = Annotated[
    str,
    Field(pattern=f"^{NAME_PATTERN}$", description="letters, digits, dots, underscores and hyphens, at most 63"),
]


class Group(BaseModel):
    """Fields of one heading in --help. Values are never converted: the reader hands in the right type or fails."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    title: ClassVar[str] = ""


Use = Literal["common", "rare"]
"""Rare: --help leaves it to --help-all, so that what most people need is found."""


def option(default: Any, help_text: str, *, commands: tuple[str, ...] = (), use: Use = "common") -> Any:
    """A field's default and its line in --help. `commands`: the only ones where it has a meaning; empty: all."""
    return Field(default, description=help_text, json_schema_extra={"commands": list(commands), "use": use})


COMPUTING = ("serve", "prefill", "decode")
ROUTING = ("serve", "router")
FRONTS = ("serve", "router", "prefill", "decode")
"""Those that take HTTP requests: workers with --http."""
DECODING = ("serve", "decode")
WORKERS_ANYWHERE = ("prefill", "decode", "serve")
"""Commands that read an option. The others refuse its flag; a file of options may be shared by all."""


class ModelSettings(Group):
    title: ClassVar[str] = "model"

    model_path: Text | None = option(None, "a Hugging Face folder or GGUF file; also the positional MODEL")
    served_model_name: Names | None = option(
        None,
        "names in the API, `A B` or `A,B`: answers carry the first; by default the folder's name",
        commands=FRONTS,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "type of weights and activations; auto is the checkpoint's own, float32 on a CPU that multiplies it slowly",
    )
    quantization: Quantization = option(
        "auto",
        "on a CPU: auto computes with quantized matrices of GGUF files, and int8 and int4 ones of folders, as they are "
        "stored; none dequantizes them when they are loaded; int8 rounds all other matrices to 8 bits, too; a8 also "
        "what they are multiplied with",
        commands=COMPUTING,
        use="rare",
    )
    chat_template: Text | None = option(
        None,
        "file of a chat template (Jinja) in place of the model's own",
        commands=FRONTS,
        use="rare",
    )
    tool_call_parser: CallParser = option(
        "auto",
        f"how calls of tools stand in answers ({'; '.join(branch_help(ANSWERS, 'tool_call_parser'))}); auto is the one "
        "that reads what the chat template writes of an earlier call; none takes no tools",
        commands=FRONTS,
        use="rare",
    )
    reasoning_parser: ReasoningParser = option(
        "auto",
        f"how reasoning stands in answers ({'; '.join(branch_help(ANSWERS, 'reasoning_parser'))}); auto is as the chat "
        "template marks it; none leaves it in the content",
        commands=FRONTS,
        use="rare",
    )
    sampling_defaults: SamplingSource = option(
        "model",
        "where the sampling of requests that name none comes from: the model's files (a GGUF file that recommends "
        "nothing: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, as local servers have it), or openai: temperature "
        "1 and no cut",
        commands=FRONTS,
    )
    context_length: Count | Auto = option(
        "auto",
        "longest prompt plus output, in tokens; auto is the model's, or what the pool can hold if that is less",
        commands=COMPUTING,
    )
    json_model_override_args: Text | None = option(
        None, "JSON object that replaces keys of the model's config.json", use="rare"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where the model runs; auto is cuda when there is one", commands=COMPUTING
    )


class MemorySettings(Group):
    title: ClassVar[str] = "memory"

    page_size: PageSize | Auto = option(
        "auto",
        "tokens of a page, the unit of sharing and moving; auto is 16 on cpu and 64 on cuda. Smaller pages share more, "
        "larger cost less",
    )
    num_pages: Count | Auto = option(
        "auto",
        "pages that keep every token (pools of windows get what running requests hold, twice, or what as many prefixes "
        "need; of states see --max-mamba-cache-size); auto fills the memory of --mem-fraction-static, up to "
        f"{USEFUL_POOL_FACTOR} times what --max-running-requests of the longest length can use",
        commands=COMPUTING,
    )
    mem_fraction_static: Share | Auto = option(
        "auto",
        "share of free memory for weights, pages and the scratch of a step of all workers here; auto is 0.85 on cuda "
        "and 0.4 on cpu",
        commands=COMPUTING,
    )
    kv_cache_dtype: KvDtype | Auto = option(
        "auto",
        "type of cached keys and values; auto is --dtype. Prefill's and decode's may differ where both have --staging",
    )
    prefill_page_size: PageSize | None = option(
        None, "tokens of a page of a prefill worker; by default --page-size", commands=("serve",), use="rare"
    )
    decode_page_size: PageSize | None = option(
        None, "tokens of a page of a decode worker; by default --page-size", commands=("serve",), use="rare"
    )
    prefill_kv_cache_dtype: KvDtype | None = option(
        None, "--kv-cache-dtype of a prefill worker; by default that", commands=("serve",), use="rare"
    )
    decode_kv_cache_dtype: KvDtype | None = option(
        None, "--kv-cache-dtype of a decode worker; by default that", commands=("serve",), use="rare"
    )
    max_mamba_cache_size: Count | Auto = option(
        "auto",
        "recurrent states that there is room for; auto gives them as much memory as the pages that keep every token, "
        f"up to {STATES_PER_ROW} for each of --max-running-requests (one goes from a state into another, the others "
        "are kept for prompts to come), or one for each prefix of a quarter of the context that those pages hold",
        commands=COMPUTING,
        use="rare",
    )
    mamba_ssm_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "type of recurrent states between steps; bfloat16 halves them, and moves logits a little", use="rare"
    )
    mamba_track_interval: Count | None = option(
        None,
        "a recurrent state is kept every so many tokens of a prompt, too; by default only where requests are likely to "
        "go on: at forks, at the ends of prompts and of answers",
        commands=COMPUTING,
        use="rare",
    )
    radix_eviction_policy: Literal["lru", "slru"] = option(
        "lru",
        "which pages go first where there is no room: those used least recently, or before them those that one request "
        "alone has used",
        commands=COMPUTING,
        use="rare",
    )
    state_eviction: Literal["lru", "cost"] = option(
        "lru",
        "which recurrent state goes first where there is no room: the least recently used one, or of those used least "
        "recently the one that costs fewest tokens to compute again",
        commands=COMPUTING,
        use="rare",
    )
    cache_dir: Text | None = option(
        None,
        "folder of a file for each worker, to which pages are copied: those that were evicted come back from there and "
        "are not computed again. It ends with the worker. In a tmpfs it is the host's memory",
        commands=COMPUTING,
        use="rare",
    )
    cache_dir_mib: Count = option(
        4096, "size of the file of each worker in --cache-dir, set aside when it starts", commands=COMPUTING, use="rare"
    )
    disable_radix_cache: bool = option(
        False, "share no pages between requests on either side; for comparison only", commands=COMPUTING, use="rare"
    )
    disable_decode_radix_cache: bool = option(
        False,
        "decode workers alone share no pages: every prompt is moved whole; for comparison only",
        commands=("serve",),
        use="rare",
    )


class SchedulingSettings(Group):
    title: ClassVar[str] = "scheduling"

    max_running_requests: Rows | Auto = option(
        "auto",
        "requests computed at a time per worker; auto is 256 on cuda and 32 on cpu. Fewer: shorter gaps per token",
        commands=COMPUTING,
    )
    chunked_prefill_size: Count | Auto = option(
        "auto",
        "tokens of one request per step, a multiple of the page; auto is 8192 on cuda and 512 on cpu",
        commands=COMPUTING,
    )
    max_prefill_tokens: Count | Auto = option(
        "auto",
        "prompt tokens per step over all requests; auto is --chunked-prefill-size",
        commands=COMPUTING,
        use="rare",
    )
    schedule_policy: Literal["fcfs", "lpm", "priority", "priority-low-first"] = option(
        "fcfs",
        "order of waiting requests: by arrival, longest cached prefix first, or by their `priority`, higher values "
        "first or lower ones",
        commands=COMPUTING,
        use="rare",
    )
    num_reserved_decode_tokens: CountOrNone = option(
        512,
        "tokens to keep room for, per running request, before another is admitted",
        commands=DECODING,
        use="rare",
    )
    decode_extend_tokens: Auto | CountOrNone = option(
        "auto",
        "longest missing suffix that decode computes itself (of retracted requests, by --conditional-prefill), and "
        "prompt tokens of a step that has rows; auto is 256, or --max-prefill-tokens where decode computes the prompts "
        "as it shares prefill's cores",
        commands=DECODING,
        use="rare",
    )
    attention_split_tokens: Count = option(
        256,
        "attention reads keys in splits of so many tokens, a multiple of the page; only whole splits are shared",
        commands=COMPUTING,
        use="rare",
    )
    attention_backend: Attention = option(
        "auto",
        "; ".join(
            (
                "what computes attention and, on a CPU, norms and small products",
                *branch_help(ATTENTION, "attention_backend"),
                f"auto, of those that are there and pass their test: {automatic_help(ATTENTION)}",
            )
        ),
        commands=COMPUTING,
        use="rare",
    )
    disable_cuda_graph: bool = option(
        False,
        "; ".join(
            (
                "on a GPU: ask for each kernel of each step; otherwise, on one rank, decode steps are recorded once "
                "for each of a few numbers of requests, or of tokens where guesses are verified, other steps in pieces "
                "between attention (with each attention backend), and replayed",
                *branch_help(ATTENTION, "disable_cuda_graph"),
            )
        ),
        commands=COMPUTING,
        use="rare",
    )
    cuda_graph_max_bs: Rows = option(
        256,
        "requests of the largest decode step that is recorded, no more than --max-running-requests; tokens of the "
        "largest that verifies guesses, and of a draft head's passes",
        commands=COMPUTING,
        use="rare",
    )
    num_threads: Threads | Auto = option(
        "auto",
        "compute threads of a rank; auto divides the cores (of 4 and more all but one) among the ranks here, and fewer "
        "compute while they wait for cores; a prefill rank of `serve` gets twice as many as a decode rank, whose steps "
        "wait for memory, and workers of one rank also compute on cores that no other one is using",
        commands=COMPUTING,
    )
    itl_target_ms: Milliseconds | None = option(
        None,
        "longest time between two tokens of a request (ITL) that is aimed at: as many requests run at once, and as "
        "much of prompts is computed beside them, as measured steps allow; by default as many as fit",
        commands=DECODING,
        use="rare",
    )
    disable_overlap_schedule: bool = option(
        False,
        "plan a step when the one before it is over, not while it computes; behind prompts CPUs always do",
        commands=COMPUTING,
        use="rare",
    )
    steps_ahead: StepsAhead = option(
        2,
        "steps that are under way at most, the one that computes among them; more hide a slow host from a "
        "quick device, and a request that ends by a stop token computes as many tokens in vain",
        commands=COMPUTING,
        use="rare",
    )
    enable_deterministic_inference: bool = option(
        False,
        "on a CPU, a request's tokens are the same whatever of it was cached, computed in whichever chunks and beside "
        "whom: prompts are computed in the arithmetic of single tokens, which takes longer",
        commands=COMPUTING,
        use="rare",
    )
    prefill_num_threads: Threads | None = option(
        None, "compute threads of a prefill rank; by default --num-threads", commands=("serve",), use="rare"
    )
    decode_num_threads: Threads | None = option(
        None, "compute threads of a decode rank; by default --num-threads", commands=("serve",), use="rare"
    )
    max_queued_requests: Count = option(1024, "requests that may wait for their first token; more get 429")
    default_max_tokens: Count | None = option(
        None,
        "output tokens of a chat request that names no limit; by default what the context leaves",
        commands=FRONTS,
    )
    stream_interval: Count = option(
        1,
        "tokens between two events of a stream; the first is never held",
        commands=FRONTS,
        use="rare",
    )
    request_timeout_s: Seconds = option(600.0, "a request without its own deadline ends after this")
    slow_reader_timeout_s: Seconds = option(
        30.0,
        "a stream is cut whose client takes nothing for so long",
        commands=FRONTS,
        use="rare",
    )


class SpeculationSettings(Group):
    title: ClassVar[str] = "speculative decoding"

    speculative_algorithm: DraftAlgorithm = option(
        "off",
        "; ".join(
            (
                "who guesses at the next tokens, several of which are verified in one step: answers stay the same, how "
                "many are verified follows from how often they are right and from what a step costs",
                *branch_help(DRAFTS, "speculative_algorithm"),
            )
        ),
        commands=COMPUTING,
    )
    speculative_draft_model_path: Text | None = option(
        None, "; ".join(branch_help(DRAFTS, "speculative_draft_model_path")), commands=COMPUTING, use="rare"
    )
    speculative_num_steps: Drafts = option(3, "tokens guessed ahead, at most", commands=DECODING, use="rare")
    speculative_policy: Literal["adaptive", "always"] = option(
        "adaptive",
        "how many tokens are guessed and verified: as many as pay, by how often guesses are right and what steps take, "
        "or always all of them",
        commands=DECODING,
        use="rare",
    )
    speculative_num_draft_tokens: Drafts | None = option(
        None,
        "the same, counted with the token before them: --speculative-num-steps and one more",
        commands=DECODING,
        use="rare",
    )
    speculative_eagle_topk: Count = option(
        1, "guesses for each place; more than 1 is not built", commands=DECODING, use="rare"
    )


class ParallelSettings(Group):
    title: ClassVar[str] = "parallelism"

    tp_size: Ranks = option(
        1,
        "tensor-parallel ranks of a worker: processes that hold the model and every page together",
        commands=COMPUTING,
    )
    prefill_tp_size: Ranks | None = option(
        None, "ranks of a prefill worker; by default --tp-size", commands=("serve",), use="rare"
    )
    decode_tp_size: Ranks | None = option(
        None, "ranks of a decode worker; by default --tp-size", commands=("serve",), use="rare"
    )
    ep_size: Ranks | Auto = option(
        "auto",
        "groups of a worker's ranks: each group holds its experts whole, each rank a part of each; 1 cuts every expert "
        "over all ranks. auto: a group for each rank where the experts divide, else 1",
        commands=COMPUTING,
        use="rare",
    )
    dp_size: Ranks = option(
        1,
        "with --enable-dp-attention: decode workers that share the experts of one model. Each has all heads, requests "
        "and a cache of its own; --decode says how many such groups there are",
        commands=COMPUTING,
        use="rare",
    )
    prefill_dp_size: Ranks = option(
        1,
        "the same of prefill workers: --prefill says how many such groups there are",
        commands=("serve",),
        use="rare",
    )
    enable_dp_attention: bool = option(
        False,
        "decode is done by groups of --dp-size workers that share experts, prefill by groups of --prefill-dp-size",
        commands=COMPUTING,
        use="rare",
    )

    nnodes: Ranks = option(
        1,
        "machines that share out the ranks of this worker (--tp-size), equally many on each, or the members of its "
        "group (--dp-size), one on each; the command runs on each of them, with one --dist-init-addr",
        commands=WORKERS_ANYWHERE,
        use="rare",
    )
    node_rank: NodeRank = option(
        0,
        "which of --nnodes this machine is; 0 is the worker for everybody else",
        commands=WORKERS_ANYWHERE,
        use="rare",
    )
    dist_init_addr: JoinAddress | None = option(
        None,
        "where the machine of --node-rank 0 waits for the others",
        commands=WORKERS_ANYWHERE,
        use="rare",
    )


class DisaggregationSettings(Group):
    title: ClassVar[str] = "disaggregation"

    prefill: Workers = option(1, "prefill workers to start", commands=("serve",))
    decode: Workers = option(1, "decode workers to start", commands=("serve",))
    disaggregation_mode: Literal["auto", "null", "prefill", "decode"] = option(
        "auto",
        "null: one worker does both; serve runs them apart by default, prefill and decode know their own",
        commands=COMPUTING,
    )
    disaggregation_transfer_backend: TransferBackend = option(
        "auto",
        "; ".join(
            (
                "what moves the pages",
                *branch_help(TRANSPORTS, "disaggregation_transfer_backend"),
                f"auto: {automatic_help(TRANSPORTS)}",
            )
        ),
        commands=COMPUTING,
    )
    transfer_tls: Transports | Auto = option(
        "auto",
        "; ".join(
            (
                "UCX_TLS of page transfers",
                "auto is tcp,self and on cuda tcp,cuda_copy,self",
                *branch_help(TRANSPORTS, "transfer_tls"),
            )
        ),
        commands=COMPUTING,
        use="rare",
    )
    transfer_devices: Devices | None = option(
        None,
        "devices of page transfers (UCX_NET_DEVICES); by default the interfaces on --trusted-data-network",
        commands=WORKERS_ANYWHERE,
        use="rare",
    )
    transfer_fenced: Transports | None = option(
        None,
        "transports, beside tcp, of which this site knows that a destroyed endpoint lets no late byte through",
        commands=COMPUTING,
        use="rare",
    )
    staging: Literal["off", "auto", "on"] = option(
        "off",
        "between workers of unequal --tp-size, gather what goes to a rank, write it at once, and scatter it there; "
        "auto: where that is cheaper than a write for each page. Pages of unequal size always go so, and only so KV of "
        "another type. A peer without it is written to directly",
        commands=COMPUTING,
        use="rare",
    )
    staging_memory_mib: StagingMemory = option(
        64,
        "memory of each rank for --staging, half to send and half to receive",
        commands=COMPUTING,
        use="rare",
    )
    disaggregation_bootstrap_port: Port = option(
        8998,
        "port on which this worker listens for links; with --cluster the first one's, others have those above",
        commands=WORKERS_ANYWHERE,
    )
    conditional_prefill: Literal["off", "auto"] = option(
        "auto",
        "auto: decode computes a prompt itself where that is sooner than by prefill; off: prefill computes them all",
        commands=ROUTING,
    )
    write_back: Literal["off", "on"] = option(
        "on",
        "on: the pages of an answer that only decode has go back to prefill, where it has memory to spare and would "
        "take longer to compute them again, at the chance of a next turn that is learnt from conversations as long; "
        "then the next turn finds both caches warm; not where KV dtypes are unequal, or only prefill has a draft head",
        commands=COMPUTING,
        use="rare",
    )
    drain_timeout_s: Seconds = option(
        2.0,
        "decode fences a prefill worker that is silent for so long about a revoked ticket",
        commands=COMPUTING,
        use="rare",
    )
    verify: Literal["off", "crc"] = option(
        "off", "crc: checksum of every page moved, made by prefill, tested by decode", commands=COMPUTING
    )


class ClusterSettings(Group):
    title: ClassVar[str] = "several machines"

    cluster: Launcher = option(
        "none",
        "; ".join(
            (
                "where the workers run",
                "none: on this machine, on which the front always is",
                *branch_help(CLUSTERS, "cluster"),
            )
        ),
        commands=("serve",),
    )
    address: Text | None = option(
        None,
        "; ".join(("where the cluster of --cluster is", *branch_help(CLUSTERS, "address"))),
        commands=("serve",),
        use="rare",
    )


class NetworkSettings(Group):
    title: ClassVar[str] = "network"

    host: Host = option("127.0.0.1", "address to listen on; anything but this machine needs keys")
    advertise: Advertised | None = option(
        None,
        "where the router and other workers reach this one, and its name; by default --host",
        commands=("prefill", "decode"),
    )
    port: Port = option(30000, "port of the API", commands=ROUTING)
    http: Port | None = option(
        None,
        "port on which this worker takes its half of requests, from a router of another project that sends each to a "
        "prefill and a decode worker at once (SGLang's, smg); by default it serves `deltaserve router` alone",
        commands=("prefill", "decode"),
    )
    admin_host: Host | None = option(
        None,
        "address of the admin routes (metrics, drain); by default 127.0.0.1",
        commands=FRONTS,
        use="rare",
    )
    admin_port: Port | None = option(
        None,
        "port of the admin routes; by default the one above --port when keys are set, else --port itself",
        commands=FRONTS,
        use="rare",
    )
    fronts: Fronts = option(
        1,
        "processes that take requests, on one port: for more streams than one core writes; each has admin routes of "
        "its own, the first at --admin-port, the next on the ports above it",
        commands=ROUTING,
        use="rare",
    )
    kv_events_config: KvEvents | None = option(
        None,
        "tell routers of others what enters and leaves the caches: a JSON object with endpoint, replay_endpoint and "
        "topic; worker i of a server binds the ports plus i",
        commands=COMPUTING,
        use="rare",
    )
    worker_name: WorkerName | None = option(
        None,
        "what this worker calls itself; by default its role and where it is reached (--advertise)",
        commands=("prefill", "decode"),
        use="rare",
    )
    workers: WorkerList | None = option(None, "worker links to dial, by role", commands=("router",))
    workers_file: Text | None = option(
        None,
        "file of such entries, one a line: looked at every second, so that workers join and leave a running router",
        commands=("router",),
    )
    workers_dns: ServiceList | None = option(
        None,
        "names whose addresses are workers, by role, as of a headless service: looked up every 5 s",
        commands=("router",),
    )
    allowed_hosts: HostList | None = option(
        None,
        "names by which clients may reach a server on loopback without keys, beside localhost: a proxy's, for instance",
        commands=FRONTS,
        use="rare",
    )
    allowed_origins: OriginList | None = option(
        None,
        "origins of web pages that may call the API (CORS), `A B` or `A,B`; by default none",
        commands=FRONTS,
        use="rare",
    )
    uds: SocketPath | None = option(
        None,
        "Unix socket on which the API listens, in place of --host and --port: who may write to the file may connect",
        commands=ROUTING,
        use="rare",
    )
    ssl_certfile: Text | None = option(
        None,
        "PEM file of the certificate chain: the API and the admin routes are https then",
        commands=FRONTS,
        use="rare",
    )
    ssl_keyfile: Text | None = option(
        None, "PEM file of the certificate's key; by default in --ssl-certfile", commands=FRONTS, use="rare"
    )
    max_connections_per_address: Count | None = option(
        None,
        "connections of one client address; by default any number, as behind a proxy",
        commands=FRONTS,
        use="rare",
    )


class SecuritySettings(Group):
    title: ClassVar[str] = "security"

    api_key_file: Text | None = option(
        None, "file of API keys, mode 0600, one `SECRET NAMESPACE [admin]` a line", commands=FRONTS
    )
    cluster_key_file: Text | None = option(None, "file of the key all workers share, mode 0600, at least 32 bytes")
    insecure_network: bool = option(False, "listen beyond this machine without keys: only on a network you trust fully")
    trusted_data_network: Network | None = option(
        None,
        "network on which page transfers, which carry no authentication, may listen",
        commands=WORKERS_ANYWHERE,
    )


class LoggingSettings(Group):
    title: ClassVar[str] = "logging"

    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe line of the logs")
    log_format: Literal["text", "json"] = option("text", "json: each line of the logs is an object")
    log_to: Literal["files", "stdout"] = option(
        "files", "stdout: the logs of all processes go where this command's own lines go", commands=("serve",)
    )
    metrics_names: MetricsNames | None = option(
        None,
        "tell metrics under the names of other servers as well, with model_name: vllm, sglang or both",
        commands=FRONTS,
        use="rare",
    )
    metrics_on_api_port: bool = option(
        False,
        "/metrics on the API's port, too, without a key: for scrapers that have none",
        commands=FRONTS,
        use="rare",
    )
    otlp_traces_endpoint: TracesUrl | None = option(
        None,
        "OpenTelemetry collector that is told where each request's time went (OTLP over HTTP); needs the extra otel",
        commands=FRONTS,
        use="rare",
    )
    log_dir: Text | None = option(
        None,
        "folder for the logs of the front and the workers, kept; by default a private one, kept only when they fail",
        commands=("serve",),
    )


class ProcessSettings(Group):
    title: ClassVar[str] = "process"

    start_timeout_s: Seconds = option(
        1800.0,
        "a process that is not ready so long after its start is given up",
        commands=("serve",),
        use="rare",
    )
    shutdown_grace_s: Seconds = option(30.0, "how long running requests may go on after a signal to stop")
    state_dir: Text | None = option(
        None,
        "folder for what a start needs while it runs, private; by default where temporary files go",
        commands=FRONTS,
        use="rare",
    )


class Settings(Group):
    """The whole tree. Frozen; equal settings give an equal server."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    parallelism: ParallelSettings = ParallelSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    cluster: ClusterSettings = ClusterSettings()
    network: NetworkSettings = NetworkSettings()
    security: SecuritySettings = SecuritySettings()
    logging: LoggingSettings = LoggingSettings()
    process: ProcessSettings = ProcessSettings()
