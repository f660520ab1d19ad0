"""Flags of other servers that people bring along: what each is called here, that it changes nothing, or why it is
refused and what to write instead.

One table for the flags of SGLang's server and router, of vLLM, Dynamo's workers and llama.cpp's server, as their
documentation names them. A name is written with what follows the flag: `name` is a switch, `name=` takes one value,
`name=*` several, and `name=a|b` is accepted with these values only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class Takes(Enum):
    """What follows a flag on a command line."""

    NOTHING = "no value"
    ONE = "one value"
    SEVERAL = "values up to the next flag"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another word for an option of ours."""

    key: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Changes nothing here, and is accepted."""

    why: str
    values: tuple[str, ...] = ()
    """The only ones that mean what happens anyway; empty: any. Such a value needs no word; a switch or a value that is
    not looked at does."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Asks for what there is not."""

    remedy: str
    """Why, and what to write instead."""


Meaning = Alias | Idle | Denied


@dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of another server."""

    name: str
    takes: Takes
    meaning: Meaning


_ALIASES = {
    "model-path": "model m",
    "served-model-name": "alias model-name",
    "context-length": "max-model-len max-seq-len ctx-size c",
    "json-model-override-args": "hf-overrides",
    "page-size": "block-size kv-cache-block-size",
    "mem-fraction-static": "gpu-memory-utilization mem-fraction",
    "disable-radix-cache": "no-enable-prefix-caching",
    "mamba-ssm-dtype": "mamba-ssm-cache-dtype",
    "max-running-requests": "max-num-seqs max-batch-size parallel np",
    "max-prefill-tokens": "max-num-batched-tokens max-num-tokens",
    "schedule-policy": "scheduling-policy",
    "disable-cuda-graph": "enforce-eager",
    "cuda-graph-max-bs": "max-cudagraph-capture-size",
    "disable-overlap-schedule": "no-async-scheduling",
    "num-threads": "threads t",
    "speculative-algorithm": "speculative-algo",
    "speculative-draft-model-path": "speculative-draft-model speculative-draft",
    "tp-size": "tp tensor-parallel-size",
    "ep-size": "ep expert-parallel-size",
    "dp-size": "dp data-parallel-size",
    "transfer-devices": "disaggregation-ib-device",
    "host": "http-host",
    "port": "http-port",
    "request-timeout-s": "request-timeout-secs",
}
"""Our key |-> its names elsewhere."""

_LOGGED = "each request leaves one line of JSON in the log of the front, without its text"
_PAIR = "the pair of workers with the least expected time to first token is taken"
_LAYERS = "layers are not split over workers"
_MACHINES = (
    "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`; leave it out"
)
_KERNELS = "which kernels compute is not a choice beyond --attention-backend"
_EXPERTS = "how experts are exchanged is not a choice, and none is held twice"
_GROUP = "a member of a group of workers that share experts has all else whole"

_HARMONY = "gpt-oss|gpt_oss|openai_gptoss"
"""SGLang's, Dynamo's and vLLM's name of a parser of what server/text/answer_channels.py reads in any case."""

_IDLE = {
    "the prefix cache is always on; --disable-radix-cache turns it off": (
        "disaggregation-decode-enable-radix-cache=true disaggregation-enable-decode-radix-cache=true "
        "enable-prefix-caching=true"
    ),
    "what was used least recently is evicted first": "radix-eviction-policy=lru",
    "the key of a prefix is a keyed hash": "prefix-caching-hash-algo=",
    "prompts are always computed in chunks; --chunked-prefill-size says how long": "enable-chunked-prefill=true",
    "prompts and decoding always share steps where one worker does both": "enable-mixed-chunk=true",
    "a chunk is as long as --chunked-prefill-size says": "enable-dynamic-chunking",
    "experts are whole on ranks where they divide over them; see --ep-size": "enable-expert-parallel",
    "metrics are always on, at /metrics": (
        "enable-metrics=true enable-metrics-for-all-schedulers collect-tokens-histogram show-time-cost "
        "bucket-time-to-first-token=* bucket-inter-token-latency=* bucket-e2e-request-latency=* "
        "prompt-tokens-buckets=* generation-tokens-buckets=* metrics"
    ),
    "usage always reports cached tokens": "enable-cache-report=true enable-prompt-tokens-details",
    "usage is sent where a request asks for it": "enable-force-include-usage",
    _LOGGED: (
        "enable-request-time-stats-logging disable-log-requests no-enable-log-requests log-requests "
        "enable-log-requests log-requests-level= log-requests-format= disable-uvicorn-access-log max-log-len= "
        "uvicorn-access-log-exclude-prefixes=*"
    ),
    "a worker that computes writes a line every 10 s": "decode-log-interval= disable-log-stats",
    "--log-level says it for all processes": "log-level-http= uvicorn-log-level= verbose",
    "steps are planned ahead; --disable-overlap-schedule ends that": "overlap-schedule=1 async-scheduling",
    "a step is planned while the one before computes": (
        "enable-single-batch-overlap enable-two-batch-overlap tbo-token-distribution-threshold= "
        "num-continuous-decode-steps="
    ),
    "messages are read in every turn of a worker's loop": (
        "scheduler-recv-interval= disaggregation-decode-polling-interval="
    ),
    "an idle worker always sleeps": "sleep-on-idle",
    "the watchdog has no setting; /livez reports it": "watchdog-timeout= soft-watchdog-timeout=",
    "each worker tries its transport when it starts": "skip-server-warmup warmups=*",
    "reasoning is told apart where a model writes it in channels (gpt-oss)": "enable-reasoning",
    "each request's `seed` makes its sampling repeatable": "random-seed= seed=",
    "code from a model folder is never run": "trust-remote-code",
    "models are never downloaded": "download-dir= offline",
    "weights are read from safetensors and GGUF files, whichever MODEL is": (
        "load-format=auto|safetensors|gguf model-loader-extra-config= weight-loader-disable-mmap "
        "weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads= no-mmap mlock"
    ),
    "each model family has one implementation": "model-impl=auto|vllm|sglang runner=auto|generate task=auto|generate",
    "the tokenizer is that of the model folder": "tokenizer-mode=auto use-sglang-tokenizer",
    "prompts may be token ids; text is read and written all the same": "skip-tokenizer-init",
    "the front has one tokenizer": (
        "tokenizer-worker-num= api-server-count= enable-tokenizer-batch-encode disable-tokenizer-batch-decode "
        "enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size= dynamic-batch-tokenizer-batch-timeout="
    ),
    "the chat template of the model is always used": "jinja",
    "sampling that the model's folder recommends is the default": "generation-config=auto",
    "a state that is kept is never written over": "mamba-scheduler-strategy=auto|extra_buffer",
    "windows get what running requests hold": (
        "swa-full-tokens-ratio= disable-hybrid-swa-memory disable-hybrid-kv-cache-manager "
        "no-disable-hybrid-kv-cache-manager"
    ),
    _LAYERS: "pp-size=1 pipeline-parallel-size=1 pp-max-micro-batch-size= pp-async-batch-depth=",
    "a prompt is computed by one worker": (
        "attn-cp-size=1 attention-context-parallel-size=1 context-parallel-size=1 "
        "prefill-context-parallel-size=1 decode-context-parallel-size=1"
    ),
    _MACHINES: "nnodes=1 node-rank=0",
    "the ranks of a worker are on one machine and find each other": (
        "dist-init-addr= nccl-init-addr= nccl-port= dist-timeout= distributed-executor-backend=mp|uni|auto "
        "master-addr= master-port= data-parallel-address= data-parallel-rpc-port="
    ),
    "workers learn from each other's greeting what they are": (
        "disaggregation-decode-tp= disaggregation-decode-dp= disaggregation-prefill-pp="
    ),
    _PAIR: (
        "load-balance-method= prefill-round-robin-balance policy= prefill-policy= decode-policy= cache-threshold= "
        "balance-abs-threshold= balance-rel-threshold= mini-lb router-mode= migration-limit= eviction-interval= "
        "max-tree-size="
    ),
    "--workers says which of them prefill and which decode": "pd-disaggregation",
    _GROUP: "enable-dp-lm-head moe-dense-tp-size= enable-prefill-delayer",
    _EXPERTS: (
        "moe-a2a-backend= deepep-mode= deepep-config= deepep-dispatcher-output-dtype= moe-runner-backend= "
        "ep-num-redundant-experts= ep-dispatch-algorithm= init-expert-location= enable-eplb eplb-algorithm= "
        "eplb-rebalance-num-iterations= eplb-config= disable-shared-experts-fusion all2all-backend= "
        "elastic-ep-backend= mooncake-ib-device= flashinfer-mxfp4-moe-precision= moe-backend="
    ),
    "of CUDA graphs only --disable-cuda-graph and --cuda-graph-max-bs can be set": (
        "cuda-graph-bs=* disable-cuda-graph-padding cudagraph-capture-sizes=* disable-piecewise-cuda-graph "
        "enable-piecewise-cuda-graph enforce-piecewise-cuda-graph piecewise-cuda-graph-tokens=* "
        "piecewise-cuda-graph-compiler= piecewise-cuda-graph-max-tokens= enable-profile-cuda-graph "
        "enable-cudagraph-gc compilation-config= enable-torch-compile torch-compile-max-bs="
    ),
    _KERNELS: (
        "prefill-attention-backend= decode-attention-backend= mm-attention-backend= sampling-backend= "
        "fp8-gemm-backend= fp4-gemm-backend= enable-flashinfer-mla disable-chunked-prefix-cache "
        "flashinfer-mla-disable-ragged disable-flashinfer-autotune triton-attention-reduce-in-fp32 "
        "triton-attention-num-kv-splits= triton-attention-split-tile-size= nsa-prefill-backend= nsa-decode-backend= "
        "dsa-prefill-backend= dsa-decode-backend= enable-fused-qk-norm-rope speculative-attention-mode= "
        "speculative-draft-attention-backend= speculative-moe-runner-backend= speculative-moe-a2a-backend= "
        "mamba-backend= linear-attn-backend= linear-attn-prefill-backend= linear-attn-decode-backend= flash-attn=* "
        "fa=* linear-backend="
    ),
    "the device is as --device says, and holds all layers": "n-gpu-layers= gpu-layers= ngl=",
    "there is no memory that ranks share": "enable-symm-mem enable-torch-symm-mem",
    "how sums over ranks are made is not a choice": (
        "disable-custom-all-reduce enable-nccl-nvls enable-p2p-check enable-flashinfer-allreduce-fusion "
        "enable-aiter-allreduce-fusion enable-mscclpp enable-attn-tp-input-scattered"
    ),
    "requests of all kinds share steps": "cont-batching cb batch-size= b= ubatch-size= ub=",
    "only text is read": "language-model-only language-only mm-max-concurrent-calls= mm-processor-cache-gb=",
    "nothing is kept on disk": "disable-outlines-disk-cache",
}
"""Why it changes nothing |-> names."""

_REFUSED = {
    "secrets come from files; write --api-key-file FILE": "api-key=",
    "secrets come from files; write --api-key-file FILE, with a line `SECRET NAMESPACE admin`": "admin-api-key=",
    "TLS is ended by a proxy before the server; leave it out": (
        "ssl-keyfile= ssl-certfile= ssl-ca-certs= ssl-keyfile-password= ssl-cert-reqs= ssl-key-file= ssl-cert-file= "
        "tls-cert-path= tls-key-path="
    ),
    "the API begins at /; let a proxy take the path away": "root-path= fastapi-root-path= api-prefix=",
    "requests from a browser of another site need a proxy that allows them": (
        "allowed-origins=* allowed-methods=* allowed-headers=* cors-allowed-origins=*"
    ),
    "write --num-pages (tokens / page size)": "max-total-tokens= num-gpu-blocks-override=",
    "write --mem-fraction-static, or --num-pages": "kv-cache-memory-bytes= kv-cache-memory=",
    "write --disaggregation-transfer-backend, and `deltaserve prefill` or `decode` where serve would start both": (
        "kv-transfer-config= kv-connector="
    ),
    "write --num-reserved-decode-tokens, how many tokens are kept free for each running request": (
        "schedule-conservativeness="
    ),
    "write --max-prefill-tokens, how many tokens of all prompts a step computes": "prefill-max-requests=",
    "write --workers prefill@HOST:PORT,decode@HOST:PORT": (
        "worker-urls=* service-discovery selector=* prefill-selector=* decode-selector=*"
    ),
    "/metrics is on the admin port; write --admin-port": "prometheus-port= prometheus-host= metrics-port=",
    "write --max-queued-requests, how many may wait for their first token": "max-concurrent-requests= queue-size=",
    "write --dump-config > FILE, which prints the settings and ends": "dump-config-to=",
    "models are never downloaded; MODEL is a folder or a GGUF file, `hf download NAME --local-dir FOLDER` gets one": (
        "revision= tokenizer-revision= code-revision= hf-repo= hf-file= hf= hf-token= model-url= "
        "speculative-draft-model-revision="
    ),
    "weights are read from safetensors and GGUF files as they are; leave it out": (
        "model-checksum= custom-weight-loader=* delete-ckpt-after-loading checkpoint-engine-wait-weights-before-ready "
        "speculative-draft-load-format= remote-instance-weight-loader-backend="
    ),
    "the checkpoint says how it is quantized; leave it out": (
        "quantization-param-path= modelopt-quant= torchao-config= speculative-draft-model-quantization= "
        "modelopt-checkpoint-restore-path= quantize-and-serve"
    ),
    "the tokenizer and its template are those of the model folder; put it there, or leave it out": (
        "tokenizer= tokenizer-path= chat-template= chat-template-file= custom-jinja-template= hf-chat-template-name= "
        "chat-template-content-format= completion-template="
    ),
    "sampling that generation_config.json in MODEL recommends is the default; write it there, or in requests": (
        "preferred-sampling-params= override-generation-config="
    ),
    _MACHINES: "data-parallel-start-rank= data-parallel-size-local= data-parallel-hybrid-lb headless",
    "write CUDA_VISIBLE_DEVICES=N before the command: it says which GPUs it sees; leave it out": (
        "base-gpu-id=0 gpu-id-step=1 main-gpu= device-ids=*"
    ),
    "write `numactl` before the command; leave it out": "numa-node=* numa-bind",
    "layers are not split over workers; leave it out": "pp-partition=",
    "pages have one tier, the memory of the worker; leave it out": (
        "enable-hierarchical-cache hicache-ratio= hicache-size= hicache-io-backend= hicache-write-policy= "
        "hicache-mem-layout= hicache-storage-backend= hicache-storage-prefetch-policy= "
        "hicache-storage-backend-extra-config= enable-lmcache enable-hisparse hisparse-config= "
        "disaggregation-decode-enable-offload-kvcache cpu-offload-gb= swap-space= kv-offloading-size= "
        "kv-offloading-backend= offload-group-size= offload-mode="
    ),
    "write --speculative-algorithm, and for a head of its own --speculative-draft-model-path": "speculative-config=",
    "--speculative-draft-model-path names the folder of a draft head, which brings its own map of tokens; "
    "leave it out": "speculative-token-map=",
    "guesses are verified exactly; leave it out": (
        "speculative-accept-threshold-single= speculative-accept-threshold-acc="
    ),
    "states get as much memory as pages of tokens do; write --max-mamba-cache-size, how many": (
        "mamba-full-memory-ratio="
    ),
    "write --mamba-ssm-dtype; the inputs of convolutions are kept as --kv-cache-dtype says": "mamba-cache-dtype=",
    "finding tool calls in answers is not built yet; leave it out, calls stay in `content` as the model writes them": (
        "tool-call-parser= enable-auto-tool-choice tool-server= dyn-tool-call-parser= tool-parser-plugin="
    ),
    "the channels of gpt-oss are told apart without it; leave it out, `<think>` of other models stays in `content`": (
        f"reasoning-parser={_HARMONY} dyn-reasoning-parser={_HARMONY} reasoning-format="
    ),
    "structured output is not built yet; leave it out, and `response_format` out of requests": (
        "grammar-backend= guided-decoding-backend= structured-outputs-config= grammar= json-schema= "
        "constrained-json-whitespace-pattern= constrained-json-disable-any-whitespace"
    ),
    "adapters are not built yet; merge it into the weights of MODEL": (
        "enable-lora lora-paths=* lora-modules=* lora= max-lora-rank= max-loras= max-loras-per-batch= "
        "max-loaded-loras= lora-target-modules=* lora-backend="
    ),
    "only text is read; leave it out": (
        "enable-multimodal limit-mm-per-prompt= limit-mm-data-per-request= mm-process-config= mmproj= encoder-only "
        "encoder-urls=* mm-processor-kwargs="
    ),
    "answers are text; embeddings are not built; leave it out": "is-embedding embedding embeddings reranking",
    "a prompt that does not fit is refused with both lengths, never cut; leave it out": "allow-auto-truncate",
    "requests are taken by arrival, or by cached prefix (--schedule-policy lpm); leave it out": (
        "enable-priority-scheduling schedule-low-priority-values-first priority-scheduling-preemption-threshold= "
        "abort-on-priority-when-disabled"
    ),
    "code of requests is never run; leave it out": "enable-custom-logit-processor logits-processors=*",
    "answers carry no inner values; leave it out": (
        "enable-return-hidden-states enable-return-routed-experts max-logprobs= return-tokens-as-token-ids"
    ),
    "there are metrics and logs, no traces and no stream of cache events; leave it out": (
        "enable-trace otlp-traces-endpoint= kv-events-config= enable-kv-cache-events"
    ),
    "no text of requests is kept; leave it out": (
        "crash-dump-folder= export-metrics-to-file export-metrics-to-file-dir= log-requests-target=* "
        "debug-tensor-dump-output-folder= slot-save-path="
    ),
    "a server keeps its weights and memory until it ends; leave it out": "enable-memory-saver enable-sleep-mode",
    "prompts are always computed in chunks; write --chunked-prefill-size, how long": (
        "no-enable-chunked-prefill max-num-partial-prefills="
    ),
    "there is one protocol, HTTP; leave it out": "grpc-mode enable-grpc",
    "workers are known by --workers of the router; leave it out": (
        "endpoint= store-kv= discovery-backend= request-plane= event-plane= namespace="
    ),
}
"""Why it is refused, and what to write instead |-> names."""


def _rows() -> Iterator[Foreign]:
    for key, names in _ALIASES.items():
        yield from (Foreign(name, Takes.ONE, Alias(key)) for name in names.split())
    for why, name, takes, values in _specs(_IDLE):
        yield Foreign(name, takes, Idle(why, values))
    for remedy, name, takes, values in _specs(_REFUSED):
        yield Foreign(name, takes, Idle(remedy, values) if values else Denied(remedy))


def _specs(table: Mapping[str, str]) -> Iterator[tuple[str, str, Takes, tuple[str, ...]]]:
    for text, specs in table.items():
        for spec in specs.split():
            name, equals, rest = spec.partition("=")
            values = () if rest in ("", "*") else tuple(rest.split("|"))
            if not equals or values == _SWITCHED_ON:
                yield text, name, Takes.NOTHING, values
            else:
                yield text, name, Takes.SEVERAL if rest == "*" else Takes.ONE, values


_SWITCHED_ON = ("true",)
FOREIGN: Mapping[str, Foreign] = {row.name: row for row in _rows()}
"""Name of a foreign flag |-> its row."""
SHORTEST_IN_FILES = 2
"""Letters: shorter names are flags of a line only."""


def key_of(name: str) -> str:
    """Our key for a name that may be an alias of one."""
    row = FOREIGN.get(name)
    return row.meaning.key if row is not None and isinstance(row.meaning, Alias) else name
